"""Reading the items of a step: everything is compared before it is read, and its checksums after."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from te_jax.checkpoint import document, recipes, trees
from te_jax.checkpoint.checksums import checksums
from te_jax.errors import check_value, message
from te_jax.recipe import DelayedScaling, Recipe

RESTORE = "checkpoint.restore"
_HINT = "for a model of another recipe than the checkpoint's: restore(..., recipe=<the model's>, migrate=True)"
_HINT_RUNS = f"{_HINT}; with migrate=True linears that the checkpoint has no FP8 state of get a new one, too"
_PARAMS = "te.checkpoint.restore_params(directory, variables['params'])"

logger = logging.getLogger("te_jax.checkpoint")


def plan_migration(
    wanted: dict[str, Any],
    described: Mapping[str, Any],
    stored: Recipe | None,
    model: Recipe | None,
    folder: epath.Path,
) -> None:
    """Makes of the FP8 state that the model wants what is to be read for `recipes.migrate_state`.

    Raises:
      ValueError: there is FP8 state that one of the recipes says nothing of, or none where there should be.
    """
    for recipe, items, where in ((stored, described["items"], str(folder)), (model, wanted, "the target")):
        ok = isinstance(recipe, DelayedScaling) or "fp8_state" not in items
        expected = f"none in {where} with recipe {recipe!r}"
        check_value(ok, RESTORE, "fp8_state", expected, "some, which can't be migrated")
    if isinstance(stored, DelayedScaling) and isinstance(model, DelayedScaling):
        if "fp8_state" in wanted:
            wanted["fp8_state"] = recipes.stored_like(wanted["fp8_state"], stored)
    elif isinstance(model, DelayedScaling):
        expected = f"the FP8 state of the model, whose recipe is {model!r}"
        check_value("fp8_state" in wanted, RESTORE, "variables", expected, "none")
        del wanted["fp8_state"]  # created, not read


def check_items(wanted: Mapping[str, Any], described: Mapping[str, Any], folder: epath.Path, dropped: bool) -> None:
    """Raises a ValueError unless what is wanted is stored, and all of the variables that are stored are wanted.

    Args:
      dropped: FP8 state may be left where it is: a migration drops it.
    """
    items = described["items"]
    for name in ("collections", "fp8_state"):  # part of variables: neither may be missing on either side
        present, asked = name in items, name in wanted
        expected, got = (f"{'some' if has else 'none'} in" for has in (present, asked))
        ok = present == asked or (dropped and name == "fp8_state" and not asked)
        hint = "" if name != "fp8_state" else f" ({_hint_at_state(present, described)})"
        check_value(ok, RESTORE, name, f"{expected} {folder}", f"{got} the target{hint}")
    for name in wanted:
        got = f"no such item in {folder}, which has {items}"
        check_value(name in items, RESTORE, name, "a stored item", got)


def _hint_at_state(stored: bool, described: Mapping[str, Any]) -> str:
    """What to do about FP8 state that is only stored, or only wanted."""
    if stored:
        return f"{_HINT}; for parameters alone: {_PARAMS}"
    if described["recipe"] is None:
        return _HINT
    return f"its parameters alone were saved: {_PARAMS} reads them, and the model's init makes new FP8 state"


def read(
    folder: epath.Path, described: Mapping[str, Any], wanted: Mapping[str, Any], op: str = RESTORE
) -> dict[str, Any]:
    """The items that are wanted, onto the shapes, dtypes and shardings that they have there.

    Raises:
      ValueError: names, shapes or dtypes differ, or an item can't be read or is not what was saved.
    """
    for name, tree in wanted.items():
        trees.check_matches(op, name, metadata(folder, name, op), tree, _HINT_RUNS if name == "fp8_state" else "")
    # Orbax warns of items without a handler.
    handlers: dict[str, Any] = {document.DOCUMENT: ocp.JsonCheckpointHandler()}
    handlers |= {name: ocp.StandardCheckpointHandler() for name in wanted}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as reader:
        try:
            loaded = _restore(reader, folder, wanted)
        except Exception as error:  # whatever orbax or tensorstore raises of a damaged file, often without its name
            bad = [name for name, tree in wanted.items() if _fails(reader, folder, name, tree)] or list(wanted)
            raise _damaged(op, folder, " and ".join(bad), error) from error
    for name, tree in loaded.items():
        trees.check_concrete(op, name, tree)
        _check_sums(op, name, described["checksums"].get(name), tree, folder)
    return loaded


def _restore(reader: ocp.Checkpointer, folder: epath.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    args = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
    loaded = reader.restore(folder, args=ocp.args.Composite(**args))
    return {name: loaded[name] for name in wanted}


def _fails(reader: ocp.Checkpointer, folder: epath.Path, name: str, tree: Any) -> bool:
    """Whether this item can't be read. Not asked of several processes, of which only some may have come here."""
    if jax.process_count() > 1:
        return False
    try:
        _restore(reader, folder, {name: tree})
    except Exception:
        return True
    return False


def metadata(folder: epath.Path, name: str, op: str = RESTORE) -> Any:
    """The names, shapes and dtypes of an item."""
    try:
        return ocp.StandardCheckpointHandler().metadata(folder / name).tree
    except Exception as error:
        raise _damaged(op, folder, name, error) from error


def _damaged(op: str, folder: epath.Path, names: str, error: Exception) -> ValueError:
    first = str(error).partition("\n")[0][:200]
    return ValueError(message(op, names, f"what was saved in {folder}", f"{type(error).__name__}: {first}"))


def _check_sums(op: str, item: str, stored: Mapping[str, str] | None, tree: Any, folder: epath.Path) -> None:
    """Raises a ValueError that names the leaves whose bits are not those that were saved."""
    if stored is None:  # written by format version 1
        logger.info("te_jax.checkpoint: %s/%s has no checksums to compare", folder, item)
        return
    found = checksums(tree)
    wrong = [
        message(op, f"{item}/{name}", f"checksum {stored.get(name)} (saved in {folder})", f"{found[name]}: damaged")
        for name in sorted(found)
        if found[name] != stored.get(name)
    ]
    trees.check_none(wrong)
