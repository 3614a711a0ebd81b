"""FP8 state as training and mistakes leave it, for tests of the kernels that read and write it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.quant import state
from te_jax.quant.format import format_of
from te_jax.recipe import DelayedScaling

FORMATS = "e4m3 e5m2 e4m3 e4m3 e5m2 e4m3"
QUANTIZERS = 6

Leaves = dict[str, jax.Array]


def cases(history: int, seed: int = 0) -> Iterator[tuple[Leaves, jax.Array]]:
    """(leaves of ``QUANTIZERS`` quantizers, amaxes f32[Q]), about 70 of them.

    Leaves are those of one to seven uses in a step after some steps, treated linearly (summed, averaged, unscaled,
    negated, cast to bfloat16) or not (stepped by an optimizer, damaged); amaxes range over subnormals and infinity.
    """
    rng = np.random.default_rng(seed)
    recipe = DelayedScaling(amax_history_len=history)
    fp8_max = np.array([format_of(word).max for word in FORMATS.split(" ")], np.float32)
    read = jax.jit(lambda leaves: state.read(leaves, fp8_max, recipe))
    write = jax.jit(state.write)

    def amax() -> np.ndarray:
        values = np.exp2(rng.uniform(-20, 20, QUANTIZERS)).astype(np.float32)
        special = rng.random(QUANTIZERS) < 0.15
        return np.where(special, rng.choice(_SPECIAL, QUANTIZERS).astype(np.float32), values)

    leaves = state.init(QUANTIZERS, recipe)
    for step in range(24):
        view = read(leaves)
        uses = []
        for _ in range((1, 1, 2, 3, 7)[step % 5]):
            now = amax()
            scale = np.where(view.scale > 0, view.scale, np.float32(1.5))
            uses.append(write(view, scale, now, like=leaves))
        total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *uses)
        treated = _treat(total, step % len(_LINEAR))
        yield treated, jnp.asarray(amax())
        yield _damage(rng, leaves, treated, step % len(_DAMAGE)), jnp.asarray(amax())
        yield _mix(rng, treated), jnp.asarray(amax())
        leaves = treated
        if step % 9 == 8:
            leaves = state.init(QUANTIZERS, recipe)


_SPECIAL = (0.0, np.inf, np.nan, 1e-40, 1e-37, 2.0**-62, 2.0**-63, 3e38, 1.4e-45)
_LINEAR = (1.0, 1.0, 1 / 3, 2.0**-10, -0.5, 0.1, 1e-20)
_DAMAGE = ("parity", "negative scale", "nan", "inf", "sgd", "negative history")


def _treat(leaves: Leaves, kind: int) -> Leaves:
    factor = np.float32(_LINEAR[kind])
    treated = {name: leaf * factor for name, leaf in leaves.items()}
    if kind == 1:
        treated = {name: leaf.astype(jnp.bfloat16).astype(jnp.float32) for name, leaf in treated.items()}
    return treated


def _mix(rng: np.random.Generator, leaves: Leaves) -> Leaves:
    """Rows of zeros, of subnormals and of NaNs between those of the state."""
    rows = rng.choice([1, 1, 0, 1e-25, np.nan], QUANTIZERS).astype(np.float32)
    return {name: leaf * rows.reshape(-1, *(1,) * (leaf.ndim - 1)) for name, leaf in leaves.items()}


def _damage(rng: np.random.Generator, old: Leaves, new: Leaves, kind: int) -> Leaves:
    arrays = {name: np.array(leaf) for name, leaf in new.items()}
    row = int(rng.integers(QUANTIZERS))
    match _DAMAGE[kind]:
        case "parity":
            arrays["uses"][row, state.PARITY] *= 1.5
        case "negative scale":
            arrays["scale"][row] *= -1
        case "nan":
            arrays[("amax_history", "uses")[row % 2]][row, -1] = np.nan
        case "inf":
            arrays["amax_history"][row, -1] = np.inf
        case "sgd":
            arrays = {name: np.array(old[name] - 1e-3 * leaf) for name, leaf in arrays.items()}
        case "negative history":
            arrays["amax_history"][row, -1] *= -1
    return {name: jnp.asarray(leaf) for name, leaf in arrays.items()}
