"""``scale_read`` and ``scale_write``: the FP8 state of a run of ops, one small kernel each.

Reference: ``te_jax.quant.state``, which says what the leaves mean. Both decode the leaves; writing does it again
instead of being handed what reading found, so that nothing of the state is saved between forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.spec import ScaleReadSpec, ScaleWriteSpec
from te_jax.quant import reference, state
from te_jax.quant.format import format_of
from te_jax.recipe import DelayedScaling

_LEAVES = ("amax_history", "scale", "uses")
_F32 = np.dtype(np.float32)


def scale_read(leaves: Mapping[str, jax.Array], spec: ScaleReadSpec) -> tuple[jax.Array, ...]:
    """The scale f32[] that each of Q quantizers quantizes with now: 0 for an unseeded one, NaN for bad state.

    With ``spec.groups`` a quantizer has a scale, and an amax below, for each group: f32[groups].

    Args:
      leaves: the state, as ``te_jax.state.init`` makes it; other dtypes than float32 are converted.
      spec: formats and how a scale comes from the history.

    Raises:
      ValueError, TypeError: leaves whose shapes are not those of Q quantizers.
    """
    return _READ(spec, *_leaves("scale_read", leaves))


def scale_write(
    leaves: Mapping[str, jax.Array], amaxes: Sequence[jax.Array], spec: ScaleWriteSpec
) -> dict[str, jax.Array]:
    """The cotangent of ``leaves``: their next value, times 2**-64, in their dtypes.

    Args:
      leaves: the state that this step read.
      amaxes: f32[] for every quantizer that was used, in order: the amax of its tensor, reduced over the mesh. A
        quantizer without history is taken to have quantized with the scale that the amax gives, as passes do.
      spec: as for ``scale_read``, and which quantizers were used; the rows of the others are zero.

    Raises:
      ValueError, TypeError: as ``scale_read``; an amax too many, too few or not f32[].
    """
    used = spec.used.count("1")
    errors.check_value(len(amaxes) == used, "scale_write", "amaxes", f"{used} (one for each used)", len(amaxes))
    outs = _WRITE(spec, *_leaves("scale_write", leaves), *amaxes)
    return {name: out.astype(leaves[name].dtype) for name, out in zip(_LEAVES, outs, strict=True)}


def _leaves(op: str, leaves: Mapping[str, jax.Array]) -> list[jax.Array]:
    errors.check_value(set(leaves) == set(_LEAVES), op, "leaves", sorted(_LEAVES), sorted(leaves))
    return [leaves[name].astype(jnp.float32) for name in _LEAVES]


def _check_leaves(op, spec, history, scale, uses):
    for word in spec.formats.split(" "):
        format_of(word)
    errors.check_value(-64 <= spec.margin <= 64, op, "margin", "-64 to 64", spec.margin)
    errors.check_value(spec.groups >= 0, op, "groups", "0 or more", spec.groups)
    q = (*_group_shape(spec), spec.quantizers)
    ok = history.shape[:-1] == q and history.shape[-1] > 0
    errors.check_value(ok, op, "amax_history", f"shape ({', '.join(map(str, q))}, at least 1)", history.shape)
    errors.check_value(scale.shape == q, op, "scale", f"shape {q}", scale.shape)
    wanted = (*q, state.RUNGS + 2)
    errors.check_value(uses.shape == wanted, op, "uses", f"shape {wanted}", uses.shape)


def _group_shape(spec) -> tuple[int, ...]:
    """The shape of one quantizer's scale: a scalar, or one for each group."""
    return (spec.groups,) if spec.groups else ()


def _check_write(spec, history, scale, uses, *rest):
    _check_leaves("scale_write", spec, history, scale, uses)
    ok = len(spec.used) == spec.quantizers and set(spec.used) <= set("01")
    errors.check_value(ok, "scale_write", "used", f"0 or 1 for each of {spec.quantizers} quantizers", repr(spec.used))
    for name, aval in zip(_write_operands(spec)[len(_LEAVES) :], rest, strict=True):
        errors.check_type(aval.dtype == jnp.float32, "scale_write", name, "dtype float32", aval.dtype)
        shape = _group_shape(spec)
        errors.check_value(aval.shape == shape, "scale_write", name, f"shape {shape}", aval.shape)


def _write_operands(spec):
    rows = [row for row, used in enumerate(spec.used) if used == "1"]
    return (*_LEAVES, *(f"amaxes[{row}]" for row in rows))


def _recipe(spec, history) -> DelayedScaling:
    algorithm = "most_recent" if spec.most_recent else "max"
    return DelayedScaling(amax_history_len=history.shape[-1], margin=spec.margin, amax_compute_algo=algorithm)


def _fp8_max(spec) -> np.ndarray:
    return np.array([format_of(word).max for word in spec.formats.split(" ")], np.float32)


def _read(spec, *leaves):
    return state.read(dict(zip(_LEAVES, leaves, strict=True)), _fp8_max(spec), _recipe(spec, leaves[0]))


def _read_reference(spec, *leaves):
    scale = _read(spec, *leaves).scale
    return tuple(scale[..., row] for row in range(spec.quantizers))


def _write_reference(spec, history, scale, uses, *amaxes):
    leaves = dict(zip(_LEAVES, (history, scale, uses), strict=True))
    given, zero = iter(amaxes), jnp.zeros(_group_shape(spec), jnp.float32)
    is_used = np.array([used == "1" for used in spec.used])
    amax = jnp.stack([next(given) if used else zero for used in is_used], axis=-1)
    view = _read(spec, history, scale, uses)
    derived = reference.scale_from_amax(amax, _fp8_max(spec), margin=spec.margin)
    new = state.write(view, jnp.where(view.scale == 0, derived, view.scale), amax, like=leaves)
    shapes = {name: (-1, 1) if name != "scale" else (-1,) for name in _LEAVES}
    rows = (jnp.where(is_used.reshape(shapes[name]), new[name], 0) for name in _LEAVES)
    return tuple(new[name] if is_used.all() else row for name, row in zip(_LEAVES, rows, strict=True))


def _rule(spec, num_results):
    """Nothing is split: the leaves are small and every scale needs whole rows."""
    group = ("g",) if spec.groups else ()
    leaves = ((*group, "q", "h"), (*group, "q"), (*group, "q", "u"))
    scales = (group,) * spec.used.count("1") if isinstance(spec, ScaleWriteSpec) else ()
    results = leaves if isinstance(spec, ScaleWriteSpec) else (group,) * num_results
    return ShardingRule(operands=leaves + scales, results=results, replicated=(*group, "q", "h", "u"))


_READ = CustomCall(
    Definition(
        name="scale_read",
        spec_type=ScaleReadSpec,
        operands=lambda spec: _LEAVES,
        check=lambda spec, *leaves: _check_leaves("scale_read", spec, *leaves),
        results=lambda spec, *leaves: ((_group_shape(spec), _F32),) * spec.quantizers,
        reference=_read_reference,
        why_not=lambda spec, *leaves: None,
        rule=lambda spec, *leaves: _rule(spec, spec.quantizers),
        local=lambda call, spec, reductions, *operands: call(spec, *operands),
    )
)

_WRITE = CustomCall(
    Definition(
        name="scale_write",
        spec_type=ScaleWriteSpec,
        operands=_write_operands,
        check=_check_write,
        results=lambda spec, *operands: tuple((x.shape, _F32) for x in operands[: len(_LEAVES)]),
        reference=_write_reference,
        why_not=lambda spec, *operands: None,
        rule=lambda spec, *operands: _rule(spec, len(_LEAVES)),
        local=lambda call, spec, reductions, *operands: call(spec, *operands),
    )
)
