"""Dense, DenseGeneral, LayerNormDense: linears as linen modules, each an op chain."""

from __future__ import annotations

from collections.abc import Sequence

from flax import linen as nn
from flax.typing import Initializer

from te_jax import ops
from te_jax.flax.layers import norm_op
from te_jax.sequential import ChainModule

default_kernel_init = nn.initializers.lecun_normal()  # nn.Dense's default
default_bias_init = nn.initializers.zeros_init()


class Dense(ChainModule, kw_only=False):
    """Drop-in for ``nn.Dense``: y [*lead, features] = x [*lead, K] kernel [K, features] + bias [features].

    Parameters are exactly ``{kernel, bias}``, with ``nn.Dense``'s initialisers and random numbers, so a checkpoint of
    either module restores into the other. With a recipe the three GEMMs run in FP8.

    Attributes:
      features: number of output features.
      use_bias: whether to add a bias.
      kernel_init, bias_init: initialisers; ``nn.with_partitioning`` and ``nn.with_logical_partitioning`` wrappers work.
      recipe: FP8 recipe; None leaves the linear unquantized.
      dtype: dtype of the computation and of y; None: promoted from x and the parameters.
      param_dtype: dtype of the parameters.
    """

    features: int
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    def chain(self):
        return (
            ops.Linear(
                self.features,
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name="",
            ),
        )


class LayerNormDense(ChainModule, kw_only=False):
    """A norm and the linear that follows it: y [*lead, features] = norm(x [*lead, K]) kernel [K, features] + bias.

    With a recipe the norm writes the linear's FP8 input itself. Parameters: ``norm/{scale[, bias]}`` and
    ``dense/{kernel, bias}``.

    Attributes:
      features: number of output features.
      use_bias: whether the linear adds a bias.
      norm: "rmsnorm" or "layernorm".
      epsilon: added to the mean square (variance) before the root.
      kernel_init, bias_init: initialisers of the linear.
      recipe, dtype, param_dtype: as in ``Dense``.

    Raises:
      ValueError: unknown norm.
    """

    features: int
    use_bias: bool = True
    norm: str = "rmsnorm"
    epsilon: float = 1e-6
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    def chain(self):
        return (
            norm_op(self.norm, self.epsilon, name="norm", caller="LayerNormDense"),
            ops.Linear(
                self.features,
                use_bias=self.use_bias,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name="dense",
            ),
        )
class DenseGeneral: pass
