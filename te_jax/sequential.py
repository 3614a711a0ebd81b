"""Sequential: a chain of ops as a Flax module, its fusions chosen while tracing."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from te_jax import compat
from te_jax.errors import check_type, check_value, message
from te_jax.fusion.execute import Kernels, Run, execute, quantize_kernels
from te_jax.fusion.pattern import Rule
from te_jax.fusion.plan import Foreign, FusionPlan, describe, make_plan
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.ops.base import LinkInfo, Op, ParamSpec, TensorType
from te_jax.ops.linear import BasicLinear, why_unquantized
from te_jax.quant import state as fp8_state
from te_jax.quant.state import KERNELS
from te_jax.recipe import Recipe

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Place:
    """One basic op, its place in the user's list and the scope of its parameters."""

    op: Op
    index: int
    scope: str


class _Scope(nn.Module):
    """Holds the parameters of one op under its own name."""

    specs: tuple[ParamSpec, ...]
    param_dtype: Any

    @nn.compact
    def parameters(self) -> dict[str, Array]:  # not __call__: capture_intermediates would take them for results
        return {s.name: self.param(s.name, s.init, s.shape, self.param_dtype) for s in self.specs}


class ChainModule(nn.Module, kw_only=True):
    """Base of all modules that are a chain of ops; subclasses say which in ``chain``.

    Attributes:
      recipe: how linears are quantized (te_jax.recipe); None: not at all.
      dtype: computation dtype, bfloat16, float16 or float32; None: the common type of input and parameters, as in Flax.
      param_dtype: dtype of the parameters.
      forward_rules, backward_rules: the fusion rules, tried in order; () fuses nothing.
    """

    recipe: Recipe | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    forward_rules: tuple[Rule, ...] = FORWARD_RULES
    backward_rules: tuple[Rule, ...] = BACKWARD_RULES

    def chain(self) -> Sequence[Op | nn.Module | Callable[[Array], Array]]:
        """The ops, in order. A Flax module or a function of one array runs as it is, and ends a fusion window."""
        raise NotImplementedError

    @nn.compact
    def __call__(self, x: Array, *extras: Array, deterministic: bool = True) -> Any:
        """Applies the chain.

        Args:
          x: [*lead, C], bfloat16, float16 or float32.
          *extras: the extra inputs of the ops that take one, in order, each of its op's input shape.
          deterministic: no dropout; otherwise it draws from the rng collection ``dropout``.

        Returns:
          y, or ``(y, *extra_outputs)`` if ops make extra outputs.

        Raises:
          ValueError: a shape that doesn't fit an op, or the wrong number of extra inputs, naming op and argument.
          TypeError: a dtype that isn't supported (float64, integers).
        """
        name = type(self).__name__
        self._check_attributes()
        for argument, array in (("x", x), *((f"extra input {i}", extra) for i, extra in enumerate(extras))):
            _check_input(name, argument, array)
        segments = _segments(self.chain())
        wanted = sum(place.op.num_extra_inputs for s in segments if isinstance(s, list) for place in s)
        check_value(len(extras) == wanted, name, "extra inputs", wanted, len(extras))
        scopes: dict[str, dict[str, Array]] = {}
        outputs: list[Array] = []
        result = "x"
        for segment in segments:
            if not isinstance(segment, list):
                x = segment(x)
                result = f"the result of {_foreign_label(segment)}"
                continue
            _check_input(name, result, x)
            params, dtype = self._run_params(segment, x, scopes)
            run = self._make_run(segment, x, dtype)
            count = sum(place.op.num_extra_inputs for place in segment)
            taken, extras = extras[:count], extras[count:]
            keys = tuple(self.make_rng("dropout") if p.op.needs_key(deterministic) else None for p in segment)
            state = self._fp8_state(run, segment[0].index)
            _check_on_device(name, {"params": params, fp8_state.COLLECTION: state})
            kernels = self._quantized_kernels(run, segment[0].index, params, state)
            taken = tuple(e.astype(dtype) for e in taken)
            x, extra_outputs = execute(run, params, state, kernels, keys, x.astype(dtype), taken)
            outputs += extra_outputs
        return (x, *outputs) if outputs else x

    @nn.nowrap
    def plan(self, *shapes_or_arrays: Any, train: bool = True, platform: str | None = None) -> FusionPlan:
        """The steps that the chain runs for such inputs, forward and (``train``) backward, with reasons.

        Args:
          *shapes_or_arrays: x and the extra inputs: arrays or ``jax.ShapeDtypeStruct``.
          train: whether the call is differentiated.
          platform: "cpu" or "cuda"; chooses only what is printed about custom calls. Default: the default backend.
        """
        name = type(self).__name__
        self._check_attributes()
        check_value(len(shapes_or_arrays) > 0, f"{name}.plan", "x", "an array or a ShapeDtypeStruct", "nothing")
        for i, given in enumerate(shapes_or_arrays):
            _check_input(f"{name}.plan", f"extra input {i - 1}" if i else "x", given)
        x, *extras = (TensorType(a.shape, a.dtype) for a in shapes_or_arrays)
        places = _segments(self.chain())
        wanted = sum(place.op.num_extra_inputs for s in places if isinstance(s, list) for place in s)
        check_value(len(extras) == wanted, f"{name}.plan", "extra inputs", wanted, len(extras))
        segments: list[Any] = []
        result = "x"
        for segment in places:
            if not isinstance(segment, list):
                segments.append(Foreign(_foreign_label(segment)))
                x = _foreign_type(segment, x)
                result = f"the result of {_foreign_label(segment)}"
                continue
            _check_input(f"{name}.plan", result, x)
            types = _types(segment, x)
            params: dict[str, dict[str, TensorType]] = {}
            for place, x_type in zip(segment, types, strict=True):
                specs = {s.name: TensorType(s.shape, self.param_dtype) for s in place.op.params(x_type)}
                params.setdefault(place.scope, {}).update(specs)
            dtype = self._compute_dtype(x, params)
            run = self._make_run(segment, x, dtype)
            count = sum(place.op.num_extra_inputs for place in segment)
            taken, extras = extras[:count], extras[count:]
            avals = {
                "params": params,
                "state": jax.eval_shape(lambda run=run: self._init_state(run)),
                "keys": (None,) * len(segment),
                "x": TensorType(x.shape, dtype),
                "extras": tuple(TensorType(e.shape, dtype) for e in taken),
            }
            segments.append((run, avals))
            x = run.links[-1].y_type
        first = shapes_or_arrays[0]
        title = f"{type(self).__name__}, recipe {describe(self.recipe)}, input {first.dtype}{list(first.shape)}"
        return make_plan(title, segments, train=train, platform=platform)

    @nn.nowrap
    def _check_attributes(self) -> None:
        name, dtypes = type(self).__name__, ", ".join(jnp.dtype(d).name for d in DTYPES)
        ok = self.recipe is None or isinstance(self.recipe, Recipe)
        check_type(ok, name, "recipe", "None or a recipe object, such as DelayedScaling()", repr(self.recipe))
        check_type(self.dtype is None or _is_dtype(self.dtype), name, "dtype", f"None, {dtypes}", repr(self.dtype))
        check_type(_is_dtype(self.param_dtype), name, "param_dtype", dtypes, repr(self.param_dtype))
        for argument, rules in (("forward_rules", self.forward_rules), ("backward_rules", self.backward_rules)):
            ok = isinstance(rules, Sequence) and all(isinstance(rule, Rule) for rule in rules)
            check_type(ok, name, argument, "a tuple of fusion rules", repr(rules))

    @nn.nowrap
    def _make_run(self, places: list[_Place], x: Array | TensorType, dtype: Any) -> Run:
        links = []
        for place, x_type in zip(places, _types(places, TensorType(x.shape, dtype)), strict=True):
            why = why_unquantized(place.op, x_type, self.recipe) if isinstance(place.op, BasicLinear) else None
            info = LinkInfo(place.op, place.index, place.scope, x_type, self.recipe, why)
            if self.recipe is not None and self.recipe.strict:
                check_value(why is None, info.label, "recipe", "a linear that can be quantized (strict=True)", why)
            links.append(info)
        return Run(tuple(links), self.recipe, tuple(self.forward_rules), tuple(self.backward_rules))

    @nn.nowrap
    def _run_params(self, places: list[_Place], x: Array, scopes: dict) -> tuple[dict[str, dict[str, Array]], Any]:
        """The parameters of a run, by scope, and the dtype it computes in."""
        wanted: dict[str, dict[str, ParamSpec]] = {}
        for place, x_type in zip(places, _types(places, TensorType(x.shape, x.dtype)), strict=True):
            for spec in place.op.params(x_type):
                first = wanted.setdefault(place.scope, {}).setdefault(spec.name, spec)
                _check_shared(place.scope, spec.name, first.shape, spec.shape)
        for scope, specs in wanted.items():
            if scope not in scopes:
                scopes[scope] = self._make_params(scope, tuple(specs.values()))
            for name, spec in specs.items():
                _check_shared(scope, name, scopes[scope][name].shape, spec.shape)
        params = {scope: scopes[scope] for scope in wanted}
        return params, self._compute_dtype(x, params)

    @nn.nowrap
    def _compute_dtype(self, x: Array | TensorType, params: Any) -> Any:
        """``dtype``, or the common type of input and parameters."""
        return jnp.dtype(self.dtype or jnp.result_type(*(a.dtype for a in jax.tree.leaves((x, params)))))

    @nn.nowrap
    def _make_params(self, scope: str, specs: tuple[ParamSpec, ...]) -> dict[str, Array]:
        if scope:
            return _Scope(specs, self.param_dtype, name=scope).parameters()
        return {s.name: self.param(s.name, s.init, s.shape, self.param_dtype) for s in specs}

    @nn.nowrap
    def _init_state(self, run: Run) -> dict[str, Array]:
        if self.recipe is None or not self.recipe.stateful or not run.quantizers:
            return {}
        return fp8_state.init(len(run.quantizers), self.recipe)

    @nn.nowrap
    def _fp8_state(self, run: Run, index: int) -> dict[str, Array]:
        """The FP8 state of a run, stacked over its quantizers; {} where the recipe keeps none."""
        shapes = jax.eval_shape(lambda: self._init_state(run))
        if not shapes:
            return {}
        name = f"fp8_{index}"
        can_make = self.is_initializing() and self.is_mutable_collection(fp8_state.COLLECTION)
        check_value(
            can_make or self.has_variable(fp8_state.COLLECTION, name),
            "/".join((*self.path, type(self).__name__)),
            "variables",
            f"collection {fp8_state.COLLECTION!r} with {name!r} (from init): the state of {describe(self.recipe)}; "
            f"nn.scan and nn.vmap need {fp8_state.COLLECTION!r} in their variable_axes",
            "none",
        )
        state = self.variable(fp8_state.COLLECTION, name, lambda: self._init_state(run)).value
        for leaf, wanted in shapes.items():
            got = state[leaf].shape if leaf in state else "none"
            check_value(got == wanted.shape, type(self).__name__, f"{name}/{leaf}", f"shape {wanted.shape}", got)
        return dict(state)

    @nn.nowrap
    def _quantized_kernels(self, run: Run, index: int, params: Any, state: Any) -> Kernels:
        """The kernels that were quantized before this call, by link; inside of ``making_kernels`` made and stored."""
        none = (None,) * len(run.links)
        names = {i: f"linear_{info.index}" for i, info in enumerate(run.links) if info.quantized}
        name, where = f"fp8_{index}", "/".join((*self.path, type(self).__name__))
        making = _making_kernels.get()
        if making is not None:
            making.update({info.label: info.why_unquantized for info in run.links if info.why_unquantized is not None})
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
                pair = [_type_name(types.get(field)) for types in (wanted[i], got)]
                check_value(pair[0] == pair[1], where, f"{KERNELS}/{name}/{key}/{field}", *pair)
        return tuple(given[names[i]] if i in names else None for i in range(len(run.links)))


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


class Sequential(ChainModule):
    """A chain of ops: ``Sequential([ops.RMSNorm(), ops.Linear(4096)], recipe=te.DelayedScaling())``.

    Parameters of the i-th op are at ``params/ops_<i>/{kernel,bias,scale}`` (or under its ``name``); an op object listed
    twice shares its parameters, under its first place. FP8 state is at ``_overwrite_with_gradient/fp8_<i>`` for a run
    of ops that starts at i.
    """

    ops: Sequence[Any] = ()

    def __post_init__(self) -> None:
        ok = isinstance(self.ops, Iterable) and not isinstance(self.ops, str)
        check_type(ok, "Sequential", "ops", "a list of ops, Flax modules and functions", repr(self.ops))
        self.ops = tuple(self.ops)  # hashable, and a generator is read once
        super().__post_init__()

    def chain(self) -> Sequence[Any]:
        return self.ops


def _type_name(array: Any) -> str:
    return "none" if array is None else f"{array.dtype}{list(array.shape)}"


def _check_input(name: str, argument: str, x: Any) -> None:
    check_type(hasattr(x, "dtype") and hasattr(x, "shape"), name, argument, "an array", type(x).__name__)
    dtypes = ", ".join(jnp.dtype(d).name for d in DTYPES)
    check_type(x.dtype in DTYPES, name, argument, f"dtype {dtypes}", x.dtype)
    check_value(x.ndim >= 1, name, argument, "at least one dimension", f"shape {x.shape}")
    check_value(not compat.in_host_memory(x), name, argument, "an array in device memory", "one in host memory")


def _check_on_device(name: str, variables: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        argument = jax.tree_util.keystr(path, simple=True, separator="/")
        got = "one in host memory (move it with jax.device_put)"
        check_value(not compat.in_host_memory(leaf), name, argument, "an array in device memory", got)


def _is_dtype(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) in DTYPES
    except TypeError:
        return False


def _segments(chain: Sequence[Any]) -> list[Any]:
    """Maximal runs of basic ops, as lists of places, and the modules and functions between them.

    Raises:
      TypeError: something that is none of these.
      ValueError: two ops want the same scope, or one that can't be stored.
    """
    segments: list[Any] = []
    scopes: dict[int, str] = {}
    owners: dict[str, tuple[int, Any]] = {}  # scope -> who has it
    for index, item in enumerate(chain):
        is_op, scope = isinstance(item, Op), ""
        ok = is_op or (callable(item) and not isinstance(item, type))
        check_type(ok, "Sequential", f"ops[{index}]", "an op, a Flax module or a function", repr(item))
        if is_op or isinstance(item, nn.Module):
            scope = scopes.setdefault(id(item), f"ops_{index}" if item.name is None else item.name)
            _check_scope(index, item, scope)
            first, owner = owners.setdefault(scope, (index, item))
            check_value(
                owner is item,
                "Sequential",
                f"ops[{index}] ({type(item).__name__})",
                "a name of its own (to share parameters, list the same object twice)",
                f"{scope!r}, which ops[{first}] ({type(owner).__name__}) has",
            )
        if not is_op:
            segments.append(item)
            continue
        _check_is_data(index, item)
        if not segments or not isinstance(segments[-1], list):
            segments.append([])
        segments[-1] += [_Place(op, index, scope) for op in item.expand()]
    return segments


def _check_scope(index: int, item: Any, scope: Any) -> None:
    """A scope is a name in the checkpoint too, which joins names with "." and "/"; fp8_<i> is the state's."""
    ok = isinstance(scope, str) and not any(c in scope for c in "./") and re.fullmatch(r"fp8_\d+", scope) is None
    expected = "None or a string without '.' and '/' that isn't fp8_<number>"
    check_value(ok, "Sequential", f"name of ops[{index}] ({type(item).__name__})", expected, repr(scope))


def _check_is_data(index: int, op: Op) -> None:
    """Plans and programs are cached on an op's fields: what is no field would be another op's behaviour."""
    argument = f"ops[{index}] ({type(op).__name__})"
    hidden = sorted(set(vars(op)) - {field.name for field in dataclasses.fields(op)})
    check_type(not hidden, "Sequential", argument, "a @dataclasses.dataclass(frozen=True), all of it in fields", hidden)
    try:
        hash(op)
    except TypeError as error:
        raise TypeError(message("Sequential", argument, "hashable fields (a tuple instead of a list)", error)) from None


def _check_shared(scope: str, name: str, first: tuple[int, ...], here: tuple[int, ...]) -> None:
    got = f"{first}, from its first place in the chain or its initialiser"
    check_value(first == here, "Sequential", f"{scope}/{name}".lstrip("/"), f"shape {here}", got)


def _types(places: list[_Place], x: TensorType) -> list[TensorType]:
    """The input type of every op of a run."""
    types = []
    for place in places:
        types.append(x)
        x = place.op.out_type(x)
        check_value(len(x.shape) >= 1, str(place.op), "result", "at least one dimension", f"shape {x.shape}")
    return types


def _foreign_label(item: Any) -> str:
    return type(item).__name__ if isinstance(item, nn.Module) else getattr(item, "__name__", "function")


def _foreign_type(item: Any, x: TensorType) -> TensorType:
    if isinstance(item, nn.Module):
        return jax.eval_shape(lambda key, x: item.init_with_output(key, x)[0], jax.random.key(0), x)
    return jax.eval_shape(item, x)
