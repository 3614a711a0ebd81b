"""Extra values of a run: handed from link to link forward, their cotangents handed back and summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from te_jax.errors import check_value
from te_jax.fusion.cotangent import Like
from te_jax.fusion.run import Output, Run
from te_jax.ops.base import BackwardContext, ForwardContext
from te_jax.ops.residual import add_cotangents


def entering(run: Run, extras: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For every link its extra inputs; None in place of those that are made inside of the run."""
    return [tuple(extras[s] if isinstance(s, int) else None for s in sources) for sources in run.wiring.inputs]


def hand_on(run: Run, links: Sequence[int], contexts: Sequence[ForwardContext]) -> None:
    """Gives the links of a step the extra inputs that links before it have made.

    What goes from one link of a step to another is the step's own business, here and in ``hand_back``.
    """
    for link in links:
        ctx = contexts[link]
        ctx.extra_inputs = tuple(
            _handed(contexts[source.link], source.number)
            if isinstance(source, Output) and source.link not in links
            else given
            for given, source in zip(ctx.extra_inputs, run.wiring.inputs[link], strict=True)
        )


def leaving(run: Run, contexts: Sequence[ForwardContext]) -> tuple[Any, ...]:
    """The extra outputs that the run returns."""
    return tuple(_made(contexts[link])[number] for link, number in run.wiring.leaving)


def leaving_grads(run: Run, grads: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For every link the cotangents of its extra outputs from outside of the run; None where there is none."""
    given = dict(zip(run.wiring.leaving, grads, strict=True))
    return [
        tuple(given.get(Output(link, number)) for number in range(info.op.num_extra_outputs))
        for link, info in enumerate(run.links)
    ]


def hand_back(run: Run, links: Sequence[int], contexts: Sequence[BackwardContext]) -> None:
    """Gives the links of a step the cotangents of their extra outputs, summed over those that took them and outside."""
    for link in links:
        ctx, grads = contexts[link], []
        for number, type_ in enumerate(ctx.info.op.extra_output_types(ctx.info.x_type)):
            taken = _taken(run, Output(link, number), contexts, without=links)
            grads.append(_sum([ctx.extra_output_grads[number], *taken], type_) if _differentiable(type_) else None)
        ctx.extra_output_grads = tuple(grads)


def entering_grads(run: Run, contexts: Sequence[BackwardContext], kinds: Sequence[Like]) -> tuple[Array | None, ...]:
    """The cotangents of the run's extra arguments, in their types; None: those of integers have none."""
    grads: list[Array | None] = []
    for argument, kind in enumerate(kinds):
        if not _differentiable(kind):
            grads.append(None)
            continue
        link, number = next(run.wiring.takers(argument))
        info = contexts[link].info
        type_ = info.op.extra_input_types(info.x_type)[number]
        grads.append(kind.match(_sum(_taken(run, argument, contexts), type_)))
    return tuple(grads)


def _differentiable(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _made(ctx: ForwardContext) -> tuple[Any, ...]:
    """An op's extra outputs, as many as it promised."""
    wanted, got = ctx.info.op.num_extra_outputs, len(ctx.extra_outputs)
    check_value(got == wanted, ctx.info.label, "ctx.extra_outputs after forward", f"{wanted} values", got)
    return ctx.extra_outputs


def _handed(ctx: ForwardContext, number: int) -> Any:
    """One of an op's extra outputs, of the shape that it promised to those that take it."""
    value, wanted = _made(ctx)[number], ctx.info.op.extra_output_types(ctx.info.x_type)[number].shape
    argument = f"ctx.extra_outputs[{number}] after forward"
    check_value(value.shape == wanted, ctx.info.label, argument, f"shape {wanted}", value.shape)
    return value


def _taken(
    run: Run, source: int | Output, contexts: Sequence[BackwardContext], without: Sequence[int] = ()
) -> list[Any]:
    """What the links that took a value say of its cotangent."""
    grads = []
    for link, number in run.wiring.takers(source):
        if link in without:
            continue
        info, given = contexts[link].info, contexts[link].extra_input_grads
        wanted = info.op.num_extra_inputs
        check_value(
            len(given) == wanted, info.label, "ctx.extra_input_grads after backward", f"{wanted} cotangents", len(given)
        )
        grads.append(given[number])
    return grads


def _sum(grads: Sequence[Any], type_: jax.ShapeDtypeStruct) -> Array:
    """The sum of the cotangents that there are, of a value of this type."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return jnp.zeros(type_.shape, type_.dtype)
    total = there[0]
    for grad in there[1:]:
        total = add_cotangents(total, grad)
    return total
