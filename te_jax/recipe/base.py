"""What every recipe has in common: frozen data over three roles (x, kernel, dy) and three GEMMs.

For y = x w the GEMMs are fprop = Q(x) Q(w), dgrad = Q(dy) Q(w)^T and wgrad = Q(x)^T Q(dy). A recipe says which FP8
format each role is cast to and how each GEMM accumulates; a subclass says where the scales come from.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from te_jax.errors import message
from te_jax.quant.format import Format, format_of

ROLES = ("x", "kernel", "dy")
GEMMS = ("fprop", "dgrad", "wgrad")
FORMATS = ("e4m3", "e5m2")
ACCUMULATIONS = ("fast", "precise")
# Hopper multiplies no e5m2 by e5m2.
PRODUCTS = {
    "fprop": ("x_format", "kernel_format"),
    "dgrad": ("dy_format", "kernel_format"),
    "wgrad": ("x_format", "dy_format"),
}
JSON_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes; use one of its subclasses. Hashable, comparable, valid once constructed.

    Attributes:
      x_format, kernel_format, dy_format: "e4m3" or "e5m2" for each role, "e5m2" for one of them at most, since each is
        multiplied by both others. HYBRID by default: dy is e5m2.
      fprop, dgrad, wgrad: "fast" (Hopper's reduced-precision FP8 accumulation) or "precise", for each GEMM.
      amax_axes: mesh axes over which amax is reduced inside `shard_map(check_vma=False)`, where varying types can't
        tell; None means all manual axes. Not read anywhere else.
      strict: a linear that can't be quantized is an error instead of running in high precision.
    """

    x_format: str = "e4m3"
    kernel_format: str = "e4m3"
    dy_format: str = "e5m2"
    fprop: str = "fast"
    dgrad: str = "precise"
    wgrad: str = "precise"
    amax_axes: tuple[str, ...] | None = None
    strict: bool = False

    name: ClassVar[str] = ""
    stateful: ClassVar[bool] = False  # keeps scale state in a variable collection

    def __post_init__(self) -> None:
        if type(self) is Recipe:
            raise TypeError(message("Recipe", "class", "DelayedScaling, CurrentScaling or BlockScaling", "Recipe"))
        for role in ROLES:
            self._check_choice(f"{role}_format", FORMATS)
        for gemm, fields in PRODUCTS.items():
            formats = tuple(getattr(self, field) for field in fields)
            if formats == ("e5m2", "e5m2"):
                expected = f"'e5m2' for one of the two at most ({gemm} multiplies them)"
                raise ValueError(message(type(self).__name__, " and ".join(fields), expected, formats))
        for gemm in GEMMS:
            self._check_choice(gemm, ACCUMULATIONS)
        self._check_type("strict", bool)
        if self.amax_axes is not None:
            ok = isinstance(self.amax_axes, tuple) and all(isinstance(axis, str) for axis in self.amax_axes)
            if not ok:
                raise self._error("amax_axes", "None or a tuple of mesh axis names", TypeError)

    # Constants for the recipes that don't have them as fields.

    @property
    def margin(self) -> int:
        """Powers of two by which a scale derived from amax is reduced."""
        return 0

    @property
    def power_of_two(self) -> bool:
        """Whether a scale derived from amax is floored to a power of two."""
        return False

    @property
    def initial_scale(self) -> float | None:
        """The scale of a quantizer without history; None: the one that the tensor's own amax gives."""
        return None

    def format(self, role: str) -> Format:
        """The FP8 format of `role`: "x", "kernel" or "dy"."""
        if role not in ROLES:
            raise ValueError(message(f"{type(self).__name__}.format", "role", f"one of {ROLES}", repr(role)))
        return format_of(getattr(self, f"{role}_format"))

    def fast_accumulation(self, gemm: str) -> bool:
        """Whether `gemm` ("fprop", "dgrad" or "wgrad") may use fast accumulation."""
        if gemm not in GEMMS:
            raise ValueError(message(f"{type(self).__name__}.fast_accumulation", "gemm", f"one of {GEMMS}", repr(gemm)))
        return getattr(self, gemm) == "fast"

    def to_json(self) -> dict[str, Any]:
        """A JSON-serializable description that `recipe_from_json` turns back into an equal recipe."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.amax_axes is not None:
            fields["amax_axes"] = list(self.amax_axes)
        if self.initial_scale is None:
            fields.pop("initial_scale", None)  # versions that don't know it yet read the description
        return {"version": JSON_VERSION, "recipe": self.name, "fields": fields}

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        if getattr(self, field) not in choices:
            raise self._error(field, f"one of {choices}", ValueError)

    def _check_type(self, field: str, kind: type) -> None:
        value = getattr(self, field)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._error(field, kind.__name__, TypeError)

    def _error(self, field: str, expected: str, kind: type[Exception]) -> Exception:
        return kind(message(type(self).__name__, field, expected, repr(getattr(self, field))))
