"""FP8 scale state for users: what an optimizer must not touch, kept apart or replaced. See docs/numerics.md.

`split`, `merge`, `accumulate`, `apply` and `check` for training loops; `optimizer` makes any optax optimizer one of
parameters and state; `te_jax.TrainState` does all of it. `report` says how healthy tensors are (docs/health.md).
"""

from te_jax.quant.health import report
from te_jax.quant.optimizer import Replacement, optimizer
from te_jax.quant.state import COLLECTION, KERNELS, MAIN_GRAD, accumulate, apply, check, init, merge, split

__all__ = [
    "COLLECTION",
    "KERNELS",
    "MAIN_GRAD",
    "Replacement",
    "accumulate",
    "apply",
    "check",
    "init",
    "merge",
    "optimizer",
    "report",
    "split",
]
