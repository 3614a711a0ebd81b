"""GroupedDense: a dense layer for each group of tokens (expert), as one linen module."""

from __future__ import annotations

import jax
from flax import linen as nn
from flax.typing import Initializer
from jax import Array

from te_jax import ops
from te_jax.flax.dense import default_bias_init
from te_jax.fusion.plan import FusionPlan
from te_jax.ops.grouped_linear import default_kernel_init
from te_jax.sequential import ChainModule


class GroupedDense(ChainModule, kw_only=False):
    """y [T, features] of the rows of each group g of x [T, K]: x kernel[g] + bias[g].

    Parameters: ``kernel`` [num_groups, K, features] and ``bias`` [num_groups, features]. With a recipe the GEMMs run in
    FP8, every group with scales of its own. Tokens may be of any number.

    Attributes:
      num_groups: number of groups (experts).
      features: number of output features.
      use_bias: whether to add biases.
      kernel_init, bias_init: initialisers, called with the whole shapes; ``nn.with_partitioning`` wrappers work.
      recipe, dtype, param_dtype: as in ``Dense``.
    """

    num_groups: int
    features: int
    use_bias: bool = True
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    def chain(self):
        return (
            ops.GroupedLinear(
                self.num_groups,
                self.features,
                self.use_bias,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name="",
            ),
        )

    @nn.compact
    def __call__(self, x: Array, group_sizes: Array) -> Array:  # type: ignore[override]
        """Applies the layer of each row's group.

        Args:
          x: [T, K], the rows of group 0 first, then those of group 1 and so on.
          group_sizes: integers [num_groups], how many rows each group has; may be traced. Rows behind the last group
            belong to none, and are 0 in the result.

        Raises:
          ValueError: sizes that can be seen while tracing and that can't be: a negative one, a sum above T.
        """
        return super().__call__(x, group_sizes)

    def plan(self, x: jax.ShapeDtypeStruct | Array, group_sizes: Array | None = None, **options) -> FusionPlan:  # type: ignore[override]
        """The plan for such an x; options as those of ``Sequential.plan``."""
        sizes = jax.ShapeDtypeStruct((self.num_groups,), "int32") if group_sizes is None else group_sizes
        return super().plan(x, sizes, **options)
