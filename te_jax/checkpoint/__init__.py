"""Checkpoints with orbax: parameters, FP8 state, optimizer state and recipe as separate items of one atomic step."""

from te_jax.checkpoint.manager import Manager, Restored, describe, latest_step, restore, save
from te_jax.checkpoint.params import restore_params
from te_jax.checkpoint.recipes import migrate_state
from te_jax.checkpoint.versions import FORMAT_VERSION

__all__ = [
    "FORMAT_VERSION",
    "Manager",
    "Restored",
    "describe",
    "latest_step",
    "migrate_state",
    "restore",
    "restore_params",
    "save",
]
