"""Passes and GEMMs by group on CUDA: against the host kernels bit for bit where arithmetic is the same, and fp64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax import primitives as P
from te_jax.testing import grouped, oracle, tolerance
from te_jax.testing.bits import assert_same_bits

ROWS, K, N = 1000, 192, 272
CASES = {
    "skewed": grouped.skewed(32, ROWS),
    "some rows of none": grouped.skewed(128, 777),
    "ragged": np.array([5, 0, 17, 300, 1, 128, 0, 549], np.int32),
    "one of two": np.array([0, ROWS], np.int32),
    "none": np.zeros(16, np.int32),
}
SIZES = pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def random(shape, dtype=ml_dtypes.bfloat16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pass_fields(fmt, sizes, **fields):
    return {"format": fmt, "data_t": True, "amax": True, "scaling": "group", "groups": len(sizes)} | fields


def scales(sizes, given):
    """Some of 0, which are derived, some given; all given if ``given``."""
    scale = np.linspace(0.5, 3, len(sizes), dtype=np.float32)
    return scale if given else np.where(np.arange(len(sizes)) % 2, scale, 0)


def assert_same(on, function, *arrays):
    for name, a, b in zip(P.QuantizeOut._fields, *(on(d, function, *arrays) for d in ("cuda", "cpu")), strict=True):
        if a is not None:
            assert_same_bits(a, b, name)


@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True], ids=["some derived", "given"])
def test_quantize_is_the_host_kernel(on, sizes, dtype, given):
    x = random((ROWS, K), DTYPES[dtype])
    x[::7] *= 100
    spec = P.QuantizeSpec(**pass_fields("e4m3", sizes, margin=1))
    assert_same(on, lambda x, n, s: P.quantize(x, s, spec, group_sizes=n), x, sizes, scales(sizes, given))
    only = P.QuantizeSpec(**pass_fields("e5m2", sizes, data=False, data_t=False))
    assert_same(on, lambda x, n, s: P.quantize(x, s, only, group_sizes=n), x, sizes, scales(sizes, given))


def test_values_that_are_not_finite(on):
    sizes = CASES["ragged"]
    x = random((ROWS, K))
    x[3, 5], x[30, 7], x[-1] = np.nan, np.inf, np.nan  # in group 0, in group 3, and in the last one
    scale = np.array([0, 0, np.nan, 0, 1, 0, 0, 2], np.float32)
    spec = P.QuantizeSpec(**pass_fields("e4m3", sizes))
    assert_same(on, lambda x, n, s: P.quantize(x, s, spec, group_sizes=n), x, sizes, scale)


@pytest.mark.parametrize("sizes", [(3000, 0, 1, 999, 1000), (0, 5000, 0), (128,) * 32], ids=str)
@pytest.mark.parametrize("data", [False, True], ids=["amax alone", "quantized"])
def test_blocks_with_several_tiles(on, sizes, data):
    """More tiles than blocks look for maxima: a block's tiles are of one group, of several, of groups with a scale."""
    sizes = np.array(sizes, np.int32)
    x = random((5000, 2048), seed=3)
    x[sizes.sum() :] = np.nan
    x[::1024, 2040] = 64 + np.arange(5)  # the last columns of some rows
    spec = P.QuantizeSpec(**pass_fields("e4m3", sizes, data=data, data_t=data))
    for given in (False, True):
        assert_same(on, lambda x, n, s: P.quantize(x, s, spec, group_sizes=n), x, sizes, scales(sizes, given))


def test_stacked_kernels_in_blocks_with_several_tiles(on):
    w = random((3, 4096, 1040), seed=4) * np.float32(2) ** np.arange(3)[:, None, None]
    spec = P.QuantizeSpec(**pass_fields("e4m3", range(3), scaling="leading"))
    for scale in ((0, 2, 0), (1, 2, 3)):
        w = w.astype(ml_dtypes.bfloat16)
        assert_same(on, lambda w, s: P.quantize(w, s, spec), w, np.array(scale, np.float32))


@pytest.mark.parametrize("rows", [64, 256, 272])
def test_stacked_kernels_are_the_host_kernel(on, rows):
    w = random((5, rows, N), np.float32) * np.exp2(np.arange(5, dtype=np.float32))[:, None, None]
    spec = P.QuantizeSpec(**pass_fields("e4m3", range(5), scaling="leading"))
    assert_same(on, lambda w, s: P.quantize(w, s, spec), w, np.array([0, 2, 0, 0, 5], np.float32))


@SIZES
def test_activations_quantize_what_they_compute(on, sizes):
    """FP8 of a gated activation and of its gradient, from the high-precision result of the same device."""
    x, dy, scale = random((ROWS, 2 * K)), random((ROWS, K), seed=1), scales(sizes, False)
    fields, plain = pass_fields("e5m2", sizes), {"format": "e5m2", "data": False, "hp": True, "kind": "swiglu"}
    zero = np.float32(0)

    def forward(x, n, s):
        return P.activation(x, s, P.ActivationSpec(kind="swiglu", **fields), group_sizes=n)

    def backward(dy, x, n, s):
        return P.activation_grad(dy, x, s, P.ActivationGradSpec(kind="swiglu", **fields), group_sizes=n)

    y = on("cuda", lambda x, s: P.activation(x, s, P.ActivationSpec(**plain)).hp, x, zero)
    dx = on("cuda", lambda dy, x, s: P.activation_grad(dy, x, s, P.ActivationGradSpec(**plain)).hp, dy, x, zero)
    for got, tensor in ((on("cuda", forward, x, sizes, scale), y), (on("cuda", backward, dy, x, sizes, scale), dx)):
        spec = P.QuantizeSpec(**fields)
        want = on("cpu", lambda t, n, s, spec=spec: P.quantize(t, s, spec, group_sizes=n), tensor, sizes, scale)
        for name in ("data", "data_t", "scale", "scale_inv", "amax"):
            assert_same_bits(getattr(got, name), getattr(want, name), name)


@SIZES
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
def test_gemms_against_fp64(on, sizes, fast):
    groups = len(sizes)
    x, dy, w = random((ROWS, K)), random((ROWS, N), seed=1), random((groups, K, N), seed=2)
    bias = random((groups, N), seed=3)

    def linear(x, dy, w, bias, sizes):
        zero = jnp.zeros(groups)
        x, dy = (
            P.quantize(a, zero, P.QuantizeSpec(**pass_fields(f, sizes, amax=False)), group_sizes=sizes)
            for a, f in ((x, "e4m3"), (dy, "e5m2"))
        )
        w = P.quantize(w, zero, P.QuantizeSpec(**pass_fields("e4m3", sizes, amax=False, scaling="leading")))
        wide = P.GroupedGemmSpec(out_dtype="float32", bias=True, fast_accumulation=fast)
        narrow = P.GroupedGemmSpec(fast_accumulation=fast)
        wgrad = P.GroupedWgradSpec(groups=groups, fast_accumulation=fast)
        y = P.grouped_gemm(
            x.data, w.data_t, sizes, wide, lhs_scale_inv=x.scale_inv, rhs_scale_inv=w.scale_inv, bias=bias
        )
        dx = P.grouped_gemm(dy.data, w.data, sizes, narrow, lhs_scale_inv=dy.scale_inv, rhs_scale_inv=w.scale_inv)
        dw = P.grouped_wgrad(x.data_t, dy.data_t, sizes, wgrad, lhs_scale_inv=x.scale_inv, rhs_scale_inv=dy.scale_inv)
        return y, dx, dw, x, dy, w

    y, dx, dw, x_q, dy_q, w_q = on("cuda", linear, x, dy, w, bias, sizes)
    x64, dy64 = (grouped.dequantize(q.data, q.scale_inv, sizes) for q in (x_q, dy_q))
    w64 = oracle.f64(w_q.data) * oracle.f64(w_q.scale_inv)[:, None, None]
    biases = np.zeros((ROWS, N))
    for g, rows in enumerate(grouped.rows_of(sizes)):
        biases[rows] = oracle.f64(bias)[g]
    for got, product, operands, added, contraction in (
        (y, grouped.rows_product, (x64, w64), biases, K),
        (dx, grouped.rows_product, (dy64, w64.transpose(0, 2, 1)), 0, N),
        (dw, grouped.contracted_product, (x64, dy64), 0, max(int(sizes.max()), 16)),
    ):
        want, magnitude = product(*operands, sizes) + added, product(*map(np.abs, operands), sizes) + np.abs(added)
        hopper = "fast" if fast else "precise"
        allowed = tolerance.gemm_error(magnitude, contraction, want, got.dtype, hopper=hopper)
        assert np.all(np.abs(oracle.f64(got) - want) <= allowed)


@SIZES
def test_gemms_in_bfloat16(on, sizes):
    x, dy, w = random((ROWS, K)), random((ROWS, N), seed=1), random((len(sizes), K, N), seed=2)
    c = random((len(sizes), K, N), np.float32, seed=3)
    x[sum(sizes) :] = np.nan  # of no group: not looked at

    def linear(x, dy, w, c, sizes):
        first = P.GroupedGemmSpec(fp8=False, rhs_contract_first=True)
        last = P.GroupedGemmSpec(fp8=False, out_dtype="float32")
        wgrad = P.GroupedWgradSpec(groups=len(sizes), fp8=False)
        adding = P.GroupedWgradSpec(groups=len(sizes), fp8=False, accumulate=True)
        return (
            P.grouped_gemm(x, w, sizes, first),
            P.grouped_gemm(dy, w, sizes, last),
            P.grouped_wgrad(x, dy, sizes, wgrad),
            P.grouped_wgrad(x, dy, sizes, adding, c=c),
        )

    results, x, tokens = on("cuda", linear, x, dy, w, c, sizes), np.nan_to_num(x), max(int(sizes.max()), 16)
    for got, product, operands, contraction, added in zip(
        results,
        (grouped.rows_product, grouped.rows_product, grouped.contracted_product, grouped.contracted_product),
        ((x, w), (dy, np.swapaxes(w, 1, 2)), (x, dy), (x, dy)),
        (K, N, tokens, tokens),
        (0, 0, 0, oracle.f64(c)),
        strict=True,
    ):
        wide = [oracle.f64(operand) for operand in operands]
        want, magnitude = product(*wide, sizes) + added, product(*map(np.abs, wide), sizes) + np.abs(added)
        assert np.all(np.abs(oracle.f64(got) - want) <= tolerance.gemm_error(magnitude, contraction, want, got.dtype))


@pytest.mark.parametrize("sizes", [(5, -1, 17, 9), (500, 400, 100, 1), (-1, -1, -1, -1)], ids=str)
def test_sizes_that_cannot_be_are_loud(on, sizes):
    sizes, one = np.array(sizes, np.int32), np.ones(4, np.float32)
    x, w = random((ROWS, K)), random((4, N, K), seed=2).astype(ml_dtypes.float8_e4m3fn)

    def linear(x, w, sizes, one):
        q = P.quantize(x, one, P.QuantizeSpec(**pass_fields("e4m3", sizes)), group_sizes=sizes)
        y = P.grouped_gemm(q.data, w, sizes, P.GroupedGemmSpec(), lhs_scale_inv=q.scale_inv, rhs_scale_inv=one)
        return y, P.grouped_gemm(q.data, w, sizes, P.GroupedGemmSpec(), lhs_scale_inv=one, rhs_scale_inv=one)

    for y in on("cuda", linear, x, w, sizes, one):
        assert np.isnan(oracle.f64(y)).all()


@pytest.mark.parametrize("recipe", [te.DelayedScaling(amax_history_len=4), te.CurrentScaling(), None], ids=str)
def test_grouped_mlp_is_that_of_the_host(on, recipe):
    """The result, all gradients and the FP8 state of a fused MLP; sizes change without another program."""
    chain = [ops.GroupedLinear(16, 2 * K, use_bias=False), ops.SwiGLU(), ops.GroupedLinear(16, N, use_bias=False)]
    module = te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16)
    x, weights = random((ROWS, K)), random((ROWS, N), np.float32, 1)
    variables = jax.jit(module.init)(jax.random.key(1), x, np.zeros(16, np.int32), np.zeros(16, np.int32))
    traces = []

    def step(variables, x, sizes, weights):
        traces.append(sizes)

        def loss(variables, x):
            y = module.apply(variables, x, sizes, sizes)
            return jnp.vdot(y.astype(jnp.float32), weights), y

        grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return y, grads

    compiled = jax.jit(step)
    counts = []
    for sizes in (grouped.skewed(16, ROWS), grouped.skewed(16, 700, seed=1)):
        got, want = (
            compiled(*jax.device_put((variables, x, sizes, weights), jax.devices(d)[0])) for d in ("cuda", "cpu")
        )
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            a, b = oracle.f64(a), oracle.f64(b)
            # Products are accumulated otherwise, and a few elements of what is quantized next fall on the other side.
            error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
            assert error <= 2e-2, (jax.tree_util.keystr(path), error)
        counts.append(len(traces))
    assert counts[0] == counts[1]  # other sizes are no other program
