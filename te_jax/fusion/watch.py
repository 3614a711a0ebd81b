"""Says while tracing that FP8 state stays as it is: a loss is differentiated in parameters and not in the state.

JAX knows what is differentiated only where it traces the rules of a custom derivative, of any transformation that it is
in. In the program there is nothing of it: it is the identity.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from te_jax import errors


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def watched(op: str, advice: str, params: Any, state: Any) -> Any:
    """``params``, after a ``UserWarning`` with ``advice`` if they are differentiated without ``state``."""
    del op, advice, state
    return params


def _forward(op: str, advice: str, params: Any, state: Any) -> tuple[Any, Any]:
    if any(leaf.perturbed for leaf in jax.tree.leaves(params)) and not any(s.perturbed for s in jax.tree.leaves(state)):
        errors.warn(errors.message(op, "FP8 state", advice, "a derivative that leaves the state as it is"))
    return jax.tree.map(lambda leaf: leaf.value, params), None


def _backward(op: str, advice: str, kept: None, grads: Any) -> tuple[Any, Any]:
    del op, advice, kept
    is_zero = lambda leaf: isinstance(leaf, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    return jax.tree.map(lambda g: None if is_zero(g) else g, grads, is_leaf=is_zero), None


watched.defvjp(_forward, _backward, symbolic_zeros=True)
