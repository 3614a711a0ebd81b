"""Small ops: Identity, ConstantScale, Dropout, Reshape."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from te_jax.errors import check_type, check_value
from te_jax.ops.base import BackwardContext, ForwardContext, Op, TensorType


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


@dataclasses.dataclass(frozen=True)
class Identity(Op):
    """y = x."""

    hands_on: ClassVar[bool] = True

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return x

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return dy


@dataclasses.dataclass(frozen=True)
class ConstantScale(Op):
    """y = x * scale, a Python number: multiplied in fp32, rounded once, as in the GEMM of a linear before it."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_type(_is_number(self.scale), "ConstantScale", "scale", "a Python number", repr(self.scale))

    def _apply(self, x: Array) -> Array:
        return (x.astype(jnp.float32) * jnp.float32(self.scale)).astype(x.dtype)

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return self._apply(x)

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return self._apply(dy)


@dataclasses.dataclass(frozen=True)
class Dropout(Op):
    """Zeroes each element with probability ``rate`` and divides the others by 1 - rate; nothing when deterministic.

    A linen call is deterministic unless it says ``deterministic=False``, an nnx module in evaluation mode.
    The mask isn't saved: the backward pass draws it again from the same key (rng collection ``dropout``).
    """

    rate: float = 0.0

    def __post_init__(self) -> None:
        check_type(_is_number(self.rate), "Dropout", "rate", "a Python number", repr(self.rate))
        check_value(0.0 <= self.rate < 1.0, "Dropout", "rate", "a number in [0, 1)", repr(self.rate))

    def needs_key(self, deterministic: bool) -> bool:
        return not deterministic and self.rate > 0.0

    def _apply(self, key: Array | None, x: Array) -> Array:
        if key is None:
            return x
        keep = jax.random.bernoulli(key, 1.0 - self.rate, x.shape)
        return jnp.where(keep, x / jnp.asarray(1.0 - self.rate, x.dtype), jnp.zeros((), x.dtype))

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return self._apply(ctx.key, x)

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return self._apply(ctx.key, dy)


@dataclasses.dataclass(frozen=True)
class Reshape(Op):
    """y = x.reshape(shape); one entry of ``shape`` may be -1."""

    shape: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        ok = isinstance(self.shape, Sequence) and all(isinstance(d, numbers.Integral) for d in self.shape)
        check_type(ok, "Reshape", "shape", "a tuple of ints", repr(self.shape))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        check_value(
            sum(d == -1 for d in self.shape) <= 1 and all(d >= -1 for d in self.shape),
            "Reshape",
            "shape",
            "non-negative sizes with at most one -1",
            repr(self.shape),
        )

    def out_type(self, x: TensorType) -> TensorType:
        size = math.prod(x.shape)
        known = math.prod(d for d in self.shape if d != -1)
        fits = size % known == 0 if -1 in self.shape and known else size == known
        check_value(fits, "Reshape", "x", f"a size that {self.shape} holds", f"shape {x.shape}")
        return TensorType(tuple(size // known if d == -1 else d for d in self.shape), x.dtype)

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return x.reshape(self.shape)

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return dy.reshape(ctx.info.x_type.shape)
