"""A matmul with a collective on two or more devices, its arrays and its reference, for ``collective.py``.

All contestants get these arrays. With FP8 they all quantize with one scale for each tensor, a power of two that is the
same for all, so that one reference is right for all of them: the fp32 product of the values that FP8 holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import te_jax as te

P = PartitionSpec
AMAX = 7.0  # of x and w: te_jax's scale is 448 / 7
SCALE = 64.0
DELAYED = te.DelayedScaling()

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """y [M, N] = x [M, K] w [K, N] + b [N] along the axis "tp" of ``mesh``, M, K, N of all devices together."""

    op: str
    m: int
    k: int
    n: int
    mesh: jax.sharding.Mesh
    recipe: str = "delayed"

    @property
    def ranks(self) -> int:
        return self.mesh.shape["tp"]

    @property
    def fp8(self) -> bool:
        return self.recipe != "none"

    @property
    def name(self) -> str:
        return f"{self.op} {self.m}, {self.k}, {self.n} {self.recipe}"

    @property
    def product(self) -> int:
        """Multiplications of one device, what SMALLEST_MEASURED is compared with."""
        return self.m * self.k * self.n // self.ranks

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        if self.op == "rs":
            split = {"x": P(None, "tp"), "w": P("tp"), "b": P(), "y": P("tp"), "lhs": P(None, "tp")}
            split |= {"rhs": P(None, "tp"), "partial": P("tp")}
        else:
            split = {"x": P("tp"), "w": P(None, "tp"), "b": P("tp"), "y": P(None, "tp"), "lhs": P("tp")}
            split |= {"rhs": P("tp"), "partial": P("tp")}
        return split | {name: P() for name in ("state", "scale_inv", "whole")}

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.specs[name])

    def shard_map(self, function: Callable, inputs: tuple[str, ...], outs: Any, **options) -> Callable:
        """``outs``: names of specs, as ``inputs``."""
        named = jax.tree.map(lambda name: self.specs[name], outs)
        in_specs = tuple(self.specs[name] for name in inputs)
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=named, **options)


def _tensor(seed: int, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.clip(jax.random.normal(jax.random.key(seed), shape, jnp.float32), -AMAX, AMAX)
    return x.at[(0,) * len(shape)].set(AMAX).astype(jnp.bfloat16)


def _to_fp8(x: jax.Array) -> jax.Array:
    return jnp.clip(x.astype(jnp.float32) * SCALE, -448, 448).astype(jnp.float8_e4m3fn)


def shapes_of(problem: Problem) -> dict[str, Any]:
    """The arrays of a problem as ``jax.ShapeDtypeStruct`` with shardings, enough to compile for devices elsewhere."""
    p, operand = problem, jnp.dtype(jnp.float8_e4m3fn if problem.fp8 else jnp.bfloat16)
    sizes = {"x": (p.m, p.k), "w": (p.k, p.n), "b": (p.n,), "lhs": (p.m, p.k), "rhs": (p.n, p.k)}
    sizes |= {"scale_inv": (), "partial": (p.ranks * p.m, p.n) if p.op == "rs" else (p.m, p.k)}
    if p.op == "ag":
        sizes["whole"] = sizes["lhs"]
    dtypes = {"lhs": operand, "rhs": operand, "whole": operand, "scale_inv": jnp.float32}
    dtypes["partial"] = jnp.dtype(jnp.bfloat16) if p.op == "rs" else operand
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.bfloat16), sharding=p.sharding(name))
        for name, shape in sizes.items()
    }
    replicated = p.sharding("state")
    state = jax.eval_shape(lambda: te.state.init(3, DELAYED))
    arrays["state"] = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=replicated) for k, v in state.items()}
    return arrays


def make_arrays(problem: Problem) -> dict[str, Any]:
    """x, w, b in bfloat16; lhs, rhs: x and w quantized (w transposed); whole: lhs on every device; partial: what a
    collective alone moves; te_jax's FP8 state."""
    shapes = shapes_of(problem)

    def made():
        x, w = _tensor(0, (problem.m, problem.k)), _tensor(1, (problem.k, problem.n))
        b = jax.random.normal(jax.random.key(2), (problem.n,), jnp.float32) * math.sqrt(problem.k)
        to_operand = _to_fp8 if problem.fp8 else lambda x: x
        arrays = {"x": x, "w": w, "b": b.astype(jnp.bfloat16), "lhs": to_operand(x), "rhs": to_operand(w).T}
        if problem.op == "rs":
            arrays["partial"] = jax.random.normal(jax.random.key(3), shapes["partial"].shape, jnp.bfloat16)
        else:
            arrays |= {"partial": arrays["lhs"], "whole": arrays["lhs"]}
        return arrays | {"scale_inv": jnp.float32(1 / SCALE)}

    wanted = {name: shape.sharding for name, shape in shapes.items() if name != "state"}
    arrays = run_untuned(made, out_shardings=wanted)
    return arrays | {"state": _seeded_state(problem, arrays)}


def _seeded_state(problem: Problem, arrays: Arrays) -> dict[str, jax.Array]:
    """te_jax's state after a step, as training has it: its "gradient" by the unfused pair."""
    initial = run_untuned(lambda: te.state.init(3, DELAYED), out_shardings=problem.sharding("state"))

    def local(x, w, b, state):
        def loss(state):
            y = function_of(problem)(x, w, "tp", bias=b, recipe=DELAYED, state=state, overlap="plain")
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(state)

    step = problem.shard_map(local, ("x", "w", "b", "state"), "state")
    return run_untuned(step, *(arrays[name] for name in "xwb"), initial, out_shardings=problem.sharding("state"))


def reference(problem: Problem, arrays: Arrays) -> jax.Array:
    """y in fp32 of what FP8 holds of x and w, XLA's own product and collective."""

    def product(lhs, rhs, b, scale_inv):
        unit = scale_inv * scale_inv if problem.fp8 else 1.0
        with jax.default_matmul_precision("highest"):
            return (lhs.astype(jnp.float32) @ rhs.astype(jnp.float32).T) * unit + b.astype(jnp.float32)

    args = [arrays[name] for name in ("lhs", "rhs", "b", "scale_inv")]
    return run_untuned(product, *args, out_shardings=problem.sharding("y"))


def run_untuned(function: Callable, *args, out_shardings: Any = None) -> Any:
    """For what is checked with, not timed: XLA times no algorithms for it."""
    jitted = jax.jit(function, out_shardings=out_shardings)
    return jitted.lower(*args).compile(compiler_options={"xla_gpu_autotune_level": "0"})(*args)


def function_of(problem: Problem) -> Callable:
    return te.collective.matmul_reduce_scatter if problem.op == "rs" else te.collective.all_gather_matmul


def moved(x: jax.Array, zero: jax.Array) -> jax.Array:
    """x with ``zero`` added to one element, in place."""
    first = (0,) * x.ndim
    return x.at[first].set((x[first].astype(jnp.float32) + zero).astype(x.dtype))
