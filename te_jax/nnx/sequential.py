"""Sequential: a chain of ops as an nnx module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.typing import Dtype
from jax import Array

from te_jax import sequential as linen
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
    attribute ``ops_<i>``; it and functions of one array run as they are, and end a fusion window.

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
        basic = [op for item in chain if isinstance(item, Op) for op in item.expand()]
        has_dropout = any(op.needs_key(False) for op in basic)
        super().__init__(definition, x, *self._extra_inputs(x), has_dropout=has_dropout, rngs=rngs)

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

    def _extra_inputs(self, x: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """The types of the chain's extra inputs for this x: each its op's input type."""
        extras = []
        for item in self._abstract_definition().ops:
            if not isinstance(item, Op):
                x = jax.eval_shape(item, x)
                continue
            for op in item.expand():
                extras += [x] * op.num_extra_inputs
                x = op.out_type(x)
        return extras

    def _with_children(self, function_of: Callable[[nnx.Module], Callable[[Array], Array]]) -> linen.Sequential:
        functions: dict[str, Any] = {}
        for item in self.ops:
            if isinstance(item, _Child):
                module = getattr(self, item.name)
                functions[item.name] = function_of(module)
                functions[item.name].__name__ = type(module).__name__
        definition: Any = self.definition
        if not functions:
            return definition
        chain = [functions[item.name] if isinstance(item, _Child) else item for item in self.ops]
        return definition.clone(ops=tuple(chain))


def _separate(ops: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, nnx.Module]]:
    """The chain with modules replaced by their names, and the modules by name."""
    chain: list[Any] = []
    children: dict[str, nnx.Module] = {}
    seen: dict[int, Any] = {}  # what stands for an object that is listed again
    kept: Sequence[Any] = tuple(ops)
    for index, item in enumerate(kept):
        expected = "an op, an nnx module (nnx.bridge.ToNNX makes one of a linen module) or a function"
        check_type(not isinstance(item, nn.Module), "nnx.Sequential", f"ops[{index}]", expected, repr(item))
        if id(item) not in seen:
            seen[id(item)] = item
            if isinstance(item, nnx.Module):
                seen[id(item)] = _Child(f"ops_{index}")
                children[f"ops_{index}"] = item
            elif isinstance(item, Op):
                seen[id(item)] = with_wrapped(item)
        chain.append(seen[id(item)])
    return tuple(chain), children


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
