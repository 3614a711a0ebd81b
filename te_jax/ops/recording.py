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
from te_jax.quant import grouped_reference, health

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
    amax, largest_inv = _over_mesh(info, x, out.scale, amax, largest_inv)
    scale = out.scale if largest_inv is None else 1.0 / largest_inv
    records[info, role] = health.measure(x, out.data, required(scale, info.label, "scale"), recipe.format(role), amax)


def record_groups(
    info: LinkInfo,
    role: str,
    x: jax.Array,
    data: jax.Array | None,
    *,
    scale: jax.Array | None,
    scale_inv: jax.Array | None,
    group_sizes: jax.Array | None,
) -> None:
    """``record`` of a tensor with a scale for each of G groups.

    Args:
      info, role: whose tensor it is.
      x, data: [T, C], or [G, R, C] where ``group_sizes`` is None.
      scale: f32[G], what x was multiplied by, if the quantizer has it.
      scale_inv: else f32[G], or those of blocks: f32[..., T] for [T, C], f32[G, ...] for [G, R, C].
      group_sizes: i32[G].
    """
    records = _records.get()
    if records is None or (info, role) in records or data is None:
        return
    groups = required(info.op.groups, info.label, "groups")
    x32 = jnp.abs(x.astype(jnp.float32))
    x32 = jnp.where(jnp.isfinite(x32), x32, 0.0)
    if group_sizes is None:
        group_of_row, amax = None, jnp.max(x32, (1, 2), initial=0.0)
        largest_inv = None if scale_inv is None else jnp.max(scale_inv.reshape(groups, -1), -1)
    else:
        group_of_row = grouped_reference.group_of_row(group_sizes, x.shape[0])
        belongs = group_of_row == jnp.arange(groups)[:, None]
        amax = jnp.max(jnp.where(belongs, jnp.max(x32, -1, initial=0.0), 0.0), -1, initial=0.0)
        largest_inv = scale_inv
        if scale_inv is not None and scale_inv.ndim > 1:  # of blocks; 1, as a block without amax has, if none is there
            largest_inv = jnp.max(jnp.where(belongs, jnp.max(scale_inv, 0), 0.0), -1, initial=0.0)
            largest_inv = jnp.where(largest_inv > 0, largest_inv, 1.0)
    amax, largest_inv = _over_mesh(info, x, scale, amax, None if scale is not None else largest_inv)
    scale = scale if largest_inv is None else 1.0 / largest_inv
    scale, fmt = required(scale, info.label, "scale"), info.quantizing_recipe.format(role)
    records[info, role] = health.measure_groups(x, data, scale, fmt, amax, group_of_row)


def _over_mesh(
    info: LinkInfo, x: jax.Array, scale: jax.Array | None, amax: jax.Array, largest_inv: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The largest of all devices in Manual mode."""
    axes = mesh.amax_axes(x, scale, info.quantizing_recipe)
    if not axes:
        return amax, largest_inv
    return jax.lax.pmax(amax, axes), None if largest_inv is None else jax.lax.pmax(largest_inv, axes)
