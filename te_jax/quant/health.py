"""What an FP8 quantizer does to its tensor: amax, scale, and the fractions that it saturates or flushes to zero.

One ``RunHealth`` belongs to one run of ops, as its FP8 state does, and is measured as that is: its leaves are zero, and
their cotangent in a step holds what the step's quantizers saw (te_jax/fusion/probe.py). Several uses in a step add up.
Counts add up rightly; amax is encoded as FP8 state encodes it, so that its sum is read as the maximum (exact for one
use, within half an octave above for more), and so is anything below 2**-62: as 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import compat, errors
from te_jax.quant import state as fp8_state
from te_jax.quant.format import Format, format_of
from te_jax.recipe import DelayedScaling

COLLECTION = "fp8_health"
"""The variable collection of a measurement. A module applied with it measures; it is never stored."""

_COUNTS = 4  # elements, saturated, flushed, not finite
_LAST = DelayedScaling(amax_history_len=1)  # an encoding of one step


class Quantizer(NamedTuple):
    """One row of a run: ``name`` is "<scope of the linear>/<role>", ``format`` "e4m3" or "e5m2"."""

    name: str
    format: str


class Measured(NamedTuple):
    """What one use of a quantizer saw: f32[] amax, scale; f32[4] counts (elements, saturated, flushed, not finite).

    Of a tensor with a scale for each of G groups all have G in front.
    """

    amax: jax.Array
    scale: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunHealth:
    """The measurements of a run's Q quantizers; [...] are leading dimensions, such as the layers of ``nn.scan``.

    Attributes:
      amax_history, scale, uses: f32[..., Q, 1], f32[..., Q], f32[..., Q, 66], encoded as FP8 state of one step.
      counts: f32[..., Q, 4], sums over uses of the counts of ``Measured``.
      quantizers: who they are.
    """

    amax_history: jax.Array
    scale: jax.Array
    uses: jax.Array
    counts: jax.Array
    quantizers: tuple[Quantizer, ...] = dataclasses.field(metadata={"static": True})

    @property
    def leaves(self) -> dict[str, jax.Array]:
        """The ones that are encoded as FP8 state."""
        return {"amax_history": self.amax_history, "scale": self.scale, "uses": self.uses}


class TensorHealth(NamedTuple):
    """One quantizer in one step; NaN where a report doesn't know.

    Attributes:
      amax: the largest absolute value; 0 if there was none that is finite and > 0.
      scale: the tensor is quantized as ``cast(clamp(x * scale))``; in block scaling the smallest of its blocks.
      saturated: fraction of the elements that are clamped: finite ones beyond what rounds to the largest FP8 value.
      flushed: fraction that is not 0 and becomes 0.
      nonfinite: fraction that is NaN or infinite.
      fp8_max: the largest value of the format.
    """

    amax: float
    scale: float
    saturated: float = math.nan
    flushed: float = math.nan
    nonfinite: float = math.nan
    fp8_max: float = math.nan

    @property
    def utilization(self) -> float:
        """amax * scale / fp8_max: 1 if the scale fits, above 1 if the tensor saturates, far below if it's stale."""
        return self.amax * self.scale / self.fp8_max


Report = dict[str, TensorHealth]


def init(quantizers: Sequence[Quantizer]) -> RunHealth:
    """The leaves of a run that nothing has been measured of: all zero."""
    leaves = fp8_state.init(len(quantizers), _LAST)
    return RunHealth(**leaves, counts=jnp.zeros((len(quantizers), _COUNTS)), quantizers=tuple(quantizers))


@compat.numpy_promotion()
def measure(x: jax.Array, data: jax.Array, scale: jax.Array, fmt: Format, amax: jax.Array) -> Measured:
    """Compares x [*lead, C] with its FP8 ``data`` of the same shape.

    Args:
      x, data: before and after.
      scale: f32[], what x was multiplied by; in block scaling the smallest of the blocks' scales, where none saturates.
      fmt: the format of data.
      amax: f32[], of x, reduced over the mesh.
    """
    flags = _flags(x, data, scale, fmt)
    return Measured(amax, scale, jnp.stack([jnp.sum(flag, dtype=jnp.float32) for flag in flags]))


@compat.numpy_promotion()
def measure_groups(
    x: jax.Array, data: jax.Array, scale: jax.Array, fmt: Format, amax: jax.Array, group_of_row: jax.Array | None
) -> Measured:
    """``measure`` of a tensor with scales and amaxes f32[G].

    Args:
      x, data: [T, C] with ``group_of_row`` i32[T] (G: of no group, not counted); or [G, R, C] without.
      scale, fmt, amax: as for ``measure``, for each group.
      group_of_row: see x.
    """
    if group_of_row is None:
        flags = _flags(x, data, scale[:, None, None], fmt)
        return Measured(amax, scale, jnp.stack([jnp.sum(flag, (1, 2), dtype=jnp.float32) for flag in flags], -1))
    flags = _flags(x, data, jnp.append(scale, jnp.float32(1))[group_of_row][:, None], fmt)
    of_rows = jnp.stack([jnp.sum(flag, -1, dtype=jnp.float32) for flag in flags], -1)  # [T, 4]
    belongs = group_of_row == jnp.arange(scale.shape[0])[:, None]  # [G, T]
    return Measured(amax, scale, jnp.sum(jnp.where(belongs[..., None], of_rows, 0.0), 1))


def _flags(x: jax.Array, data: jax.Array, scale: jax.Array, fmt: Format) -> tuple[jax.Array, ...]:
    """bool of the shape of x: that there is an element, whether it is saturated, flushed, not finite."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    finite = jnp.isfinite(magnitude)
    # Up to half a step above the largest value rounding alone gives it; a step is 2**-m of its power of two.
    power = 2.0 ** math.floor(math.log2(fmt.max))
    limit = fmt.max + 0.5 * power * 2.0 ** -jnp.finfo(fmt.dtype).nmant
    saturated = finite & (magnitude * scale > limit)
    flushed = finite & (magnitude > 0) & (data.astype(jnp.float32) == 0)
    return jnp.ones_like(finite), saturated, flushed, ~finite


@compat.numpy_promotion()
def write(health: RunHealth, rows: Sequence[Measured | None]) -> RunHealth:
    """The cotangent of ``health``: what one use of the run saw, row by row; 0 for quantizers that it didn't use."""
    zero = jnp.zeros((), jnp.float32)
    unused = Measured(zero, zero, jnp.zeros((_COUNTS,), jnp.float32))
    amax, scale, counts = (jnp.stack(column) for column in zip(*(row or unused for row in rows), strict=True))
    used = np.asarray([row is not None for row in rows])
    blank = fp8_state.init(len(rows), _LAST)
    view = fp8_state.read(blank, jnp.ones((len(rows),)), _LAST)
    leaves = fp8_state.write(view, scale, amax, blank)
    return RunHealth(
        amax_history=jnp.where(used[:, None], leaves["amax_history"], 0.0),
        scale=jnp.where(used, scale, 0.0),  # as it is, of tensors without amax too
        uses=jnp.where(used[:, None], leaves["uses"], 0.0),
        counts=counts,
        quantizers=health.quantizers,
    )


def report(variables: Mapping[str, Any]) -> Report:
    """Amax, scale and what quantizing did to every tensor that is quantized, by name.

    Without a measurement in ``variables`` (see ``te.health.measure``) it is made of the FP8 state of delayed scaling:
    the amax of the last step and the scale that it used, with rows named by their number (x, kernel and dy of each
    linear of a run in turn) and without fractions.

    Args:
      variables: concrete arrays, a dict of collections.

    Returns:
      {"<module path>/<linear>/<role>": TensorHealth}; behind it "/<group>" of a grouped linear and "/<layer>" for what
      ``nn.scan`` has stacked (of the FP8 state alone the layer is first). Quantizers that no step used yet, and groups
      without tokens in a measurement, are left out.

    Raises:
      ValueError: a measurement in which no quantizer was used.
      TypeError: tracers.
    """
    op = "state.report"
    errors.check_collections(op, "variables", variables)
    if COLLECTION in variables:
        return _measured_report(op, variables[COLLECTION])
    out: Report = {}
    for path, run in _runs(variables.get(fp8_state.COLLECTION, {})):
        _check_concrete(op, path, run["scale"])
        amax, used_scale, used = _decoded(run)
        for name, row in _rows(path, used, [str(q) for q in range(used.shape[-1])]):
            out[name] = TensorHealth(float(amax[row]), float(used_scale[row]))
    return out


def _measured_report(op: str, tree: Any) -> Report:
    out: Report = {}
    for path, run in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, RunHealth)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        expected = f"what te.health.measure returned (a {RunHealth.__name__})"
        errors.check_type(isinstance(run, RunHealth), op, f"{COLLECTION}/{name}", expected, type(run).__name__)
        _check_concrete(op, name, run.counts)
        amax, _, _ = _decoded(run.leaves)
        counts, scale = np.asarray(run.counts, np.float64), np.asarray(run.scale, np.float64)
        uses = np.asarray(run.uses, np.float64)
        uses = (uses[..., : fp8_state.RUNGS].sum(-1) + uses[..., fp8_state.NO_AMAX]) / fp8_state.W
        # The chain is named by its place; its linears have names of their own.
        parent = name.rpartition("/")[0]
        for label, row in _rows(parent, (uses > 0) & (counts[..., 0] > 0), [q.name for q in run.quantizers]):
            elements, saturated, flushed, nonfinite = counts[row]
            out[label] = TensorHealth(
                amax=float(amax[row]),
                scale=float(scale[row] / uses[row]),
                saturated=float(saturated / elements),
                flushed=float(flushed / elements),
                nonfinite=float(nonfinite / elements),
                fp8_max=format_of(run.quantizers[row[-1]].format).max,
            )
    expected = "a measurement (te.health.measure, whose loss_fn gives every collection to the model)"
    errors.check_value(bool(out), op, COLLECTION, expected, "one in which no quantizer was used")
    return out


def _decoded(run: Mapping[str, jax.Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(newest amax, scale that was used, whether a step used it), each [..., Q]."""
    host = {name: np.asarray(leaf, np.float64) for name, leaf in run.items()}
    # The most recent amax of the state is what a scale for fp8_max 1 without a history would be derived from.
    newest = fp8_state.read(run, 1.0, DelayedScaling(amax_history_len=run["amax_history"].shape[-1])).history[..., 0]
    rungs, no_amax = host["uses"][..., : fp8_state.RUNGS].sum(-1), host["uses"][..., fp8_state.NO_AMAX]
    uses = rungs + no_amax
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(uses != 0, host["scale"] / uses, 0.0)
    # A step without an amax leaves the history as it was.
    return np.where(rungs != 0, np.asarray(newest, np.float64), 0.0), scale, uses != 0


def _rows(path: str, used: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, index into [..., Q]) of the quantizers that were used."""
    for index in map(tuple, np.argwhere(used)):
        *lead, row = (int(i) for i in index)
        yield "/".join([*([path] if path else []), names[row], *map(str, lead)]), (*lead, row)


def _runs(state: Any) -> Iterator[tuple[str, Mapping[str, jax.Array]]]:
    is_run = lambda x: isinstance(x, Mapping) and set(x) == fp8_state.LEAVES  # noqa: E731
    for path, run in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_run):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        got = type(run).__name__
        errors.check_type(is_run(run), "state.report", name, f"leaves {sorted(fp8_state.LEAVES)}", got)
        yield name, run


def _check_concrete(op: str, name: str, leaf: Any) -> None:
    errors.check_type(not isinstance(leaf, jax.core.Tracer), op, name, "concrete arrays", "a tracer")
