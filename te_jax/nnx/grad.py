"""Gradients that carry FP8 state: ``nnx.grad`` and ``nnx.value_and_grad`` with the state of te.nnx modules in them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from te_jax.errors import check_type
from te_jax.nnx.state import ANY_FP8_STATE, DIFFERENTIATED, FP8State
from te_jax.quant import state as fp8_state

Argnum = int | nnx.DiffState

# What tree mode (graph=False) lacks is needed: gradients of some of the Variables of a module, and updates to others.
_PARAMETERS = inspect.signature(nnx.grad).parameters
_GRAPH_MODE: dict[str, Any] = {name: True for name in ("graph", "graph_updates") if name in _PARAMETERS}


def grad(f: Callable[..., Any], *, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``nnx.grad`` for models with FP8 state: gradients are the same, and the state is updated as exactly as in linen.

    The loss is differentiated with respect to the FP8 state of its arguments too; its "gradient" is its next value, and
    overwrites it in the model, as nnx writes other changes that ``f`` makes. So dy has delayed scaling too, where with
    ``nnx.grad`` it has current scaling. State that the loss didn't use is left as it is.

    Args:
      f: as for ``nnx.grad``.
      argnums: as for ``nnx.grad``: ints (all ``nnx.Param`` of the argument) or ``nnx.DiffState``.
      has_aux: as for ``nnx.grad``.

    Returns:
      A function of the arguments of ``f`` that returns the gradients (without the FP8 state, so that
      ``optimizer.update(model, grads)`` takes them); with ``has_aux`` (gradients, aux).
    """
    with_value = value_and_grad(f, argnums=argnums, has_aux=has_aux)

    @functools.wraps(f)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients


def value_and_grad(
    f: Callable[..., Any], *, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``nnx.value_and_grad`` for models with FP8 state; see ``te.nnx.grad``.

    Returns:
      A function of the arguments of ``f`` that returns (value, gradients), the value with aux if ``has_aux``.
    """
    asked = (argnums,) if isinstance(argnums, Argnum) else tuple(argnums)
    for argnum in asked:
        expected = "ints or nnx.DiffState"
        check_type(isinstance(argnum, Argnum), "nnx.grad", "argnums", expected, type(argnum).__name__)
    with_state = tuple(map(_with_state, asked))

    @functools.wraps(f)
    def marked(*args: Any, **kwargs: Any) -> Any:
        variables = [variable for argnum in with_state for variable in _fp8_state(args[argnum.argnum])]
        for variable in variables:
            variable.set_metadata(DIFFERENTIATED, True)
        out = f(*args, **kwargs)
        for variable in variables:
            variable.del_metadata(DIFFERENTIATED)
        return out

    differentiated = nnx.value_and_grad(marked, argnums=with_state, has_aux=has_aux, **_GRAPH_MODE)

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        if kwargs:  # what only goes by keyword nnx refuses, as it does in nnx.grad
            bound = inspect.signature(f).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        value, grads = differentiated(*args, **kwargs)
        grads = tuple(_take_state(args[argnum.argnum], g) for argnum, g in zip(with_state, grads, strict=True))
        return value, grads[0] if isinstance(argnums, Argnum) else grads

    return value_and_gradients


def _with_state(argnum: Argnum) -> nnx.DiffState:
    if isinstance(argnum, nnx.DiffState):
        return nnx.DiffState(argnum.argnum, nnx.Any(argnum.filter, ANY_FP8_STATE))
    return nnx.DiffState(argnum, nnx.Any(nnx.Param, ANY_FP8_STATE))


def _fp8_state(argument: Any) -> Iterator[FP8State]:
    return (node for _, node in nnx.iter_graph(argument) if isinstance(node, FP8State))


def _take_state(argument: Any, grads: Any) -> Any:
    """Overwrites the FP8 state of the argument by its gradient; returns the other gradients."""
    nodes = jax.tree.leaves(argument, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
    leaves, structure = jax.tree.flatten(grads, is_leaf=lambda x: isinstance(x, nnx.State | nnx.Variable))
    return structure.unflatten(_take_node_state(node, g) for node, g in zip(nodes, leaves, strict=True))


def _take_node_state(node: Any, grads: Any) -> Any:
    if not isinstance(grads, nnx.State):
        return grads
    following, rest = nnx.split_state(grads, ANY_FP8_STATE, ...)
    if following:
        old = nnx.to_pure_dict(nnx.state(node, ANY_FP8_STATE))
        nnx.update(node, fp8_state.apply(old, nnx.to_pure_dict(following)))
    return rest
