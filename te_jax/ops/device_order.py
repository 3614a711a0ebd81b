"""Halves side by side in the order of devices: of each device its part of the first, then its part of the second.

The halves of [*lead, 2, F], split over F, are two blocks of each device. [*lead, 2 F] in blocks, one of each device,
has other numbers on it: a gate and its value are on two devices. In the order of devices

  [first of device 0 | second of device 0 | first of device 1 | ...]    each F / devices

what a device has is the same in all three shapes, so that going from one to another moves nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from te_jax import primitives
from te_jax.parallel import explicit


def devices_of(op: Any) -> int:
    """In the order of how many devices the features of an op are; 1: in the order in which they are kept."""
    return getattr(op, "devices", 1)


def from_halves(x: Array, devices: int) -> Array:
    """[*lead, 2, F] -> [*lead, 2 F] in the order of ``devices``; 1: one half behind the other."""
    *lead, halves, size = x.shape
    if devices > 1:
        x = jnp.swapaxes(x.reshape(*lead, halves, devices, size // devices), -3, -2)
    return x.reshape(*lead, halves * size)


def as_wanted(kept: Array, shape: tuple[int, ...], devices: int) -> Array:
    """A parameter, or a buffer of its gradient, as an op wants it, of what is kept (``ParamSpec``)."""
    if devices > 1:
        return from_halves(kept, devices)
    lead = len(shape) - 1
    entries = explicit.spec_entries(kept)
    merged = (*entries[:lead], explicit.entry(explicit.axes(entries[lead:])))  # also an axis of one device
    return lax.reshape(kept, shape, out_sharding=explicit.out_sharding(merged, kept))


def apart(x: Array, devices: int) -> Array:
    """[*lead, C] -> [*lead, devices, C / devices]."""
    return x.reshape(*x.shape[:-1], devices, x.shape[-1] // devices)


def joined(x: Array) -> Array:
    """The reverse of ``apart``."""
    return x.reshape(*x.shape[:-2], -1)


def joined_results(out: primitives.QuantizeOut) -> primitives.QuantizeOut:
    """What a pass over what ``apart`` gives has written, as of [*lead, C]; not its dbias, a sum over devices too."""
    data_t = None if out.data_t is None else jnp.moveaxis(out.data_t, -1, 0)  # of [C / devices, *lead, devices]
    return out._replace(
        hp=None if out.hp is None else joined(out.hp),
        data=None if out.data is None else joined(out.data),
        data_t=None if data_t is None else data_t.reshape(-1, *data_t.shape[2:]),
    )
