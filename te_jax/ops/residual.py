"""Extra values: they enter and leave a chain beside the main path, or branch off and join inside of it.

``AddExtraInput()`` and ``MakeExtraOutput()`` take from the call and return to it, in order. With a ``channel``, a name,
the value stays in the chain: ``[MakeExtraOutput(channel="res"), *branch, AddExtraInput(channel="res")]``. One op makes
it, before all those that take it, and its cotangents are summed. A list inside of the chain sees the channels of the
lists around it; its own are not seen outside, so that a block of ops may be repeated. ``StartResidual()`` and
``AddResidual()`` are the two with a channel that pairs them like brackets, for which no name is needed.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax import Array, lax

from te_jax import compat
from te_jax.errors import check_type
from te_jax.ops.base import BackwardContext, Bracket, Channel, ForwardContext, Op


@dataclasses.dataclass(frozen=True)
class AddExtraInput(Op):
    """y = x + extra, where extra [*lead, C] is the chain's next extra input, or comes through ``channel``.

    ``in_place`` (as in TransformerEngine's op of this name) permits a linear before it to add its result to the extra
    input inside the GEMM: one rounding instead of two. False keeps the sum a step of its own.
    """

    in_place: bool = True
    channel: str | None = dataclasses.field(default=None, kw_only=True)
    num_extra_inputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_channel(self, self.channel)

    def extra_input_channels(self) -> tuple[Channel, ...]:
        return (self.channel,)

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        (extra,) = ctx.extra_inputs
        return x + extra

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        ctx.extra_input_grads = (dy,)
        return dy


@dataclasses.dataclass(frozen=True)
class MakeExtraOutput(Op):
    """Hands x on and also returns it as an extra output, or puts it into ``channel``; the cotangents are summed.

    ``in_place`` permits a linear or norm after it to add its input gradient to that of the extra output in its own
    kernel: one rounding instead of two.
    """

    in_place: bool = True
    channel: str | None = dataclasses.field(default=None, kw_only=True)
    num_extra_outputs: ClassVar[int] = 1
    hands_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_channel(self, self.channel)

    def extra_output_channels(self) -> tuple[Channel, ...]:
        return (self.channel,)

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        ctx.extra_outputs = (x,)
        return x

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        (extra_grad,) = ctx.extra_output_grads
        return add_cotangents(dy, extra_grad)


@dataclasses.dataclass(frozen=True)
class StartResidual(MakeExtraOutput):
    """Keeps x for the AddResidual that closes it: ``[StartResidual(), *branch, AddResidual()]`` is y = x + branch(x).

    The two pair like brackets, in one list, and may be nested.
    """

    channel: None = dataclasses.field(default=None, init=False)

    def extra_output_channels(self) -> tuple[Channel, ...]:
        return (Bracket.RESIDUAL,)


@dataclasses.dataclass(frozen=True)
class AddResidual(AddExtraInput):
    """y = x + what the StartResidual before it kept, of x's shape; ``in_place`` as for AddExtraInput."""

    channel: None = dataclasses.field(default=None, init=False)

    def extra_input_channels(self) -> tuple[Channel, ...]:
        return (Bracket.RESIDUAL,)


def _check_channel(op: Op, channel: object) -> None:
    ok = channel is None or (isinstance(channel, str) and channel != "")
    check_type(ok, str(op), "channel", "None or a name", repr(channel))


def add_cotangents(a: Array, b: Array) -> Array:
    """The sum of two cotangents of one value.

    Inside of ``shard_map`` one may vary over a manual axis that the other doesn't vary over: then it is one device's
    part of a sum, and the other is a whole, which is to be counted once.
    """
    a_axes, b_axes = compat.varying_axes(a), compat.varying_axes(b)
    a, b = _summed(a, a_axes - b_axes), _summed(b, b_axes - a_axes)
    return a + b


def addable(cotangent: Array, *operands: Array | None) -> bool:
    """Whether ``cotangent`` can be added in the kernel that computes another one of ``operands``, without a psum."""
    axes = (compat.varying_axes(operand) for operand in operands if operand is not None)
    return compat.varying_axes(cotangent) == frozenset().union(*axes)


def _summed(x: Array, axes: frozenset[str]) -> Array:
    return lax.psum(x, tuple(sorted(axes))) if axes else x
