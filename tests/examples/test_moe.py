"""The mixture of experts: routing and exchange against plain NumPy, one device against eight, FP8 against bf16."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.testing import hlo, oracle

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import moe
import moe_layer

T, C, HIDDEN, EXPERTS, DEVICES = 12, 32, 16, 16, 8


def numpy_moe(params, x):
    """[T, C] -> (y, balance loss) in fp64, token by token."""
    x = oracle.f64(x)
    logits = x @ oracle.f64(params["router"]["kernel"])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1)[:, :2]
    fc1, fc2 = (oracle.f64(params["experts"][name]["kernel"]) for name in ("expert_fc1", "expert_fc2"))
    y = np.zeros_like(x)
    for t, experts in enumerate(chosen):
        weights = probabilities[t, experts] / probabilities[t, experts].sum()
        for weight, e in zip(weights, experts, strict=True):
            gate, value = np.split(x[t] @ fc1[e], 2)
            y[t] += weight * (gate / (1 + np.exp(-gate)) * value) @ fc2[e]
    share = np.bincount(chosen.reshape(-1), minlength=EXPERTS) / chosen.size
    return y, EXPERTS * np.sum(share * probabilities.mean(0))


def test_experts_on_eight_devices_are_those_of_one():
    """Values, gradients and FP8 state; no token is lost however unequal the experts' shares are."""
    recipe = te.DelayedScaling(amax_history_len=2)
    fields = {"num_experts": EXPERTS, "hidden_features": HIDDEN, "dtype": jnp.float32}
    whole = moe_layer.MoE(recipe=recipe, **fields)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(DEVICES * T, C)), jnp.float32)
    x = x.at[: 3 * T].set(x[:1])  # three devices send all of their tokens to two experts
    variables = jax.jit(whole.init)(jax.random.key(0), x)
    exact = moe_layer.MoE(**fields)
    y, balance = jax.jit(exact.apply)({"params": variables["params"]}, x)
    want, want_balance = numpy_moe(variables["params"], x)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(balance, want_balance, rtol=1e-5)

    def loss(module, variables, x):
        y, balance = module.apply(variables, x)
        total = jnp.sum(jnp.square(y)) / len(x)
        if module.axis is not None:
            total = jax.lax.pmean(total, module.axis)
        return total + balance, y

    split = moe_layer.MoE(recipe=recipe, axis=moe.AXIS, **fields)
    mesh = jax.make_mesh((DEVICES,), (moe.AXIS,))
    specs = moe.specs_of(variables)
    step = jax.jit(
        jax.shard_map(
            lambda v, x: jax.value_and_grad(lambda v: loss(split, v, x), has_aux=True)(v),
            mesh=mesh,
            in_specs=(specs, P(moe.AXIS)),
            out_specs=((P(), P(moe.AXIS)), specs),
        )
    )
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), variables, specs)
    compiled = step.lower(sharded, jax.device_put(x, NamedSharding(mesh, P(moe.AXIS)))).compile()
    assert {"all-to-all"} <= set(hlo.count_collectives(compiled.as_text())) <= {"all-to-all", "all-reduce"}
    (total, y), grads = compiled(sharded, jax.device_put(x, NamedSharding(mesh, P(moe.AXIS))))
    (want_total, want_y), want_grads = jax.jit(jax.value_and_grad(lambda v: loss(whole, v, x), has_aux=True))(variables)
    np.testing.assert_allclose(total, want_total, rtol=1e-5)
    np.testing.assert_allclose(oracle.f64(y), oracle.f64(want_y), rtol=1e-4, atol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        a, b = oracle.f64(a), oracle.f64(b)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 8), (8, 0, 0)], ids=str)
def test_buffers_and_back(counts):
    counts, rows = jnp.array(counts), jnp.arange(16.0).reshape(8, 2)
    buffers = moe_layer.to_buffers(rows, counts)
    start = 0
    for buffer, count in zip(np.asarray(buffers), counts, strict=True):
        np.testing.assert_array_equal(buffer[:count], rows[start : start + count])
        start += int(count)
    np.testing.assert_array_equal(moe_layer.from_buffers(buffers, counts), rows)


def test_fp8_learns_what_bf16_learns(capsys):
    sizes = (
        "--steps 40 --devices 4 --width 32 --hidden 32 --heads 2 --seq 32 --batch 16 --experts 8 --learning-rate 1e-2"
    )
    moe.main([*sizes.split(), "--recipe", "delayed"])
    line = capsys.readouterr().out.splitlines()[-1]
    fp8, bf16, unigram = map(float, re.findall(r"(\d\.\d{4})", line))
    assert abs(fp8 / bf16 - 1) < 0.01, line
    assert bf16 < unigram, line
