"""Checkpoints of arrays on a GPU: checksums are those of NumPy, and what is donated while it is saved is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import checkpoint
from te_jax.checkpoint.checksums import _device_sums, _sums
from te_jax.quant import state
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=4)
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "bool", "int4", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_are_those_of_numpy(dtype):
    x = (np.random.default_rng(0).standard_normal((129, 3, 65)) * 4).astype(jnp.dtype(dtype))
    on_gpu = jax.device_put(x, jax.devices("cuda")[0])
    np.testing.assert_array_equal(_device_sums(on_gpu), _sums(x))


def test_saved_in_the_background_while_donated(tmp_path):
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((2048, 2048)).astype(np.float32)
    fp8 = {name: rng.random(leaf.shape, np.float32) for name, leaf in state.init(8, RECIPE).items()}
    params = {"kernel": kernel, "fp8": kernel.astype(jnp.float8_e4m3fn), "bf16": kernel.astype(jnp.bfloat16)}
    variables = {"params": params, state.COLLECTION: {"m": fp8}}
    gpu, cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]
    write_over = jax.jit(lambda tree: jax.tree.map(lambda x: x * jnp.zeros((), x.dtype), tree), donate_argnums=0)
    with checkpoint.Manager(tmp_path, recipe=RECIPE, async_save=True) as manager:
        for step in range(3):
            tree = jax.device_put(variables, gpu)
            manager.save(step, tree)
            jax.block_until_ready(write_over(tree))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    for device in (gpu, cpu):
        target = jax.device_put(jax.tree.map(np.zeros_like, variables), device)
        for step in range(3):
            out = checkpoint.restore(tmp_path, target, recipe=RECIPE, step=step).variables
            assert_trees_identical(out, variables)
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(out))
