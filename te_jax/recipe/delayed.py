"""Delayed scaling: the scale of this step comes from the amax of earlier steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from te_jax.recipe.base import Recipe

AMAX_ALGORITHMS = ("max", "most_recent")
_LARGEST_INITIAL = 2.0**60  # both operands of a product may have it: neither scale nor inverse of the product overflows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Per-tensor scales from an amax history: one pass over a tensor casts it and takes its amax for later.

    scale = min((fp8_max / amax) * 2**-margin, 2**126) if amax is finite and > 0, otherwise the scale is kept.
    A quantizer without history takes the amax of its current tensor, or ``initial_scale``.

    Attributes:
      amax_history_len: steps of history, >= 1.
      margin: powers of two of head room, >= 0.
      amax_compute_algo: "max" over the history, or "most_recent".
      initial_scale: the scale of a quantizer without history, from 2**-60 to 2**60; None: the one that the amax of
        its current tensor gives. Where devices have parts of a tensor, that amax has to be reduced over them before
        anything is quantized, and the program does so whether or not a quantizer is without history. With a number it
        doesn't; 1.0 is what TransformerEngine and Flax start from. State is the same either way, so it may change
        between steps. te.nnx modules ignore it for dy.
    """

    amax_history_len: int = 1024
    margin: int = 0
    amax_compute_algo: str = "max"
    initial_scale: float | None = None

    name: ClassVar[str] = "delayed"
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_type("amax_history_len", int)
        self._check_type("margin", int)
        if self.amax_history_len < 1:
            raise self._error("amax_history_len", "an int >= 1", ValueError)
        if not 0 <= self.margin <= 64:
            raise self._error("margin", "an int from 0 to 64", ValueError)
        self._check_choice("amax_compute_algo", AMAX_ALGORITHMS)
        if self.initial_scale is not None:
            self._check_type("initial_scale", float)
            if not 1 / _LARGEST_INITIAL <= self.initial_scale <= _LARGEST_INITIAL:
                raise self._error("initial_scale", "None or a float from 2**-60 to 2**60", ValueError)
