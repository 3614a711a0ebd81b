"""The leaves of FP8 scale state: float32 arrays whose "gradient" is their next value.

Delayed scaling keeps its state in the variable collection ``_overwrite_with_gradient``: differentiating a loss gives,
as the cotangent of a state leaf, the leaf's next value, and Flax's TrainState overwrites the leaf with it. On the way
people do to this tree what they do to gradients: sum it over uses and microbatches, average, clip, unscale, cast. So
the leaves are built to be read rightly after any *linear* treatment and to be caught after any other.

One dict of leaves belongs to one run of ops and is stacked over its Q quantizers (leading dimensions, such as the
layers of ``nn.scan``, may precede). One use of the run in one step writes, everything times W = 2**-64 so that state
vanishes in a gradient norm:

  amax_history [Q, H]  slot 0: this use's amax, or 0 if it was not a finite number > 0;
                       slots 1..H-1: the previous history, newest first (equal in all uses of a step)
  scale        [Q]     the scale that this step quantized with
  uses         [Q, 66] slots 0..63: a 1 in the rung that holds this use's amax; slot 64: the parity, +1 or -1, which
                       flips every step; slot 65: a 1 instead of a rung if there was no amax

Reading. A linear treatment leaves c * sum over k uses of what they wrote, for unknown c and k. Each use put exactly
one 1 into slots 0..63 and 65, so their sum u is c * k * W, and

  what all uses agree on (scale, older history, parity)  =  leaf / u                exactly if k = 1 and c = 1
  mean amax of the uses that had one                     =  slot 0 / sum of rungs   exactly if k = 1 and c = 1

Rungs are half octaves of amax, [2**(i/2), 2**((i+1)/2)), numbered modulo 64. If one rung is populated, all uses lie
within half an octave and their mean is the newest amax. Otherwise the newest amax is the upper edge of the highest
populated rung. Modulo 64 a rung could be one of many, 2**32 apart; the one nearest to the mean is meant, as the mean
lies between max / k and max. A rung that holds the share s of the uses contributes at least s * its lower edge to the
mean; one that would contribute more than the mean is a use 2**32 below the others, seen from the other side, and is
left out. So the newest amax is within half an octave of the true maximum, without reference to any scale, if every
share is at least 2**-16 and amaxes are within s * 2**31 of each other; of amaxes farther apart the newest may be up to
1.1 / s times too large or, if one that is 2**32 below the largest has its slot, as small as the mean.

u = 0 or not finite: unused or new; the quantizer takes the amax of its current tensor ("unseeded", scale 0).
|parity| != |u|: updates of several steps were mixed, as optimizers with momentum do, or ordinary gradient descent
(leaf - lr * cotangent). The scale read is then NaN, and stays NaN, so that the loss is.

Everything is done in a fixed number of elementwise operations and small reductions over all quantizers at once. Rungs
come from the bits of amax, without a logarithm, so that CPU and GPU agree; divisions by powers of two are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

W = 2.0**-64
RUNGS = 64
PARITY = 64
NO_AMAX = 65
LEAVES = frozenset(("amax_history", "scale", "uses"))
TINY = float(np.finfo(np.float32).tiny)  # the smallest normal number

_SQRT2_MANTISSA = 0x3504F3  # the mantissa bits of sqrt(2): where the upper half of an octave begins

Leaves = Mapping[str, jax.Array]


class Decoded(NamedTuple):
    """Leaves after division by what was done to them; [...] are leading dimensions and Q."""

    used: jax.Array  # bool[...]
    newest: jax.Array  # f32[...], amax of the step that wrote, 0 if none
    older: jax.Array  # f32[..., H - 1]
    older_max: jax.Array  # f32[...]
    scale: jax.Array  # f32[...], the scale of the step that wrote
    has_amax: jax.Array  # bool[...], some use had an amax
    parity: jax.Array  # f32[...], +1 or -1, 0 if bad or unused
    bad: jax.Array  # bool[...]


@functools.partial(jax.jit, inline=True)
def decode(leaves: Leaves) -> Decoded:
    history, scale, uses = (leaves[name].astype(jnp.float32) for name in ("amax_history", "scale", "uses"))
    rungs, parity = uses[..., :RUNGS], uses[..., PARITY]
    with_amax = _sum_of_rungs(rungs)
    u = with_amax + uses[..., NO_AMAX]
    used = (u != 0) & jnp.isfinite(u)
    u = jnp.where(used, u, 1.0)

    # Reductions of the leaves as they are come first, so that they share one pass; all else is elementwise.
    is_older = np.arange(history.shape[-1]) > 0
    highest = jnp.where(is_older, history, 0.0).max(-1)
    lowest = jnp.where(is_older, history, 0.0).min(-1)
    several = (rungs != 0).sum(-1) > 1
    rounded = (uses == uses.astype(jnp.bfloat16).astype(jnp.float32)).all(-1)

    # slot 0 over the share of uses that had an amax; that share is exactly 1 unless uses differed in having one.
    has_amax = used & (with_amax != 0)
    mean = _finite(_divide(history[..., 0], jnp.where(has_amax, with_amax, 1.0)))
    newest = jnp.where(several, _upper_bound(mean, rungs * (1 / u)[..., None]), mean)

    # Treatments in bfloat16 round every slot on its own: 2**-3 is above what a mean of 128 microbatches comes to (0.08)
    # if it is summed in it. Leaves that are not so rounded must match closely: 2**-15 is above the rounding of a sum of
    # 1000 microbatches (1e-5) and below two steps of gradient descent by 1e-5 (4e-5).
    mismatch = jnp.abs(jnp.abs(parity) - jnp.abs(u)) > jnp.abs(u) * jnp.where(rounded, 2.0**-3, 2.0**-15)
    negative = jnp.where(u < 0, highest > 0, lowest < 0) | (scale * u < 0)
    bad = used & (mismatch | negative)
    return Decoded(
        used=used,
        newest=jnp.where(has_amax, newest, 0.0),
        older=jnp.where(used[..., None], _finite(_over(history[..., 1:], u[..., None])), 0.0),
        older_max=jnp.where(used, _finite(_over(jnp.where(u < 0, lowest, highest), u)), 0.0),
        scale=jnp.where(used, _finite(_divide(scale, u)), 0.0),
        has_amax=has_amax,
        parity=jnp.where(used & ~bad, jnp.sign(parity) * jnp.sign(u), 0.0),
        bad=bad,
    )


def _sum_of_rungs(rungs: jax.Array) -> jax.Array:
    """[..., 64] -> [...], in halves: an order that the kernels have too, so that the sum is the same everywhere."""
    while (half := rungs.shape[-1] // 2) > 0:
        rungs = rungs[..., :half] + rungs[..., half:]
    return rungs[..., 0]


@jax.jit
def contradicts(leaves: Leaves) -> jax.Array:
    """bool[...]: the newest amax can't be of the one rung that is populated, so the leaves were treated unequally.

    Signs do that, and norms that are taken of each leaf. Uses 2**32 apart may share a slot: their mean is below the
    largest by up to their number, for which 8 octaves are left. Not part of ``decode``: what it costs, `check` pays.
    """
    newest, has_rung = decode(leaves).newest, leaves["uses"][..., :RUNGS] != 0
    above = ((_rung(newest) - jnp.argmax(has_rung, -1) + RUNGS // 2) & (RUNGS - 1)) - RUNGS // 2
    return (newest > 0) & (has_rung.sum(-1) == 1) & ((above > 1) | (above < -16))


@jax.jit
def follows(old: Leaves, new: Leaves) -> jax.Array:
    """bool[...]: ``new`` has the history of ``old`` as its older one, to bfloat16; true where ``new`` is unused.

    Leaves that were multiplied by a factor each (trust ratios) don't. As above, `check` pays for it.
    """
    before, after = decode(old), decode(new)
    pushed = jnp.concatenate([before.newest[..., None], before.older], -1)[..., :-1]
    want = jnp.where(before.newest[..., None] > 0, pushed, before.older)
    # 2**-40: what a factor on the way may have made subnormal.
    same = jnp.abs(after.older - want) <= 2.0**-6 * want + 2.0**-40
    return same.all(-1) | ~after.used


def encode(
    newest: jax.Array, older: jax.Array, scale: jax.Array, parity: jax.Array, has_amax: jax.Array | None = None
) -> dict[str, jax.Array]:
    """What one use writes. newest, scale, parity: f32[...], older: f32[..., H - 1].

    ``has_amax`` bool[...] (newest > 0 where it is None) may say that there was one too small for the history.
    """
    has_amax = newest > 0 if has_amax is None else has_amax
    slot = jnp.where(has_amax, _rung(newest) & (RUNGS - 1), NO_AMAX)[..., None]
    one_hot = (slot == np.arange(RUNGS + 2)).astype(jnp.float32)
    uses = jnp.where(np.arange(RUNGS + 2) == PARITY, parity[..., None], one_hot)
    history = jnp.concatenate([newest[..., None], older], -1)
    # Below tiny / W the product would be subnormal, which some devices flush: flush everywhere.
    return {
        "amax_history": jnp.where(history >= TINY / W, history * W, 0.0),
        "scale": jnp.where(scale >= TINY / W, scale * W, jnp.where(jnp.isnan(scale), jnp.nan, 0.0)),
        "uses": uses * W,
    }


def _upper_bound(mean: jax.Array, share: jax.Array) -> jax.Array:
    """The upper edge of the rung of the largest amax, from the mean amax [...] and the share [..., 64] per rung."""
    base = _rung(mean)[..., None]
    slots = np.arange(RUNGS, dtype=np.int32)
    rung = base + ((slots - base + RUNGS // 2) & (RUNGS - 1)) - RUNGS // 2  # the alias nearest to the mean
    # 1.1: the shares of a tree cast to bfloat16 are rounded.
    possible = (share > 0) & (share * _lower_edge(rung) <= 1.1 * mean[..., None])
    highest = jnp.where(possible, rung, base).max(-1)
    return jnp.where(mean > 0, _lower_edge(highest + 1), mean)


def _rung(amax: jax.Array) -> jax.Array:
    """i32: the half octave i with 2**(i/2) <= amax < 2**((i+1)/2), plus 2 * 127, from the bits of amax >= 0."""
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    return 2 * (bits >> 23) + ((bits & 0x7FFFFF) >= _SQRT2_MANTISSA).astype(jnp.int32)


def _lower_edge(rung: jax.Array) -> jax.Array:
    """The smallest f32 in a rung, for rungs of normal numbers; others are clipped to them."""
    rung = jnp.clip(rung, 2, 2 * 254 + 1)
    return jax.lax.bitcast_convert_type(((rung >> 1) << 23) + (rung & 1) * _SQRT2_MANTISSA, jnp.float32)


def _divide(a: jax.Array, u: jax.Array) -> jax.Array:
    """a / u, exact on every device if u is a power of two (GPU division may be off by 2 ulp otherwise)."""
    inverse, mantissa = _split(u)
    return jnp.where(mantissa == 1, a * inverse, a * inverse / mantissa)


def _over(a: jax.Array, u: jax.Array) -> jax.Array:
    """a / u for many a that share a u: off by at most 1 ulp, exact if u is a power of two.

    XLA makes this of a division by something broadcast anyway, but not everywhere.
    """
    inverse, mantissa = _split(u)
    return a * inverse * (1 / mantissa)


def _split(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(inverse, mantissa) with u * inverse = mantissa, 1 <= |mantissa| < 2, inverse a power of two."""
    bits = jax.lax.bitcast_convert_type(u, jnp.int32)
    exponent = jnp.clip(bits & 0x7F800000, 1 << 23, 253 << 23)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return inverse, u * inverse


def _finite(a: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(a), a, 0.0)
