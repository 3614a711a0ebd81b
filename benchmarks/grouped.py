"""Grouped linears on one GPU: FP8 and bf16 against ``jax.lax.ragged_dot`` and a loop of GEMMs.

    python benchmarks/grouped.py --out benchmarks/results/grouped.jsonl
    python benchmarks/grouped.py --groups 8 --cases fc1 --rounds 3 --impls te_jax "loop of GEMMs"

The 8192 tokens of all groups together are in groups of skewed sizes (Zipf's law, an eighth of the groups empty). The
loop knows them on the host and has one ``jnp.dot`` for each group that has tokens; all others take them as an array:
one program serves any sizes. "kernels kept" is te_jax with kernels that te.quantize_kernels has quantized before, as
for all microbatches of a step but the first, or for inference.
Parameters, activations and cotangents are random bfloat16. Values are checked against the loop's before anything is
timed; all implementations of a case are timed in turns in one process. fwd is y; fwd_bwd is y, dx, dw and FP8 state.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import report
from single_gpu import environment

import te_jax as te
from te_jax import ops
from te_jax.quant.state import KERNELS
from te_jax.testing import bench, grouped, tolerance

TOKENS = 8192
CASES = {"fc1": (4096, 14336), "fc2": (14336, 4096), "swiglu mlp": (4096, 14336)}
RECIPES = {"delayed": te.DelayedScaling(), "current": te.CurrentScaling(), "none": None}
IMPLS = ("te_jax", "te_jax, kernels kept", "loop of GEMMs", "ragged_dot")
UNTUNED = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
SLOW_S = 0.05  # calls that take longer are timed in bursts of two

Apply = Callable[..., jax.Array]
"""(variables, x, sizes) -> y."""


def chain(case: str, groups: int, recipe: te.Recipe | None) -> te.Sequential:
    features, width = CASES[case]
    linears = [ops.GroupedLinear(groups, width, use_bias=False)]
    if case == "swiglu mlp":
        linears = [
            ops.GroupedLinear(groups, 2 * width, use_bias=False),
            ops.SwiGLU(),
            ops.GroupedLinear(groups, features, use_bias=False),
        ]
    return te.Sequential(linears, recipe=recipe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


def kernels_of(params) -> list[jax.Array]:
    return [params[name]["kernel"] for name in sorted(params)]


def composed(linear: Callable, case: str) -> Apply:
    """The case with another implementation of its linears, ``linear(x, kernel, sizes)``."""

    def apply(variables, x, sizes):
        first, *second = kernels_of(variables["params"])
        y = linear(x, first, sizes)
        if not second:
            return y
        gate, value = jnp.split(y, 2, axis=-1)
        return linear(jax.nn.silu(gate) * value, second[0], sizes)

    return apply


def loop_of_gemms(sizes: np.ndarray, x: jax.Array, kernel: jax.Array, _: jax.Array) -> jax.Array:
    """Split, not indexed: gradients of parts are then written once, and not added up one behind the other."""
    rows = jax.lax.split(x, sizes.tolist())
    kernels = jax.lax.split(kernel, [1] * len(sizes))
    return jnp.concatenate([jnp.dot(a, b[0]) for a, b in zip(rows, kernels, strict=True) if len(a)])


def implementations(case: str, groups: int, sizes: np.ndarray) -> dict[tuple[str, str], Apply]:
    def ours(recipe):
        module = chain(case, groups, recipe)
        copies = 2 if case == "swiglu mlp" else 1
        return lambda variables, x, n: module.apply(variables, x, *(n,) * copies)

    found: dict[tuple[str, str], Apply] = {("te_jax", name): ours(recipe) for name, recipe in RECIPES.items()}
    found["te_jax, kernels kept", "delayed"] = ours(RECIPES["delayed"])
    found["ragged_dot", "none"] = composed(jax.lax.ragged_dot, case)
    found["loop of GEMMs", "none"] = composed(functools.partial(loop_of_gemms, sizes), case)
    return found


def make_arrays(case: str, groups: int):
    """(parameters, x, dy), random; kernels have standard deviation 1 / sqrt(K)."""
    features = CASES[case][0]
    module = chain(case, groups, None)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (TOKENS, features), jnp.bfloat16)
    extras = (sizes,) * (2 if case == "swiglu mlp" else 1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, *extras)["params"]
    leaves, treedef = jax.tree.flatten(shapes)
    normal = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / math.sqrt(shape[1]),
        static_argnums=1,
    )
    params = treedef.unflatten([normal(1 + i, leaf.shape) for i, leaf in enumerate(leaves)])
    y_features = features if case == "swiglu mlp" else CASES[case][1]
    dy = jax.random.normal(jax.random.key(9), (TOKENS, y_features), jnp.bfloat16)
    return params, x, dy


def programs_of(apply: Apply, variables, x, sizes, dy, options: Mapping[str, str | bool] | None = None):
    """(forward, forward and backward), compiled with these options."""

    def both(variables, x, sizes, dy):
        kept = {KERNELS: variables[KERNELS]} if KERNELS in variables else {}
        rest = {name: value for name, value in variables.items() if name != KERNELS}
        y, vjp = jax.vjp(lambda v, x: apply({**v, **kept}, x, sizes), rest, x)
        return y, vjp(dy)

    forward = jax.jit(apply).lower(variables, x, sizes).compile(options)
    return forward, jax.jit(both).lower(variables, x, sizes, dy).compile(options)


def check(results, wanted, recipe: str, case: str) -> dict[str, float]:
    """Relative errors of y, dx and dw against the loop's; raises where one is too large."""
    (y, (grads, dx)), (want_y, (want_grads, want_dx)) = results, wanted
    pairs = {"y": (y, want_y), "dx": (dx, want_dx)}
    pairs |= {
        f"dw{i}": p for i, p in enumerate(zip(*(kernels_of(g["params"]) for g in (grads, want_grads)), strict=True))
    }
    errors = {name: round(bench.relative_error(a, b), 5) for name, (a, b) in pairs.items()}
    for name, error in errors.items():
        formats = ("e4m3", "e4m3") if name == "y" else ("e5m2", "e4m3")
        roundings = 3 if case == "swiglu mlp" else 1  # quantized operands of one behind another
        quantized = 1.5 * tolerance.relative_rms_error(*formats * roundings) if recipe != "none" else 2.0**-6
        if not error <= quantized:
            raise AssertionError(f"{name}: expected a relative error of at most {quantized:.4f}, got {error}")
    return errors


def run(case: str, groups: int, rounds: int, names: Sequence[str], untuned: bool, where: dict) -> list[dict]:
    sizes = grouped.skewed(groups, TOKENS)
    on_device = jnp.asarray(sizes)
    params, x, dy = make_arrays(case, groups)
    impls = implementations(case, groups, sizes)
    start = time.perf_counter()
    options = UNTUNED if untuned else None
    loop = programs_of(impls["loop of GEMMs", "none"], {"params": params}, x, on_device, dy, options)
    loop_s = time.perf_counter() - start
    wanted = loop[1]({"params": params}, x, on_device, dy)
    impls = {key: apply for key, apply in impls.items() if key[0] in names}
    features, width = CASES[case]
    flops = 2 * TOKENS * features * width * (3 if case == "swiglu mlp" else 1)
    rows, bursts = {}, {}
    for (impl, recipe), apply in impls.items():
        row = {"case": f"grouped {case} {features}/{width}", "tokens": TOKENS, "groups": groups, "impl": impl}
        row |= {"recipe": recipe, "largest_group": int(sizes.max()), "empty_groups": int((sizes == 0).sum())}
        rows[impl, recipe] = row
        variables = {"params": params}
        start = time.perf_counter()
        try:
            if recipe == "delayed":
                module = chain(case, groups, RECIPES[recipe])
                extras = (on_device,) * (2 if case == "swiglu mlp" else 1)
                state = jax.jit(lambda m=module, e=extras: m.init(jax.random.key(0), x, *e)[te.state.COLLECTION])()
                variables[te.state.COLLECTION] = state
                if impl == "te_jax, kernels kept":
                    variables |= jax.jit(lambda v, m=module, e=extras: te.quantize_kernels(m, v, x, *e))(variables)
            is_loop = impl == "loop of GEMMs"
            forward, both = loop if is_loop else programs_of(apply, variables, x, on_device, dy)
            row["compile_s"] = round(loop_s if is_loop else time.perf_counter() - start, 1)
            if is_loop:
                row["tuned"] = not untuned
            results = both(variables, x, on_device, dy)
            row["errors"] = check(results, wanted, recipe, case)
            if recipe == "delayed":  # what is timed has a history
                variables[te.state.COLLECTION] = results[1][0][te.state.COLLECTION]
            bursts[impl, recipe, "fwd"] = bench.burst_of(forward, variables, x, on_device)
            bursts[impl, recipe, "fwd_bwd"] = bench.burst_of(both, variables, x, on_device, dy)
        except Exception as error:  # out of memory is a result too
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        results = None
    wanted = None
    times = bench.interleaved(bursts, rounds=rounds, slow_s=SLOW_S)
    for (impl, recipe, what), seconds in times.items():
        row = rows[impl, recipe]
        row[f"{what}_ms"] = bench.median_ms(seconds)
        row[f"{what}_tflops"] = round(flops * (3 if what == "fwd_bwd" else 1) / row[f"{what}_ms"] / 1e9, 1)
        row["noise"] = max(bench.spread(seconds), row.get("noise", 0.0))
    return [row | {"rounds": rounds} | where for row in rows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="rows are appended, as they come")
    parser.add_argument("--groups", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=["fc1", "fc2"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--impls", nargs="*", choices=IMPLS, default=IMPLS)
    parser.add_argument("--untuned-loop", action="store_true", help="cuBLASLt's first algorithm for each of its GEMMs")
    args = parser.parse_args()
    where = environment()
    for case in args.cases:
        for groups in args.groups:
            for row in run(case, groups, args.rounds, args.impls, args.untuned_loop, where):
                print(json.dumps(row), flush=True)
                report.append(args.out, [row])
            jax.clear_caches()


if __name__ == "__main__":
    main()
