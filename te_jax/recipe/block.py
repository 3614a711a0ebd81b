"""Block scaling: one scale per 1x128 block of x and dy, one per 128x128 block of the kernel."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from te_jax.recipe.base import GEMMS, ROLES, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """Hopper's FP8 block scaling, stateless: E4M3 for every role, fp32 scales, precise accumulation.

    Attributes:
      power_of_two: floor scales to a power of two (the default, as in TransformerEngine).
    """

    dy_format: str = "e4m3"
    fprop: str = "precise"
    power_of_two: bool = True

    name: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in ROLES:
            self._check_choice(f"{role}_format", ("e4m3",))
        for gemm in GEMMS:
            self._check_choice(gemm, ("precise",))
        self._check_type("power_of_two", bool)
