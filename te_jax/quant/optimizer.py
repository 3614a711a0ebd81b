"""An optax optimizer for a model's whole variables: it steps the parameters and replaces the FP8 state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from te_jax import compat, errors
from te_jax.quant import state_trees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replacement:
    """An update that `optax.apply_updates` replaces a leaf with, where an array would be added to it.

    ``p + (new - p)`` is not ``new`` in floating point. What scales updates scales value and weight alike, which
    changes nothing; a weight of 0 (`optax.MultiSteps` between its updates) keeps the leaf. What needs arrays
    (`optax.apply_if_finite`, `optax.add_decayed_weights`) fails with an error that names this class: it belongs inside
    of `te_jax.state.optimizer`.

    Attributes:
      value: the new value times weight, of the leaf's shape and dtype.
      weight: f32[].
    """

    value: jax.Array
    weight: jax.Array

    __module__ = "te_jax.state"  # its public place, for those errors
    __array_ufunc__ = None  # numpy_array + self comes here too, instead of being tried element by element

    @compat.numpy_promotion()
    def __radd__(self, leaf: Any) -> jax.Array:
        new = self.value / jnp.where(self.weight == 0, 1.0, self.weight)
        return jnp.where(self.weight == 0, leaf, new).astype(self.value.dtype)


def optimizer(tx: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """``tx`` for parameters and FP8 state in one tree: ``tx`` sees the parameters alone, the state is replaced.

      tx = te.state.optimizer(optax.adamw(1e-3))
      opt_state = tx.init(variables)
      loss, grads = jax.value_and_grad(loss_fn)(variables, batch)
      updates, opt_state = tx.update(grads, opt_state, variables)
      variables = optax.apply_updates(variables, updates)

    Its optimizer state is that of ``tx`` for ``te.state.split(variables)[0]``. Quantizers that a step did not use keep
    their state. So do all in a step that ``tx`` skips because of its gradients (`optax.apply_if_finite`,
    ``should_skip_update_fn`` of `optax.MultiSteps`); not those of te.nnx modules under ``nnx.grad``, whose forward pass
    has updated it by then (docs/nnx.md). With `optax.MultiSteps` inside, the state advances with every
    microbatch; outside, ``optax.MultiSteps(te.state.optimizer(tx), k)``, with every update, to within half an octave of
    the microbatches' largest amax. `optax.apply_if_finite` belongs inside: outside it is a TypeError, because a
    replacement is not an array.

    Args:
      tx: any optax transformation.

    Returns:
      A transformation of trees with FP8 state anywhere: variables (a dict or FrozenDict), an ``nnx.State``, and what
      ``nnx.Optimizer`` makes of one. Updates of state are `Replacement`s, for `optax.apply_updates`.
    """
    if isinstance(tx, optax.MultiSteps):  # takes further arguments, but isn't seen to
        step: Any = tx.update
        tx = optax.GradientTransformationExtraArgs(tx.init, step)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return tx.init(state_trees.partition(params)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        op = "state.optimizer"
        errors.check_value(params is not None, op, "params", "update(grads, opt_state, variables)", None)
        (grads, new), (rest, old) = state_trees.partition(updates), state_trees.partition(params)
        same = jax.tree.structure(new) == jax.tree.structure(old)
        expected = "the FP8 state of params: differentiate the loss with respect to it too"
        errors.check_value(same, op, "updates", expected, _runs(new) or "none")
        stepped, new_state = tx.update(grads, state, rest, **extra_args)
        replaced = keep_if(skipped(state, new_state), old, state_trees.apply(old, new))
        weighted = jax.tree.map(lambda leaf: Replacement(leaf, jnp.ones((), jnp.float32)), replaced)
        return state_trees.unite(stepped, weighted), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def skipped(before: Any, after: Any) -> jax.Array | None:
    """bool[]: whether the optimizer whose state went from `before` to `after` skipped a step for its gradients.

    None if it has nothing that skips. Where one of several parts skips, the step counts as skipped.
    """
    flags = list(_skips(before, after))
    return jnp.stack(flags).any() if flags else None


def keep_if(condition: jax.Array | None, old: Any, new: Any) -> Any:
    """`old` where the condition holds."""
    return new if condition is None else jax.tree.map(lambda a, b: jnp.where(condition, a, b), old, new)


def _skips(before: Any, after: Any) -> Iterator[jax.Array]:
    """A bool[] for each part of an optimizer's state that may skip a step."""

    def can_skip(node: Any) -> bool:
        return isinstance(node, (optax.ApplyIfFiniteState, optax.MultiStepsState))

    nodes = [jax.tree.leaves(tree, is_leaf=can_skip) for tree in (before, after)]
    for old, new in zip(*nodes, strict=True):
        if isinstance(new, optax.ApplyIfFiniteState):
            yield ~new.last_finite
            yield from _skips(old.inner_state, new.inner_state)
        elif isinstance(new, optax.MultiStepsState):
            yield (new.mini_step == old.mini_step) & (new.gradient_step == old.gradient_step)
            updated = new.gradient_step != old.gradient_step
            for inner in _skips(old.inner_opt_state, new.inner_opt_state):
                yield inner & updated  # between updates it says what the last one did


def _runs(tree: Any) -> str:
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=state_trees.is_run)
    return ", ".join(jax.tree_util.keystr(path) for path, _ in paths)
