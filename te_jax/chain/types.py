"""Types along a run: what does not fit is an error that names both ops and their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from te_jax import compat
from te_jax.chain.parts import Chain, RunPart
from te_jax.chain.places import Place
from te_jax.errors import check_type, check_value
from te_jax.fusion.pattern import Rule
from te_jax.fusion.run import Output
from te_jax.ops.base import ParamSpec, TensorType
from te_jax.recipe import Recipe

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def check_input(name: str, argument: str, x: Any) -> None:
    """Raises TypeError or ValueError unless x can go along a chain."""
    check_array(name, argument, x)
    _check_dtype(name, argument, x)
    check_value(len(x.shape) >= 1, name, argument, "at least one dimension", f"shape {x.shape}")


def check_array(name: str, argument: str, x: Any) -> None:
    """Raises TypeError or ValueError unless x is an array (or the type of one) in device memory."""
    check_type(hasattr(x, "dtype") and hasattr(x, "shape"), name, argument, "an array", type(x).__name__)
    check_value(not compat.in_host_memory(x), name, argument, "an array in device memory", "one in host memory")


def check_on_device(name: str, variables: Any) -> None:
    """Raises ValueError for a leaf in host memory, by its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        argument = jax.tree_util.keystr(path, simple=True, separator="/")
        got = "one in host memory (move it with jax.device_put)"
        check_value(not compat.in_host_memory(leaf), name, argument, "an array in device memory", got)


def check_settings(name: str, recipe: Any, dtype: Any, param_dtype: Any, rules: Mapping[str, Any]) -> None:
    """Raises TypeError for attributes of a chain that aren't what they should be; ``rules`` by attribute."""
    dtypes = ", ".join(jnp.dtype(d).name for d in DTYPES)
    ok = recipe is None or isinstance(recipe, Recipe)
    check_type(ok, name, "recipe", "None or a recipe object, such as DelayedScaling()", repr(recipe))
    check_type(dtype is None or is_dtype(dtype), name, "dtype", f"None, {dtypes}", repr(dtype))
    check_type(is_dtype(param_dtype), name, "param_dtype", dtypes, repr(param_dtype))
    for argument, value in rules.items():
        ok = isinstance(value, Sequence) and all(isinstance(rule, Rule) for rule in value)
        check_type(ok, name, argument, "a tuple of fusion rules", repr(value))


def _check_dtype(name: str, argument: str, x: Any) -> None:
    dtypes = ", ".join(jnp.dtype(d).name for d in DTYPES)
    check_type(x.dtype in DTYPES, name, argument, f"dtype {dtypes}", x.dtype)


def is_dtype(dtype: Any) -> bool:
    """Whether it names one of DTYPES."""
    try:
        return jnp.dtype(dtype) in DTYPES
    except TypeError:
        return False


def input_types(places: Sequence[Place], x: TensorType, source: str = "x") -> list[TensorType]:
    """The input type of every op of a run.

    Args:
      places: the run.
      x: type of the first op's input.
      source: where that comes from, for messages: "x" or the label of an op.

    Raises:
      ValueError: an op that refuses the result of the op before it.
    """
    types = []
    for place in places:
        types.append(x)
        got = x
        try:
            place.op.params(x)
            x = place.op.out_type(x)
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error}; at {place.label}, whose input {_shape(got)} is {result_of(source)}") from error
        check_value(len(x.shape) >= 1, place.label, "result", "at least one dimension", f"shape {x.shape}")
        source = place.label
    return types


def params_of(places: Sequence[Place], types: Sequence[TensorType]) -> dict[str, dict[str, ParamSpec]]:
    """scope -> name -> the parameters of a run; raises ValueError where ops that share one want different shapes."""
    wanted: dict[str, dict[str, ParamSpec]] = {}
    firsts: dict[tuple[str, str], Place] = {}
    for place, x_type in zip(places, types, strict=True):
        for spec in place.op.params(x_type):
            first = wanted.setdefault(place.scope, {}).setdefault(spec.name, spec)
            at = firsts.setdefault((place.scope, spec.name), place)
            check_shared(place, spec, first.shape, f"from its first place in the chain, {at.label}")
    return wanted


def check_shared(place: Place, spec: ParamSpec, shape: tuple[int, ...], of: str) -> None:
    """Raises ValueError unless a parameter that is there already has the shape that the op in this place wants."""
    argument = f"{place.scope}/{spec.name}".lstrip("/")
    check_value(
        shape == spec.shape, "Sequential", f"{argument} of {place.label}", f"shape {spec.shape}", f"{shape}, {of}"
    )


def entering(part: RunPart, x_types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """The types of the extra values that enter a run, as the first op that takes each wants it."""
    wanted: dict[int, TensorType] = {}
    for place, x_type, sources in zip(part.places, x_types, part.wiring.inputs, strict=True):
        for source, type_ in zip(sources, place.op.extra_input_types(x_type), strict=True):
            if not isinstance(source, Output):
                wanted.setdefault(source, type_)
    return tuple(wanted[number] for number in range(len(part.entering)))


def check_extras(name: str, chain: Chain, part: RunPart, x_types: Sequence[TensorType], given: Sequence[Any]) -> None:
    """Checks every extra input of a run against what its op wants.

    Args:
      name: of the module, for messages.
      chain, part: the run in its chain.
      x_types: the input type of every op of the run.
      given: the values ``part.entering`` or their types.

    Raises:
      ValueError: a shape that isn't what the op that takes the value wants, naming who made it.
      TypeError: a dtype that isn't.
    """
    for place, x_type, sources in zip(part.places, x_types, part.wiring.inputs, strict=True):
        for source, wanted in zip(sources, place.op.extra_input_types(x_type), strict=True):
            if isinstance(source, Output):
                maker = part.places[source.link]
                got = maker.op.extra_output_types(x_types[source.link])[source.number]
                _check_extra(name, f"extra input of {place.label}, made by {maker.label}", wanted, got)
            else:
                origin = chain.origin(part.entering[source])
                _check_extra(name, f"{origin}, for {place.label}", wanted, given[source])
        inputs = tuple(None if isinstance(source, Output) else given[source] for source in sources)
        try:
            place.op.check_extra_inputs(x_type, inputs)
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error}; at {place.label}") from error


def _check_extra(name: str, argument: str, wanted: TensorType, got: Any) -> None:
    check_value(got.shape == wanted.shape, name, argument, f"shape {wanted.shape}", got.shape)
    if jnp.issubdtype(wanted.dtype, jnp.floating):
        _check_dtype(name, argument, got)
    else:
        check_type(jnp.issubdtype(got.dtype, jnp.integer), name, argument, "integers", got.dtype)


def _shape(x: TensorType) -> str:
    return f"{x.dtype}{list(x.shape)}"


def result_of(source: str) -> str:
    return source if source == "x" else f"the result of {source}"
