"""Kernels that start while the ones before them end (csrc/kernels/launch.cuh) see what those have written."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.testing.bits import assert_same_bits

STEPS = 16


def step(x, gamma, scale):
    """Passes that read what the one before wrote, in memory that XLA uses again and again, and a kernel of XLA's."""
    n = P.norm(x, gamma, None, scale, P.NormSpec(kind="rmsnorm", format="e4m3", data_t=True, amax=True, stats=True))
    x = -P.dequantize(n.data, n.scale_inv, P.DequantizeSpec(out_dtype="bfloat16"))
    q = P.quantize(x, scale, P.QuantizeSpec(format="e4m3", data=False, data_t=True, amax=True, dbias=True))
    y = P.dequantize(q.data_t, q.scale_inv, P.DequantizeSpec(out_dtype="bfloat16"))
    a = P.activation(y, scale, P.ActivationSpec(kind="gelu", format="e4m3", data=False, data_t=True, amax=True))
    x = P.dequantize(a.data_t, a.scale_inv, P.DequantizeSpec(out_dtype="bfloat16"))
    return x, (n.amax, n.rstd, n.data_t, q.amax, q.dbias, a.amax, a.scale)


def unrolled(x, gamma, scale):
    outs = []
    for _ in range(STEPS):
        x, out = step(x, gamma, scale)
        outs.append(out)
    return x, jax.tree.map(lambda *values: jnp.stack(values), *outs)


def looped(x, gamma, scale):
    return jax.lax.scan(lambda x, _: step(x, gamma, scale), x, None, length=STEPS)


@pytest.mark.parametrize("whole", [unrolled, looped])
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("shape", [(16, 64), (256, 512), (2048, 1024)], ids=str)
def test_one_program_gives_the_bits_of_separate_calls(on, shape, scale, whole):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    gamma = rng.uniform(0.5, 2, shape[-1]).astype(np.float32)

    device = jax.devices("cuda")[0]
    operands = jax.device_put((x, gamma, np.float32(scale)), device)
    one = jax.jit(step)
    last, outs = operands[0], []
    for _ in range(STEPS):
        last, out = jax.block_until_ready(one(last, *operands[1:]))
        outs.append(out)
    assert float(outs[-1][0]) > 0
    expected = jax.tree.map(lambda *values: np.stack(values), *outs)

    program = jax.jit(whole)
    for _ in range(5):  # XLA captures what it has seen before
        got_last, got = program(*operands)
        assert_same_bits(np.asarray(got_last), np.asarray(last))
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(np.asarray(a), b)
