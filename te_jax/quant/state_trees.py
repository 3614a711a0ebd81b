"""FP8 state of whole models: `split`, `merge`, `accumulate`, `apply`, `check`. Public as te_jax.state.

A tree of state holds runs, each a mapping of the three leaves of te_jax.quant.state_leaves. It may be a plain dict, a
FrozenDict or an `nnx.State` (with its Variables around each leaf or around a run's dict of leaves, or without them);
results have the type of the first tree. nnx is not imported for it: it takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from te_jax import compat, errors
from te_jax.quant.state_leaves import LEAVES, Decoded, Leaves, contradicts, decode, encode, follows

COLLECTION = "_overwrite_with_gradient"
"""The variable collection of FP8 state, which Flax's TrainState overwrites with its gradient."""

KERNELS = "fp8_kernels"
"""The variable collection of kernels that were quantized once for several calls (te_jax.quantize_kernels)."""

MAIN_GRAD = "main_grad"
"""The variable collection of buffers that weight gradients are accumulated in (te_jax.main_grad)."""


def is_run(x: Any) -> bool:
    """Whether x is the state of one run of ops: a mapping of its three leaves."""
    return isinstance(x, Mapping) and set(x) == LEAVES


# -------------------------------------------------------------------------------------------- state and the rest


def split(variables: Mapping[str, Any]) -> tuple[Any, Any]:
    """(everything else, FP8 state) of a model's variables, or of their gradient.

    The first part is what an optimizer, a clip or a gradient norm should see. Quantized kernels (collection
    ``fp8_kernels``) are in neither: they are stale once the parameters change. Nor are the buffers of main gradients
    (``main_grad``), which are no gradients of anything that an optimizer steps (``te.main_grad.merge`` makes them so).

    Args:
      variables: a dict (or FrozenDict) of variable collections; or an ``nnx.State``, whose runs of FP8 state are taken
        wherever they are.

    Returns:
      Two mappings of the type of ``variables``; the state is empty if there is none.

    Raises:
      TypeError: `variables` is no mapping.
    """
    errors.check_collections("state.split", "variables", variables)
    if _is_nnx_state(variables):
        return partition(variables)
    rest = {name: value for name, value in variables.items() if name not in (COLLECTION, KERNELS, MAIN_GRAD)}
    return rebuild(variables, rest), rebuild(variables, dict(variables.get(COLLECTION, {})))


def merge(rest: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """The inverse of `split`.

    Raises:
      TypeError: `rest` is no mapping.
      ValueError: `rest` has state of its own.
    """
    errors.check_collections("state.merge", "rest", rest)
    if _is_nnx_state(rest):
        return unite(rest, state)
    errors.check_value(COLLECTION not in rest, "state.merge", "rest", f"no {COLLECTION!r}", sorted(rest))
    return rebuild(rest, {**rest, COLLECTION: dict(state)} if state else dict(rest))


def partition(tree: Any) -> tuple[Any, Any]:
    """(the tree without its runs, its runs alone), wherever they are; mappings that are left empty disappear."""
    if not isinstance(tree, Mapping):
        return tree, {}
    rest, state = (rebuild(tree, _part(_mapping(tree), runs) or {}) for runs in (False, True))
    return rest, state


def unite(a: Any, b: Any) -> Any:
    """The inverse of `partition`: the mappings of both, as the type of `a`.

    Raises:
      ValueError: both have something in one place.
    """
    return rebuild(a, _unite((), _mapping(a), _mapping(b))) if b else a


def _part(node: Any, runs: bool) -> Any:
    if is_run(_value(node)):
        return node if runs else None
    if not isinstance(node, Mapping):
        return None if runs else node
    kept = {name: part for name, child in node.items() if (part := _part(child, runs)) is not None}
    return rebuild(node, kept) if kept or not (node or runs) else None


def _unite(path: tuple, a: Any, b: Any) -> Any:
    both = isinstance(a, Mapping) and isinstance(b, Mapping) and not is_run(a) and not is_run(b)
    name = "".join(f"[{key!r}]" for key in path) or "the trees"
    errors.check_value(both, "state.merge", name, "something in one of the two trees", "something in both")
    common = {key: _unite((*path, key), a[key], b[key]) for key in b if key in a}
    return rebuild(a, {**a, **b, **common})


def _is_nnx_state(x: Any) -> bool:
    return isinstance(x, Mapping) and hasattr(x, "raw_mapping")


def _mapping(x: Any) -> Any:
    """A State's nested dicts: it wraps them in States of their own on access, which are other pytrees."""
    return x.raw_mapping if _is_nnx_state(x) else x


def rebuild(like: Any, mapping: Mapping[str, Any]) -> Any:
    """The mapping as the type of `like`: a dict, a FrozenDict, an nnx.State."""
    return mapping if type(like) is dict else type(like)(mapping)


def _value(x: Any) -> Any:
    """What an nnx.Variable holds."""
    return x.get_value() if hasattr(x, "get_value") else x


# ------------------------------------------------------------------------------------------------- what is done to it


@compat.numpy_promotion()
def accumulate(a: Any, b: Any) -> Any:
    """Combines the state cotangents of two microbatches or uses of the same step: the exact maximum of their amax.

    Associative and commutative, bit for bit. A plain sum is read rightly too, but knows the maximum only to half an
    octave. Zeros count as unused, so they can start a loop. Cotangents of different steps (unequal parity) combine to
    bad state.
    """
    return _map_runs("state.accumulate", lambda name, *runs: _accumulate(*runs), a, b)


@compat.numpy_promotion()
def accumulate_stacked(stacked: Any) -> Any:
    """Combines the state cotangents of many microbatches, stacked along a first dimension; as `accumulate` does."""
    return _map_runs("state.accumulate_stacked", lambda name, run: _accumulate_stacked(run), stacked)


@compat.numpy_promotion()
def apply(old: Any, cotangent: Any) -> Any:
    """The next state: `cotangent` where a quantizer was used in the step, `old` where it wasn't.

    Overwriting `old` with `cotangent` does the same except for quantizers that were not used: these start anew.
    """
    return _map_runs("state.apply", lambda name, *runs: _apply(*runs), old, cotangent)


@compat.numpy_promotion()
def check(before: Any, after: Any, *, allow_unused: bool = False) -> None:
    """Raises unless every quantizer's state was updated once from `before` to `after`, linearly.

    Args:
      before, after: the state (as from `split`) before and after one training step; concrete arrays.
      allow_unused: quantizers may be unchanged, as long as some quantizer was updated.

    Raises:
      ValueError: state was stepped by something that is not linear (an optimizer), or was not updated: the loss was
        not differentiated with respect to the state, or the new state was not stored. Names the run of ops. A
        treatment of each leaf by itself is found by the history that is not the one before, from the second step on; of
        the signs of leaves nothing is left but an amax of 1, found where it is far off.
    """
    bad, stale, fresh = [], [], 0

    def visit(path: str, old: Leaves, new: Leaves) -> Leaves:
        nonlocal fresh
        traced = isinstance(new["uses"], jax.core.Tracer)
        errors.check_type(not traced, "state.check", path, "concrete arrays", "a tracer")
        d_old, d_new = decode(old), decode(new)
        changed = (d_old.parity != d_new.parity) | (d_old.used & ~d_new.used)
        fresh += int(changed.sum())
        broken = d_new.bad | contradicts(new) | changed & ~follows(old, new)
        if bool(broken.any()) or not bool(jnp.isfinite(new["uses"]).all()):
            bad.append(path)
        elif not bool(changed.all()):
            stale.append(path)
        return new

    _map_runs("state.check", visit, before, after)
    expected = "a state that was overwritten with its gradient (te.state.split keeps it from the optimizer)"
    got = "one that is not finite, of several steps, or that something not linear has stepped"
    errors.check_value(not bad, "state.check", ", ".join(bad), expected, got)
    got = "state that this step did not update: differentiate the loss with respect to it too, and store it"
    ok = not stale or (allow_unused and fresh > 0)
    errors.check_value(ok, "state.check", ", ".join(stale), "a parity that flipped", got)


def _accumulate(a: Leaves, b: Leaves) -> dict[str, jax.Array]:
    stacked = {name: jnp.stack([x[name].astype(jnp.float32) for x in (a, b)]) for name in a}
    return _combine(stacked, unused=a)


def _accumulate_stacked(leaves: Leaves) -> dict[str, jax.Array]:
    return _combine(leaves, unused={name: jnp.zeros_like(leaf[0]) for name, leaf in leaves.items()})


def _combine(stacked: Leaves, unused: Leaves) -> dict[str, jax.Array]:
    """Combines uses that are stacked along a first dimension; ``unused`` gives dtypes, and the rows without a use."""
    d: Decoded = decode(stacked)
    used = d.used.any(0)
    first = jnp.argmax(d.used, 0)[None]  # all uses of a step agree on older history and parity

    def pick(x: jax.Array) -> jax.Array:
        index = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        return jnp.take_along_axis(x, index, 0)[0]

    parity = pick(d.parity)
    parity = jnp.where((d.used & (d.parity != parity)).any(0), 0.0, parity)
    # They agree on the scale too, except where each took the amax of its own tensor: then that of the largest amax.
    scale = jnp.where(d.scale > 0, d.scale, jnp.inf).min(0)
    scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
    combined = encode(d.newest.max(0), pick(d.older), scale, parity, d.has_amax.any(0))
    return _select(used, {name: combined[name].astype(unused[name].dtype) for name in combined}, unused)


def _apply(old: Leaves, cotangent: Leaves) -> dict[str, jax.Array]:
    return _select(decode(cotangent).used, {name: cotangent[name].astype(old[name].dtype) for name in old}, old)


def _select(condition: jax.Array, a: Leaves, b: Leaves) -> dict[str, jax.Array]:
    return {
        name: jnp.where(condition.reshape(condition.shape + (1,) * (a[name].ndim - condition.ndim)), a[name], b[name])
        for name in b
    }


def _map_runs(op: str, function: Callable[..., Leaves], *trees: Any) -> Any:
    """Maps ``function(path, *leaves of a run in each tree)`` over trees of one structure."""

    def visit(path: tuple, *runs: Any) -> Any:
        name = jax.tree_util.keystr(path) or "the state"
        for run in runs:
            got = sorted(run) if isinstance(run, Mapping) else type(run).__name__
            errors.check_type(is_run(run), op, name, f"leaves {sorted(LEAVES)}", got)
        # dicts, FrozenDicts and nnx.State sort their names, and a Variable around an array is a node around a leaf
        names, structure = sorted(LEAVES), jax.tree.structure(runs[0])
        arrays = [jax.tree.leaves(run) for run in runs]
        ok = all(len(leaves) == len(names) for leaves in arrays)
        errors.check_type(ok, op, name, f"one array for each of {names}", [len(leaves) for leaves in arrays])
        out = function(name, *(dict(zip(names, leaves, strict=True)) for leaves in arrays))
        return structure.unflatten([out[leaf] for leaf in names])

    return jax.tree_util.tree_map_with_path(visit, *trees, is_leaf=is_run)
