"""LayerStack: the same layer many times, scanned over, with a remat policy."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
from jax import Array

from te_jax.errors import check_type, check_value
from te_jax.quant.health import COLLECTION as HEALTH
from te_jax.quant.state import COLLECTION, KERNELS, MAIN_GRAD
from te_jax.remat import Policy
from te_jax.run_variables import NEXT

_STACKED: dict[Any, Any] = dict.fromkeys(("params", COLLECTION, KERNELS, MAIN_GRAD, HEALTH, NEXT), 0)


class LayerStack(nn.Module):
    """y = layer(... layer(x)): ``num_layers`` times, parameters and FP8 state stacked over layers under ``layers``.

    One ``nn.scan``, whose layers keep for the backward pass what ``policy`` says. It is the scan whose copies to and
    from host memory hide under compute, if the step is compiled by ``te.remat.jit`` (docs/offload.md).

    Attributes:
      layer: the module that is repeated, unbound: x -> y of the type of x, such as ``te.flax.TransformerLayer(...)``.
      num_layers: how often.
      policy: of ``te.remat.policy``; None: everything is kept, on the device.
    """

    layer: nn.Module
    num_layers: int
    policy: Policy | None = None

    @nn.compact
    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        """x, and what every layer gets beside it: ``positions``, ``deterministic``."""
        check_type(isinstance(self.layer, nn.Module), "LayerStack", "layer", "a linen module", repr(self.layer))
        ok = isinstance(self.num_layers, int) and self.num_layers > 0
        check_value(ok, "LayerStack", "num_layers", "a positive int", repr(self.num_layers))
        ok = self.policy is None or callable(self.policy)
        check_type(ok, "LayerStack", "policy", "None or a policy of te.remat.policy(...)", repr(self.policy))

        def body(layer: Any, x: Array) -> tuple[Array, None]:
            return layer(x, *args, **kwargs), None

        if self.policy is not None:
            body = nn.remat(body, policy=self.policy, prevent_cse=False)  # the loop itself keeps XLA from merging
        rngs: dict[Any, bool] = {"params": True, "dropout": True}
        names: dict[Any, Any] = {nn.PARTITION_NAME: None}  # layers are not split over devices; their parameters may be
        layers = nn.scan(body, variable_axes=_STACKED, split_rngs=rngs, length=self.num_layers, metadata_params=names)
        return layers(self.layer.clone(parent=self, name="layers"), x)[0]
