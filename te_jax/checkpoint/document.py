"""The JSON beside the arrays of a checkpoint: format version, recipe, checksums, GEMM algorithms, what wrote it.

A step folder is a plain orbax composite checkpoint, named by the bare step number:

  <directory>/<step>/params        the params collection
                     collections   other variable collections (batch statistics, ...), if any
                     fp8_state     the FP8 state collection, if any
                     opt_state     the optimizer's state, if given
                     extras        what the user adds (data position, random keys, ...), if given
                     te_jax        this document, as JSON (te_jax/checkpoint/versions.py says what it had when)

Arrays can be read with orbax alone. A step without its document is not a checkpoint of te_jax: it is ignored.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from te_jax.checkpoint import versions
from te_jax.checkpoint.checksums import checksums
from te_jax.checkpoint.runs import BY_NAME
from te_jax.checkpoint.versions import FORMAT_VERSION
from te_jax.errors import check_value
from te_jax.primitives import gemm_algorithms
from te_jax.recipe import Recipe, recipe_from_json

DOCUMENT = "te_jax"
_DELETED = "deleted"  # what the document of a step is called while the step is being deleted

logger = logging.getLogger("te_jax.checkpoint")


def make(recipe: Recipe | None, items: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a checkpoint of these trees."""
    document = {
        "format_version": FORMAT_VERSION,
        "recipe": None if recipe is None else recipe.to_json(),
        "items": sorted(items),
        "fp8_state_names": BY_NAME,
        "checksums": {name: checksums(tree) for name, tree in items.items()},
        "gemm_algorithms": gemm_algorithms.table(),
        "determinism": gemm_algorithms.determinism(),
        "written_by": {
            "jax": jax.__version__,
            "orbax": ocp.__version__,
            "platform": jax.default_backend(),
            "devices": jax.device_count(),
            "processes": jax.process_count(),
        },
    }
    return {**document, "crc32": _crc32(document)}


def read(folder: epath.Path, op: str = "checkpoint.restore") -> dict[str, Any]:
    """The document of a complete step folder, in the present format version.

    Raises:
      ValueError: there is no such folder, it is not complete, it is damaged, or a newer version of te_jax wrote it.
    """
    why = why_incomplete(folder)
    check_value(why is None, op, "step", f"a complete checkpoint at {folder}", why)
    path = folder / DOCUMENT / "metadata"
    document = json.loads(path.read_text())
    present = versions.upgrade(document, folder, op)
    if document["format_version"] >= 2:
        crc32 = _crc32({name: value for name, value in document.items() if name != "crc32"})
        got = f"{document.get('crc32')} in it: it is damaged"
        check_value(document.get("crc32") == crc32, op, str(path), f"its CRC-32 {crc32}", got)
    return present


def why_incomplete(folder: epath.Path) -> str | None:
    """Why a step folder can't be restored, or None if it can. Looks at the presence of files, not at the arrays."""
    if not folder.exists():
        return "no such folder"
    if is_half_deleted(folder):
        return "it was being deleted"
    if not (folder / "_CHECKPOINT_METADATA").exists():
        return "no _CHECKPOINT_METADATA: it was not written to its end"
    try:
        document = json.loads((folder / DOCUMENT / "metadata").read_text())
        if versions.is_newer(document):
            return None  # not ours to judge, nor to go past to an older step: reading it says what it is
        items = list(document["items"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no readable {DOCUMENT}/metadata ({type(error).__name__})"
    missing = [item for item in items if not (folder / item / "_METADATA").exists()]
    return f"items without metadata: {missing}" if missing else None


def delete(folder: epath.Path) -> None:
    """Deletes a step.

    Its document goes first, so that half of a step is never taken for one. What was the document is the last file to
    go: it says that the rest may go too.
    """
    document = folder / DOCUMENT / "metadata"
    if document.exists():
        document.rename(folder / DOCUMENT / _DELETED)
    others = [child for child in folder.iterdir() if child.name != DOCUMENT]
    others += [child for child in (folder / DOCUMENT).iterdir() if child.name != _DELETED]
    for child in others:
        child.rmtree() if child.is_dir() else child.unlink()
    folder.rmtree()


def is_half_deleted(folder: epath.Path) -> bool:
    """Whether `delete` was interrupted here."""
    return (folder / DOCUMENT / _DELETED).exists()


def has_files(folder: epath.Path) -> bool:
    """Whether there is a file in a folder or in those below it."""
    return any(has_files(child) if child.is_dir() else True for child in folder.iterdir())


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


def _crc32(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def note_determinism(document: Mapping[str, Any], folder: epath.Path) -> None:
    """Logs, on a GPU, that this process has other settings of determinism than the one that saved."""
    then, now = document["determinism"], gemm_algorithms.determinism()
    if then is not None and then != now and jax.default_backend() == "gpu":
        text = "te_jax.checkpoint: %s was saved with %s, this process has %s: its results may differ in their last bits"
        logger.warning(text, folder, then, now)


def recipe_of(document: Mapping[str, Any]) -> Recipe | None:
    """The recipe in a document."""
    return None if document["recipe"] is None else recipe_from_json(document["recipe"])
