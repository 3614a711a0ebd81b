"""FP8 scales of other libraries as te_jax's FP8 state: the next step has the scale that it would have had there.

Flax's ``fp8_ops`` keep, per tensor, ``<input, kernel, output_grad>_scale`` [1], which divides, and ``.._amax_history``
[H]: slot 0 is the newest step, 1 the oldest, H - 1 the one before the newest. The next step takes its scale from the
whole history. TransformerEngine for JAX keeps ``<x, kernel, grad><postfix>_scale`` [1], which multiplies and is the
next step's, and ``.._amax_history`` [H]: slot H - 1 is the newest step, 1 the oldest, 0 is empty. What slot 0 held
before it was emptied is still in the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.errors import check_value
from te_jax.interop.rules import as_numpy
from te_jax.quant import state as fp8_state
from te_jax.recipe import DelayedScaling

FLAX, TRANSFORMER_ENGINE = "_overwrite_with_gradient", "fp8_metas"
_FLAX_ROLES = {"x": "input", "kernel": "kernel", "dy": "output_grad"}
_TE_ROLES = {"x": "x", "kernel": "kernel", "dy": "grad"}
_TE_POSTFIX = {"kernel": "", "wi_kernel": "_0", "wo_kernel": "_1"}
_FNUZ_MAX = {"x": 240.0, "kernel": 240.0, "dy": 57344.0}  # of Flax's NANOOFp8DotGeneralOp
_FLAX_MAX = {"x": 448.0, "kernel": 448.0, "dy": 57344.0}


class Scales(NamedTuple):
    """History f32[..., H], newest first, and the scale f32[...] that the next step multiplies with, in our format."""

    history: np.ndarray
    scale: np.ndarray


def find(source: Mapping[str, Mapping[str, Any]], kernel: str, role: str, fp8_max: float) -> Scales | None:
    """The scales of one tensor of the linear whose kernel is at that path of the source; None if it has none.

    Args:
      source: flattened collections of the other library.
      kernel: path of the kernel, e.g. "mlp/up/kernel".
      role: "x", "kernel" or "dy".
      fp8_max: of our format for that role.
    """
    parent, _, leaf = kernel.rpartition("/")
    prefix = f"{parent}/" if parent else ""
    metas = source.get(FLAX, {})
    flax = [path for path in metas if _is_flax(path, prefix, f"{_FLAX_ROLES[role]}_scale")]
    if leaf == "kernel" and len(flax) == 1:
        return _from_flax(metas, flax[0], role, fp8_max)
    if leaf in _TE_POSTFIX:
        name = f"{prefix}{_TE_ROLES[role]}{_TE_POSTFIX[leaf]}_scale"
        for collection in (TRANSFORMER_ENGINE, FLAX):
            if name in source.get(collection, {}):
                return _from_transformer_engine(source[collection], name, role, fp8_max)
    return None


def _is_flax(path: str, prefix: str, name: str) -> bool:
    """``<prefix><the op>/<name>``."""
    return path.startswith(prefix) and path[len(prefix) :].count("/") == 1 and path.endswith(f"/{name}")


def _from_flax(metas: Mapping[str, Any], path: str, role: str, fp8_max: float) -> Scales:
    history = as_numpy(metas[path.removesuffix("_scale") + "_amax_history"])
    divisor = as_numpy(metas[path])[..., 0]
    theirs = _FNUZ_MAX[role] if "NANOO" in path else _FLAX_MAX[role]
    amax = history.max(-1)
    usable = (amax > 0) & np.isfinite(amax)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(usable, np.float32(fp8_max) / amax, np.float32(fp8_max / theirs) / divisor)
    newest_first = np.concatenate([history[..., :1], history[..., :0:-1]], -1)
    return Scales(np.where(np.isfinite(newest_first), newest_first, 0.0), scale.astype(np.float32))


def _from_transformer_engine(metas: Mapping[str, Any], path: str, role: str, fp8_max: float) -> Scales:
    history = as_numpy(metas[path.removesuffix("_scale") + "_amax_history"])
    scale = as_numpy(metas[path])[..., 0] * np.float32(fp8_max / _FLAX_MAX[role])
    newest_first = history[..., :0:-1]  # without slot 0, which is empty
    return Scales(np.where(np.isfinite(newest_first), newest_first, 0.0), scale)


def combine(scales: list[Scales]) -> Scales:
    """Of tensors that are one tensor here: the largest amax, the smallest scale."""
    length = max(s.history.shape[-1] for s in scales)
    padded = [np.pad(s.history, [(0, 0)] * (s.history.ndim - 1) + [(0, length - s.history.shape[-1])]) for s in scales]
    return Scales(np.max(padded, 0), np.min([s.scale for s in scales], 0))


def leaves(
    op: str, name: str, rows: list[Scales | None], fp8_max: list[float], recipe: DelayedScaling
) -> dict[str, Any]:
    """The leaves of a run, [..., Q, ...], with these scales and histories in its rows; None: a new quantizer.

    Raises:
      ValueError: the recipe would make another scale of the history, by its margin or ``amax_compute_algo``.
    """
    given = [row for row in rows if row is not None]
    lead = given[0].scale.shape if given else ()
    length = recipe.amax_history_len
    histories, scales = [], []
    for row, largest in zip(rows, fp8_max, strict=True):
        fresh = Scales(np.zeros((*lead, length), np.float32), np.zeros(lead, np.float32))
        history, scale = fresh if row is None else _fitted(op, name, row, largest, recipe)
        histories.append(history)
        scales.append(scale)
    history, scale = np.stack(histories, -2), np.stack(scales, -1)  # [..., Q, H], [..., Q]
    like = fp8_state.init(len(rows), recipe)
    view = fp8_state.StateView(
        scale=jnp.asarray(scale),
        history=jnp.asarray(np.concatenate([history[..., 1:], np.zeros_like(history[..., :1])], -1)),
        parity=jnp.ones(scale.shape, jnp.float32),
        bad=jnp.zeros(scale.shape, bool),
    )
    written = fp8_state.write(view, view.scale, jnp.asarray(history[..., 0]), like)
    new = jnp.asarray([row is None for row in rows])
    used = {n: jnp.where(new.reshape(-1, *(1,) * (like[n].ndim - 1)), 0.0, leaf) for n, leaf in written.items()}
    return jax.tree.map(jnp.asarray, used)


def _fitted(op: str, name: str, row: Scales, fp8_max: float, recipe: DelayedScaling) -> Scales:
    """The row in the recipe's length: the newest steps, and in the last slot what keeps the maximum or the scale."""
    history, length = row.history, recipe.amax_history_len
    if history.shape[-1] > length:
        last = history[..., length - 1 :].max(-1, keepdims=True)
        history = np.concatenate([history[..., : length - 1], last], -1)
    else:
        history = np.pad(history, [(0, 0)] * (history.ndim - 1) + [(0, length - history.shape[-1])])
    history = history.copy()
    by_most_recent = recipe.amax_compute_algo == "most_recent"
    for index in np.ndindex(row.scale.shape):
        scale = row.scale[index]
        amax = history[index][0] if by_most_recent else history[index].max()
        derived = _derived(amax, fp8_max, recipe.margin)
        if amax == 0 or derived == scale:
            continue
        if not by_most_recent and scale < derived:
            history[(*index, length - 1)] = _implied(scale, fp8_max, recipe.margin)
            continue
        expected = f"the scale {derived:g} that {recipe} makes of the history"
        got = f"{scale:g}: another margin, amax_compute_algo or format there"
        check_value(bool(np.isclose(derived, scale, rtol=3e-7, atol=0)), op, name, expected, got)
    return Scales(history, row.scale)


def _derived(amax: np.float32, fp8_max: float, margin: int) -> np.float32:
    if amax == 0:
        return np.float32(0)
    return np.float32(np.float32(fp8_max) / np.float32(amax)) * np.float32(2.0**-margin)


def _implied(scale: np.float32, fp8_max: float, margin: int) -> np.float32:
    """The amax that gives the scale, exactly if there is one."""
    guess = np.float32(fp8_max * 2.0**-margin / np.float64(scale))
    near = [guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda amax: abs(float(_derived(amax, fp8_max, margin)) - float(scale)))
