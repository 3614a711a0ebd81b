"""Main gradients: float32 buffers that the weight gradients of linears are accumulated in, inside of the wgrad GEMM.

A buffer is a leaf like those of FP8 state: an operand of a run of ops, whose cotangent is its next value. So whatever
carries cotangents (``jax.grad``, ``nn.scan``, ``nn.remat``, offloading policies) carries it, and nothing else does. The
kernel's own cotangent is None then. Cotangents of two uses are added, which would count what was in the buffer twice:
a buffer has one use in a differentiated call.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from te_jax import compat
from te_jax.errors import check_type, check_value
from te_jax.ops.base import BackwardContext, LinkInfo, TensorType
from te_jax.parallel import mesh
from te_jax.recipe import BlockScaling

Mode = Literal["overwrite", "add", "try"]
MODES = ("overwrite", "add", "try")
MARK = "te_jax_main_grad"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of every cotangent of a buffer that was used."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MainGrad:
    """The buffer of one kernel, or of a stack of them (the layers of ``nn.scan``).

    Attributes:
      buffer: f32, of the kernel's shape. Over manual axes that it varies over and the kernel doesn't, it is one
        shard's: nothing is summed over these.
      mode: what a differentiated call does. "overwrite": what is in the buffer is not read; for the first microbatch.
        "add": wgrad adds to it. "try": as "overwrite", but where it can't be used, as its kernel is not that of a
        single linear, it isn't: its cotangent is zero then. The kernel has its own cotangent too, the same value.
    """

    buffer: Array
    mode: Mode = dataclasses.field(default="overwrite", metadata={"static": True})

    def __post_init__(self) -> None:
        check_value(self.mode in MODES, "MainGrad", "mode", " or ".join(map(repr, MODES)), repr(self.mode))

    def first_use(self) -> bool:
        """Whether this object, which every trace has its own of, was not used before; now it is."""
        if not isinstance(self.buffer, jax.core.Tracer):
            return True
        used = "_used" in vars(self)
        object.__setattr__(self, "_used_again" if used else "_used", True)
        return not used

    def used_again(self) -> bool:
        """Whether this object was used more than once, differentiated or not."""
        return "_used_again" in vars(self)

    def check(self, where: str, kernel: TensorType) -> None:
        """Raises a ValueError or TypeError unless it is the buffer of such a kernel."""
        check_value(self.buffer.shape == kernel.shape, where, "main_grad", f"shape {kernel.shape}", self.buffer.shape)
        check_type(self.buffer.dtype == jnp.float32, where, "main_grad", "dtype float32", self.buffer.dtype)


_without: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("te_jax_without_main_grad", default=None)


@contextlib.contextmanager
def finding_without() -> Generator[list[str]]:
    """Yields the kernels of linears that are applied inside without a buffer; filled by the calls."""
    found: list[str] = []
    token = _without.set(found)
    try:
        yield found
    finally:
        _without.reset(token)


def found_none(kernel: str) -> None:
    """Enters a kernel without a buffer, inside of ``finding_without``."""
    if (found := _without.get()) is not None and kernel not in found:
        found.append(kernel)


def addend(ctx: BackwardContext, *operands: Array | None) -> Array | None:
    """The buffer, where the GEMM of these operands can add to it; None where it is added later, or not at all.

    Inside of ``shard_map`` a product may be one shard's part of a gradient that is summed first.
    """
    if ctx.info.main_grad != "add" or ctx.main_grad is None:
        return None
    axes = frozenset().union(*(compat.varying_axes(x) for x in operands if x is not None))
    return ctx.main_grad if axes <= compat.varying_axes(ctx.main_grad) else None


def wgrad_dtype(ctx: BackwardContext, otherwise: str) -> str:
    """The dtype in which wgrad's GEMM writes: that of the buffer if there is one."""
    return otherwise if ctx.info.main_grad is None else "float32"


def book(ctx: BackwardContext, dw: Array, *, added: bool = False) -> None:
    """Enters the gradient of the kernel: as such, or as the next value of its buffer.

    ``added``: ``dw`` is what a GEMM with ``addend`` as c wrote.
    """
    if ctx.info.main_grad is None:
        ctx.param_grads["kernel"] = dw.astype(ctx.params["kernel"].dtype)
        return
    buffer = ctx.main_grad
    assert buffer is not None
    dw = dw.astype(jnp.float32)
    if not added:
        summed = compat.varying_axes(dw) - compat.varying_axes(buffer)
        dw = lax.psum(dw, tuple(sorted(summed))) if summed else dw
        if mesh.regime(buffer).typed:
            dw = compat.reshard(dw, jax.typeof(buffer).sharding.spec)
        dw = compat.pvary(dw, compat.varying_axes(buffer))
        dw = buffer + dw if ctx.info.main_grad == "add" else dw
    ctx.main_grad_next = dw


def marked(cotangent: Array) -> Array:
    """The cotangent of a buffer that was used, so that programs show that it was (te_jax.accumulate)."""
    return checkpoint_name(cotangent, MARK)


def note(info: LinkInfo) -> str | None:
    """What the plan says of a linear's backward step."""
    if info.main_grad is None:
        return None
    if info.main_grad == "add":
        jnp_groups = info.op.groups is not None and isinstance(info.recipe, BlockScaling)
        return "wgrad accumulates into main_grad" + (", added by XLA" if jnp_groups or not info.quantized else "")
    return "wgrad overwrites main_grad"


def is_main_grad(node: Any) -> bool:
    return isinstance(node, MainGrad)
