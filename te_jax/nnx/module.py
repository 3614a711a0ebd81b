"""What all modules here are: nnx Variables around a linen module of te_jax, which is never bound.

The linen module says what the chain is, checks arguments, plans and runs. So both have the same fusions, errors and
paths in a checkpoint. The variables, their random keys and what a step does to the FP8 state are nnx's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from te_jax.errors import check_type, check_value
from te_jax.nnx import dropped, initializers, main_grad, state
from te_jax.nnx.main_grad import MainGradBuffer
from te_jax.nnx.state import FP8State
from te_jax.quant.state import COLLECTION, MAIN_GRAD
from te_jax.run_variables import NEXT, updating_state


class Scope(nnx.Module):
    """Holds the variables of one op, of one run of ops or of a module inside, under its own name."""


class Module(nnx.Module):
    """Base of te.nnx's modules.

    Attributes:
      definition: the linen module, unbound: static data.
      deterministic: no dropout. ``train()`` and ``eval()`` set it.
      use_running_average: FP8 state is used, not updated: evaluation. ``train()`` and ``eval()`` set it, as they do for
        ``nnx.BatchNorm``.
      rngs: the stream that dropout draws from; None without dropout.
    """

    def __init__(
        self, definition: nn.Module, *inputs: Any, has_dropout: bool, rngs: nnx.Rngs, first: nn.Module | None = None
    ):
        """Makes the variables.

        Args:
          definition: a linen module whose initialisers are `initializers.Initializer`.
          *inputs: x and the extra inputs as ``jax.ShapeDtypeStruct``; the shapes of parameters follow from them.
          has_dropout: whether calls that are not deterministic draw random numbers.
          rngs: ``rngs.params()`` initialises, ``rngs.dropout`` is forked for dropout.
          first: what makes the variables, if that isn't the definition.
        """
        name = type(self).__name__
        ok = isinstance(rngs, nnx.Rngs)
        check_type(ok, name, "rngs", "nnx.Rngs", type(rngs).__name__)
        self.definition = definition
        self.deterministic = False
        self.use_running_average = False
        self.rngs = rngs.dropout.fork() if has_dropout else nnx.data(None)
        first = self._abstract_definition() if first is None else first
        variables: Any = _init(first, inputs, rngs.params())
        _attach(self, name, variables.get("params", {}), initializers.as_param)
        _attach(self, name, variables.get(COLLECTION, {}), FP8State)

    def set_view(self, deterministic: bool | None = None, use_running_average: bool | None = None) -> None:
        """For ``nnx.view``.

        Args:
          deterministic: no dropout.
          use_running_average: FP8 state is used, not updated.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def plan(self, *shapes_or_arrays: Any, differentiate_state: bool = False, **options: Any) -> Any:
        """The steps that a call runs for such inputs, forward and backward, with reasons.

        Args:
          *shapes_or_arrays: x and the extra inputs: arrays or ``jax.ShapeDtypeStruct``.
          differentiate_state: whether the FP8 state is differentiated, as ``te.nnx.grad`` does; otherwise the forward
            pass updates it and dy uses current scaling. The plan says which.
          **options: ``train`` and ``platform``, as in ``te.Sequential.plan``.
        """
        definition: Any = self._abstract_definition()
        if differentiate_state or not options.get("train", True):
            return definition.plan(*shapes_or_arrays, **options)
        with updating_state():
            return definition.plan(*shapes_or_arrays, **options)

    def _runnable(self) -> nn.Module:
        """The linen module that a call runs."""
        return self.definition

    def _abstract_definition(self) -> nn.Module:
        """The linen module that is run for shapes alone."""
        return self.definition

    def _call(
        self,
        *args: Any,
        use_running_average: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the definition on the variables, and updates the FP8 state where that is for a call to do."""
        runs = _collect(self, lambda variable: isinstance(variable, FP8State))
        params = _collect(self, lambda variable: not isinstance(variable, FP8State | MainGradBuffer))
        buffers = _collect(self, lambda variable: isinstance(variable, MainGradBuffer))
        variables = {"params": _values(params), COLLECTION: state.read(runs)}
        variables |= {MAIN_GRAD: main_grad.collection(buffers)} if buffers else {}
        keys = self._dropout_key(kwargs.get("deterministic", True), rngs)
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if frozen and state.is_differentiated(runs):  # a gradient of zeros reads as unused: te.nnx.grad keeps the state
            variables[COLLECTION] = jax.lax.stop_gradient(variables[COLLECTION])
        definition = self._runnable()
        if not runs or frozen or state.is_differentiated(runs):
            return definition.apply(variables, *args, rngs=keys, **kwargs)
        with updating_state():
            applied: Any = definition.apply(variables, *args, rngs=keys, mutable=[NEXT], **kwargs)
        y, made = applied
        following = made.get(NEXT, {})
        dropped.warn_if_dropped(self)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((y, following)))
        state.write(runs, following, traced=traced)
        return y

    def _is_deterministic(self, asked: bool | None) -> bool:
        return self.deterministic if asked is None else asked

    def _dropout_key(self, deterministic: bool, rngs: nnx.Rngs | nnx.RngStream | None) -> dict[str, jax.Array]:
        if deterministic or self.rngs is None:
            return {}
        stream = self.rngs if rngs is None else rngs
        ok = isinstance(stream, nnx.Rngs | nnx.RngStream)
        check_type(ok, type(self).__name__, "rngs", "nnx.Rngs or nnx.RngStream", type(stream).__name__)
        return {"dropout": (stream["dropout"] if isinstance(stream, nnx.Rngs) else stream)()}


def _init(definition: nn.Module, inputs: tuple[jax.ShapeDtypeStruct, ...], key: jax.Array) -> Any:
    """Linen's variables of the definition. Compiled once for equal ones, so that only the initialisers are run."""
    try:
        hash(definition)
    except TypeError:  # an op with fields that are no data: linen's init says which
        return _init_now(definition, inputs, key)
    return _jitted_init(definition, inputs, key)


def _init_now(definition: nn.Module, inputs: tuple[jax.ShapeDtypeStruct, ...], key: jax.Array) -> Any:
    return definition.init(key, *(jnp.zeros(x.shape, x.dtype) for x in inputs))


_jitted_init = jax.jit(_init_now, static_argnums=(0, 1))


def _attach(node: nnx.Module, path: str, tree: Mapping[str, Any], make: Any) -> None:
    """Hangs a tree of variables into the module; collections share the scopes that they have in common."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner = vars(node).get(name)
            _check_free(node, path, name, inner is None or isinstance(inner, Scope))
            if inner is None:
                inner = Scope()
                setattr(node, name, inner)
            _attach(inner, f"{path}/{name}", value, make)
        else:
            _check_free(node, path, name, name not in vars(node))
            setattr(node, name, make(value))


def _check_free(node: nnx.Module, path: str, name: str, free: bool) -> None:
    ok = free and (name in vars(node) or not hasattr(type(node), name))
    expected = "a name that isn't an attribute of the module"
    check_value(ok, path, "name of an op", expected, repr(name))


def _collect(node: nnx.Module, wanted: Any) -> dict[str, Any]:
    """The variables of a module itself, in its scopes; those of other modules and of random streams are not its."""
    found: dict[str, Any] = {}
    for name, value in vars(node).items():
        if isinstance(value, Scope):
            inner = _collect(value, wanted)
            if inner:
                found[name] = inner
        elif isinstance(value, nnx.Variable) and wanted(value):
            found[name] = value
    return found


def _values(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _values(v) if isinstance(v, Mapping) else v.get_value() for name, v in tree.items()}
