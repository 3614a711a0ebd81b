"""GroupedDense: a dense layer for each group of tokens (expert), as a native nnx module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax import flax as linen
from te_jax.errors import check_value
from te_jax.flax.dense import default_bias_init
from te_jax.nnx.initializers import wrapped
from te_jax.nnx.layers import check_features, row
from te_jax.nnx.module import Module
from te_jax.ops.grouped_linear import default_kernel_init
from te_jax.recipe import Recipe


class GroupedDense(Module):
    """y [T, features] of the rows of each group g of x [T, in_features]: x kernel[g] + bias[g].

    Variables: ``kernel`` [num_groups, in_features, features] and ``bias`` [num_groups, features] (``nnx.Param``), FP8
    state under ``fp8_0_grouped``, groups first: the paths of ``te.flax.GroupedDense`` in a checkpoint.

    Attributes:
      num_groups, in_features, features: groups (experts), features of x and of y.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        features: int,
        use_bias: bool = True,
        *,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          num_groups: number of groups.
          in_features: features of x.
          features: features of y.
          use_bias: whether to add biases.
          kernel_init, bias_init: initialisers, called with the whole shapes; ``nnx.with_partitioning`` wrappers work.
          recipe, dtype, param_dtype, rngs: as in ``Dense``.

        Raises:
          ValueError: sizes that are not positive ints.
        """
        definition = linen.GroupedDense(
            num_groups,
            features,
            use_bias,
            wrapped(kernel_init),
            wrapped(bias_init),
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        definition.chain()  # checks the sizes
        self.num_groups, self.in_features, self.features = num_groups, in_features, features
        sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
        super().__init__(definition, row("GroupedDense", in_features), sizes, has_dropout=False, rngs=rngs)

    def __call__(self, x: Array, group_sizes: Array, *, use_running_average: bool | None = None) -> Array:
        """Applies the layer of each row's group.

        Args:
          x: [T, in_features], the rows of group 0 first, then those of group 1 and so on.
          group_sizes: integers [num_groups], how many rows each group has; may be traced. Rows behind the last group
            belong to none, and are 0 in the result.
          use_running_average: as in ``Dense``.

        Raises:
          ValueError: sizes that can be seen while tracing and that can't be: a negative one, a sum above T.
        """
        ok = getattr(x, "ndim", 0) == 2
        check_value(ok, "GroupedDense", "x", f"[tokens, {self.in_features}]", getattr(x, "shape", ()))
        check_features("GroupedDense", x, self.in_features)
        return self._call(x, group_sizes, use_running_average=use_running_average)

    def plan(self, x: Any, group_sizes: Any = None, **options: Any) -> Any:
        """The plan for such an x, without sizes too; options as in ``Dense``."""
        sizes = jax.ShapeDtypeStruct((self.num_groups,), jnp.int32) if group_sizes is None else group_sizes
        return super().plan(x, sizes, **options)
