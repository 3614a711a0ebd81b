"""Attention that is cuDNN's on CUDA: the reference against fp64, the custom calls against jax's, and the regimes."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.flax.core_attention import core_attention, why_not_cudnn
from te_jax.primitives import AttentionGradSpec, AttentionSpec, attention, attention_grad, support
from te_jax.testing import hlo

B, T, S, HEADS, GROUPS, D = 4, 24, 24, 4, 2, 16


def arrays(dtype=jnp.bfloat16, batch=(B,)):
    rng = np.random.default_rng(0)
    shapes = [(*batch, T, HEADS, D), (*batch, S, GROUPS, D), (*batch, S, GROUPS, D), (*batch, T, HEADS, D)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def value_and_grads(attend, q, k, v, dout):
    out, vjp = jax.vjp(attend, q, k, v)
    return (out, *vjp(dout))


def attend(causal=True, implementation=None):
    def function(q, k, v):
        return core_attention(q, k, v, causal=causal, implementation=implementation)

    return function


def fp64(q, k, v, dout, causal):
    """(out, dq, dk, dv) of [B, T, H, D], from the definition."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    k, v = (np.repeat(x, HEADS // GROUPS, axis=-2) for x in (k, v))
    z = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    if causal:
        z = np.where(np.tril(np.ones((T, S), bool)), z, -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bshd->bhts", dout, v)
    dz = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(D)
    dk, dv = np.einsum("bhts,bthd->bshd", dz, q), np.einsum("bhts,bthd->bshd", p, dout)
    dk, dv = (x.reshape(B, S, GROUPS, -1, D).sum(3) for x in (dk, dv))
    return np.einsum("bhts,bshd->bthd", p, v), np.einsum("bhts,bshd->bthd", dz, k), dk, dv


def assert_close(got, want, tolerance=0.01):
    """Relative error in the Frobenius norm; 0.01 is three roundings to bfloat16."""
    assert len(got) == len(want)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_values_and_gradients(dtype, causal):
    operands = arrays(dtype)
    got = jax.jit(lambda *x: value_and_grads(attend(causal), *x))(*operands)
    assert all(x.dtype == dtype for x in got)
    tolerance = {jnp.bfloat16: 0.01, jnp.float16: 0.002, jnp.float32: 1e-5}[dtype]
    assert_close(got, fp64(*operands, causal), tolerance)
    assert_close((attend(causal)(*operands[:3]),), got[:1])  # not differentiated


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_float16_with_a_single_key_is_its_value(tokens, implementation):
    """What is computed in float32 because XLA's GPU compiler doesn't do it in float16 (core_attention)."""
    rng = np.random.default_rng(0)
    shapes = [(B, tokens, 2, D), (B, 1, 2, D), (B, 1, 2, D), (B, tokens, 2, D)]
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in shapes)
    out, dq, dk, dv = value_and_grads(attend(causal=False, implementation=implementation), q, k, v, dout)
    assert {x.dtype for x in (out, dq, dk, dv)} == {jnp.dtype(jnp.float16)}
    np.testing.assert_array_equal(out, np.broadcast_to(v, q.shape))
    assert_close((out, dv), (out, np.asarray(dout, np.float64).sum(1, keepdims=True)), 0.001)
    assert max(np.abs(dq).max(), np.abs(dk).max()) <= 0.01


# The program for CUDA, whatever the process has.


def lowered_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def _unescaped(text):
    """MLIR writes a character that it escapes as a backslash and two hexadecimal digits."""
    return re.sub(r"\\([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), text)


def cudnn_calls(text):
    """(target, parsed configuration, types of operands and results, layouts) of each call of cuDNN."""
    found = []
    for line in text.splitlines():
        target = re.search(r"stablehlo\.custom_call @(__cudnn\$\w+)", line)
        if target:
            config = re.search(r'backend_config = "(.*?)(?<!\\)"', line)[1]
            layouts = re.findall(r"(?:operand|result)_layouts = \[.*?\](?=[,}])", line)
            types = line.rpartition(" : ")[2]
            found.append((target[1], json.loads(_unescaped(config)), types, layouts))
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_custom_calls_are_those_of_jax(monkeypatch, dtype, causal):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91400)

    def jaxs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    operands = arrays(dtype)
    for steps in (lambda f: f, lambda f: lambda q, k, v: value_and_grads(f, q, k, v, operands[3])):
        got, want = (cudnn_calls(lowered_for_cuda(steps(f), *operands[:3])) for f in (attend(causal), jaxs))
        assert [call[0] for call in got] == [call[0] for call in want]
        assert got == want
    assert len(got) == 2


def test_one_trace_lowers_for_both_platforms():
    operands = arrays()
    traced = jax.jit(lambda *x: value_and_grads(attend(), *x)).trace(*operands)
    for platform, calls in (("cpu", 0), ("cuda", 2)):
        assert len(cudnn_calls(traced.lower(lowering_platforms=(platform,)).as_text())) == calls
    exported = jax.export.export(
        jax.jit(lambda *x: value_and_grads(attend(), *x)),
        platforms=("cpu", "cuda"),
        disabled_checks=support.export_checks(),
    )(*operands)
    assert "__cudnn$fmhaSoftmaxBackward" in exported.mlir_module()
    assert_close(exported.call(*operands), fp64(*operands, True))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(jnp.float32, 16, "float32 is not"), (jnp.bfloat16, 12, "head_dim 12"), (jnp.bfloat16, 136, "head_dim 136")],
)
def test_what_cudnn_does_not_take_is_xlas(dtype, head_dim, reason):
    q = jnp.ones((1, 8, 2, head_dim), dtype)
    assert_xlas(reason, q, q)


def test_cudnn_takes_no_single_query_with_a_single_key():
    one, two = (jnp.ones((1, tokens, 2, 16), jnp.bfloat16) for tokens in (1, 2))
    assert_xlas("a single query and a single key", one, one)
    for q, k in ((one, two), (two, one)):
        assert why_not_cudnn(q, k) is None
        assert len(cudnn_calls(lowered_for_cuda(attend(), q, k, k))) == 1


def assert_xlas(reason, q, k):
    assert reason in why_not_cudnn(q, k)
    assert cudnn_calls(lowered_for_cuda(attend(), q, k, k)) == []
    with pytest.raises(ValueError, match=f"implementation='cudnn': .*{reason}"):
        attend(implementation="cudnn")(q, k, k)


def test_what_no_platform_takes_is_named():
    q, k, stats = jnp.ones((B, T, GROUPS, 2, D), jnp.bfloat16), jnp.ones((B, S, GROUPS, D), jnp.bfloat16), jnp.ones(3)
    spec, grad = AttentionSpec(causal=False, scale=1.0), AttentionGradSpec(causal=False, scale=1.0)
    with pytest.raises(ValueError, match=r"attention: v: expected shape \(4, 24, 2, 16\), got \(4, 23, 2, 16\)"):
        attention(q, k, k[:, 1:], spec)
    with pytest.raises(TypeError, match="attention: k: expected q's dtype bfloat16, got float32"):
        attention(q, k.astype(jnp.float32), k, spec)
    with pytest.raises(ValueError, match=r"attention_grad: stats: expected shape \(4, 2, 2, 24\), got \(3,\)"):
        attention_grad(q, k, k, stats, q, q, grad)


def test_xla_when_asked():
    assert cudnn_calls(lowered_for_cuda(attend(implementation="xla"), *arrays()[:3])) == []
    assert len(cudnn_calls(lowered_for_cuda(attend(implementation="cudnn"), *arrays()[:3]))) == 1


def test_vmap_is_one_call():
    operands = arrays(batch=(3, B))
    vmapped = jax.vmap(lambda *x: value_and_grads(attend(), *x))
    got = jax.jit(vmapped)(*operands)
    for i in range(3):
        assert_close([x[i] for x in got], fp64(*(x[i] for x in operands), True))
    calls = cudnn_calls(lowered_for_cuda(vmapped, *operands))
    assert len(calls) == 2
    assert all(f"tensor<{3 * B}x{T}x{HEADS}x{D}xbf16>" in call[2] for call in calls)
    shared = jax.vmap(attend(), in_axes=(0, None, None))(operands[0], operands[1][0], operands[2][0])
    assert_close((shared[1],), (attend()(operands[0][1], operands[1][0], operands[2][0]),))


def test_without_a_batch_dimension():
    operands = [x[0] for x in arrays()]
    want = [x[0] for x in fp64(*arrays(), True)]
    assert_close(value_and_grads(attend(), *operands), want)
    assert len(cudnn_calls(lowered_for_cuda(attend(), *operands[:3]))) == 1


@pytest.mark.parametrize("save", [False, True])
def test_remat_runs_the_forward_pass_again_unless_its_results_are_saved(save):
    policy = jax.checkpoint_policies.save_only_these_names("context") if save else None
    rematted = jax.checkpoint(attend(), policy=policy)
    operands = arrays()
    assert_close(jax.jit(lambda *x: value_and_grads(rematted, *x))(*operands), fp64(*operands, True))
    calls = cudnn_calls(lowered_for_cuda(lambda *x: value_and_grads(rematted, *x), *operands))
    assert len(calls) == (2 if save else 3)


def test_scan():
    operands = arrays()

    def stacked(q, k, v):
        return jax.lax.scan(lambda q, _: (attend()(q, k, v), None), q, length=2)[0]

    def unrolled(q, k, v):
        return attend()(attend()(q, k, v), k, v)

    got, want = (jax.jit(lambda *x, f=f: value_and_grads(f, *x))(*operands) for f in (stacked, unrolled))
    assert_close(got, want, 1e-3)


@pytest.mark.parametrize("heads", ["replicated", "split"])
@pytest.mark.parametrize("regime", ["auto", "explicit", "manual"])
def test_regimes(regime, heads):
    """Batch over `data`, heads over `model`: one call a shard, nothing gathered, gradients sharded as their primals."""
    kind = AxisType.Auto if regime == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    spec = P("data", None, "model" if heads == "split" else None, None)
    operands = arrays()
    want = fp64(*operands, True)
    step = lambda *x: value_and_grads(attend(), *x)  # noqa: E731
    if regime == "manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
        compiled = jax.jit(step).lower(*placed).compile()
        got = compiled(*placed)
        text = jax.jit(step).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.count_collectives(compiled.as_text()) == {}
    assert_close(got, want)
    assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4) for x in got)
    if regime != "auto":  # partitioned when it is compiled
        local = f"tensor<{B // 4}x{T}x{HEADS // (2 if heads == 'split' else 1)}x{D}xbf16>"
        calls = cudnn_calls(text)
        assert len(calls) == 2
        assert all(local in call[2] for call in calls)


@pytest.mark.parametrize("regime", ["explicit", "manual"])
def test_keys_and_values_that_are_the_same_everywhere(regime):
    """Queries sharded over the batch, keys and values replicated: their cotangents are summed over the shards."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    q, k, v, dout = arrays()
    k, v = (x[:, :, :1] for x in (k, v))  # one group, so that the query heads can be split

    def grouped(q, k, v):
        return core_attention(q, k, v, causal=True)

    want = value_and_grads(grouped, q, k, v, dout)
    specs = (P(None, None, "model"), P(), P(), P(None, None, "model"))
    step = lambda *x: value_and_grads(grouped, *x)  # noqa: E731
    if regime == "manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(specs[0], *specs[:3]))
    else:
        # One group: the heads of a sharded dimension can't be told apart, so they are gathered first.
        specs = (P(None, None, None), P(), P(), P(None, None, None))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, k, v, dout), specs, strict=True)]
        got = jax.jit(step)(*placed)
    assert_close(got, want)


def test_a_second_derivative_says_what_has_them():
    q, k, v = (jnp.ones((2, 8, 2, 16), jnp.bfloat16) for _ in range(3))

    def grad_of_norm(implementation):
        def total(q):
            return core_attention(q, k, v, causal=True, implementation=implementation).astype(jnp.float32).sum()

        return jax.grad(lambda q: (jax.grad(total)(q).astype(jnp.float32) ** 2).sum())

    with pytest.raises(NotImplementedError, match="attention_implementation='xla'"):
        grad_of_norm(None)(q)
    grad_of_norm("xla")(q)
