"""Remat policies by activation name, and activations in host memory whose copies hide under compute (docs/offload.md)."""

from te_jax.remat.names import NAMES as NAMES
from te_jax.remat.names import name as name
from te_jax.remat.policies import Policy as Policy
from te_jax.remat.policies import policy as policy
