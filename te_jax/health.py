"""How healthy FP8 training is: what quantizing does to every tensor, sampled once in a while, and what isn't right.

    probe = te.health.instrument(model, variables, x)                        # once: finds the quantizers
    measured = te.health.measure(loss_fn, {**variables, **probe}, batch)     # a forward and a backward pass
    report = te.state.report(measured)                                       # name -> TensorHealth
    flags = te.health.Monitor().update(step, report)                         # what looks like diverging, and why

``Callback`` does this every n steps. The training step itself is the program that it is without. See docs/health.md.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList
from jax import Array

from te_jax.arguments import split_arrays
from te_jax.errors import check_collections, check_type, check_value, warn
from te_jax.fusion.probe import making
from te_jax.quant.format import format_of
from te_jax.quant.health import COLLECTION, Report, TensorHealth, report
from te_jax.quant.state import COLLECTION as STATE
from te_jax.quant.state import KERNELS

__all__ = [
    "COLLECTION",
    "Callback",
    "Flag",
    "Limits",
    "Monitor",
    "Report",
    "TensorHealth",
    "instrument",
    "measure",
    "scalars",
]

Variables = Mapping[str, Any]


def instrument(module: nn.Module, variables: Variables, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The collection ``fp8_health`` for ``measure``: zeros for every quantizer of the module's chains.

    Nothing is computed. It belongs to these shapes of parameters, and to no step: make it once, add it where a step is
    measured.

    Args:
      module: any linen module; te_jax chains in it are found. Those in ``nn.scan`` or ``nn.vmap`` need the collection
        in ``variable_axes``, as parameters do.
      variables: what ``module.init`` returned.
      *args, **kwargs: as for ``module.apply``; arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      {"fp8_health": ...}

    Raises:
      ValueError: no linear of the module is quantized, or one is where the collection can't be written.
    """
    op = "health.instrument"
    check_type(isinstance(module, nn.Module), op, "module", "a flax.linen module", type(module).__name__)
    check_collections(op, "variables", variables)
    rest = {name: value for name, value in variables.items() if name != COLLECTION}
    kwargs = {name: value for name, value in kwargs.items() if name != "mutable"}
    given, rebuild = split_arrays((rest, args, kwargs))

    def make(arrays: list[Any]) -> Any:
        rest, args, kwargs = rebuild(arrays)
        with making():
            _, made = module.apply(rest, *args, **kwargs, mutable=DenyList(("params", STATE)))
        return made.get(COLLECTION, {})

    shapes = jax.eval_shape(make, given)
    expected = "a module with linears that are quantized (see its plan)"
    check_value(bool(jax.tree.leaves(shapes)), op, "module", expected, "one without for these arguments")
    return {COLLECTION: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)}


def measure(loss_fn: Callable[..., Array], variables: Variables, *batch: Any) -> dict[str, Any]:
    """``variables`` with its ``fp8_health`` filled by one forward and backward pass of ``loss_fn(variables, *batch)``.

    The pass is unfused, and its results are dropped: nothing else in ``variables`` changes. Put it in a ``jax.jit``, or
    use ``Callback``. Fractions don't need the whole batch, so a part of it may do.

    Raises:
      ValueError: ``variables`` has no collection from ``instrument``.
    """
    op = "health.measure"
    check_collections(op, "variables", variables)
    expected = f"a collection {COLLECTION!r} (te.health.instrument)"
    check_value(COLLECTION in variables, op, "variables", expected, f"collections {sorted(variables)}")
    rest = {name: value for name, value in variables.items() if name not in (COLLECTION, KERNELS)}

    def loss_of(leaves: Any) -> Array:
        return loss_fn({**rest, COLLECTION: leaves}, *batch)

    return {**variables, COLLECTION: jax.grad(loss_of)(variables[COLLECTION])}


def scalars(report: Report, prefix: str = "fp8") -> dict[str, float]:
    """The report as TensorBoard-style scalars, "<prefix>/<tensor>/<amax, scale, ...>"; without those not known."""
    return {
        f"{prefix}/{name}/{tag}": value
        for name, tensor in report.items()
        for tag in ("amax", "scale", "saturated", "flushed", "nonfinite")
        if not math.isnan(value := getattr(tensor, tag))
    }


class Flag(NamedTuple):
    """A tensor that is not healthy. ``value`` is beyond ``limit`` by ``criterion``, one of the fields of ``Limits``."""

    step: int
    name: str
    criterion: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.criterion} {self.value:.3g}, limit {self.limit:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a healthy tensor stays within. ``None`` turns a criterion off.

    Attributes:
      nonfinite: fraction of NaN and infinite elements.
      saturated: fraction of saturated elements: a scale that lags behind its tensor.
      flushed: fraction flushed to zero: outliers that set the scale, or a scale that is stale.
      growth: amax over the smallest amax of the last ``window`` reports, for x and kernel. Gradients are left out:
        their amax spikes and falls by orders of magnitude in healthy runs.
      overshoot: amax * scale / fp8_max, for x and kernel: by how much a tensor has outgrown its delayed scale.
      stale: octaves of the format's normal numbers that the scale leaves unused above amax, as a share of all that it
        has (E4M3 14.8, E5M2 29.8).
      window: reports that ``growth`` looks back on.
    """

    nonfinite: float | None = 0.0
    saturated: float | None = 0.01
    flushed: float | None = 0.5
    growth: float | None = 8.0
    overshoot: float | None = 4.0
    stale: float | None = 0.5
    window: int = 16


class Monitor:
    """Flags tensors whose reports are beyond ``limits``. Keeps amaxes of the last ``limits.window`` reports.

    A scale that diverges shows here before the loss shows it: FP8 has 15 octaves (E4M3), so that a tensor can grow, or
    an outlier in it, for a long time in which little is lost, and then everything.
    """

    def __init__(self, limits: Limits | None = None):
        self.limits = Limits() if limits is None else limits
        self._amaxes: dict[str, collections.deque[float]] = {}

    def update(self, step: int, report: Report) -> list[Flag]:
        """The flags of a report, which is remembered. Steps are only handed on to the flags."""
        flags = []
        for name, tensor in report.items():
            for criterion, value in self._values(name, tensor).items():
                limit = getattr(self.limits, criterion)
                if limit is not None and value > limit:
                    flags.append(Flag(step, name, criterion, value, limit))
            if tensor.amax > 0:
                self._amaxes.setdefault(name, collections.deque(maxlen=self.limits.window)).append(tensor.amax)
        return flags

    def _values(self, name: str, tensor: TensorHealth) -> dict[str, float]:
        values = {field: getattr(tensor, field) for field in ("nonfinite", "saturated", "flushed")}
        utilization = tensor.utilization
        if not math.isnan(utilization) and utilization > 0:
            values["stale"] = -math.log2(utilization) / _octaves(tensor.fp8_max)
        if not _is_gradient(name):
            earlier = self._amaxes.get(name)
            values["growth"] = tensor.amax / min(earlier) if earlier else math.nan
            values["overshoot"] = utilization
        return values


class Callback:
    """Measures every ``every``-th step: ``callback(step, variables, batch)`` in a training loop.

    Args:
      loss_fn: (variables, batch) -> f32[]; it gives every collection of ``variables`` to the model.
      probe: from ``instrument``.
      every: steps between measurements, from step 0 on.
      rows: measure the first ``rows`` rows of the batch's arrays, enough for the 16 tokens that FP8 needs; None: all.
        ``loss_fn`` is a mean over its rows then, so that gradients are made as small as the whole batch's.
      monitor: gets every report; None: none is made.
      write: called with (step, {"fp8/...": value}), for a log or a TensorBoard writer.
      on_flags: called with the monitor's flags if there are any. Default: one ``UserWarning`` for each report.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Array],
        probe: Variables,
        *,
        every: int = 100,
        rows: int | None = None,
        monitor: Monitor | None = None,
        write: Callable[[int, dict[str, float]], None] | None = None,
        on_flags: Callable[[list[Flag]], None] | None = None,
    ):
        for name, value in (("every", every), ("rows", 1 if rows is None else rows)):
            ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
            check_value(ok, "health.Callback", name, "a positive int", repr(value))
        self.every, self.monitor, self.write = every, monitor, write
        self.on_flags = _warn if on_flags is None else on_flags
        self._probe = dict(probe)

        def measure_rows(variables: Variables, batch: Any) -> Any:
            share = 1.0 if rows is None else rows / _rows_of(batch)
            part = jax.tree.map(lambda x: x[:rows], batch)
            return measure(lambda v, b: loss_fn(v, b) * min(share, 1.0), variables, part)[COLLECTION]

        self._measure = jax.jit(measure_rows)

    def __call__(self, step: int, variables: Variables, batch: Any) -> Report | None:
        """The report if this step is measured; waits for it."""
        return self.sample(step, variables, batch) if step % self.every == 0 else None

    def sample(self, step: int, variables: Variables, batch: Any) -> Report:
        """Measures now, whatever the step."""
        check_collections("health.Callback", "variables", variables)
        measured = self._measure({**variables, **self._probe}, batch)
        made = report({COLLECTION: jax.device_get(measured)})
        if self.write is not None:
            self.write(step, scalars(made))
        flags = self.monitor.update(step, made) if self.monitor is not None else []
        if flags:
            self.on_flags(flags)
        return made


@functools.cache
def _octaves(fp8_max: float) -> float:
    """From the smallest normal number of the format with that maximum to the maximum."""
    (fmt,) = (fmt for fmt in map(format_of, ("e4m3", "e5m2")) if fmt.max == fp8_max)
    return math.log2(fp8_max / float(jnp.finfo(fmt.dtype).tiny))


def _rows_of(batch: Any) -> int:
    sizes = {leaf.shape[0] if getattr(leaf, "shape", ()) else 0 for leaf in jax.tree.leaves(batch)}
    ok = len(sizes) == 1 and 0 not in sizes
    check_value(ok, "health.Callback", "batch", "arrays of the same number of rows (rows=...)", f"sizes {sizes}")
    return sizes.pop()


def _is_gradient(name: str) -> bool:
    return "dy" in name.split("/")


def _warn(flags: list[Flag]) -> None:
    warn("te_jax.health: " + "; ".join(map(str, flags)))
