"""te_jax: FP8 training and overlapped tensor parallelism for JAX and Flax.

import te_jax as te
from te_jax import ops
"""

import importlib

from te_jax import collective as collective
from te_jax import flax as flax
from te_jax import health as health
from te_jax import main_grad as main_grad
from te_jax import nnx as nnx
from te_jax import ops as ops
from te_jax import remat as remat
from te_jax import state as state
from te_jax.accumulate import accumulate_gradients as accumulate_gradients
from te_jax.accumulate import quantize_kernels as quantize_kernels
from te_jax.flax.train_state import TrainState as TrainState
from te_jax.fp8_params import dequantize_params as dequantize_params
from te_jax.fp8_params import quantize_params as quantize_params
from te_jax.fusion.plan import FusionPlan as FusionPlan
from te_jax.quant.tensor import QTensor as QTensor
from te_jax.recipe import BlockScaling as BlockScaling
from te_jax.recipe import CurrentScaling as CurrentScaling
from te_jax.recipe import DelayedScaling as DelayedScaling
from te_jax.recipe import Recipe as Recipe
from te_jax.sequential import ChainModule as ChainModule
from te_jax.sequential import Sequential as Sequential

__version__ = "0.1.0"

__all__ = [
    "BlockScaling",
    "ChainModule",
    "CurrentScaling",
    "DelayedScaling",
    "FusionPlan",
    "QTensor",
    "Recipe",
    "Sequential",
    "TrainState",
    "accumulate_gradients",
    "checkpoint",
    "collective",
    "dequantize_params",
    "flax",
    "health",
    "interop",
    "main_grad",
    "nnx",
    "ops",
    "quantize_kernels",
    "quantize_params",
    "remat",
    "state",
]
_LAZY = ("checkpoint", "interop")


def __getattr__(name: str):
    """``te.checkpoint``, on first use: orbax takes a while to import; ``te.interop``."""
    if name in _LAZY:
        return importlib.import_module(f"te_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What users are to find: not the packages that imports leave here."""
    return [*__all__, "__version__", "__file__", "__doc__"]
