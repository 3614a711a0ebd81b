"""The runs of FP8 state that a checkpoint has and those that a model wants: matched by the names of their ops.

The state of a run is stacked over its quantizers. Its name says which ops they are where parameters have the names of
ops (te_jax/chain/parts.py), so state of one name is state of the same ops in the same order, and is taken whole.
Checkpoints of format versions 1 and 2 have the state of such chains without the names of ops: it is taken if there is
one in the same place, and the order, which nothing can compare then, is said aloud.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.checkpoint import trees
from te_jax.quant.state_trees import is_run

Path = tuple[str, ...]
BY_NAME, BY_PLACE = "by name", "by place"
"""How the FP8 state of chains of named ops is stored."""

_GROUPED = "_grouped"
_SAYS = "te_jax.checkpoint.restore: fp8_state"


class Match(NamedTuple):
    """How stored runs become those of the model.

    Attributes:
      wanted: the model's state, abstract.
      sources: wanted run -> stored run, for those that are stored.
      to_read: what to ask of storage.
      texts: what is to be said aloud.
    """

    wanted: Any
    sources: Mapping[Path, Path]
    to_read: dict[str, Any]
    texts: tuple[str, ...]

    def rebuild(self, read: Mapping[str, Any]) -> Any:
        """The model's state of what was read; runs that were not stored are new."""
        found, (new, structure) = _flat(read), _flatten(self.wanted)
        runs = [found[self.sources[path]] if path in self.sources else created(run) for path, run in new]
        return structure.unflatten(runs)


def match(stored: Any, wanted: Any, described: Mapping[str, Any], folder: Any, *, partial: bool) -> Match:
    """Matches the runs of an item's metadata with those of the model.

    Args:
      stored: the metadata of the checkpoint's FP8 state.
      wanted: the model's, abstract.
      described: the checkpoint's document.
      folder: for messages.
      partial: runs that the checkpoint doesn't have are new, and those that the model doesn't have are dropped.
        Otherwise they are asked for, so that they are found missing when names are compared.
    """
    have, want = _flat(stored), _flat(wanted)
    sources = {path: path for path in want if path in have}
    texts = []
    if described["fp8_state_names"] == BY_PLACE:
        for path in want.keys() - sources.keys():
            old = _by_place(path, have.keys() - set(sources.values()))
            if old is not None:
                sources[path] = old
                what = f"{folder} is of an older format, which has this as {'/'.join(old)}, without the names of ops"
                texts.append(f"{_SAYS}/{'/'.join(path)}: {what}: taken for these ops in this order")
    asked = {sources.get(path, path): run for path, run in want.items() if path in sources or not partial}
    if partial:
        new = sorted("/".join(path) for path in want.keys() - sources.keys())
        left = {path: run for path, run in have.items() if path not in sources.values()}
        asked |= {path: jax.tree.map(_anywhere, run) for path, run in left.items()}
        if new or left:
            gone = sorted("/".join(path) for path in left)
            created_now = f"{new} of the model is not in {folder}: created without history"
            dropped = f"{gone} of {folder} is not in the model: dropped"
            texts.append(f"{_SAYS}: {'; '.join([created_now] * bool(new) + [dropped] * bool(gone))}")
    return Match(wanted, sources, _nested(asked), tuple(texts))


def created(like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a run of quantizers that have seen nothing: all zero, see state.init."""
    return {
        name: np.zeros(leaf.shape, leaf.dtype)
        if isinstance(leaf, np.ndarray)
        else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in like.items()
    }


def _by_place(path: Path, stored: Iterable[Path]) -> Path | None:
    """The run that was stored by place for ``fp8_<place>_<names of ops>``; the longest place, as of lists in lists."""
    parent, name = path[:-1], path[-1]
    ending = _GROUPED if name.endswith(_GROUPED) else ""
    places = [
        old[-1]
        for old in stored
        if old[:-1] == parent
        and re.fullmatch(rf"fp8_\d+(_\d+)*{ending}", old[-1])
        and name.startswith(old[-1].removesuffix(ending) + "_")
    ]
    return (*parent, max(places, key=len)) if places else None


def _flatten(tree: Any) -> tuple[list[tuple[Path, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_run)
    return [(tuple(trees.keys(path)), run) for path, run in leaves], structure


def _flat(tree: Any) -> dict[Path, Any]:
    return dict(_flatten(tree)[0])


def _nested(runs: Mapping[Path, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, run in runs.items():
        node = out
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = run
    return out


def _anywhere(leaf: Any) -> Any:
    """A stored leaf that is read to be dropped."""
    return trees.abstract(jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype))
