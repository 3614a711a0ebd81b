"""FP8 state as nnx Variables, and what one step does to it.

A call outside of evaluation replaces the state of a run by what its forward pass knows of the next one. Several calls
of a module in one step (a shared layer) all read the state that the step began with, and the amaxes of all are
combined. Where a step ends cannot be seen in the values. It is seen in the objects: every nnx transformation makes
new Variables for what runs inside, so calls belong to one step if they are traced on the same Variable, and nothing
else has set its value in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx
from jax import Array

from te_jax.quant import state as fp8_state
from te_jax.quant.state import COLLECTION

DIFFERENTIATED = "differentiated"
"""Metadata of an FP8State whose gradient will overwrite it (te.nnx.grad): the forward pass leaves it as it is."""


def _registered() -> Any:
    """The class that flax made for the collection, if a linen module with FP8 state came through nnx.bridge before."""
    try:
        return nnx.variable_type_from_name(COLLECTION)
    except ValueError:
        return None


_FLAXS_CLASS = _registered()
_Base: Any = _FLAXS_CLASS or nnx.Variable


class _Step(NamedTuple):
    began_with: Array
    written: Array


class FP8State(_Base):
    """A leaf of FP8 scale state, f32, of a shape in docs/numerics.md: linen's collection ``_overwrite_with_gradient``.

    Not a Param: ``nnx.Optimizer(wrt=nnx.Param)``, gradient norms and weight decay don't see it. Calls of its module
    update it, and ``te.nnx.grad`` does so exactly.
    """

    __slots__ = ("_step",)  # lost wherever nnx makes a new object of it, which is what marks a new step

    @property
    def differentiated(self) -> bool:
        """Whether the gradient of this state is asked for and will overwrite it."""
        return bool(self.get_metadata(DIFFERENTIATED, False))

    def in_step(self) -> bool:
        """Whether the step that is being traced has already written this state."""
        step = self._get_step()
        return step is not None and step.written is self.get_raw_value()

    def at_step_begin(self) -> Array:
        """The value that this step began with."""
        step = self._get_step()
        return step.began_with if step is not None and self.in_step() else self.get_value()

    def write(self, value: Array, *, in_step: bool) -> None:
        """Sets the value; ``in_step``: until something else sets it, later calls belong to the same step."""
        began_with = self.at_step_begin()
        self.set_value(value)
        self._step = _Step(began_with, self.get_raw_value()) if in_step else None

    def _get_step(self) -> _Step | None:
        try:
            return object.__getattribute__(self, "_step")
        except AttributeError:
            return None


# What nnx.bridge makes of the collection is then an FP8State too. Code that looks for the collection's name in that
# of the class (there was nothing else to look for) still finds it.
FP8State.__name__ = COLLECTION
if _FLAXS_CLASS is None:
    nnx.register_variable_name(COLLECTION, FP8State)

ANY_FP8_STATE: Any = _FLAXS_CLASS or FP8State
"""FP8State, and what nnx.bridge makes of linen's collection."""


def is_differentiated(runs: Mapping[str, Any]) -> bool:
    """Whether any state in a tree of FP8State is differentiated."""
    if isinstance(runs, FP8State):
        return runs.differentiated
    return any(is_differentiated(inner) for inner in runs.values())


def read(runs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a tree of FP8State, as this step began with them."""
    return {name: v.at_step_begin() if isinstance(v, FP8State) else read(v) for name, v in runs.items()}


def write(runs: Mapping[str, Any], following: Mapping[str, Any], *, traced: bool) -> None:
    """Writes what one call's forward pass leaves, combined with what earlier calls of the step left.

    Args:
      runs: scope -> ... -> run -> leaf name -> FP8State.
      following: the same tree of arrays; runs that are missing are left as they are.
      traced: whether the call is part of a traced step. Calls outside of any transformation are a step each.
    """
    for name, new in following.items():
        inner = runs[name]
        if not any(isinstance(leaf, FP8State) for leaf in inner.values()):
            write(inner, new, traced=traced)
            continue
        if all(leaf.in_step() for leaf in inner.values()):
            new = fp8_state.accumulate({n: leaf.get_value() for n, leaf in inner.items()}, new)
        for n, leaf in inner.items():
            leaf.write(new[n], in_step=traced)
