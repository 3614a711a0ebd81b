"""Sequential: a chain of ops as a Flax module, its fusions chosen while tracing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax.chain import CALL, Chain, Foreign, ForeignPart, RunPart, Value, read_chain, types
from te_jax.chain.places import freeze
from te_jax.errors import check_type, check_value
from te_jax.fusion import inference, probe
from te_jax.fusion import plan as planning
from te_jax.fusion.execute import execute
from te_jax.fusion.pattern import Rule
from te_jax.fusion.plan import FusionPlan, describe
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.fusion.run import Run
from te_jax.ops.base import LinkInfo, Op, TensorType
from te_jax.ops.main_grad import MODES, MainGrad, Mode
from te_jax.quant import state as fp8_state
from te_jax.run_variables import RunVariables, is_updating_state


class ChainModule(RunVariables, kw_only=True):
    """Base of all modules that are a chain of ops; subclasses say which in ``chain``.

    Attributes:
      recipe: how linears are quantized (te_jax.recipe); None: not at all.
      dtype: computation dtype, bfloat16, float16 or float32; None: the common type of input and parameters, as in Flax.
      param_dtype: dtype of the parameters.
      forward_rules, backward_rules: the fusion rules, tried in order; () fuses nothing.
    """

    forward_rules: tuple[Rule, ...] = dataclasses.field(default=FORWARD_RULES, repr=False)  # dozens of lines
    backward_rules: tuple[Rule, ...] = dataclasses.field(default=BACKWARD_RULES, repr=False)

    fixed_order: ClassVar[bool] = False
    """Whether ``chain`` gives linears of the same names in the same order, whatever the attributes are.

    Otherwise the FP8 state of linears with names is under these names.
    """

    def chain(self) -> Sequence[Op | nn.Module | Callable[[Array], Array] | Sequence]:
        """The ops, in order. A Flax module or a function of one array runs as it is, and ends a fusion window.

        A list of these inside of the list is part of the chain. A module that is a chain keeps to itself, as any Flax
        module does: its own recipe and dtypes, parameters and state in its scope. It takes and returns extra values by
        order, and is deterministic or not with this one.
        """
        raise NotImplementedError

    @nn.compact
    def __call__(self, x: Array, *extras: Array, deterministic: bool = True) -> Any:
        """Applies the chain.

        Args:
          x: [*lead, C], bfloat16, float16 or float32.
          *extras: the extra inputs of the ops that take one from the call, in order, each of the type that its op
            wants: for most the shape of its input.
          deterministic: no dropout, which is the default, whether there is a ``dropout`` key or not. Training with
            dropout takes ``deterministic=False``; then it draws from the rng collection ``dropout``.

        Returns:
          y, or ``(y, *extra_outputs)`` if ops make extra outputs.

        Raises:
          ValueError: a shape that doesn't fit an op, or the wrong number of extra inputs, naming ops and places; a
            channel or residual that has one end.
          TypeError: a dtype that isn't supported (float64, integers).
        """
        name = type(self).__name__
        chain = self._read_chain(name, x, extras)
        values = {Value(CALL, i): extra for i, extra in enumerate(extras)}
        scopes: dict[str, dict[str, Array]] = {}
        source = "x"
        for part in chain.parts:
            given = tuple(values[value] for value in part.entering)
            if isinstance(part, ForeignPart):
                x, made = _call_foreign(part.foreign, x, given, source, deterministic)
            else:
                types.check_input(name, types.result_of(source), x)
                x, made = self._call_run(chain, part, x, given, source, scopes, deterministic)
            values |= zip(part.leaving, made, strict=True)
            source = part.label
        outputs = tuple(values[value] for value in chain.outputs)
        return (x, *outputs) if outputs else x

    @nn.nowrap
    def _call_run(
        self,
        chain: Chain,
        part: RunPart,
        x: Array,
        extras: tuple[Array, ...],
        source: str,
        scopes: dict[str, dict[str, Array]],
        deterministic: bool,
    ) -> tuple[Array, tuple[Array, ...]]:
        """The result of one run and the extra values that leave it. ``scopes``: the parameters of the chain so far."""
        name = type(self).__name__
        params, dtype = self._run_params(part, x, source, scopes)
        main_grads = self._main_grads(part, params)
        modes = {scope: buffer.mode for scope, buffer in main_grads.items()}
        run, extra_types = self._make_run(chain, part, TensorType(x.shape, dtype), extras, source, modes)
        keys = tuple(self.make_rng("dropout") if p.op.needs_key(deterministic) else None for p in part.places)
        state = self._fp8_state(run, part)
        types.check_on_device(name, {"params": params, fp8_state.COLLECTION: state})
        params, kernels = self._kernels(run, part, self._watched(params, state), state)
        health = self._health(run, part)
        cast = tuple(extra.astype(type_.dtype) for extra, type_ in zip(extras, extra_types, strict=True))
        run_it = execute if health is None else functools.partial(probe.probe, health)
        y, extra_outputs, next_state = run_it(run, params, state, kernels, keys, x.astype(dtype), cast, main_grads)
        self._put_next_state(part, next_state)
        return y, extra_outputs

    @nn.nowrap
    def plan(
        self,
        *shapes_or_arrays: Any,
        train: bool = True,
        platform: str | None = None,
        main_grad: Mode | None = None,
    ) -> FusionPlan:
        """The steps that the chain runs for such inputs, forward and (``train``) backward, with reasons.

        Args:
          *shapes_or_arrays: x and the extra inputs: arrays or ``jax.ShapeDtypeStruct``.
          train: whether the call is differentiated.
          platform: "cpu" or "cuda"; chooses only what is printed about custom calls. Default: the default backend.
          main_grad: the mode ("overwrite", "add") of the buffers that the linears have, if they do (te.main_grad).
        """
        name = type(self).__name__
        ok = len(shapes_or_arrays) > 0
        check_value(ok, f"{name}.plan", "x", "an array or a ShapeDtypeStruct", "nothing")
        ok = main_grad is None or main_grad in MODES
        check_value(ok, f"{name}.plan", "main_grad", f"None or one of {MODES}", repr(main_grad))
        segments, _ = self._segments(f"{name}.plan", main_grad, *shapes_or_arrays)
        first = shapes_or_arrays[0]
        title = f"{name}, recipe {describe(self.recipe)}, input {first.dtype}{list(first.shape)}"
        return planning.make_plan(title, segments, train=train, platform=platform)

    @nn.nowrap
    def extra_input_types(self, x: Any) -> tuple[TensorType, ...]:
        """Shapes and dtypes of the extra inputs that the call takes for such an x (an array or its type).

        Floating-point ones are cast to the computation dtype, whatever they come in.
        """
        chain = read_chain(self.chain(), _extras_of)
        wanted: dict[Value, TensorType] = {}
        x, source = TensorType(x.shape, x.dtype), "x"
        for part in chain.parts:
            if isinstance(part, RunPart):
                x_types = types.input_types(part.places, x, source)
                entering = types.entering(part, x_types)
                x = part.places[-1].op.out_type(x_types[-1])
            else:
                item = part.foreign.item
                entering = item.extra_input_types(x) if isinstance(item, ChainModule) else ()
                x = _foreign_segment(part.foreign, x, entering)[1][0]
            wanted |= zip(part.entering, entering, strict=True)
            source = part.label
        return tuple(wanted[Value(CALL, i)] for i in range(len(chain.takers)))

    @nn.nowrap
    def _segments(
        self, name: str, main_grad: Mode | None, x: Any, *extras: Any
    ) -> tuple[list[planning.Segment], list[TensorType]]:
        """What a plan needs of every part for such inputs; and the types of the result and the extra outputs."""
        chain = self._read_chain(name, x, extras)
        x = TensorType(x.shape, x.dtype)
        values = {Value(CALL, i): TensorType(extra.shape, extra.dtype) for i, extra in enumerate(extras)}
        segments: list[planning.Segment] = []
        source = "x"
        for part in chain.parts:
            given = tuple(values[value] for value in part.entering)
            if isinstance(part, ForeignPart):
                segment, (x, *made) = _foreign_segment(part.foreign, x, given, main_grad)
            else:
                types.check_input(name, types.result_of(source), x)
                segment, (x, *made) = self._run_segment(chain, part, x, given, source, main_grad)
            segments.append(segment)
            values |= zip(part.leaving, made, strict=True)
            source = part.label
        return segments, [x, *(values[value] for value in chain.outputs)]

    @nn.nowrap
    def _run_segment(
        self,
        chain: Chain,
        part: RunPart,
        x: TensorType,
        extras: tuple[TensorType, ...],
        source: str,
        main_grad: Mode | None,
    ) -> tuple[planning.Segment, list[TensorType]]:
        specs = types.params_of(part.places, types.input_types(part.places, x, source))
        params = {
            scope: {name: TensorType(spec.shape, self.param_dtype) for name, spec in named.items()}
            for scope, named in specs.items()
        }
        x = TensorType(x.shape, self._compute_dtype(x, params))
        scopes = [place.scope for place in part.places if place.op.has_main_grad]
        modes = {} if main_grad is None else {scope: main_grad for scope in scopes if scopes.count(scope) == 1}
        run, extra_types = self._make_run(chain, part, x, extras, source, modes)
        avals = {
            "params": params,
            "state": jax.eval_shape(lambda: self._init_state(run)),
            "keys": (None,) * len(part.places),
            "x": x,
            "extras": extra_types,
            "main_grads": jax.eval_shape(lambda: _empty_buffers(params, modes)),
        }
        made = [
            run.links[link].op.extra_output_types(run.links[link].x_type)[number] for link, number in run.wiring.leaving
        ]
        return (run, avals), [run.links[-1].y_type, *made]

    @nn.nowrap
    def _read_chain(self, name: str, x: Any, extras: Sequence[Any]) -> Chain:
        """The chain, after checking all that can be seen of attributes and arguments."""
        rules = {"forward_rules": self.forward_rules, "backward_rules": self.backward_rules}
        types.check_settings(type(self).__name__, self.recipe, self.dtype, self.param_dtype, rules)
        types.check_input(name, "x", x)
        for i, extra in enumerate(extras):
            types.check_array(name, f"extra input {i}", extra)
        chain = read_chain(self.chain(), _extras_of, fixed=self.fixed_order)
        chain.check_count(name, extras)
        return chain

    @nn.nowrap
    def _make_run(
        self,
        chain: Chain,
        part: RunPart,
        x: TensorType,
        extras: Sequence[Any],
        source: str,
        main_grads: Mapping[str, Mode],
    ) -> tuple[Run, tuple[TensorType, ...]]:
        """The run for such an input, and the types that its extra arguments are to have.

        ``main_grads``: scope -> mode of the buffers of kernels.
        """
        x_types = types.input_types(part.places, x, source)
        types.check_extras(type(self).__name__, chain, part, x_types, extras)
        links = []
        own_name = self.name or type(self).__name__
        for place, x_type in zip(part.places, x_types, strict=True):
            why = place.op.why_unquantized(x_type, self.recipe)
            mode = main_grads.get(place.scope) if place.op.has_main_grad else None
            name, axis = place.scope or own_name, place.op.mesh_axis()
            info = LinkInfo(
                place.op, place.path, place.scope, x_type, self.recipe, name, axis, why, mode, is_updating_state()
            )
            if self.recipe is not None and self.recipe.strict:
                check_value(why is None, info.label, "recipe", "a linear that can be quantized (strict=True)", why)
            links.append(info)
        rules = (tuple(self.forward_rules), tuple(self.backward_rules))
        quantizes = any(info.quantized for info in links)
        forward_state = is_updating_state() and quantizes and self.recipe is not None and self.recipe.stateful
        return Run(tuple(links), self.recipe, *rules, part.wiring, forward_state), types.entering(part, x_types)

    @nn.nowrap
    def _run_params(
        self, part: RunPart, x: Array, source: str, scopes: dict[str, dict[str, Array]]
    ) -> tuple[dict[str, dict[str, Array]], Any]:
        """The parameters of a run, by scope, and the dtype it computes in."""
        x_types = types.input_types(part.places, TensorType(x.shape, x.dtype), source)
        wanted = types.params_of(part.places, x_types)
        for scope, specs in wanted.items():
            if scope not in scopes:
                scopes[scope] = self._make_params(scope, tuple(specs.values()))
        for place, x_type in zip(part.places, x_types, strict=True):
            for spec in place.op.params(x_type):
                shape = inference.shape_of(scopes[place.scope][spec.name])
                types.check_shared(place, spec, shape, "from its first place in the chain or its initialiser")
        params = {scope: scopes[scope] for scope in wanted}
        values = [value for values in params.values() for value in values.values()]
        return params, self._compute_dtype(x, [TensorType((), inference.dtype_of(v, self.param_dtype)) for v in values])

    @nn.nowrap
    def _compute_dtype(self, x: Array | TensorType, params: Any) -> Any:
        """``dtype``, or the common type of input and parameters."""
        return jnp.dtype(self.dtype or jnp.result_type(*(a.dtype for a in jax.tree.leaves((x, params)))))


class Sequential(ChainModule):
    """A chain of ops: ``Sequential([ops.RMSNorm(), ops.Linear(4096)], recipe=te.DelayedScaling())``.

    Parameters of the i-th op are at ``params/ops_<i>/{kernel,bias,scale}`` (or under its ``name``); an op object listed
    twice shares its parameters, under its first place. FP8 state is at ``_overwrite_with_gradient/fp8_<i>`` for a run
    of ops that starts at i, and at ``fp8_<i>_<names>`` in a chain of several linears with names of their own, so that
    none gets another's. A list in the list is part of the chain: op j of it is at ``ops_<i>_<j>``.
    """

    ops: Sequence[Any] = ()

    def __post_init__(self) -> None:
        ok = isinstance(self.ops, Iterable) and not isinstance(self.ops, str)
        check_type(ok, "Sequential", "ops", "a list of ops, Flax modules and functions", repr(self.ops))
        self.ops = freeze(self.ops)  # hashable, and a generator is read once
        super().__post_init__()

    def chain(self) -> Sequence[Any]:
        return self.ops


def _empty_buffers(params: Mapping[str, Mapping[str, TensorType]], modes: Mapping[str, Mode]) -> dict[str, MainGrad]:
    shapes = {scope: params[scope]["kernel"].shape for scope in modes}
    return {scope: MainGrad(jnp.zeros(shapes[scope], jnp.float32), mode) for scope, mode in modes.items()}


def _extras_of(item: Any) -> tuple[int, int]:
    """How many extra inputs and outputs something in a chain that is not an op has: those of a chain in it."""
    if not isinstance(item, ChainModule):
        return 0, 0
    inner = read_chain(item.chain(), _extras_of)
    return len(inner.takers), len(inner.outputs)


def _call_foreign(
    foreign: Foreign, x: Array, extras: tuple[Array, ...], source: str, deterministic: bool
) -> tuple[Array, tuple[Array, ...]]:
    """The result of what stands between runs, and its extra outputs."""
    options = {"deterministic": False} if isinstance(foreign.item, ChainModule) and not deterministic else {}
    try:
        result = foreign.item(x, *extras, **options)
    except Exception as error:
        error.add_note(f"in {foreign.label}, whose input {x.dtype}{list(x.shape)} is {types.result_of(source)}")
        raise
    if foreign.num_extra_outputs:
        y, *made = result
        return y, tuple(made)
    return result, ()


def _foreign_segment(
    foreign: Foreign, x: TensorType, extras: tuple[TensorType, ...], main_grad: Mode | None = None
) -> tuple[planning.Segment, list[TensorType]]:
    item = foreign.item
    if isinstance(item, ChainModule):
        segments, made = item._segments(f"{type(item).__name__}.plan", main_grad, x, *extras)
        return planning.Nested(foreign.scope, segments), made
    fn = item
    if isinstance(item, nn.Module):
        fn = lambda x: item.init_with_output(jax.random.key(0), x)[0]  # noqa: E731
    return planning.Foreign(foreign.name), [jax.eval_shape(fn, x)]
