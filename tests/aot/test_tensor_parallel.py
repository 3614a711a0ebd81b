"""The step of a tensor-parallel layer compiled for two H200: its collectives are in its products."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.testing import aot, hlo

X, WIDTH, HIDDEN = (1, 8192, 4096), 4096, 8192
TOKENS = P(None, "tp")


# All-reduces after XLA has combined them; one is that of the gradients of the two norms. Scales that may be without
# history come from an amax for which each of the eight tensors in parts (x and dy of four linears) waits. The amaxes of
# all twelve quantizers, for the state, make one more.
@pytest.mark.parametrize(("initial_scale", "all_reduces", "passes"), [(None, 10, 24), (1.0, 2, 12)])
def test_a_layer_has_no_collective_of_a_matrix(initial_scale, all_reduces, passes):
    layer = te.flax.TransformerLayer(
        32,
        HIDDEN,
        num_kv_heads=8,
        recipe=te.DelayedScaling(initial_scale=initial_scale),
        dtype=jnp.bfloat16,
        tensor_axis="tp",
        sequence_parallel=True,
    )
    mesh = Mesh(np.array(aot.h200(2)), ("tp",))
    x = jax.ShapeDtypeStruct(X, jnp.bfloat16)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), x)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)

    def loss(variables, x):
        return jax.lax.pmean(jnp.mean(layer.apply(variables, x).astype(jnp.float32) ** 2), "tp")

    grad = jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=(specs, TOKENS), out_specs=P()), argnums=(0, 1))
    args = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        (variables, x),
        (specs, TOKENS),
    )
    compiled = jax.jit(grad).lower(*args).compile(compiler_options=aot.COMPILER_OPTIONS)
    text = compiled.as_text()
    # Each of four linears: forward and dgrad with a collective, wgrad without.
    calls = hlo.count_custom_calls(text)
    assert (calls["te_jax_collective_gemm"], calls["te_jax_gemm"]) == (8, 4)
    assert sum(calls[f"te_jax_{name}"] for name in ("quantize", "norm", "activation", "activation_grad")) == passes
    assert hlo.count_collectives(text) == {"all-reduce": all_reduces}
    shapes = re.findall(r"= (\([^=]*?\)|\S+) all-reduce(?:-start)?\(", text)
    sizes = [
        int(np.prod([int(n) for n in dims.split(",") if n])) for s in shapes for dims in re.findall(r"\[([\d,]*)\]", s)
    ]
    assert max(sizes) <= 2 * WIDTH, sizes  # gradients of the two norms; the others are amaxes and the loss
