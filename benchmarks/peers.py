"""The implementations that are compared: te_jax, plain Flax in bf16, Flax's own FP8, TransformerEngine for JAX.

All get the same parameters, inputs and cotangents in bfloat16. A call is what a user's step does: forward alone, or
forward and backward with the output and every gradient kept, FP8 state included (all of these libraries give the next
state as a gradient), from a random cotangent.

TransformerEngine is used where it can be imported; ``TE_SITE`` names a folder that holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import report
from flax.core import meta
from flax.linen import fp8_ops

import te_jax as te
from te_jax.testing import bench
from te_jax.testing.bench import Case

BF16 = jnp.bfloat16
STATE = "_overwrite_with_gradient"  # of flax, te_jax and TransformerEngine alike
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
FAST = {"fprop": "fast", "dgrad": "fast", "wgrad": "fast"}


def te_environment() -> None:
    """Starts this process again with TransformerEngine and its libraries on the paths, if ``TE_SITE`` asks for it.

    The loader reads LD_LIBRARY_PATH when a process starts. Call this before anything else.
    """
    site = os.environ.get("TE_SITE")
    if not site or os.environ.get("TE_SITE_ACTIVE") == site:
        return
    libraries = [found for path in sys.path for found in glob.glob(f"{path}/nvidia/*/lib")]
    env = {**os.environ, "TE_SITE_ACTIVE": site, "UB_SKIPMC": "1", "NCCL_NVLS_ENABLE": "0"}
    env["LD_LIBRARY_PATH"] = ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    env["PYTHONPATH"] = ":".join([os.environ.get("PYTHONPATH", ""), site])
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


@dataclasses.dataclass(frozen=True)
class Impl:
    """One contestant.

    Attributes:
      name, recipe, accumulation: what results say.
      module: case -> Flax module, called with x.
      tree: (case, arrays by ``Case.param_shapes`` names) -> the module's parameters.
      names: (case, gradients in the module's tree) -> gradients by those names.
      context: entered while the module is traced.
      options: XLA options of its programs.
      dy: the FP8 format of gradients, or "bf16" where nothing is quantized.
    """

    name: str
    recipe: str
    accumulation: str
    module: Callable[[Case], nn.Module]
    tree: Callable[[Case, Mapping[str, jax.Array]], Any]
    names: Callable[[Case, Any], dict[str, jax.Array]]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dy: str = "e5m2"

    @property
    def label(self) -> str:
        """As tables name it."""
        return report.Key(self.name, self.recipe, self.accumulation).label


# te_jax


def _te_module(recipe: te.recipe.Recipe | None) -> Callable[[Case], nn.Module]:
    def module(case: Case) -> nn.Module:
        common = {"recipe": recipe, "dtype": BF16, "param_dtype": BF16}
        if case.kind == "linear":
            return te.flax.Dense(case.width, **common)
        return te.flax.LayerNormMLP(case.features, case.width, use_bias=False, **common)

    return module


def _te_tree(case: Case, p: Mapping[str, jax.Array]) -> Any:
    if case.kind == "linear":
        return {"kernel": p["w"], "bias": p["b"]}
    return {"mlp_norm": {"scale": p["gamma"]}, "fc1": {"kernel": p["w1"]}, "fc2": {"kernel": p["w2"]}}


def _te_names(case: Case, g: Any) -> dict[str, jax.Array]:
    if case.kind == "linear":
        return {"w": g["kernel"], "b": g["bias"]}
    return {"gamma": g["mlp_norm"]["scale"], "w1": g["fc1"]["kernel"], "w2": g["fc2"]["kernel"]}


# Flax


class FlaxMlp(nn.Module):
    """RMSNorm and a SwiGLU MLP as one writes them in Flax; gate and up projection as one kernel, or as two."""

    width: int
    split: bool = False
    dot_general_cls: Any = None
    param_dtype: Any = BF16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(n):
            types = {"dtype": BF16, "param_dtype": self.param_dtype}
            return nn.Dense(n, use_bias=False, dot_general_cls=self.dot_general_cls, **types)

        h = nn.RMSNorm(dtype=BF16, param_dtype=self.param_dtype)(x)
        if self.split:
            gate, up = dense(self.width)(h), dense(self.width)(h)
        else:
            gate, up = jnp.split(dense(2 * self.width)(h), 2, axis=-1)
        return dense(x.shape[-1])(nn.silu(gate) * up)


def _flax_impl(name: str, *, fp8: bool = False, split: bool = False, options: Mapping[str, Any] | None = None) -> Impl:
    cls = fp8_ops.Fp8DirectDotGeneralOp if fp8 else None

    def module(case: Case) -> nn.Module:
        if case.kind == "linear":
            return nn.Dense(case.width, dtype=BF16, param_dtype=BF16, dot_general_cls=cls)
        return FlaxMlp(case.width, split=split, dot_general_cls=cls)

    def tree(case: Case, p: Mapping[str, jax.Array]) -> Any:
        if case.kind == "linear":
            return {"kernel": p["w"], "bias": p["b"]}
        first = jnp.split(p["w1"], 2, axis=1) if split else [p["w1"]]
        kernels = [*first, p["w2"]]
        return {"RMSNorm_0": {"scale": p["gamma"]}} | {f"Dense_{i}": {"kernel": k} for i, k in enumerate(kernels)}

    def names(case: Case, g: Any) -> dict[str, jax.Array]:
        if case.kind == "linear":
            return {"w": g["kernel"], "b": g["bias"]}
        kernels = [g[f"Dense_{i}"]["kernel"] for i in range(3 if split else 2)]
        return {"gamma": g["RMSNorm_0"]["scale"], "w1": jnp.concatenate(kernels[:-1], 1), "w2": kernels[-1]}

    return Impl(
        name,
        "delayed" if fp8 else "bf16",
        "xla" if fp8 else "",
        module,
        tree,
        names,
        options=options or {},
        dy="e5m2" if fp8 else "bf16",
    )


# TransformerEngine


def _transformer_engine() -> dict[str, Impl]:
    try:
        import transformer_engine.jax as te_peer
        import transformer_engine.jax.flax as te_flax
        from transformer_engine.common import recipe as te_recipe
    except (ImportError, OSError, RuntimeError) as error:
        print(f"TransformerEngine is not here: {error}", file=sys.stderr)
        return {}

    def module(case: Case) -> nn.Module:
        if case.kind == "linear":
            return te_flax.DenseGeneral(features=case.width, use_bias=True, dtype=BF16)
        return te_flax.LayerNormMLP(
            intermediate_dim=case.width, layernorm_type="rmsnorm", activations=("silu", "linear"), use_bias=False,
            dtype=BF16, intermediate_dropout_rate=0.0,
        )  # fmt: skip

    def tree(case: Case, p: Mapping[str, jax.Array]) -> Any:
        if case.kind == "linear":
            return {"kernel": p["w"], "bias": p["b"]}
        wi = p["w1"].reshape(case.features, 2, case.width)
        return {"scale": p["gamma"], "wi_kernel": wi, "wo_kernel": p["w2"]}

    def names(case: Case, g: Any) -> dict[str, jax.Array]:
        if case.kind == "linear":
            return {"w": g["kernel"], "b": g["bias"]}
        return {"gamma": g["scale"], "w1": g["wi_kernel"].reshape(case.features, -1), "w2": g["wo_kernel"]}

    recipes = {"delayed": te_recipe.DelayedScaling(), "current": te_recipe.Float8CurrentScaling()}
    return {
        f"te {name}": Impl(
            "TransformerEngine", name, "fast", module, tree, names,
            context=lambda recipe=recipe: te_peer.autocast(enabled=True, recipe=recipe),
        )
        for name, recipe in recipes.items()
    }  # fmt: skip


def implementations() -> dict[str, Impl]:
    """Every implementation that this process has, by the name that ``--impls`` takes."""
    recipes = {
        "delayed": (te.DelayedScaling(**FAST), "fast"),
        "current": (te.CurrentScaling(**FAST), "fast"),
        "delayed_default": (te.DelayedScaling(), "fast forward, precise backward"),
        "current_default": (te.CurrentScaling(), "fast forward, precise backward"),
        "block": (te.BlockScaling(), "precise"),
    }
    ours = {
        f"te_jax {key}": Impl(
            "te_jax", key.partition("_")[0], accumulation, _te_module(recipe), _te_tree, _te_names,
            dy="e4m3" if key == "block" else "e5m2",
        )
        for key, (recipe, accumulation) in recipes.items()
    }  # fmt: skip
    flax = {
        "flax": _flax_impl("flax"),
        "flax_split": _flax_impl("flax split", split=True),
        "fp8_direct": _flax_impl("Fp8DirectDotGeneralOp", fp8=True),
        "fp8_direct_no_triton": _flax_impl("Fp8DirectDotGeneralOp, no triton", fp8=True, options=NO_TRITON),
    }
    return ours | flax | _transformer_engine()


@dataclasses.dataclass
class Program:
    """An implementation of a case, compiled, with its operands and an FP8 state that has seen some steps."""

    impl: Impl
    case: Case
    forward: Callable[..., Any]
    both: Callable[..., Any]
    params: Any
    state: Any
    x: jax.Array
    dy: jax.Array

    @property
    def forward_burst(self) -> bench.Burst:
        return bench.burst_of(self.forward, self.params, self.state, self.x)

    @property
    def both_burst(self) -> bench.Burst:
        """A call's FP8 state is what the call before it returned."""

        def burst(count: int) -> None:
            out = None
            for _ in range(count):
                out = self.both(self.params, self.state, self.x, self.dy)
                self.state = out[1][1]
            jax.block_until_ready(out)

        return burst

    def results(self) -> dict[str, jax.Array]:
        """y, dx and the gradients of the parameters, by the names of ``bench.reference_grads``."""
        y, (grads, self.state, dx) = self.both(self.params, self.state, self.x, self.dy)
        return {"y": y, "dx": dx} | {f"d{k}": v for k, v in self.impl.names(self.case, grads).items()}


def lower(impl: Impl, case: Case, arrays: Mapping[str, jax.Array]) -> Callable[[], Program]:
    """Traces both calls. What is returned compiles them, and may do so in another thread.

    Tracing may not: TransformerEngine's recipe is a global.
    """
    x, dy = arrays["x"], arrays["dy"]
    params = impl.tree(case, {name: arrays[name] for name in case.param_shapes()})
    with impl.context():
        module = impl.module(case)

        def init(x):
            variables = module.init(jax.random.key(0), x)
            return meta.unbox({name: tree for name, tree in variables.items() if name != "params"})

        def forward(params, state, x):
            y = module.apply({"params": params, **state}, x)
            return y[0] if isinstance(y, tuple) else y

        def both(params, state, x, dy):
            y, vjp = jax.vjp(forward, params, state, x)
            return y, vjp(dy)

        initial = jax.jit(init).lower(x)  # without the parameters: compiled away
        state = jax.eval_shape(init, x)
        lowered = [jax.jit(forward).lower(params, state, x), jax.jit(both).lower(params, state, x, dy)]

    def compiled() -> Program:
        programs = [program.compile(compiler_options=dict(impl.options)) for program in lowered]
        return Program(impl, case, *programs, params, initial.compile()(x), x, dy)

    return compiled


def build(impl: Impl, case: Case, arrays: Mapping[str, jax.Array], *, warm_up: int = 3) -> Program:
    """Compiles both calls; ``warm_up`` steps fill the FP8 state, so that scales are those of the data."""
    program = lower(impl, case, arrays)()
    for _ in range(warm_up):
        program.results()
    return program


def check(program: Program, expected: Mapping[str, jax.Array]) -> dict[str, float]:
    """Relative errors of all results; raises AssertionError for one beyond what its format explains."""
    errors = {}
    for name, value in program.results().items():
        errors[name] = bench.relative_error(value, expected[name])
        bound = 0.015 if program.impl.dy == "bf16" else bench.allowed_error(program.case, name, program.impl.dy)
        if not errors[name] <= bound:
            raise AssertionError(
                f"{program.impl.label}, {program.case.name}, {name}: expected a relative error of at most {bound:.3g}, "
                f"got {errors[name]:.3g}"
            )
    return {name: round(error, 5) for name, error in errors.items()}
