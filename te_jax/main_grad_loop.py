"""The loop of ``te.accumulate_gradients(main_grad=True)``.

A first trace, of which only the program is looked at, gives every kernel a buffer to try. A kernel has a main gradient
if that buffer came back used, once, no branch leaves it out, and its own gradient is the same value: it is what the
linear was given, and nothing else was made of it. If it is that value alone, it is not even asked for. So gradients are
right whatever else the loss does with a kernel: what isn't known to be accumulated in a buffer is an ordinary gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import Array

from te_jax import compat, main_grad, programs
from te_jax.errors import message, warn
from te_jax.ops.main_grad import MainGrad, Mode, finding_without
from te_jax.quant import state as fp8_state
from te_jax.quant.state import COLLECTION

Path = tuple[str, ...]


def wide(param: Any) -> Any:
    """The dtype in which gradients of a parameter are summed."""
    return jnp.promote_types(param.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Which leaves of the variables have a buffer, and what is differentiated beside the buffers.

    Attributes:
      structure: of the variables.
      paths: leaf -> the place of its buffer in the collection ``main_grad``.
      fixed: the leaves of them that are not differentiated: their gradients are in the buffers and nowhere else.
    """

    structure: Any
    paths: Mapping[int, Path]
    fixed: frozenset[int]

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(those that are differentiated, those that are not)."""
        parts: tuple[list[Any], list[Any]] = ([], [])
        for i, leaf in enumerate(leaves):
            parts[i in self.fixed].append(leaf)
        return parts

    def join(self, moving: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        given = iter(moving), iter(fixed)
        return [next(given[i in self.fixed]) for i in range(self.structure.num_leaves)]

    def collection(self, buffers: Sequence[Array], mode: Mode) -> dict[str, Any]:
        nodes = [MainGrad(buffer, mode) for buffer in buffers]
        return traverse_util.unflatten_dict(dict(zip(self.paths.values(), nodes, strict=True)))

    def buffers_of(self, collection: Any) -> list[Array]:
        flat = _nodes(collection)
        return [flat[path].buffer for path in self.paths.values()]

    def gradients(self, loss_fn: Callable, mode: Mode, again: set[Path] | None = None) -> Callable:
        """(moving leaves, buffers, fixed leaves, microbatch) -> (loss, gradients of moving leaves, next buffers).

        ``again`` is given the places of buffers that were used more than once.
        """

        def loss_of(moving: Any, collection: Any, fixed: Any, microbatch: Any) -> Array:
            variables = self.structure.unflatten(self.join(moving, fixed))
            loss = loss_fn({**variables, main_grad.COLLECTION: collection}, microbatch)
            if again is not None:
                again.update(path for path, node in _nodes(collection).items() if node.used_again())
            return loss

        def gradients(moving: Any, buffers: Any, fixed: Any, microbatch: Any) -> Any:
            grad = jax.value_and_grad(loss_of, argnums=(0, 1))
            loss, (own, following) = grad(moving, self.collection(buffers, mode), fixed, microbatch)
            return loss, own, self.buffers_of(following)

        return gradients


def run(
    loss_fn: Callable[[Any, Any], Array], variables: Any, microbatch_of: Callable[[Any], Any], num_microbatches: int
) -> tuple[Array, dict[str, Any]]:
    """(loss, gradients) as of ``te.accumulate_gradients``, of variables without ``fp8_kernels``.

    Args:
      loss_fn: (variables, microbatch) -> f32[].
      variables: a dict of collections, differentiated.
      microbatch_of: number -> microbatch; the number may be traced.
      num_microbatches: at least 1.
    """
    leaves, structure = jax.tree.flatten(variables)
    kernels = _find(loss_fn, variables, microbatch_of(0))
    moving, fixed = kernels.split(leaves)
    is_state = kernels.split(_is_state(variables))[0]
    empty = [compat.zeros_like(leaves[i], jnp.float32) for i in kernels.paths]

    def sums_and_state(grads: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        parts: tuple[list[Array], list[Array]] = ([], [])
        for grad, part in zip(grads, is_state, strict=True):
            parts[part].append(grad)
        return parts

    @jax.jit
    def first(moving: Any, empty: Any, fixed: Any, microbatch: Any) -> Any:
        loss, grads, buffers = kernels.gradients(loss_fn, "overwrite")(moving, empty, fixed, microbatch)
        return loss.astype(jnp.float32), grads, buffers

    def body(carry: Any, i: Array) -> Any:
        sums, buffers = carry
        arguments = (moving, buffers, fixed, microbatch_of(i))
        program, shapes = programs.trace(kernels.gradients(loss_fn, "add"), *arguments)
        updates = {1 + len(moving) + n: len(moving) + n for n in range(len(buffers))}
        outputs = program.in_place(*jax.tree.leaves(arguments), updates=updates)
        loss, grads, buffers = jax.tree.structure(shapes).unflatten(outputs)
        grads, state = sums_and_state(grads)
        with compat.numpy_promotion():
            sums = [total + grad.astype(total.dtype) for total, grad in zip(sums, grads, strict=True)]
        return (sums, buffers), (loss.astype(jnp.float32), state)

    loss, grads, buffers = first(moving, empty, fixed, microbatch_of(0))
    grads, state = sums_and_state(grads)
    sums = [grad.astype(wide(grad)) for grad in grads]
    (sums, buffers), (losses, states) = jax.lax.scan(body, (sums, buffers), jnp.arange(1, num_microbatches))
    with compat.numpy_promotion():
        loss = jnp.mean(jnp.concatenate([loss[None], losses]))
    states = [jnp.concatenate([one[None], more]) for one, more in zip(state, states, strict=True)]

    # Means, rounded once; each kernel's is that of its buffer, with what the loss does to it beside its linear.
    totals, stacked = iter(sums), iter(states)
    own = [next(stacked) if part else next(totals) for part in is_state]
    all_totals = kernels.join(own, [None] * len(fixed))
    of = dict(zip(kernels.paths, buffers, strict=True))
    means = []
    with compat.numpy_promotion():
        for i, (total, leaf, part) in enumerate(zip(all_totals, leaves, _is_state(variables), strict=True)):
            if part:
                means.append(total)
                continue
            there = [x for x in (of.get(i), total) if x is not None]
            means.append((sum(there[1:], there[0]) / num_microbatches).astype(leaf.dtype))
    grads = structure.unflatten(means)
    rest, stacked_state = fp8_state.split(grads)
    return loss, fp8_state.merge(rest, fp8_state.accumulate_stacked(stacked_state)) if stacked_state else rest


def _nodes(collection: Any) -> dict[Any, Any]:
    return traverse_util.flatten_dict(collection, is_leaf=lambda _, x: isinstance(x, MainGrad))


def _is_state(variables: Any) -> list[bool]:
    paths = [path for path, _ in jax.tree.leaves_with_path(variables)]
    return [_names(path)[0] == COLLECTION for path in paths]


def _names(path: Any) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)


def _find(loss_fn: Callable, variables: Any, microbatch: Any) -> _Kernels:
    """The kernels whose gradients are accumulated in buffers."""
    flat, structure = jax.tree.flatten_with_path(variables)
    leaves = [leaf for _, leaf in flat]
    places: dict[int, Path] = {}
    for i, (path, leaf) in enumerate(flat):
        collection, *inside = _names(path)
        name = tuple(inside[:-1] if inside[-1:] == ["value"] else inside)  # a box may be around a leaf
        if collection == "params" and name and main_grad.is_kernel(name, leaf):
            places[i] = name
    tried = _Kernels(structure, places, frozenset())
    empty = [compat.zeros_like(leaves[i], jnp.float32) for i in places]
    again: set[Path] = set()  # one of the uses may not be differentiated, and a linear would refuse it
    with finding_without() as without:
        program, _ = programs.trace(tried.gradients(loss_fn, "try", again), leaves, empty, [], microbatch)
    if without:
        warn(
            f"te.accumulate_gradients: main_grad=True: {', '.join(without)}: no buffer is handed down to them, so they "
            "keep ordinary gradients: apply modules with all of the variables; nn.scan and nn.vmap need "
            f"{main_grad.COLLECTION!r} in their variable_axes"
        )
    # The linear gives what it wrote to both. Where that is all that becomes of it, the buffer is the kernel's: not that
    # of another kernel, nor of something that is computed from one.
    used = [program.only_result(1 + len(leaves) + n, 1 + i, main_grad.MARK) for n, i in enumerate(places)]
    found = {i: how for i, how in zip(places, used, strict=True) if how is not None and places[i] not in again}
    paths = {i: places[i] for i in found}
    expected = "a loss of at least one te_jax linear that is given a buffer (it is applied with all of the variables) "
    expected += "and a kernel as it is in params"
    if not paths:
        named = {
            place: program.terms_named(1 + len(leaves) + n, main_grad.MARK) for n, place in enumerate(places.values())
        }
        got = _why_none({"/".join(place): _why_not(terms, place in again) for place, terms in named.items()})
        raise ValueError(message("accumulate_gradients", "main_grad", expected, got))
    return _Kernels(structure, paths, frozenset(i for i, how in found.items() if how == "alone"))


def _why_not(terms: Sequence[bool], again: bool) -> str:
    """Why a kernel has no main gradient; ``terms``: of its buffer's next value, whether a linear wrote each."""
    if again or sum(terms) > 1:
        return "more than one call of a linear uses it"
    if not any(terms):
        return (
            "no te_jax linear took its buffer in a differentiated call outside of branches and loops (it is another "
            "library's layer, unused, applied without all of the variables, or its nn.scan or nn.vmap doesn't have "
            f"{main_grad.COLLECTION!r} in variable_axes)"
        )
    return "the loss does something else with it too, or gives the linear something that is computed from it"


def _why_none(reasons: Mapping[str, str]) -> str:
    """All kernels, by reason."""
    if not reasons:
        return "variables without a kernel: no parameter in params has that name and a floating dtype"
    by_reason: dict[str, list[str]] = {}
    for kernel, reason in reasons.items():
        by_reason.setdefault(reason, []).append(kernel)
    return "none: " + "; ".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in by_reason.items())
