"""Gradient accumulation in main gradients as an H200 gets it: memory, and that nothing moves the buffers."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax import ops
from te_jax.testing import aot

WIDTH, HIDDEN, TOKENS, LAYERS, N = 512, 1024, 512, 5, 3
KERNELS = ((WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH))
TREE = 4 * LAYERS * sum(k * n for k, n in KERNELS)  # bytes of the layers' gradients
DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "block": te.BlockScaling()}


def block():
    layers = [ops.RMSNorm(), ops.Linear(2 * HIDDEN, use_bias=False), ops.SwiGLU(), ops.Linear(WIDTH, use_bias=False)]
    return [ops.StartResidual(), layers, ops.AddResidual()]


class Layer(nn.Module):
    recipe: te.Recipe | None

    @nn.compact
    def __call__(self, x, _):
        return te.Sequential(block(), recipe=self.recipe, dtype=jnp.bfloat16)(x), None


class Model(nn.Module):
    """Layers in a scan; ``policy``: with ``nn.remat``."""

    recipe: te.Recipe | None
    policy: object = None

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False, policy=self.policy) if self.policy else Layer
        axes = {"params": 0, te.state.COLLECTION: 0, te.main_grad.COLLECTION: 0}
        layers = nn.scan(layer, length=LAYERS, variable_axes=axes, split_rngs={"params": True})
        return layers(self.recipe, name="layers")(x, None)[0]


MODELS = {
    "scan": Model,
    "scan, remat": lambda recipe: Model(recipe, policy=jax.checkpoint_policies.nothing_saveable),
    "no scan": lambda recipe: te.Sequential([block() for _ in range(LAYERS)], recipe=recipe, dtype=jnp.bfloat16),
}


def compiled(module, main_grad):
    x = jax.ShapeDtypeStruct((TOKENS * N, WIDTH), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)

    def loss(variables, batch):
        x, y = batch
        return jnp.mean((module.apply(variables, x).astype(jnp.float32) - y) ** 2)

    def gradients(variables, batch):
        return te.accumulate_gradients(loss, variables, batch, num_microbatches=N, main_grad=main_grad)

    return aot.compile_for_h200(gradients, (variables, (x, x)))


def moving_buffers(text):
    """Instructions beside GEMMs that make a buffer, or a stack of them: {computation: names without numbers}."""
    shapes = "|".join(f"(?:{LAYERS},|1,)?{k},{n}" for k, n in KERNELS)
    found, where = collections.defaultdict(set), ""
    for line in text.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            where = header[1]
        made = re.match(rf"\s+(?:ROOT )?%?([a-z_-]+)[\w.-]* = \(?f32\[(?:{shapes})\]\S* ([a-z][\w-]*)\(", line)
        moves = made and made[2] in ("copy", "copy-start", "fusion", "dynamic-slice", "dynamic-update-slice", "add")
        if moves and not where.startswith(("fused", "dynamic-slice-fusion", "wrapped")):
            found[where.partition(".")[0]].add(made[1])
    return dict(found)


@pytest.mark.parametrize(("model", "recipe"), [*((model, "delayed") for model in MODELS), ("scan", "block")])
def test_no_second_tree_of_gradients(model, recipe):
    """Nothing but GEMMs touches the buffers in the loop over microbatches, not even in the stack that layers are.

    Behind it the means are taken. Where layers are a loop, their stack is filled with zeros once (XLA does that to
    everything that a loop makes), and a tree of gradients less is in memory; where they aren't, the ordinary gradients
    are added to the sum one by one, and the saving is but the adding.
    """
    module = MODELS[model](RECIPES[recipe])
    without, having = (compiled(module, main_grad) for main_grad in (False, True))
    saved = without.memory_analysis().temp_size_in_bytes - having.memory_analysis().temp_size_in_bytes
    zeros = set() if model == "no scan" else {"loop_broadcast_fusion"}
    assert moving_buffers(having.as_text()) == {"main": {"loop_multiply_fusion"} | zeros}
    assert set(moving_buffers(without.as_text())) > {"main"}
    assert saved >= (-0.01 if model == "no scan" else 0.95) * TREE
