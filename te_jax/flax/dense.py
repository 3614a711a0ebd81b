"""Dense, DenseGeneral, LayerNormDense: linears as linen modules, each an op chain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax.errors import check_value
from te_jax.flax.layers import check_array, norm_op
from te_jax.flax.tensor_parallel import Parallel, TensorParallel
from te_jax.fusion import probe
from te_jax.fusion.inference import is_quantized
from te_jax.fusion.plan import FusionPlan
from te_jax.ops.main_grad import MainGrad
from te_jax.quant.health import COLLECTION as HEALTH
from te_jax.quant.state import COLLECTION, KERNELS, MAIN_GRAD
from te_jax.recipe import Recipe
from te_jax.run_variables import NEXT
from te_jax.sequential import ChainModule

default_kernel_init = nn.initializers.lecun_normal()  # nn.Dense's default
default_bias_init = nn.initializers.zeros_init()


class Dense(ChainModule, kw_only=False):
    """Drop-in for ``nn.Dense``: y [*lead, features] = x [*lead, K] kernel [K, features] + bias [features].

    Parameters are exactly ``{kernel, bias}``, with ``nn.Dense``'s initialisers and random numbers, so a checkpoint of
    either module restores into the other. With a recipe the three GEMMs run in FP8.

    Attributes:
      features: number of output features.
      use_bias: whether to add a bias.
      kernel_init, bias_init: initialisers; ``nn.with_partitioning`` and ``nn.with_logical_partitioning`` wrappers work.
      recipe: FP8 recipe; None leaves the linear unquantized.
      dtype: dtype of the computation and of y; None: promoted from x and the parameters.
      param_dtype: dtype of the parameters.
      parallel: "column" (output features) or "row" (input features): which are split over ``tensor_axis``.
      tensor_axis: the mesh axis of tensor parallelism, inside of ``shard_map`` over it (docs/collective.md).
      sequence_parallel: x of a column-parallel, y of a row-parallel linear is split along its last but one dimension;
        otherwise it is the same on all devices of the axis.
      overlap: as of ``te.ops.AllGather``.
    """

    features: int
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    parallel: Parallel | None = None
    tensor_axis: str | None = None
    sequence_parallel: bool = False
    overlap: str = "auto"

    def chain(self):
        tensor = self._tensor()
        ok = self.parallel in ("column", "row") if self.tensor_axis is not None else self.parallel is None
        expected = "'column' or 'row' with a tensor_axis, None without"
        check_value(ok, "Dense", "parallel", expected, repr(self.parallel))
        linear = tensor.linear(
            self.features,
            self.parallel or "column",
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name="",
        )
        column = self.parallel == "column"
        return (*(tensor.before() if column else ()), linear, *(() if column else tensor.behind()))

    @nn.nowrap
    def own_features(self, in_features: int) -> int:
        """A device's part of x's features: all of them, but for a row-parallel linear."""
        return self._tensor().share("in_features", in_features) if self.parallel == "row" else in_features

    @nn.nowrap
    def _tensor(self) -> TensorParallel:
        return TensorParallel("Dense", self.tensor_axis, self.sequence_parallel, self.overlap)


class LayerNormDense(ChainModule, kw_only=False):
    """A norm and the linear that follows it: y [*lead, features] = norm(x [*lead, K]) kernel [K, features] + bias.

    With a recipe the norm writes the linear's FP8 input itself. Parameters: ``norm/{scale[, bias]}`` and
    ``dense/{kernel, bias}``.

    Attributes:
      features: number of output features.
      use_bias: whether the linear adds a bias.
      norm: "rmsnorm" or "layernorm".
      epsilon: added to the mean square (variance) before the root.
      kernel_init, bias_init: initialisers of the linear.
      tensor_axis, sequence_parallel, overlap: as in ``Dense``: the linear is column-parallel.
      recipe, dtype, param_dtype: as in ``Dense``.

    Raises:
      ValueError: unknown norm.
    """

    features: int
    use_bias: bool = True
    norm: str = "rmsnorm"
    epsilon: float = 1e-6
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    tensor_axis: str | None = None
    sequence_parallel: bool = False
    overlap: str = "auto"

    def chain(self):
        tensor = TensorParallel("LayerNormDense", self.tensor_axis, self.sequence_parallel, self.overlap)
        return (
            norm_op(self.norm, self.epsilon, name="norm", caller="LayerNormDense"),
            *tensor.before(),
            tensor.linear(
                self.features,
                "column",
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name="dense",
            ),
        )


class DenseGeneral(nn.Module):
    """Drop-in for ``nn.DenseGeneral`` (without batch_dims): a linear over several axes into several features.

    y [*kept, *features] = x contracted over ``axis`` with kernel [*axis sizes, *features], + bias [*features].
    Parameters are exactly ``{kernel, bias}`` in these shapes, with ``nn.DenseGeneral``'s initialisers. The computation
    is that of ``Dense`` on the flattened sizes; FP8 state is that of one linear.

    Attributes:
      features: output sizes.
      axis: contracted axes of x; the kernel's first dimensions are theirs in ascending order.
      use_bias: whether to add a bias.
      kernel_init, bias_init: initialisers, called with the flattened shapes as flax does; partitioning wrappers work.
      recipe, dtype, param_dtype: as in ``Dense``.

    Raises:
      ValueError: an axis that x doesn't have, or has twice.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    recipe: Recipe | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x with the contracted axes anywhere -> [*kept, *features]."""
        check_array("DenseGeneral", x)
        features, axis = self._features(), self._axes(x.shape)
        kept = tuple(i for i in range(x.ndim) if i not in axis)
        sizes = tuple(x.shape[i] for i in axis)
        flat = x.transpose(*kept, *axis).reshape(*(x.shape[i] for i in kept), math.prod(sizes))

        kernel = self._fp8_kernel()
        params = {"kernel": kernel or self._param("kernel", self.kernel_init, (*sizes, *features), len(sizes))}
        if self.use_bias:
            params["bias"] = self._param("bias", self.bias_init, features, 0)
        dense = self._dense()
        if self.is_initializing():
            with probe.below(self.path):
                initial: Any = dense.init(jax.random.key(0), flat)
            for name, state in initial.get(COLLECTION, {}).items():
                self.put_variable(COLLECTION, name, state)
        given = {name: self.variables[name] for name in (COLLECTION, KERNELS, HEALTH) if name in self.variables}
        if kernel is None and self.has_variable(MAIN_GRAD, "kernel"):
            given[MAIN_GRAD] = {"kernel": self._main_grad(params["kernel"])}
        writes = [c for c in (KERNELS, NEXT, HEALTH) if self.is_mutable_collection(c) and not self.is_initializing()]
        writes += ["params"] if self.is_mutable_collection("params") and not self.is_initializing() else []
        applied: Any = dense.apply({"params": params, **given}, flat, mutable=writes)
        y, made = applied
        for collection in writes:
            for name, value in made.get(collection, {}).items():
                if collection != "params" or is_quantized(value):
                    self.put_variable(collection, name, value)
        return y.reshape(*y.shape[:-1], *features)

    def plan(self, x: jax.ShapeDtypeStruct | Array, **options) -> FusionPlan:
        """The plan for this x; options as those of ``Sequential.plan``."""
        axis = self._axes(x.shape)
        kept = (size for i, size in enumerate(x.shape) if i not in axis)
        flat = jax.ShapeDtypeStruct((*kept, math.prod(x.shape[i] for i in axis)), x.dtype)
        return self._dense().plan(flat, **options)

    @nn.nowrap
    def _features(self) -> tuple[int, ...]:
        sizes = (self.features,) if not isinstance(self.features, Sequence) else tuple(self.features)
        ok = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
        check_value(ok, "DenseGeneral", "features", "positive ints", repr(self.features))
        return sizes

    @nn.nowrap
    def _dense(self) -> Dense:
        """The linear on flattened sizes, unbound: its parameters are views of this module's."""
        features = math.prod(self._features())
        return Dense(
            features,
            self.use_bias,
            recipe=self.recipe,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            parent=None,
        )

    @nn.nowrap
    def _fp8_kernel(self) -> dict[str, Array] | None:
        """The kernel on flattened sizes, if it is one in FP8 (te.quantize_params)."""
        value: Any = self.get_variable("params", "kernel") if self.has_variable("params", "kernel") else None
        return dict(value) if is_quantized(value) else None

    @nn.nowrap
    def _main_grad(self, kernel: Any) -> MainGrad:
        """The buffer of the kernel's gradient as a matrix; it has the kernel's own shape. Used as often as this is."""
        whole: MainGrad = self.get_variable(MAIN_GRAD, "kernel")
        buffer = MainGrad(whole.buffer.reshape(kernel.shape), whole.mode)
        if not whole.first_use():
            buffer.first_use()
        return buffer

    @nn.nowrap
    def _param(self, name: str, init: Initializer, shape: tuple[int, ...], contracted: int) -> Array:
        """The parameter as a matrix (a vector, if ``contracted`` is 0); it is kept in ``shape``."""
        rows, columns = shape[:contracted], shape[contracted:]
        flat_shape = (*((math.prod(rows),) if rows else ()), math.prod(columns))

        def init_flat(key: Array, shape: tuple[int, ...], dtype: Dtype) -> Array | meta.AxisMetadata:
            value = init(key, flat_shape, dtype)
            if isinstance(value, meta.AxisMetadata):  # nn.with_partitioning: the names are those of the full shape
                return meta.replace_boxed(value, value.unbox().reshape(shape))
            return jnp.reshape(value, shape)

        value: Any = self.param(name, init_flat, shape, self.param_dtype)  # unboxed
        return value.reshape(flat_shape)

    @nn.nowrap
    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``axis`` counted from the front, ascending."""
        asked, ndim = _as_tuple(self.axis), len(shape)
        axes = tuple(sorted(a % ndim for a in asked if -ndim <= a < ndim))  # sorted, as flax does
        ok = len(asked) > 0 and len(axes) == len(asked) == len(set(axes))
        check_value(ok, "DenseGeneral", "axis", f"distinct axes of x {shape}", self.axis)
        return axes


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
