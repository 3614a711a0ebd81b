"""What a run of a chain has in Flax variables: parameters, FP8 state, kernels quantized before, main gradients, ..."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax import Array

from te_jax import compat
from te_jax.chain import Place, RunPart
from te_jax.errors import check_value, message, required
from te_jax.fusion import inference, probe, watch
from te_jax.fusion.execute import Kernels, quantize_kernels
from te_jax.fusion.plan import describe
from te_jax.fusion.run import SHARED, Run, State, StatePart
from te_jax.ops import device_order, main_grad
from te_jax.ops.base import ParamSpec, TensorType
from te_jax.ops.main_grad import MainGrad
from te_jax.parallel import mesh
from te_jax.quant import state as fp8_state
from te_jax.quant.health import COLLECTION as HEALTH
from te_jax.quant.health import RunHealth
from te_jax.quant.state import KERNELS, MAIN_GRAD
from te_jax.recipe import Recipe

GROUPED = "_grouped"
"""How the name of a grouped linear's FP8 state ends."""

NEXT = "fp8_next_state"
"""The variable collection into which chains put the state that their forward pass leaves (``updating_state``)."""

_updating_state: contextvars.ContextVar[bool] = contextvars.ContextVar("te_jax_updating_state", default=False)


@contextlib.contextmanager
def updating_state() -> Generator[None]:
    """Chains that are applied inside put the FP8 state that their forward pass leaves into ``fp8_next_state``.

    That is for callers that don't differentiate with respect to the state, such as ``nnx.grad``: x and kernel have
    their next state, dy is new again and so uses current scaling. Apply with ``mutable=[NEXT]``.
    """
    token = _updating_state.set(True)
    try:
        yield
    finally:
        _updating_state.reset(token)


def is_updating_state() -> bool:
    return _updating_state.get()


_making_kernels: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "te_jax_making_kernels", default=None
)


@contextlib.contextmanager
def making_kernels() -> Generator[dict[str, str]]:
    """Chains that are applied inside put the kernels that they quantize into the collection ``fp8_kernels``.

    That it can be written is not enough for it: under ``apply(mutable=True)`` a model would return kernels that are
    stale after the next step.

    Yields:
      The linears that are not quantized, by label, and why not; filled by the calls inside.
    """
    unquantized: dict[str, str] = {}
    token = _making_kernels.set(unquantized)
    try:
        yield unquantized
    finally:
        _making_kernels.reset(token)


def _parameter(module: nn.Module, spec: ParamSpec, dtype: Any) -> Any:
    """A parameter, made if the module is initializing; a kernel in FP8 as it is."""
    if module.has_variable("params", spec.name):
        value = module.get_variable("params", spec.name)
        if inference.is_quantized(value):
            return dict(value)
        _check_shape(module, spec, value)
    if spec.kept is None:
        return module.param(spec.name, spec.init, spec.shape, dtype)

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Any:
        value = spec.init(key, spec.shape, dtype)
        if isinstance(value, meta.AxisMetadata):  # nn.with_partitioning: its names are those of the shape that is kept
            box: Any = value
            bare = box.value if hasattr(box, "value") else box.unbox()  # without a sharding constraint
            return box.replace_boxed(bare.reshape(shape))  # meta.replace_boxed would make one, of the other shape
        return value.reshape(shape)

    value: Any = module.param(spec.name, init, spec.kept, dtype)
    return device_order.as_wanted(value, spec.shape, spec.devices)


def _check_shape(module: nn.Module, spec: ParamSpec, value: Any) -> None:
    """Raises ValueError for a parameter that is another part than is wanted here, and says what makes the right one.

    Of other shapes Flax says that they are not the initialiser's.
    """
    got, wanted = jnp.shape(getattr(value, "value", value)), spec.kept or spec.shape  # the value of a box
    axes = mesh.manual_axes()
    sizes = {compat.get_abstract_mesh().shape[axis] for axis in axes} - {1}
    if got == wanted or not (got and (axes or math.prod(got) == math.prod(wanted))):
        return
    expected = f"shape {wanted}" + (f", a device's part inside of shard_map over {axes}" if axes else "")
    if len(got) < len(wanted) and spec.kept is not None:
        advice = "of a module without a tensor_axis: te.flax.split_projections makes the one of a module with it"
    elif len(got) > len(wanted) and math.prod(got) % math.prod(wanted) == 0:
        advice = "of a module with a tensor_axis: te.flax.join_projections makes the one of a module without it"
    elif len(got) == len(wanted) and math.prod(got) in (size * math.prod(wanted) for size in sizes):
        advice = "of the whole: give shard_map in_specs that split it"
    elif len(got) == len(wanted) and axes and math.prod(got) == math.prod(wanted):
        advice = "a part along another dimension: give shard_map other in_specs"
    else:
        return
    if axes:
        advice += " (nn.get_partition_spec of the boxed variables that init returns, nnx.get_partition_spec of a state)"
    owner = module.parent if isinstance(module, _Scope) else module
    path = "/".join(("params", *module.path, spec.name))
    raise ValueError(message(type(owner).__name__, path, expected, f"shape {got}, {advice}"))


class _Scope(nn.Module):
    """Holds the parameters of one op under its own name."""

    specs: tuple[ParamSpec, ...]
    param_dtype: Any

    @nn.compact
    def parameters(self) -> dict[str, Array]:  # not __call__: capture_intermediates would take them for results
        return {s.name: _parameter(self, s, self.param_dtype) for s in self.specs}


class RunVariables(nn.Module, kw_only=True):
    """Base of modules that are chains: reads and makes the variables of a run, and checks what is there.

    Attributes: those of ``te_jax.sequential.ChainModule`` that variables depend on.
    """

    recipe: Recipe | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.nowrap
    def _make_params(self, scope: str, specs: tuple[ParamSpec, ...]) -> dict[str, Array]:
        if scope:
            return _Scope(specs, self.param_dtype, name=scope).parameters()
        return {s.name: _parameter(self, s, self.param_dtype) for s in specs}

    @nn.nowrap
    def _init_state(self, run: Run) -> dict[str, dict[str, Array]]:
        """The FP8 state of a run by the keys of ``Run.state_parts``; {} where the recipe keeps none."""
        recipe = self.recipe
        if recipe is None or not recipe.stateful:
            return {}

        def init(part: StatePart) -> dict[str, Array]:
            leaves = fp8_state.init(math.prod(part.shape), recipe)
            return {name: leaf.reshape(*part.shape, *leaf.shape[1:]) for name, leaf in leaves.items()}

        return {key: init(part) for key, part in run.state_parts().items()}

    @nn.nowrap
    def _fp8_state(self, run: Run, part: RunPart) -> dict[str, dict[str, Array]]:
        """The FP8 state of a run, from its variables: one for all linears without groups, one for each with."""
        state = {}
        for key, shapes in jax.eval_shape(lambda: self._init_state(run)).items():
            name = _state_name(part, key)
            state[key] = self._leaves(name, shapes, lambda key=key: self._init_state(run)[key])
        return state

    @nn.nowrap
    def _leaves(
        self, name: str, shapes: dict[str, TensorType], init: Callable[[], dict[str, Array]]
    ) -> dict[str, Array]:
        """A variable of FP8 state, whose leaves have these shapes."""
        can_make = self.is_initializing() and self.is_mutable_collection(fp8_state.COLLECTION)
        check_value(
            can_make or self.has_variable(fp8_state.COLLECTION, name),
            "/".join((*self.path, type(self).__name__)),
            "variables",
            f"collection {fp8_state.COLLECTION!r} with {name!r} (from init): the state of {describe(self.recipe)}; "
            f"nn.scan and nn.vmap need {fp8_state.COLLECTION!r} in their variable_axes",
            "none",
        )
        state = self.variable(fp8_state.COLLECTION, name, init).value
        for leaf, wanted in shapes.items():
            got = state[leaf].shape if leaf in state else "none"
            check_value(got == wanted.shape, type(self).__name__, f"{name}/{leaf}", f"shape {wanted.shape}", got)
        return dict(state)

    @nn.nowrap
    def _put_next_state(self, part: RunPart, next_state: State) -> None:
        """Inside of ``updating_state``: the state that a run's forward pass leaves, of several uses combined."""
        if self.is_initializing() or not self.is_mutable_collection(NEXT):
            return
        for key, leaves in next_state.items():
            name = _state_name(part, key)
            if self.has_variable(NEXT, name):
                leaves = fp8_state.accumulate(self.get_variable(NEXT, name), leaves)
            self.put_variable(NEXT, name, leaves)

    @nn.nowrap
    def _watched(self, params: Any, state: State) -> Any:
        """The parameters; says so if nnx differentiates them alone, where the state would be frozen without a word.

        ``nnx.grad`` is of nnx.Param, and a linen module in nnx's bridge can't write its state as te.nnx modules do.
        """
        in_bridge = bool(state) and not self.is_initializing() and any(True for _ in compat.nnx_bridges())
        if not in_bridge or is_updating_state():
            return params
        advice = "te.nnx.grad in place of nnx.grad (or a te.nnx module in place of one in nnx.bridge.ToNNX)"
        return watch.watched("/".join((*self.path, type(self).__name__)), advice, params, state)

    @nn.nowrap
    def _kernels(self, run: Run, part: RunPart, params: Any, state: Any) -> tuple[Any, Kernels]:
        """The parameters, without kernels that are kept in FP8; and, by link, what was quantized before the call."""
        _check_order(type(self).__name__, self.path, part, params)
        if inference.making_now() is not None and not self.is_initializing():
            self._make_fp8_params(run, params, state)
        rest, kept = inference.split(run, params, state, self.param_dtype)
        if kept is None:
            return params, self._quantized_kernels(run, part, params, state)
        where = "/".join((*self.path, type(self).__name__))
        check_value(_making_kernels.get() is None, where, "kernel", "one in high precision", "one in FP8 for inference")
        return rest, kept

    @nn.nowrap
    def _make_fp8_params(self, run: Run, params: Any, state: Any) -> None:
        """Puts FP8 kernels in the place of those that the run quantizes (te.quantize_params)."""
        if any(inference.is_quantized(v.get(inference.KERNEL)) for v in params.values()):  # by an earlier call
            return
        for scope, kernel in inference.make(run, params, state).items():
            dtype, where = params[scope][inference.KERNEL].dtype, "/".join((*self.path, scope, inference.KERNEL))
            ok = self.dtype is not None or dtype == self.param_dtype
            expected = (
                f"a module that says its dtype, or a kernel of its param_dtype {jnp.dtype(self.param_dtype).name}"
            )
            check_value(ok, "quantize_params", where, expected, dtype)
            own = required(self.scope, where, "scope")
            place = own.push(scope, reuse=True) if scope else own
            place.put_variable("params", inference.KERNEL, kernel)
            inference.replaced(where)

    @nn.nowrap
    def _main_grads(self, part: RunPart, params: Any) -> dict[str, MainGrad]:
        """Scope -> the buffer of its kernel's gradient, if the call was given one (te_jax.main_grad).

        Raises:
          ValueError: a kernel of several linears, or a call that is not the first to use its buffer.
        """
        linears = [place for place in part.places if place.op.has_main_grad]
        scopes = [place.scope for place in linears]
        orders = {place.scope: device_order.devices_of(place.op) for place in linears}
        where, buffers = "/".join((*self.path, type(self).__name__)), {}
        for scope in dict.fromkeys(scopes):
            buffer = self._main_grad(scope)
            if self.is_initializing() or inference.is_quantized(params[scope]["kernel"]):
                continue
            if buffer is None:
                main_grad.found_none(f"{where}/{scope}/kernel".replace("//", "/"))
                continue
            name = f"{where}: {MAIN_GRAD}/{scope}/kernel".replace("//", "/")
            shared, used = scopes.count(scope) > 1, not buffer.first_use()
            kernel = params[scope]["kernel"]
            kept = self._kept_shape(scope)
            buffer.check(name, TensorType(kept, kernel.dtype))
            if kept != kernel.shape:
                buffer = dataclasses.replace(
                    buffer, buffer=device_order.as_wanted(buffer.buffer, kernel.shape, orders[scope])
                )
            if buffer.mode == "try" and shared:
                buffer.first_use()  # which is the second
                continue
            expected = "one use in a differentiated call, as two would add what was in it twice: leave shared kernels, "
            expected += "and calls that are not differentiated, without a buffer"
            ok = buffer.mode == "try" or not (shared or used)
            check_value(ok, name, "main_grad", expected, "a second one")
            buffers[scope] = buffer
        return buffers

    @nn.nowrap
    def _kept_shape(self, scope: str) -> tuple[int, ...]:
        """The shape in which a scope's kernel is kept (``ParamSpec.kept``)."""
        kept: Any = self.get_variable("params", scope)["kernel"] if scope else self.get_variable("params", "kernel")
        return jnp.shape(getattr(kept, "value", kept))  # the value of a box

    @nn.nowrap
    def _main_grad(self, scope: str) -> MainGrad | None:
        if scope:
            found: Any = self.get_variable(MAIN_GRAD, scope) if self.has_variable(MAIN_GRAD, scope) else {}
            return found.get("kernel")
        return self.get_variable(MAIN_GRAD, "kernel") if self.has_variable(MAIN_GRAD, "kernel") else None

    @nn.nowrap
    def _health(self, run: Run, part: RunPart) -> RunHealth | None:
        """The leaves that this call's measurements go to, if it is measured (te.health); made inside of ``making``."""
        name, where = f"fp8_{part.name}", "/".join((*self.path, type(self).__name__))
        probe.found_run((*self.path, name), run)
        if not run.quantizes or self.is_initializing():
            return None
        if probe.is_making():
            expected = f"a collection that can be written: nn.scan and nn.vmap need {HEALTH!r} in their variable_axes"
            check_value(self.is_mutable_collection(HEALTH), where, HEALTH, expected, "one that is not handed down")
            self.put_variable(HEALTH, name, probe.init(run))
            return None
        return self.get_variable(HEALTH, name) if self.has_variable(HEALTH, name) else None

    @nn.nowrap
    def _quantized_kernels(self, run: Run, part: RunPart, params: Any, state: Any) -> Kernels:
        """The kernels that were quantized before this call, by link; inside of ``making_kernels`` made and stored."""
        none = (None,) * len(run.links)
        names = {
            i: "linear_" + "_".join(map(str, p.path)) + _order_of(p)
            for i, p in enumerate(part.places)
            if run.links[i].quantizes_kernel
        }
        name, where = f"fp8_{part.name}", "/".join((*self.path, type(self).__name__))
        making = _making_kernels.get()
        if making is not None:
            linears = [info for info in run.links if "kernel" in info.op.roles]
            making.update({info.label: info.why_unquantized for info in linears if info.why_unquantized is not None})
        if not names or self.is_initializing():
            return none
        if making is not None:
            expected = f"a collection that can be written: nn.scan and nn.vmap need {KERNELS!r} in their variable_axes"
            check_value(self.is_mutable_collection(KERNELS), where, KERNELS, expected, "one that is not handed down")
            made = quantize_kernels(run, params, state)
            self.put_variable(KERNELS, name, {names[i]: made[i] for i in names})
            return made
        if not self.has_variable(KERNELS, name):
            return none
        given = self.get_variable(KERNELS, name)
        wanted = jax.eval_shape(lambda: quantize_kernels(run, params, state))
        for i, key in names.items():
            got = {n: TensorType(a.shape, a.dtype) for n, a in dict(given.get(key, {})).items()}
            for field in sorted({*wanted[i], *got}):
                pair = [_type_name(fields.get(field)) for fields in (wanted[i], got)]
                check_value(pair[0] == pair[1], where, f"{KERNELS}/{name}/{key}/{field}", *pair)
        return tuple(given[names[i]] if i in names else None for i in range(len(run.links)))


def _order_of(place: Place) -> str:
    """What a kernel in FP8 is called after that isn't in the order in which it is kept, so that no other is taken."""
    devices = device_order.devices_of(place.op)
    return f"_of_{devices}_devices" if devices > 1 else ""


def _check_order(module: str, path: tuple[str, ...], part: RunPart, params: Any) -> None:
    """Raises ValueError for kernels in FP8 alone, which are kept as one matrix, where they are split by halves."""
    for place in part.places:
        devices = device_order.devices_of(place.op)
        if devices == 1 or not place.op.has_main_grad:
            continue
        ok = inference.making_now() is None and not inference.is_quantized(params[place.scope][inference.KERNEL])
        expected = "one in high precision where the mesh that is set has a tensor_axis of several devices"
        got = "one in FP8 for inference (te.quantize_params), which is for one device or without jax.set_mesh"
        check_value(ok, module, "/".join((*path, place.scope, inference.KERNEL)), expected, got)


def _state_name(part: RunPart, key: str) -> str:
    """The variable that holds one part of a run's FP8 state."""
    return f"fp8_{part.name}" if key == SHARED else f"fp8_{part.name_of(int(key))}{GROUPED}"


def _type_name(array: Any) -> str:
    return "none" if array is None else f"{array.dtype}{list(array.shape)}"
