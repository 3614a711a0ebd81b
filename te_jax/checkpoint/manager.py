"""Saving and restoring training state with orbax."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from te_jax.checkpoint import document, reading, recipes, runs, trees
from te_jax.errors import check_collections, check_type, check_value, message, warn
from te_jax.primitives import gemm_algorithms
from te_jax.quant import state
from te_jax.recipe import DelayedScaling, Recipe


class Restored(NamedTuple):
    """A restored checkpoint.

    Attributes:
      step: its step.
      variables: the variable collections, FP8 state included.
      opt_state, extras: as asked for, None if not asked for.
    """

    step: int
    variables: dict[str, Any]
    opt_state: Any
    extras: Any


class Manager:
    """Checkpoints of one training run, one folder a step.

    A save is atomic: it is written beside and renamed once complete, so an interrupted one leaves the last good step.
    Step folders that are not complete are ignored when reading, and moved to `<step>.incomplete` when writing.

    One manager writes to a directory at a time. In a run of several processes each makes one, for a directory that all
    of them see, and each calls `save`, `restore` and `close`, in the same order.

    Args:
      directory: folder of the run; made if needed.
      recipe: the model's recipe, None without quantization. Stored, and compared on restore.
      max_to_keep: the newest steps to keep, beside one that is being written; None keeps all.
      async_save: return from `save` once the arrays are copied, and write in the background. They may be donated then.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        recipe: Recipe | None,
        max_to_keep: int | None = 3,
        async_save: bool = False,
    ):
        ok = max_to_keep is None or max_to_keep >= 1
        check_value(ok, "checkpoint.Manager", "max_to_keep", "None or an int >= 1", max_to_keep)
        ok = recipe is None or isinstance(recipe, Recipe)
        check_type(ok, "checkpoint.Manager", "recipe", "None or a recipe object", repr(recipe))
        self._directory = _path(directory)
        self._recipe = recipe
        self._max_to_keep = max_to_keep
        # What an earlier process left half written is of no use, and no other process writes here.
        self._options = ocp.CheckpointManagerOptions(
            create=True, enable_async_checkpointing=async_save, cleanup_tmp_directories=True
        )
        self._manager: ocp.CheckpointManager | None = None

    def save(self, step: int, variables: Mapping[str, Any], *, opt_state: Any = None, extras: Any = None) -> None:
        """Saves a step.

        Args:
          step: >= 0, not saved yet.
          variables: variable collections as Flax has them, {"params": ..., "_overwrite_with_gradient": ..., ...}. A
            collection ``fp8_kernels`` (``te.quantize_kernels``) is left out: it is stale after the step.
          opt_state: the optimizer's state.
          extras: a tree of arrays and numbers, such as the data position and random keys.

        Raises:
          ValueError: the step is already saved, the FP8 state is not that of the recipe, an array is empty, or a name
            contains ".", which orbax would confuse.
          TypeError: a leaf is neither an array that orbax can store nor a number.
        """
        op = "checkpoint.save"
        check_collections(op, "variables", variables)
        step = _checked_step(op, step)
        check_value("params" in variables, op, "variables", "a 'params' collection", sorted(variables))
        recipes.check_state(op, state.split(variables)[1], self._recipe)
        self.wait()  # an earlier save: so that all processes see the same steps
        check_value(step not in self.all_steps(), op, "step", "a step that is not saved yet", step)
        items = {name: trees.storable(op, name, tree) for name, tree in _items(variables, opt_state, extras).items()}
        args: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        args[document.DOCUMENT] = ocp.args.JsonSave(document.make(self._recipe, items))
        saved = self._writer().save(step, args=ocp.args.Composite(**args), force=True)
        if not saved:
            raise RuntimeError(message(op, "step", f"step {step} to be saved", "refused by orbax"))
        if not self._options.enable_async_checkpointing:
            self._delete_old_steps()

    def restore(
        self,
        variables: Mapping[str, Any],
        *,
        opt_state: Any = None,
        extras: Any = None,
        step: int | None = None,
        migrate: bool = False,
    ) -> Restored:
        """Restores a step onto the shapes, dtypes and shardings of the given trees.

        Args:
          variables, opt_state, extras: arrays, or `jax.ShapeDtypeStruct` with shardings (`jax.eval_shape` of what
            makes them); what to restore. Variables are restored whole, but for ``fp8_kernels``, which is not stored.
            opt_state and extras may be left out, with a ``UserWarning`` if they are stored.
          step: the latest if None.
          migrate: go on with another recipe than the checkpoint's: FP8 state is created, dropped, or brought to another
            length of history as `migrate_state` says, with a ``UserWarning`` that names both recipes. Or with other
            linears: FP8 state of the same linears in the same order is kept, other is new or dropped, with a warning.

        Raises:
          FileNotFoundError: there is no complete checkpoint.
          ValueError: recipe, names, shapes or dtypes differ, or what is stored is damaged. Nothing is cast or filled
            in.
        """
        self.wait()
        step = self._step(step)
        folder = self._directory / str(step)
        described = document.read(folder)
        stored = document.recipe_of(described)
        changed = not recipes.same(stored, self._recipe)
        if not migrate:
            recipes.check_same(stored, self._recipe, folder)

        wanted = {name: trees.abstract(tree) for name, tree in _items(variables, opt_state, extras).items()}
        for name, tree in (("opt_state", opt_state), ("extras", extras)):
            if tree is not None and name in described["items"]:
                wanted[name] = trees.abstract(tree)  # even without leaves: what is stored must match it
        state_like = wanted.get("fp8_state", {})
        if changed:
            reading.plan_migration(wanted, described, stored, self._recipe, folder)
        dropped = changed and not isinstance(self._recipe, DelayedScaling)
        reading.check_items(wanted, described, folder, dropped)
        matched = None
        if "fp8_state" in wanted:
            kept = reading.metadata(folder, "fp8_state")
            matched = runs.match(kept, wanted["fp8_state"], described, folder, partial=migrate)
            wanted["fp8_state"] = matched.to_read
        loaded = reading.read(folder, described, wanted)
        if matched is not None:
            loaded["fp8_state"] = matched.rebuild(loaded["fp8_state"])
            for text in matched.texts:
                warn(text)
        if changed:
            old = loaded.get("fp8_state", {})
            loaded["fp8_state"] = recipes.migrate_state(old, stored, self._recipe, state_like)
            warn(recipes.announcement(stored, self._recipe, folder))

        algorithms = described["gemm_algorithms"]
        if algorithms.get("devices"):  # so that a run on CUDA goes on with the same algorithms
            gemm_algorithms.load_table(algorithms)
        document.note_determinism(described, folder)
        targets = _items(variables, opt_state, extras)
        out = {name: trees.restored(loaded[name], tree) for name, tree in targets.items() if name in loaded}
        rest = {"params": out.get("params", variables["params"]), **out.get("collections", {})}
        restored = state.merge(rest, out.get("fp8_state", {}))
        for name in [name for name, tree in (("opt_state", opt_state), ("extras", extras)) if tree is None]:
            if name in described["items"]:
                expected = f"a target for what {folder} stores ({name}=...)"
                got = f"None: {name} is not restored"
                warn(message("checkpoint.restore", name, expected, got))
        return Restored(step, restored, out.get("opt_state", opt_state), out.get("extras", extras))

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """The document of a step (the latest if None), as JSON: recipe, determinism, what wrote it, ..."""
        return document.read(self._directory / str(self._step(step)), "checkpoint.describe")

    def latest_step(self) -> int | None:
        """The newest complete step, None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Complete steps, ascending."""
        return document.steps(self._directory)

    def wait(self) -> None:
        """Waits for a save in the background; raises what it raised."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._delete_old_steps()

    def close(self) -> None:
        """Waits, and releases orbax's threads."""
        if self._manager is not None:
            self.wait()
            self._manager.close()
            self._manager = None

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, step: int | None) -> int:
        if step is not None:
            return _checked_step("checkpoint.restore", step)
        latest = self.latest_step()
        if latest is None:
            got = f"none in {self._directory}"
            raise FileNotFoundError(message("checkpoint.restore", "directory", "a complete step", got))
        return latest

    def _writer(self) -> ocp.CheckpointManager:
        """Orbax's manager, made at the first save: it takes every folder named by a number for a good step."""
        if self._manager is None:
            if jax.process_index() == 0:
                self._set_aside_incomplete()
            ocp.multihost.sync_global_processes("te_jax.checkpoint: incomplete steps are set aside")
            self._manager = ocp.CheckpointManager(self._directory, options=self._options)
        return self._manager

    def _set_aside_incomplete(self) -> None:
        if not self._directory.exists():
            return
        good = set(self.all_steps())
        for folder in list(self._directory.iterdir()):
            if folder.is_dir() and folder.name.isdecimal() and int(folder.name) not in good:
                if document.is_half_deleted(folder):
                    document.delete(folder)
                    continue
                if not document.has_files(folder):  # the very end of a deletion
                    folder.rmtree()
                    continue
                aside = self._directory / f"{folder.name}.incomplete"
                if aside.exists():
                    aside.rmtree()
                folder.rename(aside)

    def _delete_old_steps(self) -> None:
        """All but the newest steps, by one process. Not left to orbax: a process that is killed while orbax deletes
        leaves a step that looks complete."""
        if self._max_to_keep is not None and jax.process_index() == 0:
            for step in self.all_steps()[: -self._max_to_keep]:
                document.delete(self._directory / str(step))


def save(
    directory: str | os.PathLike[str],
    step: int,
    variables: Mapping[str, Any],
    *,
    recipe: Recipe | None,
    opt_state: Any = None,
    extras: Any = None,
) -> None:
    """Saves one step and waits for it. Keeps all steps; `Manager` says what the arguments are."""
    with Manager(directory, recipe=recipe, max_to_keep=None) as manager:
        manager.save(step, variables, opt_state=opt_state, extras=extras)


def restore(
    directory: str | os.PathLike[str],
    variables: Mapping[str, Any],
    *,
    recipe: Recipe | None,
    opt_state: Any = None,
    extras: Any = None,
    step: int | None = None,
    migrate: bool = False,
) -> Restored:
    """Restores one step, the latest if not said; `Manager.restore` says what the arguments are."""
    with Manager(directory, recipe=recipe) as manager:
        return manager.restore(variables, opt_state=opt_state, extras=extras, step=step, migrate=migrate)


def describe(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """The document of a step (the latest if None): recipe, items, checksums, settings of determinism, what wrote it."""
    with Manager(directory, recipe=None) as manager:
        return manager.describe(step)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest step with a complete checkpoint, None if there is none."""
    return max(document.steps(_path(directory)), default=None)


def _checked_step(op: str, step: Any) -> int:
    """As an int: orbax would name a folder "True" or "-1", which no restore would find."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    check_value(number >= 0, op, "step", "an int >= 0", repr(step))
    return number


def _path(directory: str | os.PathLike[str]) -> epath.Path:
    """Absolute, as orbax wants it; URLs (gs://, s3://) as they are."""
    path = os.fspath(directory)
    return epath.Path(path if "://" in path else os.path.abspath(path))


def _items(variables: Mapping[str, Any], opt_state: Any, extras: Any) -> dict[str, Any]:
    rest, fp8 = state.split(variables)
    others = {name: collection for name, collection in rest.items() if name != "params"}
    candidates = {
        "params": rest.get("params"),
        "collections": others,
        "fp8_state": fp8,
        "opt_state": opt_state,
        "extras": extras,
    }
    # An item without leaves (no FP8 state, an optimizer without state) is not stored.
    return {name: tree for name, tree in candidates.items() if jax.tree.leaves(tree)}
