"""FP8 scale state for users: `te.state.split`, `merge`, `accumulate`, `apply`, `check`. See docs/numerics.md."""

from te_jax.quant.state import COLLECTION, KERNELS, accumulate, apply, check, init, merge, split

__all__ = ["COLLECTION", "KERNELS", "accumulate", "apply", "check", "init", "merge", "split"]
