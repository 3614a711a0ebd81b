"""Lets a probe see what the linears quantize (te_jax/fusion/probe.py). Nothing is added to a program outside of one."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator

import jax
import jax.numpy as jnp

from te_jax.errors import required
from te_jax.ops.base import LinkInfo
from te_jax.parallel import mesh
from te_jax.primitives.quantizing import QuantizeOut
from te_jax.quant import health

Records = dict[tuple[LinkInfo, str], health.Measured]

_records: contextvars.ContextVar[Records | None] = contextvars.ContextVar("te_jax_records", default=None)


@contextlib.contextmanager
def recording() -> Generator[Records]:
    """Operands that are quantized inside, in high precision and by themselves, by (link, role).

    The values are those of the trace it is used in: it belongs around a rule of a custom VJP, not around a call of one.
    """
    records: Records = {}
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record(info: LinkInfo, role: str, x: jax.Array, out: QuantizeOut) -> None:
    """Measures x [*lead, C] against what it became, inside of ``recording``; does nothing anywhere else."""
    records = _records.get()
    if records is None or (info, role) in records or out.data is None:
        return
    recipe = info.quantizing_recipe
    x32 = jnp.abs(x.astype(jnp.float32))
    amax = jnp.max(jnp.where(jnp.isfinite(x32), x32, 0.0), initial=0.0)
    largest_inv = None if out.scale_inv is None or out.scale is not None else jnp.max(out.scale_inv)
    axes = mesh.amax_axes(x, out.scale, recipe)
    if axes:
        amax = jax.lax.pmax(amax, axes)
        largest_inv = None if largest_inv is None else jax.lax.pmax(largest_inv, axes)
    scale = out.scale if largest_inv is None else 1.0 / largest_inv
    records[info, role] = health.measure(x, out.data, required(scale, info.label, "scale"), recipe.format(role), amax)
