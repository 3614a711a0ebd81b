"""Runs a run of ops as ``execute`` does, unfused, and measures what each quantizer does to its tensor.

A fused step writes a linear's FP8 operand without the tensor it is made of, so there the tensor can't be looked at: the
probe applies op by op. Measurements leave as the cotangent of a ``RunHealth``, as FP8 state leaves, since dy exists
only in the backward pass.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import jax
from jax import Array

from te_jax import compat
from te_jax.fusion import execute as execution
from te_jax.fusion.cotangent import Like
from te_jax.fusion.run import Run
from te_jax.ops.recording import Records, recording
from te_jax.quant import health
from te_jax.quant.health import Measured, Quantizer, RunHealth

_making: contextvars.ContextVar[bool] = contextvars.ContextVar("te_jax_making_health", default=False)


@contextlib.contextmanager
def making() -> Generator[None]:
    """Chains that are applied inside put the leaves of their measurements into the collection ``fp8_health``."""
    token = _making.set(True)
    try:
        yield
    finally:
        _making.reset(token)


def is_making() -> bool:
    """Whether this is inside of ``making``."""
    return _making.get()


_found: contextvars.ContextVar[dict[str, Run] | None] = contextvars.ContextVar("te_jax_runs_found", default=None)
_prefix: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("te_jax_runs_prefix", default=())


@contextlib.contextmanager
def finding_runs() -> Generator[dict[str, Run]]:
    """Yields the runs that are traced inside, by "<module path>/fp8_<i>", where FP8 state is; filled by them."""
    found: dict[str, Run] = {}
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


@contextlib.contextmanager
def below(path: tuple[str, ...]) -> Generator[None]:
    """A module at ``path`` calls one that is unbound, and keeps its variables."""
    token = _prefix.set(path)
    try:
        yield
    finally:
        _prefix.reset(token)


def found_run(path: tuple[str, ...], run: Run) -> None:
    """Enters a run, inside of ``finding_runs``."""
    found = _found.get()
    if found is not None:
        found["/".join((*_prefix.get(), *path))] = run


def quantizers(run: Run) -> tuple[Quantizer, ...]:
    """By row of the FP8 state that linears share: the linear's scope, its place if the scope has several, the role."""
    return tuple(_quantizer(run, link, role, ()) for link, role in run.quantizers)


def _measured(run: Run) -> tuple[tuple[int, str, int | None], ...]:
    """(link, role, group) of every row of a measurement: those of ``quantizers``, then every group of each."""
    grouped = [(i, info.op.groups, info.op.roles) for i, info in enumerate(run.links) if info.op.groups is not None]
    return (
        *((link, role, None) for link, role in run.quantizers),
        *((link, role, group) for link, groups, roles in grouped for role in roles for group in range(groups)),
    )


def _quantizer(run: Run, link: int, role: str, behind: tuple[int, ...]) -> Quantizer:
    info = run.links[link]
    several = sum(other.scope == info.scope and bool(other.op.roles) for other in run.links) > 1
    place = ["_".join(map(str, info.path))] if several else []
    fmt = "e4m3" if run.recipe is None else run.recipe.format(role).name
    return Quantizer("/".join([*([info.scope] if info.scope else []), *place, role, *map(str, behind)]), fmt)


def init(run: Run) -> RunHealth:
    """Zeros for the measurements of a run."""
    rows = _measured(run)
    return health.init([_quantizer(run, link, role, () if group is None else (group,)) for link, role, group in rows])


def probe(leaves: RunHealth, run: Run, *operands: Any) -> tuple[Array, tuple[Array, ...], Any]:
    """``execute(run, *operands)``, whose measurements are the cotangent of ``leaves``."""
    return _probed(dataclasses.replace(run, forward_rules=(), backward_rules=()), leaves, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probed(run: Run, leaves: RunHealth, *operands: Any):
    del leaves
    return execution.execute(run, *operands)


@compat.numpy_promotion()
def _probed_fwd(run: Run, leaves: RunHealth, *operands: Any):
    with recording() as records:
        outputs, residuals = execution.run_fwd(run, *operands)
    return outputs, (leaves, residuals, _by_row(run, records))


@compat.numpy_promotion()
def _probed_bwd(run: Run, kept: Any, cotangents: Any):
    leaves, residuals, forward = kept
    with recording() as records:
        grads = execution.run_bwd(run, residuals, cotangents)
    rows = [ahead or behind for ahead, behind in zip(forward, _by_row(run, records), strict=True)]
    measured = health.write(leaves, rows)
    return jax.tree.map(lambda leaf, grad: Like.of(leaf).match(grad), leaves, measured), *grads


_probed.defvjp(_probed_fwd, _probed_bwd)


def _by_row(run: Run, records: Records) -> list[Measured | None]:
    rows = [(records.get((run.links[link], role)), group) for link, role, group in _measured(run)]
    return [
        seen if group is None or seen is None else Measured(*(leaf[group] for leaf in seen)) for seen, group in rows
    ]
