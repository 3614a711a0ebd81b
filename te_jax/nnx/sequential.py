"""Sequential: a chain of ops as an nnx module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.typing import Dtype
from jax import Array

from te_jax import sequential as linen
from te_jax.chain.places import Path, freeze, position
from te_jax.errors import check_type, check_value
from te_jax.fusion.pattern import Rule
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.nnx.initializers import with_wrapped
from te_jax.nnx.module import Module
from te_jax.ops.base import Op
from te_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class _Child:
    """Stands in the chain for an nnx module, which is an attribute of that name."""

    name: str


class Sequential(Module):
    """A chain of ops: ``te.nnx.Sequential([ops.RMSNorm(), ops.Linear(4096)], 1024, recipe=..., rngs=rngs)``.

    Variables have the paths of ``te.Sequential``: ``ops_<i>/{kernel,bias,scale}`` (or under the op's ``name``), FP8
    state at ``fp8_<i>``. An op or module object listed twice shares its parameters. An nnx module in the list is the
    attribute ``ops_<i>``; it and functions of one array run as they are, and end a fusion window. A list inside of the
    list is part of the chain; its elements are ``ops_<i>_<j>``.

    Attributes:
      ops: the chain; nnx modules are named there, not held.
    """

    def __init__(
        self,
        ops: Iterable[Op | nnx.Module | Callable[[Array], Array]],
        in_features: int | jax.ShapeDtypeStruct,
        *,
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        forward_rules: tuple[Rule, ...] = FORWARD_RULES,
        backward_rules: tuple[Rule, ...] = BACKWARD_RULES,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          ops: the chain.
          in_features: features of x; or an example of x, where ops or functions need more dimensions than two.
          recipe: how linears are quantized; None: not at all.
          dtype: computation dtype; None: the common type of x and the parameters.
          param_dtype: dtype of the parameters.
          forward_rules, backward_rules: the fusion rules, tried in order; () fuses nothing.
          rngs: ``rngs.params()`` initialises; with dropout in the chain, ``rngs.dropout`` is forked.

        Raises:
          TypeError: something in the list that is none of these.
          ValueError: shapes that don't fit, or two ops that want the same name.
        """
        ok = isinstance(ops, Iterable) and not isinstance(ops, str)
        check_type(ok, "nnx.Sequential", "ops", "a list of ops, nnx modules and functions", repr(ops))
        chain, children = _separate(ops)
        for name, child in children.items():
            check_value(not hasattr(type(self), name), "nnx.Sequential", "ops", "a name that is free", repr(name))
            setattr(self, name, child)
        self.ops = chain
        definition = linen.Sequential(
            chain,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
            forward_rules=forward_rules,
            backward_rules=backward_rules,
        )
        self.definition = definition
        x = _example(in_features)
        has_dropout = any(op.needs_key(False) for item in _flat(chain) if isinstance(item, Op) for op in item.expand())
        extras = self._abstract_definition().extra_input_types(x)
        super().__init__(definition, x, *extras, has_dropout=has_dropout, rngs=rngs)

    def __call__(
        self,
        x: Array,
        *extras: Array,
        deterministic: bool | None = None,
        use_running_average: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Any:
        """Applies the chain.

        Args:
          x: [*lead, C], bfloat16, float16 or float32.
          *extras: the extra inputs of the ops that take one, in order.
          deterministic: no dropout; None: the attribute.
          use_running_average: the FP8 state is used and left as it is; None: the attribute.
          rngs: for dropout; None: the module's own stream.

        Returns:
          y, or ``(y, *extra_outputs)`` if ops make extra outputs.

        Raises:
          ValueError, TypeError: as ``te.Sequential``, naming op and argument.
        """
        deterministic = self._is_deterministic(deterministic)
        return self._call(x, *extras, deterministic=deterministic, use_running_average=use_running_average, rngs=rngs)

    def _runnable(self) -> linen.Sequential:
        return self._with_children(lambda module: lambda x: module(x))

    def _abstract_definition(self) -> linen.Sequential:
        return self._with_children(_abstract_call)

    def _with_children(self, function_of: Callable[[nnx.Module], Callable[[Array], Array]]) -> linen.Sequential:
        definition: Any = self.definition
        names = {item.name for item in _flat(self.ops) if isinstance(item, _Child)}
        if not names:
            return definition
        functions: dict[str, Any] = {}
        for name in names:
            module = getattr(self, name)
            functions[name] = function_of(module)
            functions[name].__name__ = type(module).__name__
        return definition.clone(ops=_replaced(self.ops, functions))


def _separate(ops: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, nnx.Module]]:
    """The chain with modules replaced by their names, and the modules by name."""
    children: dict[str, nnx.Module] = {}
    seen: dict[int, Any] = {}  # what stands for an object that is listed again
    kept = freeze(ops)  # ids stay those of these objects

    def stand_in(item: Any, path: Path) -> Any:
        if isinstance(item, tuple):
            return tuple(stand_in(inner, (*path, i)) for i, inner in enumerate(item))
        expected = "an op, an nnx module (nnx.bridge.ToNNX makes one of a linen module) or a function"
        check_type(not isinstance(item, nn.Module), "nnx.Sequential", position(path), expected, repr(item))
        if id(item) not in seen:
            seen[id(item)] = item
            if isinstance(item, nnx.Module):
                name = "_".join(("ops", *map(str, path)))
                seen[id(item)], children[name] = _Child(name), item
            elif isinstance(item, Op):
                seen[id(item)] = with_wrapped(item)
        return seen[id(item)]

    return tuple(stand_in(item, (i,)) for i, item in enumerate(kept)), children


def _flat(chain: Sequence[Any]) -> Iterator[Any]:
    for item in chain:
        yield from _flat(item) if isinstance(item, tuple) else (item,)


def _replaced(chain: Sequence[Any], functions: dict[str, Any]) -> tuple[Any, ...]:
    """The chain with functions in the places of modules."""
    return tuple(
        _replaced(item, functions)
        if isinstance(item, tuple)
        else functions[item.name]
        if isinstance(item, _Child)
        else item
        for item in chain
    )


def _abstract_call(module: nnx.Module) -> Callable[[Array], Array]:
    """Zeros of the type of the module's result; the module's own variables are left alone."""
    graphdef, state = nnx.split(module)

    def call(x: Array) -> Array:
        y: Any = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, x)  # type: ignore[operator]
        return jnp.zeros(y.shape, y.dtype)

    return call


def _example(in_features: Any) -> jax.ShapeDtypeStruct:
    if isinstance(in_features, jax.ShapeDtypeStruct):
        return in_features
    ok = isinstance(in_features, int) and not isinstance(in_features, bool) and in_features > 0
    check_value(ok, "nnx.Sequential", "in_features", "a positive int or a jax.ShapeDtypeStruct", repr(in_features))
    return jax.ShapeDtypeStruct((1, in_features), jnp.float32)
