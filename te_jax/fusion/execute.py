"""Runs a run of ops: one ``jax.custom_vjp`` over plain arrays, forward and backward by the steps of its plan.

The FP8 state goes in as an argument; its "cotangent" is its new value (te_jax.quant.state), so every JAX
transformation carries it, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from te_jax import compat, errors, primitives
from te_jax.fusion.fuser import RunPlan, plan_run
from te_jax.fusion.pattern import Rule, Step
from te_jax.ops.base import BackwardContext, ForwardContext, LinkInfo, QuantizedKernel, Used
from te_jax.ops.linear import quantize_kernel
from te_jax.parallel import mesh
from te_jax.primitives.spec import ScaleReadSpec, ScaleWriteSpec
from te_jax.quant.format import is_fp8
from te_jax.recipe import DelayedScaling, Recipe

Params = Mapping[str, Mapping[str, Array]]  # scope -> name -> array
Scales = list[dict[str, Array]]  # link -> role -> f32[]
Kernels = tuple[QuantizedKernel | None, ...]  # by link; None: this call quantizes it, or there is none


@dataclasses.dataclass(frozen=True)
class Run:
    """A maximal run of ops, with everything that tracing knows of it. Hashable: the static argument of the VJP."""

    links: tuple[LinkInfo, ...]
    recipe: Recipe | None
    forward_rules: tuple[Rule, ...]
    backward_rules: tuple[Rule, ...]

    @property
    def plan(self) -> RunPlan:
        return plan_run(self.links, self.forward_rules, self.backward_rules)

    @property
    def quantizes(self) -> bool:
        """Whether any linear is quantized."""
        return any(info.quantized for info in self.links)

    @property
    def quantizers(self) -> tuple[tuple[int, str], ...]:
        """(link, role) of every row of the run's FP8 state. Unquantized linears have theirs, unused."""
        return tuple((i, role) for i, info in enumerate(self.links) for role in info.op.roles)

    @property
    def stateful_recipe(self) -> DelayedScaling:
        """The recipe of a run that has FP8 state; raises TypeError for one that keeps none."""
        if not isinstance(self.recipe, DelayedScaling):
            raise TypeError(errors.message("fusion.execute", "recipe", "DelayedScaling", type(self.recipe).__name__))
        return self.recipe

    @property
    def scale_spec(self) -> ScaleReadSpec:
        """How the scales of the run's quantizers come from its FP8 state."""
        recipe = self.stateful_recipe
        return ScaleReadSpec(
            formats=" ".join(recipe.format(role).name for _, role in self.quantizers),
            margin=recipe.margin,
            most_recent=recipe.amax_compute_algo == "most_recent",
        )


@functools.partial(jax.jit, static_argnums=0, inline=True)  # one program where it is called outside of one
def execute(
    run: Run,
    params: Params,
    state: Mapping[str, Array],
    kernels: Kernels,
    keys: tuple,
    x: Array,
    extras: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...]]:
    """y and the extra outputs of a run, differentiable in params, state, x and extras, in any mesh regime.

    The gradient of a kernel that came quantized goes to the parameter all the same.
    """
    return _run(run, params, state, kernels, keys, x, extras)


@compat.numpy_promotion()
def quantize_kernels(run: Run, params: Params, state: Mapping[str, Array]) -> Kernels:
    """The kernels of the run's linears in FP8, as the run itself would quantize them now."""
    kernels: list[QuantizedKernel | None] = []
    for info, scales in zip(run.links, read_scales(run, state), strict=True):
        ctx = ForwardContext(info, params.get(info.scope, {}), train=True, scales=scales)
        kernels.append(quantize_kernel(ctx) if info.quantized else None)
    return tuple(kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compat.numpy_promotion()
def _run(run: Run, params, state, kernels, keys, x, extras):
    y, contexts = _forward(run, params, read_scales(run, state), kernels, keys, x, extras, train=False)
    return y, leaving(run, [ctx.extra_outputs for ctx in contexts])


@compat.numpy_promotion()
def _run_fwd(run: Run, params, state, kernels, keys, x, extras):
    scales = read_scales(run, state)
    y, contexts = _forward(run, params, scales, kernels, keys, x, extras, train=True)
    kinds = jax.tree.map(_Like.of, (x, extras))
    saved = jax.tree.map(_apart, [ctx.saved for ctx in contexts])
    used = [ctx.used for ctx in contexts]
    # A scan over layers stacks every residual, scalars too, so only the scales that are used yet are kept.
    left = [{role: s for role, s in scale.items() if role not in u} for scale, u in zip(scales, used, strict=True)]
    residuals = (params, state, left, keys, kinds, saved, used)
    outputs = (y, leaving(run, [ctx.extra_outputs for ctx in contexts]))
    if mesh.regime(x).explicit and run.quantizes:
        outputs = _as_without_backward(outputs, run, params, state, kernels, keys, x, extras)
    return outputs, residuals


def _as_without_backward(outputs: Any, run: Run, *operands: Any) -> Any:
    """The outputs in the Explicit shardings that they have where no backward pass follows, as JAX requires.

    Block scaling splits fewer dimensions where it also writes operands for wgrad, whose blocks go along tokens.
    """
    kinds = []
    jax.eval_shape(lambda *operands: kinds.append(jax.tree.map(_Like.of, _run(run, *operands))), *operands)
    return jax.tree.map(lambda kind, out: kind.match(out), kinds[0], outputs, is_leaf=_is_kind)


def _apart(saved: Array) -> Array:
    """A saved activation, kept apart from the value that the forward pass goes on with.

    In a scan over layers XLA (0.11) fuses a custom call with the update of the stacked residuals that its result goes
    into, and where the result is needed elsewhere too it runs the custom call, a whole GEMM, twice.
    """
    return saved if is_fp8(saved.dtype) or saved.ndim < 2 else jax.lax.optimization_barrier(saved)


@compat.numpy_promotion()
def _run_bwd(run: Run, residuals, cotangents):
    params, state, scales, keys, kinds, saved, used = residuals
    dy, extra_output_grads = cotangents
    contexts = backward_contexts(run, params, keys, saved, extra_output_grads, scales)
    for step in run.plan.backward:
        dy = backward_step(run, step, contexts, dy)
    extra_grads = leaving(run, [ctx.extra_input_grads for ctx in contexts])
    dx, extra_grads = jax.tree.map(lambda kind, g: kind.match(g), kinds, (dy, extra_grads), is_leaf=_is_kind)
    state_grad = write_state(run, state, [{**f, **ctx.used} for f, ctx in zip(used, contexts, strict=True)])
    return _param_grads(params, contexts), state_grad, None, None, dx, extra_grads


_run.defvjp(_run_fwd, _run_bwd)


def forward_contexts(run: Run, params, kernels, keys, extras, scales, *, train: bool) -> list[ForwardContext]:
    contexts, extras = [], list(extras)
    for info, kernel, key, scale in zip(run.links, kernels, keys, scales, strict=True):
        taken, extras = extras[: info.op.num_extra_inputs], extras[info.op.num_extra_inputs :]
        contexts.append(ForwardContext(info, params.get(info.scope, {}), train, key, tuple(taken), scale, kernel))
    return contexts


def backward_contexts(run: Run, params, keys, saved, extra_output_grads, scales) -> list[BackwardContext]:
    contexts, grads = [], list(extra_output_grads)
    for info, key, kept, scale in zip(run.links, keys, saved, scales, strict=True):
        taken, grads = grads[: info.op.num_extra_outputs], grads[info.op.num_extra_outputs :]
        contexts.append(BackwardContext(info, params.get(info.scope, {}), kept, key, tuple(taken), scale))
    return contexts


def _forward(run: Run, params, scales: Scales, kernels: Kernels, keys, x, extras, *, train: bool):
    contexts = forward_contexts(run, params, kernels, keys, extras, scales, train=train)
    for step in run.plan.forward:
        x = forward_step(run, step, contexts, x)
    return x, contexts


def forward_step(run: Run, step: Step, contexts: list[ForwardContext], x: Any) -> Any:
    """Runs a step, after handing on what residuals inside of the run have kept."""
    for start, add in run.plan.residuals:
        contexts[add].extra_inputs = contexts[start].extra_outputs
    return step(contexts, x)


def backward_step(run: Run, step: Step, contexts: list[BackwardContext], dy: Any) -> Any:
    """Runs a step, after handing back the cotangents of what residuals inside of the run have kept."""
    for start, add in run.plan.residuals:
        contexts[start].extra_output_grads = contexts[add].extra_input_grads
    return step(contexts, dy)


def leaving(run: Run, extras: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Of the extra values of every link those that leave the run."""
    inside = {link for pair in run.plan.residuals for link in pair}
    return tuple(value for link, values in enumerate(extras) if link not in inside for value in values)


def _param_grads(params: Params, contexts: list[BackwardContext]) -> dict[str, dict[str, Array]]:
    """Scope -> name -> gradient; those of a parameter that several links share are summed."""
    grads: dict[str, dict[str, Array]] = {scope: {} for scope in params}
    for ctx in contexts:
        scope = grads.get(ctx.info.scope, {})
        for spec in ctx.info.op.params(ctx.info.x_type):
            argument, expected = f"ctx.param_grads[{spec.name!r}] after backward", f"an array of shape {spec.shape}"
            errors.check_value(spec.name in ctx.param_grads, ctx.info.label, argument, expected, "none")
            grad = ctx.param_grads[spec.name]
            errors.check_value(grad.shape == spec.shape, ctx.info.label, argument, expected, grad.shape)
            scope[spec.name] = scope[spec.name] + grad if spec.name in scope else grad
    return {
        scope: {name: _Like.of(param).match(grads[scope][name]) for name, param in names.items()}
        for scope, names in params.items()
    }


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Like:
    """What a cotangent's type takes from its primal: dtype, manual axes it varies over, Explicit sharding."""

    dtype: Any
    varying: frozenset[str]
    spec: PartitionSpec | None

    @classmethod
    def of(cls, primal: Array) -> _Like:
        spec = jax.typeof(primal).sharding.spec if mesh.regime(primal).explicit else None
        return cls(primal.dtype, compat.varying_axes(primal), spec)

    def match(self, grad: Array) -> Array:
        """``grad`` in that type: a primal that is the same on several devices gets the sum of their gradients."""
        summed = compat.varying_axes(grad) - self.varying
        if summed:
            grad = jax.lax.psum(grad, tuple(sorted(summed)))
        grad = compat.pvary(grad.astype(self.dtype), self.varying)
        if self.spec is None or jax.typeof(grad).sharding.spec == self.spec:
            return grad
        return compat.reshard(grad, self.spec)


def _is_kind(node: Any) -> bool:
    return isinstance(node, _Like)


def read_scales(run: Run, state: Mapping[str, Array]) -> Scales:
    """Per link: role -> f32[], the scale to quantize with. Empty without state (current scaling)."""
    scales: Scales = [{} for _ in run.links]
    if state and run.quantizes:
        for (link, role), scale in zip(run.quantizers, primitives.scale_read(state, run.scale_spec), strict=True):
            scales[link][role] = scale
    return scales


def write_state(run: Run, state: Mapping[str, Array], used: Sequence[Used]) -> Mapping[str, Array]:
    """The state's cotangent: its next value; zero in the rows of quantizers that this call didn't use."""
    if not state or not run.quantizes:
        return jax.tree.map(lambda leaf: _Like.of(leaf).match(jnp.zeros(leaf.shape, leaf.dtype)), state)
    rows = [used[link].get(role) for link, role in run.quantizers]
    read = run.scale_spec
    spec = ScaleWriteSpec(
        formats=read.formats,
        margin=read.margin,
        most_recent=read.most_recent,
        used="".join("0" if row is None else "1" for row in rows),
    )
    return primitives.scale_write(state, [amax for amax in rows if amax is not None], spec)
