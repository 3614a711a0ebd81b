"""LayerNormMLP: norm, fc1, activation, fc2 and the residual as one op chain."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn
from flax.typing import Initializer
from jax import Array

from te_jax import ops
from te_jax.errors import check_value
from te_jax.flax.dense import default_bias_init, default_kernel_init
from te_jax.flax.layers import activation_op, check_array, is_gated, norm_op
from te_jax.flax.tensor_parallel import TensorParallel
from te_jax.fusion.plan import FusionPlan
from te_jax.sequential import ChainModule


class LayerNormMLP(ChainModule, kw_only=False):
    """y [*lead, features] = fc2(activation(fc1(norm(x [*lead, K])))) [+ x].

    One chain, so that with a recipe the norm and the activation write the FP8 inputs of fc1 and fc2, and fc2's GEMM
    adds the residual. Parameters: ``mlp_norm/{scale[, bias]}``, ``fc1/{kernel[, bias]}``, ``fc2/{kernel[, bias]}``;
    fc1's kernel is [K, hidden_features], [K, 2 * hidden_features] for a gated activation (gate first).

    Attributes:
      features: output features; with ``residual`` equal to K.
      hidden_features: features between fc1 and fc2, after a gated activation.
      activation: the kind of an activation of ``te_jax.ops``: "gelu", "silu", "relu", "quick_gelu", "squared_relu",
        or gated "geglu", "swiglu", "glu", "reglu", "qgeglu", "sreglu", "clamped_swiglu".
      use_bias: whether fc1 and fc2 add biases.
      norm: "rmsnorm" or "layernorm".
      epsilon: added to the mean square (variance) before the root.
      dropout_rate: of dropout on fc2's output; only with ``deterministic=False``, from the "dropout" stream.
      residual: whether x is added to the output.
      kernel_init, bias_init: initialisers of fc1 and fc2.
      tensor_axis: the mesh axis of tensor parallelism: fc1 is column-, fc2 row-parallel, inside of ``shard_map`` over
        it, or with the mesh set (docs/collective.md). fc1's kernel of a gated activation is then kept as
        [K, 2, hidden_features], its bias as [2, hidden_features]: the same numbers, of which a device has a part of
        both halves.
      sequence_parallel: x and y are split along their last but one dimension over the axis; otherwise they are the same
        on all of its devices.
      overlap: as of ``te.ops.AllGather``.
      recipe, dtype, param_dtype: as in ``Dense``.

    Raises:
      ValueError: unknown norm or activation, or a residual whose width isn't ``features``.
    """

    features: int
    hidden_features: int
    activation: str = "swiglu"
    use_bias: bool = False
    norm: str = "rmsnorm"
    epsilon: float = 1e-6
    dropout_rate: float = 0.0
    residual: bool = False
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    tensor_axis: str | None = None
    sequence_parallel: bool = False
    overlap: str = "auto"

    def chain(self):
        tensor = TensorParallel("LayerNormMLP", self.tensor_axis, self.sequence_parallel, self.overlap)
        order = tensor.order(tensor.share("hidden_features", self.hidden_features))
        activation = activation_op(self.activation, name="act", caller="LayerNormMLP", devices=order)
        gated = is_gated(self.activation)
        fc1_features, parts = self.hidden_features * (2 if gated else 1), (2, self.hidden_features) if gated else None
        return (
            *((ops.StartResidual(),) if self.residual else ()),
            norm_op(self.norm, self.epsilon, name="mlp_norm", caller="LayerNormMLP"),
            *tensor.before(),
            tensor.linear(fc1_features, "column", parts=parts, split=int(gated), name="fc1", **self._linear_options()),
            activation,
            tensor.linear(self.features, "row", name="fc2", **self._linear_options()),
            *tensor.behind(),
            *((ops.Dropout(self.dropout_rate),) if self.dropout_rate else ()),
            *((ops.AddResidual(),) if self.residual else ()),
        )

    fixed_order = True

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool = True) -> Array:  # type: ignore[override]
        """x [*lead, K] -> [*lead, features], in ``dtype``."""
        if not self.residual:
            return super().__call__(x, deterministic=deterministic)
        check_array("LayerNormMLP", x)
        ok = x.shape[-1:] == (self.features,)
        expected = f"shape [*lead, {self.features}]: as many features as the result, with residual=True"
        check_value(ok, "LayerNormMLP", "x", expected, f"shape {list(x.shape)}")
        return super().__call__(x, deterministic=deterministic)

    def plan(self, x: jax.ShapeDtypeStruct | Array, **options) -> FusionPlan:  # type: ignore[override]
        """The chain's plan for x [*lead, K]; options as those of ``Sequential.plan``."""
        return super().plan(x, **options)

    @nn.nowrap
    def _linear_options(self) -> dict[str, Any]:
        return {"use_bias": self.use_bias, "kernel_init": self.kernel_init, "bias_init": self.bias_init}
