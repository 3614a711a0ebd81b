"""A mixture of experts with expert parallelism: top-k routing, all_to_all to the experts' devices and back.

Inside of ``shard_map`` over ``axis`` a device has T tokens of its own and ``num_experts`` / devices of the experts. No
token is dropped: a device may send all of its tokens to one other, so that is what buffers hold. Where they are not
full, rows belong to no group of the grouped linears, which do nothing for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

import te_jax as te
from te_jax import ops


class Routing(NamedTuple):
    """Of T tokens to k experts each; rows are (token, choice) pairs."""

    experts: Array  # i32[T, k]
    weights: Array  # f32[T, k], sum 1
    balance_loss: Array  # f32[]: 1 if all experts have the same share of the tokens


class Router(nn.Module):
    """Top-k of a softmax over the experts. All of it float32: a rounding here sends a token elsewhere."""

    num_experts: int
    top_k: int
    axis: str | None

    @nn.compact
    def __call__(self, x: Array) -> Routing:
        """x [T, C]."""
        x = te.remat.name(x, "router_fc1")
        init = nn.initializers.normal(0.02)
        kernel = self.param("kernel", init, (x.shape[-1], self.num_experts), jnp.float32)
        probabilities = jax.nn.softmax(jnp.dot(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST))
        weights, experts = lax.top_k(probabilities, self.top_k)
        # Switch Transformer (arXiv:2101.03961), eq. 4: the share of an expert times its mean probability.
        share = jnp.mean(jax.nn.one_hot(experts, self.num_experts), axis=(0, 1))
        mean = jnp.mean(probabilities, axis=0)
        if self.axis is not None:
            share, mean = lax.pmean((share, mean), self.axis)
        loss = self.num_experts * jnp.sum(lax.stop_gradient(share) * mean)
        return Routing(experts, weights / weights.sum(-1, keepdims=True), loss)


class MoE(nn.Module):
    """x [T, C] -> (y [T, C], balance loss): the weighted sum of each token's top-k experts, gated MLPs.

    Attributes:
      num_experts: of all devices.
      hidden_features: of an expert, behind its SwiGLU.
      axis: the mesh axis that experts are split over; None: all of them are here.
      recipe, dtype: of the experts.
    """

    num_experts: int
    hidden_features: int
    top_k: int = 2
    axis: str | None = None
    recipe: te.Recipe | None = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        devices = 1 if self.axis is None else lax.axis_size(self.axis)
        local = self.num_experts // devices
        if local * devices != self.num_experts:
            raise ValueError(f"MoE: num_experts: expected a multiple of {devices} devices, got {self.num_experts}")
        routing = Router(self.num_experts, self.top_k, self.axis, name="router")(x)
        sent = sort_rows(routing.experts.reshape(-1), self.num_experts)
        rows = x.astype(self.dtype)[sent.order // self.top_k]  # by expert, so by device too

        counts = sent.counts.reshape(devices, local)
        buffers = to_buffers(rows, counts.sum(1))  # [devices, rows, C]: what goes to each device
        arrived, arrived_counts = exchange(buffers, self.axis), exchange(counts, self.axis)  # from each device
        here = sort_rows(experts_of_rows(arrived_counts, arrived.shape[1]).reshape(-1), local)
        experts = te.Sequential(
            [
                ops.GroupedLinear(local, 2 * self.hidden_features, use_bias=False, sizes="experts", name="expert_fc1"),
                ops.SwiGLU(name="moe_act"),
                ops.GroupedLinear(local, x.shape[-1], use_bias=False, sizes="experts", name="expert_fc2"),
            ],
            recipe=self.recipe,
            dtype=self.dtype,
            name="experts",
        )
        y = experts(arrived.reshape(-1, x.shape[-1])[here.order], here.counts)
        back = exchange(y[here.inverse].reshape(arrived.shape), self.axis)
        y = from_buffers(back, counts.sum(1))[sent.inverse].reshape(*routing.weights.shape, -1)
        y = te.remat.name(y, "moe_mlpwo")  # the gradient of the weights reads it
        return jnp.einsum("tk,tkc->tc", routing.weights, y.astype(jnp.float32)).astype(x.dtype), routing.balance_loss


class Sorted(NamedTuple):
    """Rows by key, in the order that they had among those of one key."""

    order: Array  # i32[rows]: which row comes where
    inverse: Array  # i32[rows]: where a row has come
    counts: Array  # i32[keys]: rows of every key; those with a key of ``keys`` or above are last, and not counted


def sort_rows(keys: Array, num_keys: int) -> Sorted:
    order = jnp.argsort(keys, stable=True)
    counts = jnp.sum(keys[:, None] == jnp.arange(num_keys), axis=0, dtype=jnp.int32)
    return Sorted(order, jnp.argsort(order, stable=True), counts)


def to_buffers(rows: Array, sizes: Array) -> Array:
    """[D, R, C]: buffer d begins with the d-th of D successive parts of rows [R, C]; what is behind has no meaning."""
    starts = jnp.cumsum(sizes) - sizes
    return rows[jnp.minimum(starts[:, None] + jnp.arange(len(rows)), len(rows) - 1)]


def from_buffers(buffers: Array, sizes: Array) -> Array:
    """[R, C]: the inverse."""
    place = jnp.arange(buffers.shape[1])
    ends = jnp.cumsum(sizes)
    part = jnp.sum(place[:, None] >= ends, axis=1)
    return buffers[part, place - (ends - sizes)[part]]


def experts_of_rows(counts: Array, rows: int) -> Array:
    """i32[D, rows]: which expert of this device a row is for; their number for one that has no meaning."""
    ends = jnp.cumsum(counts, axis=1)  # [D, local]
    return jnp.sum(jnp.arange(rows)[:, None] >= ends[:, None], axis=2)


def exchange(x: Array, axis: str | None) -> Array:
    """x[d] goes to device d, and the result's [d] has come from it."""
    return x if axis is None else lax.all_to_all(x, axis, 0, 0, tiled=True)
