"""Checkpoints with orbax: parameters, FP8 state, optimizer state and recipe as separate items of one atomic step."""

from te_jax.checkpoint.document import FORMAT_VERSION
from te_jax.checkpoint.manager import Manager, Restored, latest_step, restore, save

__all__ = ["FORMAT_VERSION", "Manager", "Restored", "latest_step", "restore", "save"]
