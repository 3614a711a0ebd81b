"""A checkpoint of one recipe, a model of another: which differences count, and what becomes of the FP8 state.

Parameters and the optimizer's state know nothing of recipes. The FP8 state does, and only delayed scaling has some:

  checkpoint             model                  FP8 state
  delayed                delayed                its amax history is brought to the model's length, see `migrate_state`
  delayed                none, current, block   dropped
  none, current, block   delayed                created without history
  none, current, block   none, current, block   there is none

None of it happens unasked, and all of it is said in a warning that names both recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.checkpoint.runs import created
from te_jax.errors import check_type, check_value, message
from te_jax.quant import state
from te_jax.quant.state_trees import is_run
from te_jax.recipe import DelayedScaling, Recipe

# None changes a shape, or a number of a quantizer with history: a checkpoint may be restored onto another mesh, with
# another strictness or with another way to start.
_NOT_COMPARED = ("amax_axes", "strict", "initial_scale")
# What a scale was derived with, beside amax.
_OF_SCALES = ("x_format", "kernel_format", "dy_format", "margin")
_OP = "checkpoint.migrate_state"


def same(stored: Recipe | None, model: Recipe | None) -> bool:
    """Whether a model may take a checkpoint as it is."""
    return _comparable(stored) == _comparable(model)


def conversion(stored: Recipe | None, model: Recipe | None) -> str:
    """What `migrate_state` does between two recipes, in words."""
    if not isinstance(model, DelayedScaling):
        return "FP8 state is dropped" if isinstance(stored, DelayedScaling) else "there is no FP8 state to convert"
    if not isinstance(stored, DelayedScaling):
        return "FP8 state is created without history: a quantizer takes the amax of the first tensor that it sees"
    before, after = stored.amax_history_len, model.amax_history_len
    if after > before:
        return f"the amax history is lengthened from {before} to {after}: later steps fill the rest"
    if after < before:
        how = "its maximum kept" if _keeps_maximum(model) else "the newest kept"
        return f"the amax history is shortened from {before} to {after}, {how}"
    return "the amax history is kept, and scales are derived anew from it"


def check_same(stored: Recipe | None, model: Recipe | None, where: Any) -> None:
    """Raises a ValueError that names both recipes, and the call that migrates, unless they are the same."""
    if same(stored, model):
        return
    expected = f"{stored!r}, which {where} was trained with"
    hint = f"restore(..., migrate=True) goes on with the model's recipe: {conversion(stored, model)}"
    raise ValueError(message("checkpoint.restore", "recipe", expected, f"{model!r} for the model ({hint})"))


def check_state(op: str, fp8: Mapping[str, Any], recipe: Recipe | None) -> None:
    """Raises a ValueError that names both unless the state is one of that recipe: what is saved has to restore."""
    runs = jax.tree_util.tree_leaves_with_path(fp8, is_leaf=is_run)
    if not isinstance(recipe, DelayedScaling):
        got = "FP8 state, which a model of another recipe has made"
        check_value(
            not runs, op, "recipe", "the recipe of the variables, DelayedScaling(...)", f"{recipe!r} with {got}"
        )
        return
    got = "none (parameters alone are saved with recipe=None)"
    check_value(bool(runs), op, "variables", f"the FP8 state of {recipe!r}", got)
    lengths = {}
    for path, run in runs:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        check_value(is_run(run), op, name, f"leaves {sorted(state.LEAVES)}", type(run).__name__)
        lengths.setdefault(run["amax_history"].shape[-1], name)
    found = " or ".join(f"{length} (as {name} has)" for length, name in lengths.items())
    expected = f"the recipe of the variables, with amax_history_len {found}"
    check_value(recipe.amax_history_len in lengths, op, "recipe", expected, repr(recipe))


def announcement(stored: Recipe | None, model: Recipe | None, where: Any) -> str:
    """What a restore that migrated says."""
    pair = f"{where} was trained with {stored!r}, the model has {model!r}"
    return f"te_jax.checkpoint.restore: recipe: {pair}: {conversion(stored, model)}"


def stored_like(like: Mapping[str, Any], stored: DelayedScaling) -> Any:
    """The FP8 state to read from a checkpoint of `stored`, for a model whose state is `like`: of other lengths."""

    def convert(path: Any, leaf: Any) -> Any:
        if path[-1] != jax.tree_util.DictKey("amax_history"):
            return leaf
        shape = (*leaf.shape[:-1], stored.amax_history_len)
        if isinstance(leaf, np.ndarray):
            return np.zeros(shape, leaf.dtype)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=_of_rows(leaf.sharding, leaf.ndim))

    return jax.tree_util.tree_map_with_path(convert, like)


def migrate_state(
    fp8: Mapping[str, Any], stored: Recipe | None, model: Recipe | None, like: Mapping[str, Any]
) -> dict[str, Any]:
    """The FP8 state with which a model of recipe `model` goes on from a checkpoint of recipe `stored`.

    Between two delayed scalings the amax history, newest first, is lengthened with empty slots, or shortened to its
    newest entries, with the maximum of what is left out in the last slot. A history of one entry is that maximum, or,
    for ``amax_compute_algo="most_recent"``, the newest. So the next scale is the one that the longer history gives.
    A scale without history that other formats or another margin gave is forgotten.

    Args:
      fp8: the checkpoint's state, ``te.state.split(variables)[1]``; {} if it has none.
      stored, model: the two recipes.
      like: the model's state, arrays or `jax.ShapeDtypeStruct`: names, shapes, dtypes and shardings; {} if none.

    Returns:
      The state, of the structure of `like`.

    Raises:
      ValueError: a state is not what its recipe says, or the two differ in more than the length of the history.
    """
    for name, tree, recipe in (("fp8", fp8, stored), ("like", like, model)):
        check_type(isinstance(tree, Mapping), _OP, name, "a dict of FP8 state", type(tree).__name__)
        ok = isinstance(recipe, DelayedScaling) or not jax.tree.leaves(tree)
        check_value(ok, _OP, name, f"no FP8 state with {recipe!r}", f"state of {sorted(tree)}")
    if not isinstance(model, DelayedScaling):
        return {}
    old, new = _runs("fp8", fp8, stored), _runs("like", like, model)
    structure = jax.tree.structure(like, is_leaf=is_run)
    if not isinstance(stored, DelayedScaling):
        return jax.tree.unflatten(structure, [created(run) for run in new.values()])
    names = f"the quantizers of the checkpoint, {sorted(old)}"
    check_value(old.keys() == new.keys(), _OP, "like", names, f"those of the model, {sorted(new)}")
    reset = any(getattr(stored, field) != getattr(model, field) for field in _OF_SCALES)
    converted = []
    for path, leaves in old.items():  # in the order of `new`: both are flattened with sorted keys
        for name, leaf in leaves.items():
            cut = -1 if name == "amax_history" else None
            expected, got = (f"{x.dtype}{list(x.shape[:cut])}" for x in (leaf, new[path][name]))
            check_value(expected == got, _OP, f"{path}/{name}", f"{expected} (checkpoint)", f"{got} (model)")
        converted.append(_resized(leaves, new[path], model, reset))
    return jax.tree.unflatten(structure, converted)


def _resized(leaves: state.Leaves, like: Mapping[str, Any], model: DelayedScaling, reset: bool) -> dict[str, Any]:
    """The leaves of one run with the history of `model`, where those of `like` are."""
    shardings = tuple((name, getattr(leaf, "sharding", None)) for name, leaf in sorted(like.items()))
    out = _program(model, reset, shardings)(dict(leaves))
    return {name: np.asarray(out[name]) if isinstance(leaf, np.ndarray) else out[name] for name, leaf in like.items()}


@functools.lru_cache
def _program(model: DelayedScaling, reset: bool, shardings: tuple) -> Any:
    return jax.jit(functools.partial(_resize, model=model, reset=reset), out_shardings=dict(shardings))


def _resize(leaves: state.Leaves, *, model: DelayedScaling, reset: bool) -> dict[str, jax.Array]:
    history, scale, uses = (leaves[name] for name in ("amax_history", "scale", "uses"))
    length, missing = model.amax_history_len, model.amax_history_len - history.shape[-1]
    if missing >= 0:
        history = jnp.concatenate([history, jnp.zeros((*history.shape[:-1], missing), history.dtype)], -1)
    elif length > 1:
        # Slots after the first are one multiple of amax, whatever was done to the state: c k W, te_jax/quant/state.py.
        rest = history[..., length - 1 :]
        last = jnp.where(_multiple(uses) < 0, rest.min(-1), rest.max(-1))
        if model.amax_compute_algo == "most_recent" and length == 2:  # the newest, after a step without amax
            last = jnp.where(history[..., 0] == 0, history[..., 1], last)
        history = jnp.concatenate([history[..., : length - 1], last[..., None]], -1)
    elif _keeps_maximum(model):
        leaves = _of_one_entry(history, scale, uses)
        history, scale, uses = (leaves[name] for name in ("amax_history", "scale", "uses"))
    else:
        history = history[..., :1]
    if reset:
        scale = jnp.where((history != 0).any(-1), scale, 0)
    return {"amax_history": history, "scale": scale, "uses": uses}


def _of_one_entry(history: jax.Array, scale: jax.Array, uses: jax.Array) -> dict[str, jax.Array]:
    """Leaves with a history of one entry, the maximum, as one use writes them."""
    leaves = {"amax_history": history, "scale": scale, "uses": uses}
    view = state.read(leaves, jnp.float32(1), DelayedScaling(amax_history_len=history.shape[-1]))
    u = _multiple(uses)
    used = (u != 0) & jnp.isfinite(u)
    amax = view.history.max(-1)
    stepped_with = scale.astype(jnp.float32) / jnp.where(used, u, 1)
    written = state.write(view._replace(history=amax[..., None], parity=-view.parity), stepped_with, amax, leaves)
    # Where there was no use, or what is no state, nothing is made of it.
    kept = {**leaves, "amax_history": history[..., :1]}
    where = {"amax_history": used[..., None], "scale": used, "uses": used[..., None]}
    return {name: jnp.where(where[name], written[name], kept[name]) for name in kept}


def _multiple(uses: jax.Array) -> jax.Array:
    """f32[..., Q]: by what values are multiplied in the leaves, 0 if there was no use."""
    uses = uses.astype(jnp.float32)
    return uses[..., : state.RUNGS].sum(-1) + uses[..., state.NO_AMAX]


def _runs(argument: str, tree: Mapping[str, Any], recipe: Recipe | None) -> dict[str, Mapping[str, Any]]:
    """The runs of a state by path; raises unless they are those of the recipe."""
    found = {}
    for path, run in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_run):
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        check_value(is_run(run), _OP, f"{argument}/{name}", f"leaves {sorted(state.LEAVES)}", type(run).__name__)
        expected = None if recipe is None else getattr(recipe, "amax_history_len", None)
        got = run["amax_history"].shape[-1]
        check_value(got == expected, _OP, f"{argument}/{name}/amax_history", f"{expected} entries ({recipe!r})", got)
        found[name] = run
    return found


def _keeps_maximum(model: DelayedScaling) -> bool:
    """Whether a shortened history of the model holds the maximum of the longer one."""
    return model.amax_history_len > 1 or model.amax_compute_algo == "max"


def _of_rows(sharding: Any, ndim: int) -> Any:
    """The sharding, but for the last dimension, whose length may not be a multiple of the mesh's."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[: ndim - 1])
        return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def _comparable(recipe: Recipe | None) -> Any:
    if recipe is None:
        return None
    description = recipe.to_json()
    fields = {name: value for name, value in description["fields"].items() if name not in _NOT_COMPARED}
    return {**description, "fields": fields}
