"""Recipes: frozen descriptions of what is quantized, to which format, with scales from where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_jax.errors import message
from te_jax.recipe.base import GEMMS, JSON_VERSION, ROLES, Recipe
from te_jax.recipe.block import BlockScaling
from te_jax.recipe.current import CurrentScaling
from te_jax.recipe.delayed import DelayedScaling

RECIPES: Mapping[str, type[Recipe]] = {kind.name: kind for kind in (DelayedScaling, CurrentScaling, BlockScaling)}


def recipe_from_json(description: Mapping[str, Any]) -> Recipe:
    """The recipe that `Recipe.to_json` described.

    Raises:
      ValueError: the version, the recipe or a field is not known, or a value is not valid.
    """
    version = description.get("version")
    if version != JSON_VERSION:
        raise ValueError(message("recipe_from_json", "version", JSON_VERSION, repr(version)))
    name = description.get("recipe")
    if name not in RECIPES:
        raise ValueError(message("recipe_from_json", "recipe", f"one of {tuple(RECIPES)}", repr(name)))
    fields = dict(description.get("fields", {}))
    known = set(RECIPES[name].__dataclass_fields__)
    if unknown := sorted(set(fields) - known):
        raise ValueError(message("recipe_from_json", f"fields of {name}", f"some of {sorted(known)}", unknown))
    if fields.get("amax_axes") is not None:
        fields["amax_axes"] = tuple(fields["amax_axes"])
    return RECIPES[name](**fields)


__all__ = [
    "GEMMS",
    "RECIPES",
    "ROLES",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Recipe",
    "recipe_from_json",
]
