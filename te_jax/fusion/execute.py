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
from jax import Array

from te_jax import compat, errors
from te_jax.fusion import extras as extra_values
from te_jax.fusion.cotangent import Like, is_like
from te_jax.fusion.pattern import Step
from te_jax.fusion.run import Run, Scales, State, read_scales, write_state
from te_jax.ops import main_grad
from te_jax.ops.base import BackwardContext, ForwardContext, QuantizedKernel
from te_jax.ops.main_grad import MainGrad
from te_jax.parallel import mesh
from te_jax.parallel.amax import reduce_together
from te_jax.quant.format import is_fp8
from te_jax.recipe import BlockScaling

Params = Mapping[str, Mapping[str, Array]]  # scope -> name -> array
Kernels = tuple[QuantizedKernel | None, ...]  # by link; None: this call quantizes it, or there is none
MainGrads = Mapping[str, MainGrad]  # scope -> the buffer of its kernel, of the links that have ``info.main_grad``


@functools.partial(jax.jit, static_argnums=0, inline=True)  # one program where it is called outside of one
def execute(
    run: Run,
    params: Params,
    state: State,
    kernels: Kernels,
    keys: tuple,
    x: Array,
    extras: tuple[Array, ...],
    main_grads: MainGrads,
) -> tuple[Array, tuple[Array, ...], Mapping[str, Array]]:
    """y, the extra outputs that leave a run and its next state, differentiable in params, state, x, extras, main_grads.

    In any mesh regime. The gradient of a kernel that came quantized goes to the parameter all the same, or to the main
    gradient, whose "cotangent" is its next value. The next state
    is {} unless ``run.forward_state``: the new rows of the quantizers that the forward pass used (x and kernel), zeros,
    which read as unused, in the others. Nothing is differentiated through it.
    """
    y, extra_outputs, next_state = _run(run, params, state, kernels, keys, x, extras, main_grads)
    return y, extra_outputs, jax.lax.stop_gradient(next_state)


@compat.numpy_promotion()
def quantize_kernels(run: Run, params: Params, state: State, *, train: bool = True) -> Kernels:
    """The kernels of the run's linears in FP8, as the run itself would quantize them now, if it is differentiated.

    They may leave the function that a device runs by itself: their amaxes are reduced.
    """
    kernels: list[QuantizedKernel | None] = []
    amaxes, axes = {}, []
    for link, (info, scales) in enumerate(zip(run.links, read_scales(run, state), strict=True)):
        ctx = ForwardContext(info, params.get(info.scope, {}), train=train, scales=scales)
        kernel = info.op.quantize_kernel(ctx) if info.quantizes_kernel else None
        kernels.append(kernel)
        if kernel is not None and "amax" in kernel:
            amaxes[link] = kernel["amax"]
            axes.append(mesh.amax_axes(kernel["amax"], scales.get("kernel"), info.recipe))
    for link, amax in zip(amaxes, reduce_together([*amaxes.values()], axes), strict=True):
        kernels[link] = {**(kernels[link] or {}), "amax": amax}
    return tuple(kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@compat.numpy_promotion()
def _run(run: Run, params, state, kernels, keys, x, extras, main_grads):
    del main_grads
    train = run.forward_state  # which amaxes are taken for
    y, contexts = _forward(run, params, read_scales(run, state), kernels, keys, x, extras, train=train)
    return y, extra_values.leaving(run, contexts), _forward_state(run, state, contexts)


@compat.numpy_promotion()
def run_fwd(run: Run, params, state, kernels, keys, x, extras, main_grads):
    """The forward rule: (outputs, residuals)."""
    scales = read_scales(run, state)
    y, contexts = _forward(run, params, scales, kernels, keys, x, extras, train=True)
    kinds = jax.tree.map(Like.of, (x, extras))
    saved = jax.tree.map(_apart, [ctx.saved for ctx in contexts])
    used = [{role: _named_amax(ctx, role) for role in ctx.used} for ctx in contexts]
    # A scan over layers stacks every residual, scalars too, so only the scales that are used yet are kept.
    left = [{role: s for role, s in scale.items() if role not in u} for scale, u in zip(scales, used, strict=True)]
    residuals = (params, state, left, keys, kinds, saved, used, main_grads)
    outputs = (y, extra_values.leaving(run, contexts), _forward_state(run, state, contexts))
    if isinstance(run.recipe, BlockScaling) and run.quantizes and mesh.regime(x).explicit:
        outputs = _as_without_backward(outputs, run, params, state, kernels, keys, x, extras, main_grads)
    return outputs, residuals


def _as_without_backward(outputs: Any, run: Run, *operands: Any) -> Any:
    """The outputs in the Explicit shardings that they have where no backward pass follows, as JAX requires.

    Block scaling splits fewer dimensions where it also writes operands for wgrad, whose blocks go along tokens.
    """
    kinds = []
    jax.eval_shape(lambda *operands: kinds.append(jax.tree.map(Like.of, _run(run, *operands))), *operands)
    return jax.tree.map(lambda kind, out: kind.match(out), kinds[0], outputs, is_leaf=is_like)


def _forward_state(run: Run, state: State, contexts: Sequence[ForwardContext]) -> State:
    return write_state(run, state, [ctx.used for ctx in contexts]) if run.forward_state else {}


def _named_amax(ctx: ForwardContext, role: str) -> Array:
    """An amax goes with the scales of its tensor: recomputed, it would be quantized again for it."""
    return ctx.named(ctx.used[role], f"{'input' if role == 'x' else role}_scale")


def _apart(saved: Array) -> Array:
    """A saved activation, kept apart from the value that the forward pass goes on with.

    In a scan over layers XLA (0.11) fuses a custom call with the update of the stacked residuals that its result goes
    into, and where the result is needed elsewhere too it runs the custom call, a whole GEMM, twice.
    """
    return saved if is_fp8(saved.dtype) or saved.ndim < 2 else jax.lax.optimization_barrier(saved)


@compat.numpy_promotion()
def run_bwd(run: Run, residuals, cotangents):
    """The backward rule: cotangents of everything but ``run``."""
    params, state, scales, keys, (x_kind, extra_kinds), saved, used, main_grads = residuals
    dy, extra_output_grads, _ = cotangents
    contexts = backward_contexts(run, params, keys, saved, extra_output_grads, scales, main_grads)
    for step in run.plan.backward:
        dy = backward_step(run, step, contexts, dy)
    extra_grads = extra_values.entering_grads(run, contexts, extra_kinds)
    state_grad = write_state(run, state, [{**f, **ctx.used} for f, ctx in zip(used, contexts, strict=True)])
    param_grads, main_grads = _param_grads(params, contexts), _next_main_grads(main_grads, contexts)
    for scope, node in main_grads.items():
        if node.mode == "try":  # the value is looked for in the gradient of what the kernel was made from
            kernel = params[scope]["kernel"]
            param_grads[scope]["kernel"] = Like.of(kernel).match(node.buffer.astype(kernel.dtype))
    return param_grads, state_grad, None, None, x_kind.match(dy), extra_grads, main_grads


_run.defvjp(run_fwd, run_bwd)


def forward_contexts(run: Run, params, kernels, keys, extras, scales, *, train: bool) -> list[ForwardContext]:
    """A context for every link; extra inputs that are made inside of the run are not there yet."""
    return [
        ForwardContext(info, params.get(info.scope, {}), train, key, given, scale, kernel)
        for info, kernel, key, given, scale in zip(
            run.links, kernels, keys, extra_values.entering(run, extras), scales, strict=True
        )
    ]


def backward_contexts(run: Run, params, keys, saved, extra_output_grads, scales, main_grads) -> list[BackwardContext]:
    """A context for every link; of extra outputs it has the cotangents that come from outside of the run."""
    buffers = [main_grads[info.scope].buffer if info.main_grad else None for info in run.links]
    return [
        BackwardContext(info, params.get(info.scope, {}), kept, key, grads, scale, buffer)
        for info, key, kept, grads, scale, buffer in zip(
            run.links, keys, saved, extra_values.leaving_grads(run, extra_output_grads), scales, buffers, strict=True
        )
    ]


def _forward(run: Run, params, scales: Scales, kernels: Kernels, keys, x, extras, *, train: bool):
    contexts = forward_contexts(run, params, kernels, keys, extras, scales, train=train)
    for step in run.plan.forward:
        reader = run.saved_by(step.links[0]) if train and isinstance(x, Array) else None
        x = x if reader is None else contexts[reader].named(x, "input")
        x = forward_step(run, step, contexts, x)
    return x, contexts


def forward_step(run: Run, step: Step, contexts: list[ForwardContext], x: Any) -> Any:
    """Runs a step, with the extra inputs that links before it have made."""
    extra_values.hand_on(run, step.links, contexts)
    return step(contexts, x)


def backward_step(run: Run, step: Step, contexts: list[BackwardContext], dy: Any) -> Any:
    """Runs a step, with the cotangents of its extra outputs summed over those that took them."""
    extra_values.hand_back(run, step.links, contexts)
    return step(contexts, dy)


def _next_main_grads(main_grads: MainGrads, contexts: list[BackwardContext]) -> dict[str, MainGrad]:
    """Scope -> the buffer with its next value."""
    following = {}
    for ctx in contexts:
        if ctx.info.main_grad:
            scope, buffer = ctx.info.scope, main_grads[ctx.info.scope].buffer
            value = errors.required(ctx.main_grad_next, ctx.info.label, "ctx.main_grad_next after backward")
            value = main_grad.marked(Like.of(buffer).match(value))
            following[scope] = dataclasses.replace(main_grads[scope], buffer=value)
    return following


def _param_grads(params: Params, contexts: list[BackwardContext]) -> dict[str, dict[str, Array | None]]:
    """Scope -> name -> gradient; those of a parameter that several links share are summed.

    None (a zero that nobody has to write): that of a kernel with a main gradient.
    """
    grads: dict[str, dict[str, Array]] = {scope: {} for scope in params}
    without = {(ctx.info.scope, "kernel") for ctx in contexts if ctx.info.main_grad}
    for ctx in contexts:
        scope = grads.get(ctx.info.scope, {})
        for spec in ctx.info.op.params(ctx.info.x_type):
            if (ctx.info.scope, spec.name) in without:
                continue
            argument, expected = f"ctx.param_grads[{spec.name!r}] after backward", f"an array of shape {spec.shape}"
            errors.check_value(spec.name in ctx.param_grads, ctx.info.label, argument, expected, "none")
            grad = ctx.param_grads[spec.name]
            errors.check_value(grad.shape == spec.shape, ctx.info.label, argument, expected, grad.shape)
            scope[spec.name] = scope[spec.name] + grad if spec.name in scope else grad
    return {
        scope: {
            name: None if (scope, name) in without else Like.of(param).match(grads[scope][name])
            for name, param in names.items()
        }
        for scope, names in params.items()
    }
