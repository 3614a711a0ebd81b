"""Remat policies by activation name; activations in host memory, whose copies hide under compute (docs/offload.md)."""

from te_jax.remat.met import UnusedNamesWarning as UnusedNamesWarning
from te_jax.remat.names import NAMES as NAMES
from te_jax.remat.names import name as name
from te_jax.remat.offload import compiler_options as compiler_options
from te_jax.remat.offload import hideable_bytes as hideable_bytes
from te_jax.remat.offload import jit as jit
from te_jax.remat.offload import scan as scan
from te_jax.remat.offload import xla_flags as xla_flags
from te_jax.remat.placement import ExposedCopiesWarning as ExposedCopiesWarning
from te_jax.remat.placement import hiding as hiding
from te_jax.remat.policies import Policy as Policy
from te_jax.remat.policies import policy as policy
from te_jax.remat.policies import report as report
