"""Passes and GEMMs by group: handler and reference against fp64 NumPy, sizes that can't be, the mesh regimes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import primitives
from te_jax.primitives import GroupedGemmSpec, GroupedWgradSpec, QuantizeSpec
from te_jax.primitives.definition import DEFINITIONS
from te_jax.testing import grouped, hlo, oracle, tolerance

G, K, N = 4, 32, 48
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # jax has either, by where it waits for the program
SIZES = pytest.mark.parametrize("sizes", grouped.SIZES.values(), ids=grouped.SIZES)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.partial(jax.jit, static_argnums=0)
def reference(spec, *operands):
    return DEFINITIONS[type(spec)].reference(spec, *operands)


@functools.partial(jax.jit, static_argnames="spec")
def quantize(x, sizes, scale, spec):
    return primitives.quantize(x, scale, spec, group_sizes=sizes)


def by_group(fmt, **fields):
    return QuantizeSpec(format=fmt, data_t=True, scaling="group", groups=G, **fields)


def operands(sizes):
    """x, dy and kernel in FP8 by group, and their fp64 values."""
    x, dy, w = normal((grouped.ROWS, K)), normal((grouped.ROWS, N), seed=1), normal((G, K, N), jnp.float32, 2)
    zero = jnp.zeros(G)
    x_q, dy_q = quantize(x, sizes, zero, by_group("e4m3")), quantize(dy, sizes, zero, by_group("e5m2"))
    w_q = primitives.quantize(w, zero, QuantizeSpec(format="e4m3", data_t=True, scaling="leading", groups=G))
    wide = [grouped.dequantize(q.data, q.scale_inv, sizes) for q in (x_q, dy_q)]
    return (x_q, dy_q, w_q), (*wide, oracle.f64(w_q.data) * oracle.f64(w_q.scale_inv)[:, None, None])


@SIZES
@pytest.mark.parametrize("given", [0.0, 3.0], ids=["unseeded", "seeded"])
def test_quantize_is_the_definition(sizes, given):
    x = normal((grouped.ROWS, K)) * 2
    x = x.at[-1].set(jnp.inf) if sum(sizes) < grouped.ROWS else x  # of no group: not looked at
    scale, sizes_on_device = np.array([given, 0, given, given], np.float32), jnp.array(sizes, jnp.int32)
    spec = by_group("e4m3", amax=True, margin=1, power_of_two=True)
    want = grouped.quantize(x, sizes, scale, "e4m3", margin=1, power_of_two=True)
    handler = quantize(x, sizes_on_device, scale, spec)
    in_jnp = primitives.QuantizeOut(**dict(zip(want, reference(spec, x, sizes_on_device, scale), strict=True)))
    for out in (handler, in_jnp):
        for name, expected in want.items():
            got = np.asarray(getattr(out, name))
            got = oracle.codes(got) if name in ("data", "data_t") else got
            np.testing.assert_array_equal(got, expected, err_msg=name)


def test_quantize_of_stacked_kernels_is_that_of_each():
    w = normal((G, K, N), jnp.float32) * jnp.exp2(jnp.arange(G, dtype=jnp.float32))[:, None, None]
    scale = jnp.array([0, 5.0, jnp.nan, 0])
    spec = QuantizeSpec(format="e4m3", data_t=True, amax=True, scaling="leading", groups=G)
    got, want = primitives.quantize(w, scale, spec), reference(spec, w, scale)
    one = QuantizeSpec(format="e4m3", data_t=True, amax=True)
    for i, name in enumerate(("data", "data_t", "scale", "scale_inv", "amax")):
        value = np.asarray(getattr(got, name))
        np.testing.assert_array_equal(oracle.f64(value), oracle.f64(want[i]), err_msg=name)
        for g in range(G):
            alone = getattr(primitives.quantize(w[g], scale[g], one), name)
            np.testing.assert_array_equal(oracle.f64(value[g]), oracle.f64(alone), err_msg=name)


@SIZES
def test_activations_by_group_are_activation_and_quantize(sizes):
    x, dy, scale = normal((grouped.ROWS, 2 * K)), normal((grouped.ROWS, K), seed=1), jnp.zeros(G)
    sizes = jnp.array(sizes, jnp.int32)
    fields = {"format": "e4m3", "data_t": True, "amax": True, "scaling": "group", "groups": G}
    plain = {"format": "e4m3", "data": False, "hp": True, "kind": "swiglu"}
    one = jnp.float32(0)
    for call, plain_type, spec_type, tensors in (
        (primitives.activation, primitives.ActivationSpec, primitives.ActivationSpec, (x,)),
        (primitives.activation_grad, primitives.ActivationGradSpec, primitives.ActivationGradSpec, (dy, x)),
    ):
        got = call(*tensors, scale, spec_type(kind="swiglu", **fields), group_sizes=sizes)
        want = quantize(call(*tensors, one, plain_type(**plain)).hp, sizes, scale, by_group("e4m3", amax=True))
        for name in ("data", "data_t", "scale", "scale_inv", "amax"):
            a, b = (oracle.f64(getattr(out, name)) for out in (got, want))
            np.testing.assert_array_equal(a, b, err_msg=name)


@SIZES
def test_gemms_against_fp64(sizes):
    on_device = jnp.array(sizes, jnp.int32)
    (x, dy, w), (x64, dy64, w64) = operands(on_device)
    bias = normal((G, N), jnp.float32, 3)
    rows = np.zeros((grouped.ROWS, N))
    for g, where in enumerate(grouped.rows_of(sizes)):
        rows[where] = oracle.f64(bias)[g]
    fprop, dgrad = GroupedGemmSpec(out_dtype="float32", bias=True), GroupedGemmSpec(out_dtype="bfloat16")
    wgrad = GroupedWgradSpec(groups=G)
    c = normal((G, K, N), jnp.float32, 4)
    cases = [
        (dataclasses.replace(wgrad, accumulate=True), (x.data_t, dy.data_t, on_device, x.scale_inv, dy.scale_inv, c),
         grouped.contracted_product, (x64, dy64), oracle.f64(c)),
        (fprop, (x.data, w.data_t, on_device, x.scale_inv, w.scale_inv, bias), grouped.rows_product, (x64, w64), rows),
        (dgrad, (dy.data, w.data, on_device, dy.scale_inv, w.scale_inv), grouped.rows_product,
         (dy64, w64.transpose(0, 2, 1)), 0),
        (wgrad, (x.data_t, dy.data_t, on_device, x.scale_inv, dy.scale_inv), grouped.contracted_product,
         (x64, dy64), 0),
    ]  # fmt: skip
    for spec, arrays, product, wide, added in cases:
        of_wgrad = isinstance(spec, GroupedWgradSpec)
        call = primitives.grouped_wgrad if of_wgrad else primitives.grouped_gemm
        names = ("lhs_scale_inv", "rhs_scale_inv", "c" if of_wgrad else "bias")
        handler = call(*arrays[:3], spec, **dict(zip(names, arrays[3:], strict=False)))
        want = product(*wide, sizes) + added
        magnitude = product(*map(np.abs, wide), sizes) + np.abs(added)
        allowed = tolerance.gemm_error(magnitude, max(K, N, grouped.ROWS), want, handler.dtype)
        for got in (handler, *reference(spec, *arrays)):
            assert np.all(np.abs(oracle.f64(got) - want) <= allowed), spec


@SIZES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gemms_in_high_precision(sizes, dtype):
    """bfloat16: the handler; float32: the reference."""
    x, dy, w = normal((grouped.ROWS, K), dtype), normal((grouped.ROWS, N), dtype, 1), normal((G, K, N), dtype, 2)
    x = x.at[-1].set(jnp.nan) if sum(sizes) < grouped.ROWS else x  # of no group: not looked at
    clean, sizes_on_device = jnp.nan_to_num(x), jnp.array(sizes, jnp.int32)
    first = GroupedGemmSpec(fp8=False, rhs_contract_first=True, out_dtype=jnp.dtype(dtype).name)
    last, wgrad = GroupedGemmSpec(fp8=False, out_dtype="float32"), GroupedWgradSpec(groups=G, fp8=False)
    results = (
        (primitives.grouped_gemm(x, w, sizes_on_device, first), grouped.rows_product, (clean, w)),
        (primitives.grouped_gemm(dy, w, sizes_on_device, last), grouped.rows_product, (dy, np.swapaxes(w, 1, 2))),
        (primitives.grouped_wgrad(x, dy, sizes_on_device, wgrad), grouped.contracted_product, (clean, dy)),
    )
    for got, product, (a, b) in results:
        want, magnitude = product(a, b, sizes), product(np.abs(a), np.abs(b), sizes)
        allowed = tolerance.gemm_error(magnitude, max(K, N, grouped.ROWS), want, got.dtype)
        assert np.all(np.abs(oracle.f64(got) - want) <= allowed)


def test_other_sizes_are_the_same_program():
    calls = []

    @jax.jit
    def function(x, sizes):
        calls.append(sizes)
        return quantize(x, sizes, jnp.zeros(G), by_group("e4m3")).data

    x = normal((grouped.ROWS, K))
    for sizes in grouped.SIZES.values():
        data = oracle.codes(function(x, jnp.array(sizes, jnp.int32)))
        np.testing.assert_array_equal(data, grouped.quantize(x, sizes, np.zeros(G), "e4m3")["data"])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((5, -1, 17, 9), r"group_sizes\[1\]: expected 0 or more, got -1"),
     ((5, 0, 17, 16), r"group_sizes: expected a sum of at most 37 \(the rows\), got 38"),
     ((2**31 - 1, 2**31 - 1, 2, 0), "group_sizes: expected a sum of at most 37")],
)  # fmt: skip
def test_sizes_that_cannot_be(sizes, message):
    """A typed error on CPU; NaN, everywhere, in the reference and in what a CUDA kernel is given."""
    sizes = jnp.array(sizes, jnp.int32)
    x, w, one = normal((grouped.ROWS, K)), normal((G, K, N), jnp.float32), jnp.ones(G)
    with pytest.raises(RUNTIME_ERRORS, match=f"INVALID_ARGUMENT.*{message}"):
        jax.block_until_ready(quantize(x, sizes, one, by_group("e4m3")).data)
    x_q, w_q = (a.astype(jnp.float8_e4m3fn) for a in (x, w.swapaxes(1, 2)))
    gemm, wgrad = GroupedGemmSpec(), GroupedWgradSpec(groups=G)
    x_t = jnp.pad(x_q.T, ((0, 0), (0, 11)))
    product = jax.jit(lambda *a: primitives.grouped_gemm(*a, gemm, lhs_scale_inv=one, rhs_scale_inv=one))
    with pytest.raises(RUNTIME_ERRORS, match=f"INVALID_ARGUMENT.*{message}"):
        jax.block_until_ready(product(x_q, w_q, sizes))
    _, _, scale, scale_inv = reference(by_group("e4m3"), x, sizes, one)
    (y,) = reference(gemm, x_q, w_q, sizes, one, one)
    assert all(np.isnan(oracle.f64(out)).all() for out in (scale, scale_inv, y))
    (dw,) = reference(wgrad, x_t, x_t, sizes * 2, one, one)  # padded rows are no error here
    assert np.isnan(oracle.f64(dw)).all()

    on_device = DEFINITIONS[GroupedGemmSpec].on_device(gemm, x_q, w_q, sizes, one, one)
    np.testing.assert_array_equal(on_device[2], [grouped.ROWS, 0, 0, 0])
    assert np.isnan(on_device[3]).all()
    _, same, kept = DEFINITIONS[QuantizeSpec].on_device(by_group("e4m3"), x, jnp.array([37, 0, 0, 0]), one)
    np.testing.assert_array_equal(same, [37, 0, 0, 0])
    np.testing.assert_array_equal(kept, one)


def test_errors_name_operand_expected_and_got():
    x, sizes, one = normal((grouped.ROWS, K)), jnp.zeros(G, jnp.int32), jnp.ones(G)
    for arguments, message in (
        ((x, sizes[:3], one), r"quantize: group_sizes: expected shape \(4,\), got \(3,\)"),
        ((x, sizes.astype(jnp.float32), one), "quantize: group_sizes: expected dtype int32, got float32"),
        ((x, sizes, one[0]), r"quantize: scale: expected shape \(4,\), got \(\)"),
        ((x[None], sizes, one), r"quantize: x: expected 2 dimensions, \[tokens, features\]"),
        ((x, None, one), "quantize: group_sizes: expected an array for scaling group, got None"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            quantize(*arguments, by_group("e4m3"))
    fp8 = x.astype(jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"grouped_gemm: rhs: expected shape \(4, 48, 32\), got \(4, 48, 16\)"):
        primitives.grouped_gemm(
            fp8, jnp.zeros((G, N, 16), fp8.dtype), sizes, GroupedGemmSpec(), lhs_scale_inv=one, rhs_scale_inv=one
        )
    with pytest.raises(ValueError, match=r"grouped_wgrad: lhs: expected tokens padded to a multiple of 16, got 37"):
        primitives.grouped_wgrad(fp8.T, fp8.T, sizes, GroupedWgradSpec(groups=G), lhs_scale_inv=one, rhs_scale_inv=one)
    spec = primitives.NormSpec(format="e4m3", scaling="group", groups=G)
    with pytest.raises(ValueError, match="norm: scaling: expected group for quantize"):
        DEFINITIONS[primitives.NormSpec].check(spec, x, x[0], sizes, one)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_meshes_split_features(kind):
    """Features over the mesh, kept (one call a shard) and contracted (a sum); tokens are whole on every device."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    sizes = jnp.array(grouped.SIZES["ragged"], jnp.int32)
    x, w = normal((grouped.ROWS, 64)), normal((G, 64, 64), jnp.float32, 2)

    def fprop(x, w, sizes):
        x_q = quantize(x, sizes, jnp.zeros(G), by_group("e4m3", amax=True))
        w_q = primitives.quantize(
            w, jnp.zeros(G), QuantizeSpec(format="e4m3", data_t=True, amax=True, scaling="leading", groups=G)
        )
        y = primitives.grouped_gemm(
            x_q.data, w_q.data_t, sizes, GroupedGemmSpec(out_dtype="float32"),
            lhs_scale_inv=x_q.scale_inv, rhs_scale_inv=w_q.scale_inv,
        )  # fmt: skip
        return y, x_q.amax, w_q.amax

    want = jax.jit(fprop)(x, w, sizes)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    arrays = put(x, None, "a"), put(w, None, "a", "b"), put(sizes)
    with jax.set_mesh(mesh):
        compiled = jax.jit(fprop).lower(*arrays).compile()
        got = compiled(*arrays)
    text = compiled.as_text()
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    (gemm,) = [call for call in hlo.custom_calls(text) if call.target == "te_jax_grouped_gemm"]
    assert [dims for _, dims in gemm.operands[:3]] == [(37, 16), (4, 32, 16), (4,)]
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-4)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmap_is_a_loop_over_examples():
    x = normal((3, grouped.ROWS, K))
    sizes = jnp.array([*grouped.SIZES.values()][:3], jnp.int32)
    spec = by_group("e4m3", amax=True)
    got = jax.vmap(lambda x, s: quantize(x, s, jnp.zeros(G), spec))(x, sizes)
    for i in range(3):
        want = quantize(x[i], sizes[i], jnp.zeros(G), spec)
        np.testing.assert_array_equal(oracle.codes(got.data[i]), oracle.codes(want.data))
        np.testing.assert_array_equal(got.amax[i], want.amax)


def test_what_has_no_kernel_says_why():
    def why(spec, *shapes, dtypes=(jnp.float8_e4m3fn,) * 2):
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
        return primitives.support.why_not(spec, *avals, jax.ShapeDtypeStruct((spec_groups(spec),), jnp.int32))

    def spec_groups(spec):
        return getattr(spec, "groups", G)

    assert why(GroupedGemmSpec(), (37, K), (G, N, K)) is None
    assert "contracted size 24 is not a multiple of 16" in why(GroupedGemmSpec(), (37, 24), (G, N, 24))
    assert "tokens" in why(GroupedGemmSpec(), (0, K), (G, N, K))
    assert "float32" in why(GroupedGemmSpec(fp8=False), (37, K), (G, N, K), dtypes=(jnp.float32,) * 2)
    assert "more than 1024" in why(GroupedWgradSpec(groups=1025), (K, 48), (N, 48))
