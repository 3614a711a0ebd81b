"""References for ``te_jax.flax``: the maths of the modules in plain jax.numpy, over their parameter trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = {
    "relu": lambda h: jnp.maximum(h, 0),
    "silu": lambda h: h / (1 + jnp.exp(-h)),
    "gelu": jax.nn.gelu,
    "swiglu": lambda h: ACTIVATIONS["silu"](h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
    "geglu": lambda h: ACTIVATIONS["gelu"](h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
}


def norm(params, x, epsilon=1e-6):
    """RMSNorm, or LayerNorm if there is a bias."""
    if "bias" in params:
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * params["scale"]
    return y + params.get("bias", 0.0)


def linear(params, x):
    return jnp.einsum("...k,kn->...n", x, params["kernel"]) + params.get("bias", 0.0)


def mlp(params, x, activation):
    h = ACTIVATIONS[activation](linear(params["fc1"], norm(params["mlp_norm"], x)))
    return linear(params["fc2"], h)


def rotary(x, positions, base=10000.0):
    """As multiplication by complex numbers: x [T, H, D], positions [T]."""
    half = x.shape[-1] // 2
    z = np.asarray(x[..., :half], np.complex128) + 1j * np.asarray(x[..., half:], np.complex128)
    angle = np.asarray(positions)[:, None, None] * base ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def attention(params, x, heads, kv_heads, head_dim, *, causal, rope):
    """One sequence x [T, C], head by head."""
    h = norm(params["qkv"]["attn_norm"], x) if "attn_norm" in params["qkv"] else x
    qkv = linear(params["qkv"]["qkv_linear"], h).reshape(len(x), heads + 2 * kv_heads, head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if rope:
        q, k = rotary(q, np.arange(len(x))), rotary(k, np.arange(len(x)))
    context = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        logits = q[:, head] @ k[:, group].T / np.sqrt(head_dim)
        if causal:
            logits = jnp.where(np.tri(len(x), dtype=bool), logits, -jnp.inf)
        context.append(jax.nn.softmax(logits, axis=-1) @ v[:, group])
    return linear(params["proj"]["attn_proj"], jnp.concatenate(context, -1))
