"""The JSON beside the arrays of a checkpoint: format version, recipe, GEMM algorithms, and what wrote it.

A step folder is a plain orbax composite checkpoint, named by the bare step number:

  <directory>/<step>/params        the params collection
                     collections   other variable collections (batch statistics, ...), if any
                     fp8_state     the FP8 state collection, if any
                     opt_state     the optimizer's state, if given
                     extras        what the user adds (data position, random keys, ...), if given
                     te_jax        this document, as JSON

Arrays can be read with orbax alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from te_jax.errors import check_value, message
from te_jax.primitives import gemm_algorithms
from te_jax.recipe import Recipe, recipe_from_json

FORMAT_VERSION = 1
DOCUMENT = "te_jax"

# Neither changes a number or a shape: a checkpoint may be restored onto another mesh or with another strictness.
_NOT_COMPARED = ("amax_axes", "strict")

logger = logging.getLogger("te_jax.checkpoint")


def make(recipe: Recipe | None, items: Sequence[str]) -> dict[str, Any]:
    """The document of a checkpoint that holds `items`."""
    return {
        "format_version": FORMAT_VERSION,
        "recipe": None if recipe is None else recipe.to_json(),
        "items": sorted(items),
        "gemm_algorithms": gemm_algorithms.table(),
        "written_by": {
            "jax": jax.__version__,
            "orbax": ocp.__version__,
            "platform": jax.default_backend(),
            "devices": jax.device_count(),
        },
    }


def read(folder: epath.Path) -> dict[str, Any]:
    """The document of a complete step folder.

    Raises:
      ValueError: there is no such folder, it is not complete, or another version of te_jax wrote it.
    """
    why = why_incomplete(folder)
    check_value(why is None, "checkpoint.restore", "step", f"a complete checkpoint at {folder}", why)
    document = json.loads((folder / DOCUMENT / "metadata").read_text())
    got = document.get("format_version")
    check_value(got == FORMAT_VERSION, "checkpoint.restore", f"format version of {folder}", FORMAT_VERSION, repr(got))
    return document


def why_incomplete(folder: epath.Path) -> str | None:
    """Why a step folder can't be restored, or None if it can. Looks at the presence of files, not at the arrays."""
    if not folder.exists():
        return "no such folder"
    if not (folder / "_CHECKPOINT_METADATA").exists():
        return "no _CHECKPOINT_METADATA: it was not written to its end"
    try:
        document = json.loads((folder / DOCUMENT / "metadata").read_text())
        items = list(document["items"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no readable {DOCUMENT}/metadata ({type(error).__name__})"
    missing = [item for item in items if not (folder / item / "_METADATA").exists()]
    return f"items without metadata: {missing}" if missing else None


def steps(directory: epath.Path) -> list[int]:
    """Steps with a complete checkpoint, ascending. Others are ignored, with a line in the log."""
    if not directory.exists():
        return []
    found = []
    for folder in directory.iterdir():
        if not (folder.name.isdecimal() and str(int(folder.name)) == folder.name and folder.is_dir()):
            continue
        why = why_incomplete(folder)
        if why is None:
            found.append(int(folder.name))
        else:
            logger.warning("te_jax.checkpoint: ignoring %s: %s", folder, why)
    return sorted(found)


def check_recipe(document: dict[str, Any], recipe: Recipe | None, folder: epath.Path) -> None:
    """Raises a ValueError that names both recipes unless the checkpoint's one is the model's one."""
    stored = None if document["recipe"] is None else recipe_from_json(document["recipe"])
    if _comparable(stored) == _comparable(recipe):
        return
    expected = f"{stored!r}, which {folder} was trained with"
    hint = "build the model with the checkpoint's recipe; checkpoints are not converted between recipes"
    raise ValueError(message("checkpoint.restore", "recipe", expected, f"{recipe!r} for the model ({hint})"))


def _comparable(recipe: Recipe | None) -> Any:
    if recipe is None:
        return None
    description = recipe.to_json()
    fields = {name: value for name, value in description["fields"].items() if name not in _NOT_COMPARED}
    return {**description, "fields": fields}
