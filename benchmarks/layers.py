"""A transformer layer and a language model's train step, in te_jax, plain Flax in bf16 and TransformerEngine."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from peers import BF16, FAST, FlaxMlp

import te_jax as te
from te_jax.testing import bench

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a causal pre-norm layer with RoPE, grouped-query attention and a SwiGLU MLP, no biases."""

    batch: int = 2
    seq: int = 4096
    features: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8

    @property
    def x_shape(self) -> tuple[int, int, int]:
        return self.batch, self.seq, self.features

    @property
    def flops(self) -> int:
        """Of a layer, forward and backward: its linears, and the half of the attention matrix that is causal."""
        tokens, head_dim = self.batch * self.seq, self.features // self.heads
        qkv = self.features * (self.heads + 2 * self.kv_heads) * head_dim
        linears = qkv + self.features**2 + 3 * self.features * self.hidden
        attention = self.seq * self.features  # two products, half of them masked
        return 3 * 2 * tokens * (linears + attention)

    def scaled(self, by: int) -> Size:
        heads, kv_heads = max(2, self.heads // by), max(1, self.kv_heads // by)
        return Size(self.batch, self.seq // by, self.features // by, self.hidden // by, heads, kv_heads)


RECIPES = {
    "delayed": te.DelayedScaling(**FAST),
    "current": te.CurrentScaling(**FAST),
    "delayed_default": te.DelayedScaling(),
    "block": te.BlockScaling(),
    "none": None,
}


class FlaxLayer(nn.Module):
    """The layer as one writes it in Flax, attention through jax.nn with cuDNN where that is."""

    size: Size
    attention: str | None = None
    param_dtype: Any = BF16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, head_dim = self.size, self.size.features // self.size.heads

        def dense(n, name):
            return nn.Dense(n, use_bias=False, dtype=BF16, param_dtype=self.param_dtype, name=name)

        h = nn.RMSNorm(dtype=BF16, param_dtype=self.param_dtype, name="attn_norm")(x)
        heads = size.heads + 2 * size.kv_heads
        qkv = dense(heads * head_dim, "qkv")(h).reshape(*x.shape[:-1], heads, head_dim)
        query, key, value = jnp.split(qkv, (size.heads, size.heads + size.kv_heads), axis=-2)
        positions = jnp.arange(x.shape[-2])
        query, key = (te.flax.apply_rotary(t, positions) for t in (query, key))
        context = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=self.attention)
        x = x + dense(size.features, "proj")(context.reshape(x.shape))
        return x + FlaxMlp(size.hidden, param_dtype=self.param_dtype, name="mlp")(x)


def te_layer(size: Size, recipe, **options) -> te.flax.TransformerLayer:
    return te.flax.TransformerLayer(
        num_heads=size.heads, num_kv_heads=size.kv_heads, hidden_features=size.hidden, recipe=recipe, dtype=BF16,
        **options,
    )  # fmt: skip


def _transformer_engine_layers(size: Size) -> dict[str, tuple]:
    try:
        import transformer_engine.jax as te_peer
        import transformer_engine.jax.flax as te_flax
        from transformer_engine.common import recipe as te_recipe
    except (ImportError, OSError, RuntimeError):
        return {}
    # deterministic=False is what tells its attention that it trains; nothing is dropped.
    layer = te_flax.TransformerLayer(
        hidden_size=size.features, mlp_hidden_size=size.hidden, num_attention_heads=size.heads,
        num_gqa_groups=size.kv_heads, layernorm_type="rmsnorm", hidden_dropout=0.0, attention_dropout=0.0,
        intermediate_dropout=0.0, mlp_activations=("silu", "linear"), use_bias=False, dtype=BF16,
        layer_type=te_flax.TransformerLayerType.ENCODER, self_attn_mask_type="causal",
        enable_relative_embedding=False, enable_rotary_pos_emb=True,
    )  # fmt: skip
    recipes = {"bf16": None, "delayed": te_recipe.DelayedScaling(), "current": te_recipe.Float8CurrentScaling()}
    return {
        f"te {name}": (
            layer, {"deterministic": False}, lambda r=r: te_peer.autocast(enabled=r is not None, recipe=r)
        )
        for name, r in recipes.items()
    }  # fmt: skip


def layer_steps(size: Size, wanted: list[str] | None = None) -> dict[str, tuple[Callable, Callable, tuple, tuple]]:
    """name -> (forward, forward and backward, their arguments), jitted."""
    on_gpu = jax.default_backend() == "gpu"
    ours = {
        f"te_jax {n}": (te_layer(size, r, param_dtype=BF16), {}, contextlib.nullcontext) for n, r in RECIPES.items()
    }
    flax = {"flax bf16": (FlaxLayer(size, "cudnn" if on_gpu else None), {}, contextlib.nullcontext)}
    x = jax.random.normal(jax.random.key(1), size.x_shape, BF16)
    dy = jax.random.normal(jax.random.key(2), size.x_shape, BF16)
    out = {}
    for name, (module, kwargs, context) in (ours | flax | _transformer_engine_layers(size)).items():
        if wanted and name not in wanted:
            continue
        with context():
            init = jax.jit(lambda x, m=module, kw=kwargs: m.init(jax.random.key(0), x, **kw))
            variables = meta.unbox(init(x))

            def forward(variables, x, module=module, kwargs=kwargs):
                y = module.apply(variables, x, **kwargs)
                return y[0] if isinstance(y, tuple) else y

            def both(variables, x, dy, forward=forward):
                y, vjp = jax.vjp(forward, variables, x)
                return y, vjp(dy)

            programs = (
                jax.jit(forward).lower(variables, x).compile(),
                jax.jit(both).lower(variables, x, dy).compile(),
            )
        for _ in range(3 if len(variables) > 1 else 0):  # FP8 state of the data
            _, (grads, _) = programs[1](variables, x, dy)
            variables = {"params": variables["params"]} | {k: v for k, v in grads.items() if k != "params"}
        out[name] = (*programs, (variables, x), (variables, x, dy))
    return out


class FlaxLanguageModel(nn.Module):
    """As examples/lm_model.py, in plain Flax with bf16 computation and float32 parameters."""

    size: Size
    layers: int
    vocabulary: int
    attention: str | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.size.features, dtype=BF16, name="embed")(tokens)
        layers = nn.scan(_ScanFlaxLayer, length=self.layers, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = layers(self.size, self.attention, name="layers")(x, None)
        x = nn.RMSNorm(dtype=BF16, name="norm")(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=BF16, name="dense")(x).astype(jnp.float32)


class _ScanFlaxLayer(nn.Module):
    size: Size
    attention: str | None

    @nn.compact
    def __call__(self, x, _):
        return FlaxLayer(self.size, self.attention, jnp.float32, name="layer")(x), None


def flax_params(p: dict) -> dict:
    """The parameters of ``FlaxLanguageModel`` that make it examples/lm_model.py's model of parameters ``p``."""
    attention, mlp = p["layers"]["attn"], p["layers"]["mlp"]
    layer = {
        "attn_norm": attention["qkv"]["attn_norm"],
        "qkv": attention["qkv"]["qkv_linear"],
        "proj": attention["proj"]["attn_proj"],
        "mlp": {"RMSNorm_0": mlp["mlp_norm"], "Dense_0": mlp["fc1"], "Dense_1": mlp["fc2"]},
    }
    return {"embed": p["embed"], "layers": {"layer": layer}, **p["head"]}


def language_model(size: Size, layers: int, recipe: te.Recipe | None) -> nn.Module:
    """The model of examples/train_lm.py at that size."""
    import lm_data
    import lm_model

    return lm_model.LanguageModel(
        vocabulary=lm_data.VOCABULARY, layers=layers, width=size.features, heads=size.heads, kv_heads=size.kv_heads,
        hidden_features=size.hidden, recipe=recipe,
    )  # fmt: skip


def train_step(size: Size, layers: int, name: str) -> tuple[Callable[[Any, jax.Array], Any], Any, jax.Array]:
    """(step(state, tokens) -> (state, loss), state, tokens): the step of examples/train_lm.py, its state donated.

    ``name`` is "te_jax " + a recipe, or "flax bf16". All start from the same parameters, in float32.
    """
    import lm_data
    import train_lm

    args = train_lm.parse_args(["--out", "unused"])
    flax = name == "flax bf16"
    model = language_model(size, layers, None if flax else RECIPES[name.removeprefix("te_jax ")])
    optimizer = train_lm.make_optimizer(args)
    tokens = jax.random.randint(jax.random.key(3), (size.batch, size.seq + 1), 0, lm_data.VOCABULARY)
    state = train_lm.init_state(model, optimizer, 0, tokens)
    if flax:
        params = flax_params(state.params)
        state = train_lm.TrainState.of({"params": params}, jax.jit(optimizer.init)(params))
        model = FlaxLanguageModel(size, layers, lm_data.VOCABULARY, "cudnn" if jax.default_backend() == "gpu" else None)
    step = jax.jit(lambda state, tokens: train_lm.train_step(model, optimizer, state, tokens), donate_argnums=0)
    return step, state, tokens


def layer_bursts(steps: dict[str, tuple]) -> dict[tuple[str, str], bench.Burst]:
    out = {}
    for name, (forward, both, args, both_args) in steps.items():
        out["fwd", name] = bench.burst_of(forward, *args)
        out["fwd_bwd", name] = bench.burst_of(both, *both_args)
    return out
