"""An MLP of Auto and of Explicit axes compiled for four H200: its collectives are in its products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.testing import aot, hlo

X, HIDDEN = (2, 8192, 4096), 8192
WHOLE_X = jax.ShapeDtypeStruct(X, jnp.bfloat16)
SPECS = {"up": P(None, "tp"), "down": P("tp")}


def compiled(module, variables, specs, kind):
    """The gradient's program for 2x2 H200: variables split as specs say, x over data and tp."""
    mesh = Mesh(np.array(aot.h200(4)).reshape(2, 2), ("data", "tp"), axis_types=(kind, kind))

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def loss(variables, x):
        return jnp.mean(module.apply(variables, x).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        args = jax.tree.map(placed, variables, specs), placed(WHOLE_X, P("data", "tp"))
        grad = jax.jit(jax.grad(loss, (0, 1)), out_shardings=jax.tree.map(lambda a: a.sharding, args))
        return grad.lower(*args).compile(compiler_options=aot.COMPILER_OPTIONS).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_no_collective_of_activations(kind):
    chain = te.Sequential(
        [
            ops.RMSNorm(),
            ops.AllGather("tp"),
            ops.Linear(HIDDEN, name="up"),
            ops.GELU(),
            ops.Linear(X[-1], name="down"),
            ops.ReduceScatter("tp"),
        ],
        recipe=te.DelayedScaling(),
        dtype=jnp.bfloat16,
    )
    variables = jax.eval_shape(chain.init, jax.random.key(0), WHOLE_X)

    def spec_of(path, leaf):
        name = next((key.key for key in path if key.key in SPECS), None)
        return SPECS[name] if name and leaf.ndim == 2 else P("tp") if name == "up" else P()

    specs = jax.tree_util.tree_map_with_path(spec_of, variables)

    text = compiled(chain, variables, specs, kind)
    calls = hlo.count_custom_calls(text)
    # Each of two linears: forward and dgrad with a collective, wgrad without.
    assert (calls["te_jax_collective_gemm"], calls["te_jax_gemm"]) == (4, 2)
    # Gradients are summed over the data axis. No activation travels by itself, of which a device has 2 M elements.
    assert set(hlo.count_collectives(text)) == {"all-reduce"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_no_collective_of_a_gated_mlp(kind):
    """The halves of fc1 are kept as [K, 2, H], split over H, and no matrix moves."""
    module = te.flax.LayerNormMLP(
        X[-1], HIDDEN, recipe=te.DelayedScaling(), dtype=jnp.bfloat16, tensor_axis="tp", sequence_parallel=True
    )
    boxed = jax.eval_shape(module.init, jax.random.key(0), WHOLE_X)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)

    text = compiled(module, variables, specs, kind)
    calls = hlo.count_custom_calls(text)
    assert (calls["te_jax_collective_gemm"], calls["te_jax_gemm"]) == (4, 2)
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
