"""TrainState: flax's, with FP8 state that is kept, replaced and checked as it must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np
import optax
from flax import struct
from flax.core import unfreeze
from flax.training import train_state
from jax import Array

from te_jax.accumulate import accumulate_gradients
from te_jax.errors import check_type, check_value
from te_jax.quant import optimizer, state_trees
from te_jax.quant.state import COLLECTION

_FIELDS = frozenset(("params", COLLECTION))


class TrainState(train_state.TrainState):
    """``flax.training.train_state.TrainState`` for parameters with FP8 state.

      state = te.TrainState.create(apply_fn=model.apply, params=model.init(key, x), tx=tx)

      @jax.jit
      def step(state, batch):
          loss, grads = state.accumulate_gradients(loss_fn, batch, num_microbatches=4)
          return state.apply_gradients(grads=grads), loss

    Beside what flax's does: a quantizer that a step did not use keeps its state, where flax's overwrites it (it starts
    anew); so does all FP8 state in a step that ``tx`` skips because of its gradients (`optax.apply_if_finite`,
    ``should_skip_update_fn`` of `optax.MultiSteps`). With `optax.MultiSteps` FP8 state advances with every
    microbatch.

    Attributes:
      params: ``{"params": ..., "_overwrite_with_gradient": ...}``, what ``module.init`` returns; the second is absent
        without a recipe that has state. Or the parameters alone. Further collections (batch statistics) belong into
        fields of a subclass.
      opt_state: of ``tx`` for the parameters alone, in either case: it does not depend on the recipe.
      step, apply_fn, tx: flax's.
    """

    # jax (0.10 to 0.12) takes dataclasses of different classes for equal where their fields are: jit (jaxlib 0.10) then
    # ran, in one of about a hundred processes, what it had compiled for flax's class. Static data, so that they differ.
    _class: Any = struct.field(pytree_node=False, default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_class", type(self))

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any) -> Self:
        """A state at step 0.

        Raises:
          ValueError: `params` has other collections than those two, or FP8 state anywhere else: the optimizer would
            step it.
        """
        if isinstance(params, Mapping) and _FIELDS & set(params):  # without FP8 state too: no recipe decides this
            expected = f"the collections {sorted(_FIELDS)}; others in fields of a subclass"
            check_value(set(params) <= _FIELDS, "TrainState", "params", expected, sorted(params))
        inside = state_trees.partition(_trained(params))[1]
        expected = f"FP8 state at the top, params[{COLLECTION!r}] (for several models: te.state.optimizer)"
        check_value(not inside, "TrainState", "params", expected, f"some below {sorted(inside)}")
        opt_state = tx.init(_trained(params))
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """The state after a step, with further fields replaced as in ``kwargs``.

        Args:
          grads: gradients in the structure of ``params``: those of FP8 state are its next value.

        Raises:
          ValueError: gradients without those of the FP8 state.
        """
        old, new = (_fp8(tree) for tree in (self.params, grads))
        same = jax.tree.structure(old) == jax.tree.structure(new)
        expected = "those of the FP8 state too: differentiate the loss with respect to all of params"
        got = sorted(grads) if isinstance(grads, Mapping) else type(grads).__name__
        check_value(same, "TrainState.apply_gradients", "grads", expected, got)
        params = _trained(self.params)
        updates, opt_state = self.tx.update(_trained(grads), self.opt_state, params)
        params = optax.apply_updates(params, updates)
        if old:
            skipped = optimizer.skipped(self.opt_state, opt_state)
            new = optimizer.keep_if(skipped, old, state_trees.apply(old, new))
        new_params = _with(self.params, params, new)
        return self.replace(step=self.step + 1, params=new_params, opt_state=opt_state, **kwargs)

    def accumulate_gradients(
        self,
        loss_fn: Callable[[Any, Any], Array],
        batch: Any,
        *,
        num_microbatches: int = 1,
        main_grad: bool = False,
    ) -> tuple[Array, Any]:
        """(loss, gradients with respect to ``params``) of a batch, by ``te.accumulate_gradients``."""
        return accumulate_gradients(loss_fn, self.params, batch, num_microbatches=num_microbatches, main_grad=main_grad)

    def check(self, before: TrainState, *, allow_unused: bool = False) -> None:
        """Raises unless the one step since `before` updated FP8 state as it must; outside of jit, once in a while.

        Args:
          before: the state before the step, not donated to it.
          allow_unused: quantizers may be unchanged, as long as some quantizer was updated.

        Raises:
          ValueError: not one step; FP8 state that was not updated, or not by overwriting (`te.state.check`), or that
            a skipped step changed.
        """
        op, name = "TrainState.check", "before"
        check_type(not isinstance(self.step, jax.core.Tracer), op, name, "concrete arrays", "a tracer")
        check_value(int(self.step) == int(before.step) + 1, op, name, f"step {int(self.step) - 1}", int(before.step))
        old, new = _fp8(before.params), _fp8(self.params)
        skipped = optimizer.skipped(before.opt_state, self.opt_state)
        if skipped is None or not bool(skipped):
            state_trees.check(old, new, allow_unused=allow_unused)
        else:
            same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), old, new)
            ok = all(jax.tree.leaves(same))
            check_value(ok, op, name, "FP8 state as it was, since the optimizer skipped the step", "other state")


def _is_collections(params: Any) -> bool:
    return isinstance(params, Mapping) and "params" in params and set(params) <= _FIELDS


def _trained(params: Any) -> Any:
    return params["params"] if _is_collections(params) else params


def _fp8(params: Any) -> Any:
    return unfreeze(params.get(COLLECTION, {})) if _is_collections(params) else {}


def _with(like: Any, params: Any, fp8: Any) -> Any:
    if not _is_collections(like):
        return params
    collections = {"params": params} | ({COLLECTION: fp8} if COLLECTION in like else {})
    return state_trees.rebuild(like, collections)
