"""Calls whose changes to the FP8 state nnx drops: of a module that ``nnx.scan`` has as a constant (``in_axes=None``).

Nothing in the module or its Variables says so: nnx hands the body new ones, and leaves what becomes of them to what it
does behind the body. So the bodies that are being traced are looked at.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from te_jax import compat
from te_jax.errors import message, warn
from te_jax.nnx.state import FP8State


def warn_if_dropped(module: Any) -> None:
    """Warns if what this call of a te.nnx module writes into its FP8 state is dropped by an ``nnx.scan`` around it."""
    for body in compat.nnx_scan_bodies():
        axes, args = getattr(body.get("self"), "in_axes", ()), body.get("args", ())
        prefixes = axes if isinstance(axes, tuple) else (axes,) * len(args)
        if any(_is_constant(prefix, arg, module) for prefix, arg in zip(prefixes, args, strict=False)):
            expected = (
                "te.nnx.grad in place of nnx.grad, the module as nnx.Carry, or model.eval() if the state is to stay"
            )
            got = "a constant of nnx.scan (in_axes=None), which drops the state that the call leaves"
            warn(message(f"nnx.{type(module).__name__}", "FP8 state", expected, got))
            return


def _is_constant(prefix: Any, arg: Any, module: Any) -> bool:
    """Whether the module is in the argument, and its FP8 state is under the axis None."""
    if prefix is not None and not isinstance(prefix, nnx.StateAxes):
        return False
    for path, node in nnx.iter_graph(arg):
        # Transformations inside of the body make new objects, which share the definition.
        if getattr(node, "definition", None) is module.definition:
            found = [(inner, variable) for inner, variable in nnx.iter_graph(node) if isinstance(variable, FP8State)]
            return any(_axis(prefix, (*path, *inner), variable) is None for inner, variable in found)
    return False


def _axis(prefix: Any, path: tuple, variable: FP8State) -> Any:
    if prefix is None:
        return None
    for wanted, axis in zip(prefix.filters, prefix.axes, strict=True):
        if nnx.filterlib.to_predicate(wanted)(path, variable):
            return axis
    return 0  # nnx says what is wrong with that
