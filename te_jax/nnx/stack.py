"""LayerStack: the same nnx layer many times, scanned over, with a remat policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from te_jax.errors import check_type, check_value
from te_jax.remat import Policy

_LAYERS = {nnx.PARTITION_NAME: None}  # the dimension of the layers, in the names of how a parameter is split


class LayerStack(nnx.Module):
    """y = layer(... layer(x)): ``num_layers`` times; ``layers`` is one module whose variables are stacked.

    One ``nnx.scan``, whose layers keep for the backward pass what ``policy`` says. It is the scan whose copies to and
    from host memory hide under compute, if the step is compiled by ``te.remat.jit`` (docs/offload.md). Variables have
    the paths of ``te.flax.LayerStack``.
    """

    def __init__(
        self,
        make_layer: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        policy: Policy | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          make_layer: ``lambda rngs: te.nnx.TransformerLayer(..., rngs=rngs)``: x -> y of the type of x.
          num_layers: how many.
          policy: of ``te.remat.policy``; None: everything is kept, on the device.
          rngs: split over the layers.
        """
        check_type(callable(make_layer), "nnx.LayerStack", "make_layer", "a function of nnx.Rngs", repr(make_layer))
        ok = isinstance(num_layers, int) and num_layers > 0
        check_value(ok, "nnx.LayerStack", "num_layers", "a positive int", repr(num_layers))
        ok = policy is None or callable(policy)
        check_type(ok, "nnx.LayerStack", "policy", "None or a policy of te.remat.policy(...)", repr(policy))
        self.policy = policy
        create = nnx.vmap(make_layer, in_axes=0, out_axes=0, transform_metadata=_LAYERS)
        self.layers: Any = nnx.split_rngs(splits=num_layers)(create)(rngs)

    def __call__(self, x: Array, **kwargs: Any) -> Array:
        """x, and what every layer gets beside it: ``positions``, ``deterministic``, ``use_running_average``."""
        kept: set[Any] = set()  # variables that a layer leaves as they are; a remat gives all of them new values

        def body(x: Array, layer: Any) -> Array:
            before = {path: variable.get_raw_value() for path, variable in _variables(layer).items()}
            y = layer(x, **kwargs)
            after = _variables(layer)
            same = (path for path in before if path in after and after[path].get_raw_value() is before[path])
            kept.update(same)
            return y

        if self.policy is not None:
            body = nnx.remat(body, policy=self.policy, prevent_cse=False)  # the loop itself keeps XLA from merging
        before = {path: (variable, variable.get_raw_value()) for path, variable in _variables(self.layers).items()}
        y = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=_LAYERS)(x, self.layers)
        for path in kept:
            variable, value = before[path]
            variable.set_raw_value(value)
        return y


def _variables(layer: Any) -> dict[Any, nnx.Variable]:
    return {path: node for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)}
