"""Benchmark cases, the bytes and GEMMs that a case cannot do without, and timing that is fair to all contestants.

A case is one module of a transformer at one size. Tests run small cases of the same kinds (``Case.scaled``).

The limit of a case is the time of its GEMMs alone plus its bytes over the device's copy bandwidth. Bytes are those of
every tensor's one read in bfloat16 and of the FP8 copies that the GEMMs want: two of each tensor, one as it is and one
transposed, since Hopper's FP8 GEMM takes only operands whose contracted dimension is last. What a GEMM itself reads
and writes is in its time.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

HP = 2  # bytes of a bfloat16
FP8 = 1


@dataclasses.dataclass(frozen=True)
class Gemm:
    """out [m, n] in bfloat16 = lhs [m, k] . rhs [n, k], lhs and rhs in FP8 of these formats."""

    name: str
    m: int
    n: int
    k: int
    lhs: str = "e4m3"
    rhs: str = "e4m3"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one pass over memory: what it reads, what it writes, and what scales of the present tensor cost more."""

    name: str
    reads: int
    writes: int
    amax_reads: int  # current scaling reads these once more, to know the scale
    backward: bool = False

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


@dataclasses.dataclass(frozen=True)
class Case:
    """One module at one size, parameters and activations in bfloat16.

    Attributes:
      kind: "linear" (with bias: y = x w + b) or "mlp" (RMSNorm, fc1, SwiGLU, fc2, without biases or residual).
      tokens: T; x is [T, K] for a linear, [1, T, K] for an MLP.
      features: K, of x.
      width: N of a linear; of an MLP the features between SwiGLU and fc2. An MLP's result has ``features``.
    """

    kind: str
    tokens: int
    features: int
    width: int

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "mlp"):
            raise ValueError(f"Case: kind: expected 'linear' or 'mlp', got {self.kind!r}")

    @property
    def name(self) -> str:
        what = f"linear {self.features}->{self.width} bias"
        return what if self.kind == "linear" else f"rmsnorm+swiglu mlp {self.features}/{self.width}"

    def scaled(self, by: int) -> Case:
        """The same with every size divided by ``by``."""
        return dataclasses.replace(self, tokens=self.tokens // by, features=self.features // by, width=self.width // by)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.features) if self.kind == "linear" else (1, self.tokens, self.features)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.width) if self.kind == "linear" else self.x_shape

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters by the names that ``reference`` knows. w1 holds the gate's kernel, then the other one's."""
        k, n = self.features, self.width
        return {"w": (k, n), "b": (n,)} if self.kind == "linear" else {"gamma": (k,), "w1": (k, 2 * n), "w2": (n, k)}

    def _linears(self) -> dict[str, tuple[int, int]]:
        k, n = self.features, self.width
        return {"": (k, n)} if self.kind == "linear" else {"fc1 ": (k, 2 * n), "fc2 ": (n, k)}

    def gemms(self, *, backward: bool = True, dy: str = "e5m2") -> tuple[Gemm, ...]:
        """The GEMMs of a call, those of the forward pass first."""
        t = self.tokens
        forward = [Gemm(f"{name}fprop", t, n, k) for name, (k, n) in self._linears().items()]
        if not backward:
            return tuple(forward)
        grads = [
            (Gemm(f"{name}dgrad", t, k, n, lhs=dy), Gemm(f"{name}wgrad", k, n, t, rhs=dy))
            for name, (k, n) in reversed(self._linears().items())
        ]
        return (*forward, *itertools.chain(*grads))

    def traffic(self, *, backward: bool = True) -> tuple[Traffic, ...]:
        """The passes over memory beside the GEMMs. Without ``backward`` one FP8 copy of each tensor is enough."""
        copies = 2 * FP8 if backward else FP8
        t, k, n = self.tokens, self.features, self.width
        x, y = t * k, t * n

        def quantize(name: str, size: int, *, backward: bool = False) -> Traffic:
            return Traffic(name, HP * size, copies * size, HP * size, backward)

        if self.kind == "linear":
            passes = [quantize("quantize x", x), quantize("quantize w", k * n)]
            return (*passes, quantize("quantize dy, dbias", y, backward=True)) if backward else tuple(passes)
        passes = [
            Traffic("norm", HP * x, copies * x, HP * x),
            quantize("quantize w1", 2 * k * n),
            Traffic("swiglu", HP * 2 * y, copies * y, HP * 2 * y),
            quantize("quantize w2", n * k),
        ]
        if backward:
            passes += [
                quantize("quantize dy", x, backward=True),
                Traffic("d-swiglu", HP * 3 * y, copies * 2 * y, HP * 3 * y, backward=True),
                Traffic("d-norm", HP * 2 * x, HP * x, 0, backward=True),
            ]
        return tuple(passes)

    def bytes(self, *, backward: bool = True, current: bool = False) -> int:
        """Bytes of all passes; ``current``: each quantized tensor's source is read once more for its amax."""
        return sum(p.bytes + (p.amax_reads if current else 0) for p in self.traffic(backward=backward))

    def arrays(self, seed: int = 0) -> dict[str, jax.Array]:
        """x, dy and the parameters, random, bfloat16. Kernels have standard deviation 1 / sqrt(K)."""
        shapes = {"x": self.x_shape, "dy": self.y_shape} | self.param_shapes()
        return {
            name: _normal(seed + i, shape, _deviation(name, shape), 1.0 if name == "gamma" else 0.0)
            for i, (name, shape) in enumerate(shapes.items())
        }


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    return {"x": 1.0, "dy": 1.0, "b": 1.0, "gamma": 0.1}.get(name, 1 / math.sqrt(shape[0]))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(seed: int, shape: tuple[int, ...], deviation: float, mean: float) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * deviation + mean).astype(jnp.bfloat16)


SINGLE_GPU = tuple(
    Case(kind, tokens, features, width)
    for tokens in (2048, 8192)
    for kind, features, width in (
        ("linear", 4096, 4096),
        ("linear", 8192, 8192),
        ("linear", 4096, 14336),
        ("mlp", 4096, 14336),
    )
)
"""The rows of the single-GPU table."""


def reference(case: Case, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """y in float32, of float32 copies of the operands."""
    p = {name: value.astype(jnp.float32) for name, value in params.items()}
    x = x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        if case.kind == "linear":
            return x @ p["w"] + p["b"]
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["gamma"]
        gate, up = jnp.split(h @ p["w1"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ p["w2"]


def reference_grads(case: Case, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """y, dx and the gradients "d" + name of every parameter, float32."""
    params = {name: arrays[name] for name in case.param_shapes()}

    def run(params, x, dy):
        # float32 primals, so that gradients aren't rounded to bfloat16
        f32 = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
        y, vjp = jax.vjp(lambda p, x: reference(case, p, x), *f32)
        grads, dx = vjp(dy.astype(jnp.float32))
        return {"y": y, "dx": dx} | {f"d{name}": g for name, g in grads.items()}

    return untuned(run, params, arrays["x"], arrays["dy"])(params, arrays["x"], arrays["dy"])


def untuned(function: Callable, *args) -> Callable:
    """``function`` compiled for these arguments without timing algorithms: for what is checked with, not timed."""
    return jax.jit(function).lower(*args).compile(compiler_options={"xla_gpu_autotune_level": "0"})


def allowed_error(case: Case, name: str, dy: str = "e5m2") -> float:
    """Largest relative error (Frobenius norm) of result ``name`` of an FP8 implementation of ``case``.

    1.5 times the rms error expected of the quantized operands that it depends on (te_jax.testing.tolerance); what
    accumulation, bfloat16 results and nonlinearities add is small beside them.
    """
    from te_jax.testing import tolerance

    q, d = "e4m3", dy
    linear = {"y": (q, q), "dx": (d, q), "dw": (q, d), "db": (d,)}
    # h depends on (x, w1), y on h twice (both halves), the SwiGLU's copy and w2; the backward pass on dy, w2, h, ..
    mlp = {
        "y": (q,) * 6,
        "dx": (d, q, q, q, q, q, d, q),
        "dw1": (d, q, q, q, q, q, d, q),
        "dw2": (q,) * 5 + (d,),
        "dgamma": (d, q, q, q, q, q, d, q),
    }
    return 1.5 * tolerance.relative_rms_error(*(linear if case.kind == "linear" else mlp)[name])


@jax.jit
def _relative_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    a, e = actual.astype(jnp.float32).reshape(-1), expected.astype(jnp.float32).reshape(-1)
    return jnp.linalg.norm(a - e) / jnp.linalg.norm(e)


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """|actual - expected| / |expected|, Frobenius norms, in float32 on the device."""
    return float(_relative_error(actual, expected.reshape(actual.shape)))


Burst = Callable[[int], None]
"""Makes n calls, many in flight, and returns when all have finished."""


def burst_of(function: Callable, *args) -> Burst:
    """Calls of a jitted function; the results of a call are dropped when the next one is made."""

    def burst(count: int) -> None:
        out = None
        for _ in range(count):
            out = function(*args)
        jax.block_until_ready(out)

    return burst


def interleaved(
    contestants: Mapping[str, Burst],
    *,
    rounds: int = 9,
    burst_s: float = 0.03,
    pause_s: float = 0.01,
    least: int = 10,
    slow_s: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one figure a round.

    Every round gives each contestant one burst of about ``burst_s``, starting with another one each time, with a pause
    between bursts: whatever clocks, temperature and power limit do in the meantime, they do to all of them. The number
    of calls in a burst is chosen once, at least ``least``, after warming up. Contestants whose call takes more than
    ``slow_s`` have bursts of two calls: that much is many times what a launch takes.
    """
    counts = {}
    for name, burst in contestants.items():
        start = time.perf_counter()
        burst(2)
        slow = (time.perf_counter() - start) / 2 > slow_s
        start = time.perf_counter()
        burst(2 if slow else 5)
        per_call = (time.perf_counter() - start) / (2 if slow else 5)
        counts[name] = 2 if per_call > slow_s else min(500, max(least, math.ceil(burst_s / per_call)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                time.sleep(pause_s)
                start = time.perf_counter()
                contestants[name](counts[name])
                times[name].append((time.perf_counter() - start) / counts[name])
    finally:
        if collecting:
            gc.enable()
    return times


def median_ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 5)


def spread(seconds: Iterable[float]) -> float:
    """Half the distance of the quartiles, relative to the median: the noise of a row."""
    low, middle, high = np.quantile(list(seconds), (0.25, 0.5, 0.75))
    return round(float((high - low) / 2 / middle), 4)


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))
