"""Current scaling: the scale of a tensor comes from that tensor."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from te_jax.recipe.base import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """Per-tensor scales, stateless: scale = fp8_max / amax of the same tensor; amax 0, inf or NaN gives scale 1.

    Attributes:
      power_of_two: floor scales to a power of two.
    """

    power_of_two: bool = False

    name: ClassVar[str] = "current"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_type("power_of_two", bool)
