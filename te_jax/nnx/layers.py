"""The modules of ``te.flax`` as native nnx modules: same arguments after the input's features, same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax import flax as linen
from te_jax.errors import check_value
from te_jax.flax.dense import default_bias_init, default_kernel_init
from te_jax.flax.tensor_parallel import Parallel, TensorParallel
from te_jax.nnx.initializers import wrapped
from te_jax.nnx.module import Module
from te_jax.recipe import Recipe


class Dense(Module):
    """Drop-in for ``nnx.Linear``: y [*lead, features] = x [*lead, in_features] kernel + bias [features].

    Variables: ``kernel`` [in_features, features] and ``bias`` [features] (``nnx.Param``), FP8 state under ``fp8_0``.

    Attributes:
      in_features, features: of x and of y.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        use_bias: bool = True,
        *,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        parallel: Parallel | None = None,
        tensor_axis: str | None = None,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          in_features: features of x.
          features: features of y.
          use_bias: whether to add a bias.
          kernel_init, bias_init: initialisers; ``nnx.with_partitioning`` wrappers work, and their metadata is kept.
          recipe: FP8 recipe; None leaves the linear unquantized.
          dtype: dtype of the computation and of y; None: promoted from x and the parameters.
          parallel, tensor_axis, sequence_parallel, overlap: as in ``te.flax.Dense``. The sizes are those of the whole;
            parameters are made so and say how they are split (``nnx.get_partition_spec``).
          param_dtype: dtype of the parameters.
          rngs: ``rngs.params()`` initialises.

        Raises:
          ValueError: sizes that are not positive ints, ``parallel`` without a ``tensor_axis`` or that without it.
        """
        definition = linen.Dense(
            features,
            use_bias,
            wrapped(kernel_init),
            wrapped(bias_init),
            parallel=parallel,
            tensor_axis=tensor_axis,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features, self.features = in_features, features
        x = row("Dense", definition.own_features(in_features), definition)
        super().__init__(definition, x, has_dropout=False, rngs=rngs)

    def __call__(self, x: Array, *, use_running_average: bool | None = None) -> Array:
        """x [*lead, in_features] -> [*lead, features], in ``dtype``.

        ``use_running_average``: whether to leave the FP8 state as it is; None: the attribute.
        """
        definition: Any = self.definition
        check_features("Dense", x, definition.own_features(self.in_features))
        return self._call(x, use_running_average=use_running_average)


class LayerNormDense(Module):
    """A norm and the linear that follows it: y [*lead, features] = norm(x [*lead, in_features]) kernel + bias.

    With a recipe the norm writes the linear's FP8 input itself. Variables: ``norm/{scale[, bias]}``,
    ``dense/{kernel, bias}``, FP8 state under ``fp8_0``.

    Attributes:
      in_features, features: of x and of y.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        use_bias: bool = True,
        *,
        norm: str = "rmsnorm",
        epsilon: float = 1e-6,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        tensor_axis: str | None = None,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          norm: "rmsnorm" or "layernorm".
          epsilon: added to the mean square (variance) before the root.
          in_features, features, use_bias, kernel_init, bias_init, recipe, dtype, param_dtype, rngs: as in ``Dense``.
          tensor_axis, sequence_parallel, overlap: as in ``te.flax.LayerNormDense``, parameters as in ``Dense``.

        Raises:
          ValueError: unknown norm, or sizes that are not positive ints.
        """
        definition = linen.LayerNormDense(
            features,
            use_bias,
            norm,
            epsilon,
            wrapped(kernel_init),
            wrapped(bias_init),
            tensor_axis=tensor_axis,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features, self.features = in_features, features
        super().__init__(definition, row("LayerNormDense", in_features, definition), has_dropout=False, rngs=rngs)

    def __call__(self, x: Array, *, use_running_average: bool | None = None) -> Array:
        """x [*lead, in_features] -> [*lead, features], in ``dtype``; the argument as in ``Dense``."""
        check_features("LayerNormDense", x, self.in_features)
        return self._call(x, use_running_average=use_running_average)


class LayerNormMLP(Module):
    """y [*lead, features] = fc2(activation(fc1(norm(x [*lead, in_features])))) [+ x], as one op chain.

    Variables: ``mlp_norm/{scale[, bias]}``, ``fc1/{kernel[, bias]}``, ``fc2/{kernel[, bias]}``, FP8 state under
    ``fp8_<i>``; shapes as in ``te.flax.LayerNormMLP``.

    Attributes:
      in_features, features: of x and of y.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        features: int | None = None,
        *,
        activation: str = "swiglu",
        use_bias: bool = False,
        norm: str = "rmsnorm",
        epsilon: float = 1e-6,
        dropout_rate: float = 0.0,
        residual: bool = False,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        tensor_axis: str | None = None,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          in_features: features of x.
          hidden_features: features between fc1 and fc2, after a gated activation.
          features: features of y; None: those of x.
          activation, use_bias, norm, epsilon, dropout_rate, residual: as in ``te.flax.LayerNormMLP``.
          tensor_axis, sequence_parallel, overlap: as in ``te.flax.LayerNormMLP``, parameters as in ``Dense``.
          kernel_init, bias_init, recipe, dtype, param_dtype: as in ``Dense``.
          rngs: ``rngs.params()`` initialises; with dropout, ``rngs.dropout`` is forked.

        Raises:
          ValueError: unknown norm or activation, sizes that are not positive ints, or a residual onto other features.
        """
        features = in_features if features is None else features
        definition = linen.LayerNormMLP(
            features,
            hidden_features,
            activation,
            use_bias,
            norm,
            epsilon,
            dropout_rate,
            residual,
            wrapped(kernel_init),
            wrapped(bias_init),
            tensor_axis=tensor_axis,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features, self.features = in_features, features
        x = row("LayerNormMLP", in_features, definition)
        super().__init__(definition, x, has_dropout=dropout_rate > 0, rngs=rngs)

    def __call__(
        self,
        x: Array,
        *,
        deterministic: bool | None = None,
        use_running_average: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Array:
        """x [*lead, in_features] -> [*lead, features], in ``dtype``.

        ``deterministic``, ``use_running_average``: None: the attributes. ``rngs``: for dropout, None: the module's.
        """
        check_features("LayerNormMLP", x, self.in_features)
        deterministic = self._is_deterministic(deterministic)
        return self._call(x, deterministic=deterministic, use_running_average=use_running_average, rngs=rngs)


class DenseGeneral(Module):
    """Drop-in for ``nnx.LinearGeneral`` (without batch axes): a linear over several axes into several features.

    y [*kept, *features] = x contracted over ``axis`` with kernel [*in_features, *features], + bias [*features].
    Variables: ``kernel`` and ``bias``, FP8 state under ``fp8_0``.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        use_bias: bool = True,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          in_features: sizes of the contracted axes, in ascending order of the axes.
          features: output sizes.
          axis: contracted axes of x.
          use_bias, kernel_init, bias_init, recipe, dtype, param_dtype, rngs: as in ``Dense``.

        Raises:
          ValueError: sizes that are not positive ints, or another number of axes than of sizes.
        """
        sizes, axes = _as_tuple(in_features), _as_tuple(axis)
        expected = f"one size for each axis of {axes}"
        check_value(len(sizes) == len(axes), "DenseGeneral", "in_features", expected, in_features)
        shape = tuple(row("DenseGeneral", size).shape[-1] for size in sizes)
        definition = linen.DenseGeneral(
            features if isinstance(features, int) else tuple(features),
            axes,
            use_bias,
            wrapped(kernel_init),
            wrapped(bias_init),
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features = sizes
        # Parameters depend on the sizes of the contracted axes, not on where they are in x.
        first = definition.clone(axis=tuple(range(-len(sizes), 0)))
        x = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
        super().__init__(definition, x, first=first, has_dropout=False, rngs=rngs)

    def __call__(self, x: Array, *, use_running_average: bool | None = None) -> Array:
        """x with the contracted axes anywhere -> [*kept, *features]; the argument as in ``Dense``."""
        axes = sorted(a % x.ndim for a in _as_tuple(self.definition.axis) if -x.ndim <= a < x.ndim)
        got = tuple(x.shape[a] for a in axes)
        check_value(got == self.in_features, "DenseGeneral", "x", f"sizes {self.in_features} to contract", x.shape)
        return self._call(x, use_running_average=use_running_average)


def row(name: str, in_features: Any, definition: Any = None) -> jax.ShapeDtypeStruct:
    """An input of one row, or of as many as a definition with a ``tensor_axis`` needs."""
    ok = isinstance(in_features, int) and not isinstance(in_features, bool) and in_features > 0
    check_value(ok, name, "in_features", "a positive int", repr(in_features))
    rows = 1
    if definition is not None and definition.tensor_axis is not None:
        rows = TensorParallel(name, definition.tensor_axis, definition.sequence_parallel).fewest_tokens
    return jax.ShapeDtypeStruct((rows, in_features), jnp.float32)


def check_features(name: str, x: Any, in_features: int) -> None:
    shape = getattr(x, "shape", ())
    check_value(shape[-1:] == (in_features,), name, "x", f"[*lead, {in_features}]", shape)


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
