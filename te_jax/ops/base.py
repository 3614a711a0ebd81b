"""What an op of a chain is, and what it is given.

An op is frozen data plus a forward and a backward function over plain arrays. It knows nothing of Flax, of the
ops around it or of fusion: a fused step calls the same functions, or replaces them and keeps what they save.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from te_jax.errors import required
from te_jax.parallel.mesh import NamedAxis
from te_jax.recipe import Recipe
from te_jax.remat import names

T = TypeVar("T")
TensorType = jax.ShapeDtypeStruct  # shape and dtype of a value between ops


class Bracket(enum.Enum):
    """The channel of residuals that open and close like brackets."""

    RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True)
class Shared:
    """An extra input of the call that all ops of a chain with this name take: it is passed once."""

    name: str


Channel = str | Bracket | None  # how an extra value gets from op to op; None: by order, from and to the call
Initializer = Callable[[Array, tuple[int, ...], Any], Array]
Used = dict[str, Array]  # role -> f32[], the amax of the operand that was quantized
QuantizedKernel = Mapping[str, Array]  # fields of a QuantizeOut: data, data_t, scale, scale_inv, amax, ...


def tokens(x: TensorType | Array) -> int:
    """Product of the leading dimensions: the number of rows a GEMM sees."""
    return math.prod(x.shape[:-1])


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A parameter an op wants: ``shape``, ``init(key, shape, dtype)``; its dtype is the chain's ``param_dtype``.

    ``kept``: the shape in which it is kept, of as many elements in the same order; None: ``shape``.
    ``devices``: above 1 the op wants the halves that are kept, [..., 2, F], in the order of so many devices
    (te_jax.ops.device_order).
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    kept: tuple[int, ...] | None = None
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class Op:
    """Base of all ops. Subclasses are frozen dataclasses; an object listed twice shares its parameters.

    ``name``: the scope of the op's parameters (default ``ops_<i>``; "" means the module's own scope).
    """

    name: str | None = dataclasses.field(default=None, kw_only=True)

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    roles: ClassVar[tuple[str, ...]] = ()  # the quantizers it has: of linears and Quantize
    hands_on: ClassVar[bool] = False  # whether its result is its input, as it is
    has_main_grad: ClassVar[bool] = False  # whether its backward takes a buffer for the gradient of ``kernel``

    def saves_input(self, info: LinkInfo) -> bool:
        """Whether ``forward`` saves x itself for ``backward``: then x is named for remat policies before it is used."""
        del info
        return False

    @property
    def groups(self) -> int | None:
        """How many scales each of its quantizers has, one for each group of tokens; None: a single one."""
        return None

    def expand(self) -> tuple[Op, ...]:
        """The basic ops it stands for; they share the parameter scope of this one."""
        return (self,)

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        """The parameters it needs for an input of this type."""
        del x
        return ()

    def out_type(self, x: TensorType) -> TensorType:
        """Shape and dtype of its result; raises ValueError where the input doesn't fit."""
        return x

    def extra_input_types(self, x: TensorType) -> tuple[TensorType, ...]:
        """Shape and dtype of its extra inputs: floating-point ones or integers, which are cast to it."""
        return (x,) * self.num_extra_inputs

    def extra_output_types(self, x: TensorType) -> tuple[TensorType, ...]:
        """Shape and dtype of its extra outputs."""
        return (x,) * self.num_extra_outputs

    def extra_input_channels(self) -> tuple[Channel | Shared, ...]:
        """For each extra input the channel that it comes through; None: it is the next extra input of the call."""
        return (None,) * self.num_extra_inputs

    def extra_output_channels(self) -> tuple[Channel, ...]:
        """For each extra output the channel that it goes into; None: it is the next extra output of the call."""
        return (None,) * self.num_extra_outputs

    def check_extra_inputs(self, x: TensorType, inputs: tuple[Any, ...]) -> None:
        """Raises ValueError or TypeError for extra inputs that don't fit, beyond their shapes and dtypes.

        Args:
          x: type of the op's input.
          inputs: the arrays, traced or not, or their types; None for one that is made in the same run.
        """

    def why_unquantized(self, x: TensorType, recipe: Recipe | None) -> str | None:
        """Why an op with quantizers doesn't quantize for an input of this type; None if it does, or has none."""
        del x, recipe
        return None

    def quantize_kernel(self, ctx: ForwardContext) -> QuantizedKernel:
        """Linears: the kernel as ``forward`` would quantize it, for ``ForwardContext.quantized_kernel``."""
        raise NotImplementedError

    def mesh_axis(self) -> NamedAxis | None:
        """Collectives: their mesh axis as the code being traced sees it, which their fusions depend on."""
        return None

    def needs_key(self, deterministic: bool) -> bool:
        """Whether it draws random numbers."""
        del deterministic
        return False

    def note(self, info: LinkInfo) -> str | None:
        """What the plan says of its step, beside its name."""
        del info
        return None

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        """The result; puts what ``backward`` needs into ``ctx.saved``."""
        raise NotImplementedError

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        """The cotangent of x; puts those of parameters and extra inputs into ``ctx`` (None for one of integers)."""
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class LinkInfo:
    """What is known of one op in its place in a chain before any value is."""

    op: Op
    path: tuple[int, ...]  # place in the user's list: (3,), or (3, 0) in a list that is the list's element 3
    scope: str  # where its parameters are: the scope of the first place of the same object
    x_type: TensorType
    recipe: Recipe | None = None
    module: str = ""  # the name that remat policies know it by: the last part of its Flax path
    mesh_axis: NamedAxis | None = None  # of a collective
    why_unquantized: str | None = None  # ops with quantizers: why they run in high precision; None: they are quantized
    main_grad: str | None = None  # what wgrad does with the kernel's buffer (te_jax.ops.main_grad); None: there is none
    dy_without_history: bool = False  # perhaps nothing writes the FP8 state of dy: its quantizer's scale is always 0

    @property
    def label(self) -> str:
        return f"{self.op}({self.scope or 'params'})"

    @property
    def quantizing_recipe(self) -> Recipe:
        """The recipe of what is quantized; raises ValueError where there is none."""
        return required(self.recipe, self.label, "recipe")

    @property
    def quantized(self) -> bool:
        return bool(self.op.roles) and self.why_unquantized is None

    @property
    def quantizes_kernel(self) -> bool:
        return self.quantized and "kernel" in self.op.roles

    @property
    def y_type(self) -> TensorType:
        return self.op.out_type(self.x_type)

    def initial_scale(self, role: str) -> float | None:
        """The scale of that role's quantizer while it has no history; None: the one that its tensor's amax gives."""
        if self.recipe is None or (role == "dy" and self.dy_without_history):
            return None
        return self.recipe.initial_scale


@dataclasses.dataclass
class ForwardContext:
    """One op's view of a forward pass: what it is given (above) and what it leaves (below)."""

    info: LinkInfo
    params: Mapping[str, Array]
    train: bool  # a backward pass follows
    key: Array | None = None
    extra_inputs: tuple[Array, ...] = ()
    scales: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # by role; f32[], 0: unseeded
    quantized_kernel: QuantizedKernel | None = None  # the kernel, if it was quantized before the call

    saved: Any = ()
    extra_outputs: tuple[Array, ...] = ()
    used: Used = dataclasses.field(default_factory=dict)

    def named(self, x: T, tensor: str) -> T:
        """x (an array, a tree of them or None), named ``<module>_<tensor>`` for remat policies (te_jax/remat/names.py).

        For what goes into ``saved``. What the forward pass goes on with has to be the result too: what is computed from
        x itself isn't recomputed from a tensor that a policy has saved.
        """
        return names.named(x, self.info.module, tensor) if self.train else x


@dataclasses.dataclass
class BackwardContext:
    """One op's view of a backward pass."""

    info: LinkInfo
    params: Mapping[str, Array]
    saved: Any
    key: Array | None = None
    extra_output_grads: tuple[Array, ...] = ()
    scales: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    main_grad: Array | None = None  # the kernel's buffer, if ``info.main_grad``; f32

    param_grads: dict[str, Array] = dataclasses.field(default_factory=dict)
    main_grad_next: Array | None = None  # its next value, instead of ``param_grads["kernel"]``
    extra_input_grads: tuple[Array | None, ...] = ()
    used: Used = dataclasses.field(default_factory=dict)


def sum_over_lead(x: Array, dtype: Any) -> Array:
    """[*lead, C] -> [C]: summed in fp32, rounded once."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)), dtype=jnp.float32).astype(dtype)
