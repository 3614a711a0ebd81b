"""What ``collective.py`` compares: te_jax's overlapped calls, the same work one after the other, XLA's own, and parts.

Every contestant computes ``y = x w + b``, row-parallel ("rs": the sum of all devices' products, of which each keeps
some rows) or column-parallel ("ag": all devices' rows times each one's columns), from the same arrays
(``collective_problem.py``).

A program is some calls in a row, each of which waits for the one before: a number that is 0, read from its result, is
added to an element of x, in place, and to the scales. Both: without the first an all-gather of x would be the same in
all calls, and XLA would keep one of them; without the other so would quantizing w.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from collective_problem import DELAYED, SCALE, Arrays, Problem, function_of, moved, run_untuned
from jax.sharding import PartitionSpec

from te_jax import primitives
from te_jax.primitives import CollectiveGemmSpec, GemmSpec
from te_jax.primitives.collective_schedule import Schedule, schedule
from te_jax.testing import tolerance

P = PartitionSpec
RECIPES = {"delayed": DELAYED, "none": None}
KINDS = {"rs": "matmul_reduce_scatter", "ag": "all_gather_matmul"}
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# jax's documentation of collective matmuls and XLA's flags: dots whose operand is gathered, or whose result is
# scattered, become loops of partial dots and collective-permutes.
WINDOWED = NO_TRITON | {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}

Call = Callable[[Arrays, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]]
"""(arrays, f32[] that is 0, or None in the first call) -> (y, carried arrays, for the next call in place of these)."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One implementation of a problem, or one part of the work.

    Attributes:
      name: as results name it.
      call: one call, of whole arrays.
      names: of the arrays that it reads.
      y_spec: how y is split.
      operands: "bf16": quantizing both operands is part of the call; "fp8": they come quantized. None: neither.
      carried: names of arrays that each call gets from the one before.
      options: XLA's, for its programs.
      context: entered while it is traced.
      finish: y of the problem, in its layout, from the result of a call and the arrays.
      expected: what ``finish`` has to give, from the arrays; None: ``reference``.
    """

    name: str
    call: Call
    names: tuple[str, ...]
    y_spec: PartitionSpec
    operands: str | None = "bf16"
    carried: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    finish: Callable[[jax.Array, Arrays], jax.Array] = lambda y, arrays: y
    expected: Callable[[Arrays], jax.Array] | None = None


def te_jax_call(problem: Problem, overlap: str) -> Contestant:
    """``te.collective`` as a user calls it: operands in bfloat16, quantized in the call."""
    recipe = RECIPES[problem.recipe]

    def local(x, w, b, *state):
        given = {"state": state[0]} if state else {}
        return function_of(problem)(x, w, "tp", bias=b, recipe=recipe, overlap=overlap, **given)

    names = ("x", "w", "b", "state") if problem.fp8 else ("x", "w", "b")
    mapped = problem.shard_map(local, names, "y")

    def multiply(x, arrays, zero):
        state = arrays["state"] | {"scale": arrays["state"]["scale"] + zero} if problem.fp8 else None
        return mapped(x, arrays["w"], arrays["b"], *([state] if problem.fp8 else []))

    return waiting(problem, f"te_jax {overlap}", multiply, names, problem.specs["y"])


def waiting(problem: Problem, name: str, multiply: Callable, names: tuple[str, ...], y_spec: Any, **more) -> Contestant:
    """Of ``multiply(x, arrays, zero)``, x being the first of ``names`` with ``zero`` added to an element of it."""
    first, multiply = names[0], jax.jit(multiply)  # traced once, not for each call
    move = problem.shard_map(moved, (first, "scale_inv"), first)

    def call(arrays, zero):
        x = arrays[first] if zero is None else move(arrays[first], zero)
        return multiply(x, arrays, jnp.float32(0) if zero is None else zero), {first: x}

    return Contestant(name, call, names, y_spec, carried=(first,), **more)


def overlapped_operands(problem: Problem, how: Schedule | None = None, keep: bool = False) -> Contestant:
    """The custom call alone, on operands that are quantized: with this schedule, or the one that is chosen."""
    spec = CollectiveGemmSpec(
        kind=KINDS[problem.op], axis_name="tp", ranks=problem.ranks, fp8=problem.fp8, bias=True, fast_accumulation=True,
        keep_gathered=keep,
    )  # fmt: skip
    t, scatters = problem.ranks, problem.op == "rs"
    lhs = (problem.m, problem.k // t) if scatters else (problem.m // t, problem.k)
    rhs = (problem.n, problem.k // t) if scatters else (problem.n // t, problem.k)
    dtype = jnp.float8_e4m3fn if problem.fp8 else jnp.bfloat16
    chosen = how or schedule(spec, *(jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs)))
    spec = dataclasses.replace(spec, chunks=chosen.chunks, direct=chosen.direct)
    name = f"{chosen}, kept" if keep else str(chosen) if how else "custom call"

    def local(lhs, rhs, b, scale_inv):
        scales = {"lhs_scale_inv": scale_inv, "rhs_scale_inv": scale_inv} if problem.fp8 else {}
        found = primitives.collective_gemm(lhs, rhs, spec, bias=b, **scales)
        # The gathered operand has to be written: an element of it is part of the result.
        return found.out + 0 * found.gathered[:1, :1].astype(found.out.dtype) if keep else found.out

    return _of_operands(problem, name, local, problem.specs["y"])


def pair_of_operands(problem: Problem) -> Contestant:
    """The GEMM, and jax's collective behind or before it."""

    def local(lhs, rhs, b, scale_inv):
        if problem.op == "ag":
            gathered = jax.lax.all_gather(lhs, "tp", axis=0, tiled=True)
            return _gemm(problem, gathered, rhs, scale_inv, b)
        out = _gemm(problem, lhs, rhs, scale_inv)
        return jax.lax.psum_scatter(out, "tp", scatter_dimension=0, tiled=True) + b

    return _of_operands(problem, "GEMM and collective", local, problem.specs["y"])


def _gemm(problem: Problem, lhs, rhs, scale_inv, bias=None):
    spec = GemmSpec(fp8=problem.fp8, bias=bias is not None, fast_accumulation=problem.fp8, out_dtype="bfloat16")
    scales = {"lhs_scale_inv": scale_inv, "rhs_scale_inv": scale_inv} if problem.fp8 else {}
    return primitives.gemm(lhs, rhs, spec, bias=bias, **scales)[0]


def _of_operands(problem: Problem, name: str, local: Callable, y_spec: Any, lhs: str = "lhs", **more) -> Contestant:
    """Of lhs (or what takes its place), rhs, b and scale_inv."""
    names = (lhs, "rhs", "b", "scale_inv")
    in_specs = tuple(problem.specs[name] for name in names)
    mapped = jax.shard_map(local, mesh=problem.mesh, in_specs=in_specs, out_specs=y_spec)

    def multiply(x, arrays, zero):
        return mapped(x, arrays["rhs"], arrays["b"], arrays["scale_inv"] + zero)

    operands = "fp8" if problem.fp8 else "bf16"
    return waiting(problem, name, multiply, names, y_spec, operands=operands, **more)


def gemm_alone(problem: Problem) -> Contestant:
    """The same product of a device, nothing travelling; its algorithm is the fastest of those that are timed."""

    def local(lhs, rhs, b, scale_inv):
        return _gemm(problem, lhs, rhs, scale_inv, b if problem.op == "ag" else None)

    if problem.op == "ag":
        return _of_operands(problem, "GEMM", local, problem.specs["y"], "whole")

    def summed(y, arrays):
        def add(y, b):
            total = jax.lax.psum_scatter(y.astype(jnp.float32), "tp", scatter_dimension=0, tiled=True)
            return total + b.astype(jnp.float32)

        return problem.shard_map(add, ("partial", "b"), "y")(y, arrays["b"])

    return _of_operands(problem, "GEMM", local, problem.specs["partial"], finish=summed)


def collective_alone(problem: Problem) -> Contestant:
    """jax's collective of what the plain pair moves: partial sums in bfloat16, or rows in the operands' dtype."""
    scatters = problem.op == "rs"

    def local(partial, *zero):
        partial = moved(partial, *zero) if zero else partial
        if scatters:
            return jax.lax.psum_scatter(partial, "tp", scatter_dimension=0, tiled=True), partial
        return jax.lax.all_gather(partial, "tp", axis=0, tiled=True), partial

    outs = ("y" if scatters else "whole", "partial")

    def call(arrays, zero):
        rest = () if zero is None else (zero,)
        names = ("partial", "scale_inv")[: 1 + len(rest)]
        y, partial = problem.shard_map(local, names, outs, check_vma=False)(arrays["partial"], *rest)
        return y, {"partial": partial}

    def expected(arrays):
        if not scatters:
            return arrays["lhs"]
        return arrays["partial"].reshape(problem.ranks, problem.m, problem.n).astype(jnp.float32).sum(0)

    spec = problem.specs[outs[0]]
    return Contestant("collective", call, ("partial",), spec, None, ("partial",), expected=expected)


def xla(problem: Problem, name: str, options: Mapping[str, Any]) -> Contestant:
    """jax.numpy, its operands and result sharded: XLA places the collective."""

    def multiply(x, arrays, zero):
        w, scale = arrays["w"], SCALE + zero
        if problem.fp8:
            x, w = (jnp.clip(a.astype(jnp.float32) * scale, -448, 448).astype(jnp.float8_e4m3fn) for a in (x, w))
        y = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)
        y = y * (1 / (scale * scale)).astype(jnp.bfloat16) if problem.fp8 else y
        return jax.lax.with_sharding_constraint(y, problem.sharding("y")) + arrays["b"]

    return waiting(problem, name, multiply, ("x", "w", "b"), problem.specs["y"], options=options)


def contestants(problem: Problem) -> list[Contestant]:
    """All of a table's row but TransformerEngine."""
    found = [te_jax_call(problem, overlap) for overlap in ("overlapped", "plain", "ring")]
    found += [overlapped_operands(problem), pair_of_operands(problem), gemm_alone(problem), collective_alone(problem)]
    return [*found, xla(problem, "XLA", NO_TRITON), xla(problem, "XLA windowed einsum", WINDOWED)]


def small(problem: Problem) -> list[Contestant]:
    return [te_jax_call(problem, "overlapped"), te_jax_call(problem, "plain")]


def schedules(problem: Problem) -> list[Contestant]:
    if problem.op == "ag":
        tried = [overlapped_operands(problem, Schedule(chunks, False)) for chunks in (1, 2)]
        return [*tried, overlapped_operands(problem, Schedule(1, False), keep=True), gemm_alone(problem)]
    tried = [Schedule(chunks, False) for chunks in (1, 2, 4, 8)] + [Schedule(chunks, True) for chunks in (1, 2, 4)]
    return [*(overlapped_operands(problem, how) for how in tried), gemm_alone(problem)]


# Programs


def chain(contestant: Contestant, problem: Problem, calls: int) -> Callable:
    """(carried, arrays) -> (y of the last call, carried): that many calls, one after the other."""
    first = jax.shard_map(
        lambda y: y[(0,) * y.ndim].astype(jnp.float32) * 0,
        mesh=problem.mesh,
        in_specs=contestant.y_spec,
        out_specs=P(),
        check_vma=False,  # every device reads its own
    )

    def run(carried, arrays):
        y, zero = None, None  # adding to an argument would copy all of it
        for _ in range(calls):
            y, carried = contestant.call({**arrays, **carried}, zero)
            zero = first(y)
        return y, carried

    return run


def lower(contestant: Contestant, problem: Problem, arrays: Arrays, calls: int) -> jax.stages.Lowered:
    """``arrays`` may be shapes. Tracing isn't for several threads (contexts), compiling what this gives is."""
    carried = {name: arrays[name] for name in contestant.carried}
    rest = {name: arrays[name] for name in contestant.names if name not in carried}
    with contestant.context():
        return jax.jit(chain(contestant, problem, calls), donate_argnums=0).lower(carried, rest)


@dataclasses.dataclass
class Program:
    """Compiled, with its operands; what is carried is its own."""

    contestant: Contestant
    problem: Problem
    compiled: jax.stages.Compiled
    carried: dict[str, jax.Array]
    rest: dict[str, Any]

    def __call__(self) -> jax.Array:
        y, self.carried = self.compiled(self.carried, self.rest)
        return y

    def error(self, arrays: Arrays, reference: jax.Array) -> float:
        """|y - reference| / |reference|; AssertionError where rounding doesn't explain it, also of one element."""
        c = self.contestant
        y = run_untuned(c.finish, self(), dict(arrays))
        expected = reference if c.expected is None else run_untuned(c.expected, dict(arrays))
        error, largest = map(float, _errors(y, expected))
        hopper = "fast" if self.problem.fp8 and jax.default_backend() == "gpu" else ""
        allowed = 3e-3 + tolerance.gemm_error_norm(self.problem.k, hopper=hopper)
        if not (error < allowed and largest < 20 * allowed):
            raise AssertionError(
                f"{c.name}: expected a relative error of at most {allowed:.2g}, and of one element {20 * allowed:.2g} "
                f"of the rms, got {error:.3g} and {largest:.3g}"
            )
        return error


@jax.jit
def _errors(y: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the whole, in Frobenius norms, and the largest of one element, relative to the rms of all."""
    difference, wanted = y.astype(jnp.float32) - expected.astype(jnp.float32), expected.astype(jnp.float32)
    rms = jnp.sqrt((wanted * wanted).mean())
    return jnp.sqrt((difference * difference).mean()) / rms, jnp.abs(difference).max() / rms


def options_of(contestant: Contestant) -> dict[str, Any]:
    # Each process times its algorithms: several programs are compiled at once, in no order.
    return {"xla_gpu_shard_autotuning": False, **contestant.options}


def compiled(contestant: Contestant, problem: Problem, arrays: Arrays, lowered: jax.stages.Lowered) -> Program:
    options = options_of(contestant) if jax.default_backend() == "gpu" else {}
    carried = {name: jnp.copy(arrays[name]) for name in contestant.carried}
    rest = {name: arrays[name] for name in contestant.names if name not in carried}
    return Program(contestant, problem, lowered.compile(compiler_options=options), carried, rest)
