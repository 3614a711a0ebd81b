"""The three mesh regimes, read from the compiled program: local shapes, no gathers, right values and types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import compat, primitives
from te_jax.parallel import mesh as mesh_lib
from te_jax.primitives import ActivationSpec, GemmSpec, NormGradSpec, NormSpec, QuantizeOut, QuantizeSpec
from te_jax.testing import hlo, oracle

UNSEEDED = np.float32(0)
FULL = QuantizeSpec(format="e4m3", data_t=True, amax=True, dbias=True)
FULL_SPECS = QuantizeOut(data=P("a", "b"), data_t=P(None, "a", "b"), scale=P(), scale_inv=P(), amax=P(), dbias=P())


def make_mesh(*kinds):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def compile_and_run(function, *operands):
    compiled = jax.jit(function).lower(*operands).compile()
    return compiled(*operands), compiled.as_text()


def assert_equal(got: QuantizeOut, want: QuantizeOut):
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is None:
            continue
        tolerance = {"dbias": 1e-4, "hp": 0.02, "mean": 1e-5, "rstd": 1e-5}.get(name, 0)
        np.testing.assert_allclose(oracle.f64(a), oracle.f64(b), rtol=tolerance, atol=tolerance, err_msg=name)


def spec_of(x):
    """The sharding of a concrete array with trailing Nones dropped."""
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


COMPILER_CHOOSES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@COMPILER_CHOOSES
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_quantize(kind, scale):
    x = normal((8, 64, 32))
    want = primitives.quantize(x, np.float32(scale), FULL)
    mesh = make_mesh(kind, kind)
    with jax.set_mesh(mesh):
        operands = put(mesh, x, "a", "b"), jnp.float32(scale)
        got, text = compile_and_run(lambda x, s: primitives.quantize(x, s, FULL), *operands)
    assert_equal(got, want)
    calls = hlo.custom_calls(text)
    # One pass for the amax of a scale that may be unseeded, one that writes.
    assert [c.operands[0] for c in calls] == [("bf16", (2, 32, 32))] * 2
    assert calls[1].results[:2] == (("f8e4m3fn", (2, 32, 32)), ("f8e4m3fn", (32, 2, 32)))
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert spec_of(got.data) == P("a", "b")
    assert spec_of(got.data_t) == P(None, "a", "b")
    assert {spec_of(s) for s in (got.scale, got.scale_inv, got.amax, got.dbias)} == {P()}


@COMPILER_CHOOSES
def test_dbias_is_summed_over_shards_before_it_is_rounded(kind):
    x = normal((8, 64, 32))
    spec = QuantizeSpec(format="e5m2", dbias=True, dbias_dtype="bfloat16")
    mesh = make_mesh(kind, kind)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(lambda x: primitives.quantize(x, jnp.float32(1), spec), put(mesh, x, "a", "b"))
    want = oracle.f64(x).sum((0, 1))
    assert got.dbias.dtype == jnp.bfloat16
    np.testing.assert_allclose(oracle.f64(got.dbias), want, rtol=2.0**-8 + 1e-5)  # one rounding
    assert [c.results[3] for c in hlo.custom_calls(text) if len(c.results) > 3] == [("f32", (32,))]


@COMPILER_CHOOSES
def test_quantize_without_jit_and_without_a_mesh_in_context(kind):
    x = normal((8, 64, 32))
    got = primitives.quantize(put(make_mesh(kind, kind), x, "a", "b"), UNSEEDED, FULL)
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert spec_of(got.data) == P("a", "b")


@COMPILER_CHOOSES
def test_feature_dimension_of_quantize_may_be_sharded(kind):
    x, mesh = normal((64, 64)), make_mesh(kind, kind)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(lambda x: primitives.quantize(x, UNSEEDED, FULL), put(mesh, x, "a", "b"))
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert {c.operands[0] for c in hlo.custom_calls(text)} == {("bf16", (16, 32))}
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert spec_of(got.data_t) == P("b", "a")
    assert spec_of(got.dbias) == P("b")


@COMPILER_CHOOSES
def test_norm(kind):
    x, gamma, beta = normal((8, 64, 32)), normal(32, seed=1), normal(32, seed=2)
    spec = NormSpec(format="e4m3", kind="layernorm", hp=True, amax=True, stats=True, dbias=True)

    def function(x):
        return primitives.norm(x, gamma, beta, UNSEEDED, spec)

    want = function(x)
    mesh = make_mesh(kind, kind)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, put(mesh, x, "a", "b"))
    assert_equal(got, want)
    assert {c.operands[0] for c in hlo.custom_calls(text)} == {("bf16", (2, 32, 32))}
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert spec_of(got.rstd) == spec_of(got.mean) == P("a", "b")


def norm_grad_case():
    """(function of dy, x, mean, rstd, dres; these operands)"""
    dy, x, dres = (normal((8, 64, 32), seed=seed) for seed in range(3))
    gamma, x64 = normal(32, seed=3), oracle.f64(x)
    mean, rstd = np.float32(x64.mean(-1)), np.float32(1 / x64.std(-1))
    spec = NormGradSpec(kind="layernorm", residual=True)

    def function(dy, x, mean, rstd, dres):
        return primitives.norm_grad(dy, x, gamma, mean, rstd, spec, dres=dres)

    return function, (dy, x, mean, rstd, dres)


def assert_equal_grads(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(oracle.f64(a), oracle.f64(b), rtol=1e-4, atol=1e-4)


@COMPILER_CHOOSES
def test_norm_grad(kind):
    function, operands = norm_grad_case()
    mesh = make_mesh(kind, kind)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, *(put(mesh, x, "a", "b") for x in operands))
    assert_equal_grads(got, function(*operands))
    (call,) = hlo.custom_calls(text)
    assert call.operands[0] == ("bf16", (2, 32, 32))
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert [spec_of(x) for x in got] == [P("a", "b"), P(), P()]


def test_norm_grad_needs_whole_rows():
    function, operands = norm_grad_case()
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    specs = [("a", None, "b"), ("a", None, "b"), ("a",), ("a",), ("a", None, "b")]
    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, *(put(mesh, x, *s) for x, s in zip(operands, specs, strict=True)))
    assert_equal_grads(got, function(*operands))
    assert {c.operands[0][1][-1] for c in hlo.custom_calls(text)} == {32}


def test_norm_grad_manual():
    function, operands = norm_grad_case()
    mesh, types = make_mesh(AxisType.Auto, AxisType.Auto), {}

    def shard(*operands):
        dx, *sums = function(*operands)
        types.update(dx=compat.varying_axes(dx), sums=compat.varying_axes(sums[0]))
        return dx, *(jax.lax.psum(s, ("a", "b")) for s in sums)

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("a", "b"), out_specs=(P("a", "b"), P(), P()))
    got, text = compile_and_run(mapped, *operands)
    assert_equal_grads(got, function(*operands))
    assert types == {"dx": {"a", "b"}, "sums": {"a", "b"}}
    (call,) = hlo.custom_calls(text)
    assert call.operands[0] == ("bf16", (2, 32, 32))


@COMPILER_CHOOSES
def test_a_gated_activation_needs_whole_rows(kind):
    x, spec, mesh = normal((8, 64, 64)), ActivationSpec(format="e4m3", kind="swiglu", hp=True), make_mesh(kind, kind)

    def function(x):
        return primitives.activation(x, np.float32(1), spec)

    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, put(mesh, x, "a", None, "b"))
    assert_equal(got, function(x))
    assert {c.operands[0] for c in hlo.custom_calls(text)} <= {("bf16", (2, 64, 64)), ("bf16", (2, 32, 64))}
    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, put(mesh, x, "a", "b"))
    assert_equal(got, function(x))
    assert not set(hlo.count_collectives(text)) - {"all-reduce"}


# lhs spec, rhs spec, local lhs, local rhs, out spec, collectives
GEMM_CASES = {
    "data parallel": (P("a", "b"), P(), (2, 32, 64), (32, 64), P("a", "b"), set()),
    "column parallel": (P("a"), P("b"), (2, 64, 64), (16, 64), P("a", None, "b"), set()),
    "row parallel": (P("a", None, "b"), P(None, "b"), (2, 64, 32), (32, 32), P("a"), {"all-reduce"}),
}


@COMPILER_CHOOSES
@pytest.mark.parametrize("case", GEMM_CASES.values(), ids=GEMM_CASES)
def test_gemm(kind, case):
    lhs_spec, rhs_spec, local_lhs, local_rhs, out_spec, collectives = case
    mesh = make_mesh(kind, kind)
    lhs, rhs, bias, c = normal((8, 64, 64)), normal((32, 64), seed=1), normal(32, seed=2), normal((8, 64, 32), seed=3)
    spec = GemmSpec(bias=True, beta=1.0, out_dtype="bfloat16", alpha=0.5)
    lhs, rhs = lhs.astype(jnp.float8_e4m3fn), rhs.astype(jnp.float8_e4m3fn)
    one = np.float32(1)

    def function(lhs, rhs, bias, c):
        return primitives.gemm(lhs, rhs, spec, lhs_scale_inv=one, rhs_scale_inv=one, bias=bias, c=c)[0]

    want = 0.5 * oracle.f64(lhs) @ oracle.f64(rhs).T + oracle.f64(bias) + oracle.f64(c)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(
            function,
            put(mesh, lhs, *lhs_spec),
            put(mesh, rhs, *rhs_spec),
            put(mesh, bias, *out_spec[2:]),
            put(mesh, c, *out_spec),
        )
    np.testing.assert_allclose(oracle.f64(got), want, rtol=0.02, atol=0.05)
    (call,) = hlo.custom_calls(text)
    assert call.operands[:2] == (("f8e4m3fn", local_lhs), ("f8e4m3fn", local_rhs))
    assert set(hlo.count_collectives(text)) == collectives
    assert spec_of(got) == out_spec


@COMPILER_CHOOSES
def test_wgrad_sums_over_the_data_axes(kind):
    mesh = make_mesh(kind, kind)
    x_t, dy_t = (normal((n, 8, 64), seed=n).astype(jnp.float8_e4m3fn) for n in (32, 48))
    spec, one = GemmSpec(contract_dims=2, out_dtype="float32"), np.float32(1)

    def function(x_t, dy_t):
        return primitives.gemm(x_t, dy_t, spec, lhs_scale_inv=one, rhs_scale_inv=one)[0]

    with jax.set_mesh(mesh):
        got, text = compile_and_run(function, *(put(mesh, x, None, "a", "b") for x in (x_t, dy_t)))
    np.testing.assert_allclose(got, np.einsum("kab,nab->kn", oracle.f64(x_t), oracle.f64(dy_t)), rtol=1e-4, atol=1e-3)
    (call,) = hlo.custom_calls(text)
    assert call.operands[:2] == (("f8e4m3fn", (32, 2, 32)), ("f8e4m3fn", (48, 2, 32)))
    assert hlo.count_collectives(text) == {"all-reduce": 1}


@COMPILER_CHOOSES
def test_fp8_output_of_a_sharded_contraction(kind):
    mesh = make_mesh(kind, kind)
    lhs, rhs = (normal((32, 64), seed=n).astype(d) for n, d in enumerate((jnp.float8_e5m2, jnp.float8_e4m3fn)))
    spec, one = GemmSpec(out_dtype="float8_e5m2", amax=True), np.float32(1)

    def function(lhs, rhs):
        return primitives.gemm(lhs, rhs, spec, lhs_scale_inv=one, rhs_scale_inv=one, out_scale=np.float32(2))

    with jax.set_mesh(mesh):
        (out, amax), _ = compile_and_run(function, put(mesh, lhs, "a", "b"), put(mesh, rhs, None, "b"))
    want = oracle.f64(lhs) @ oracle.f64(rhs).T
    np.testing.assert_allclose(oracle.f64(out), 2 * want, rtol=2.0**-3, atol=1e-4)
    np.testing.assert_allclose(amax, np.abs(want).max(), rtol=1e-5)


@COMPILER_CHOOSES
def test_local_shapes_without_a_kernel_run_the_reference(kind):
    x, mesh = normal((32, 32)), make_mesh(kind, kind)  # 8 rows per shard and a transposed copy
    with jax.set_mesh(mesh):
        got, text = compile_and_run(lambda x: primitives.quantize(x, UNSEEDED, FULL), put(mesh, x, "a"))
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert {c.results[0] for c in hlo.custom_calls(text)} == {("f32", ())}  # only the amax pass


@pytest.mark.parametrize("check_vma", [True, False])
def test_manual(check_vma):
    x, mesh = normal((8, 64, 32)), make_mesh(AxisType.Auto, AxisType.Auto)
    types = {}

    def function(x):
        out = primitives.quantize(x, UNSEEDED, FULL)
        types.update({n: compat.varying_axes(v) for n, v in out._asdict().items() if v is not None})
        return out._replace(dbias=jax.lax.psum(out.dbias, ("a", "b")))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("a", "b"), out_specs=FULL_SPECS, check_vma=check_vma)
    got, text = compile_and_run(mapped, put(mesh, x, "a", "b"))
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert_equal(mapped(put(mesh, x, "a", "b")), got)  # without jit
    assert {c.operands[0] for c in hlo.custom_calls(text)} == {("bf16", (2, 32, 32))}
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    everywhere = {"a", "b"} if check_vma else set()
    assert types == {
        "data": everywhere,
        "data_t": everywhere,
        "dbias": everywhere,
        "scale": set(),
        "scale_inv": set(),
        "amax": set(),
    }


def test_manual_amax_is_kept_apart_over_axes_that_the_scale_varies_over():
    x, mesh = normal((8, 64, 32)), make_mesh(AxisType.Auto, AxisType.Auto)

    def function(x, scale):
        out = primitives.quantize(x, scale[0], QuantizeSpec(format="e4m3", amax=True))
        assert compat.varying_axes(out.amax) == {"a"}
        return out.data, out.amax[None]

    stages = jax.shard_map(function, mesh=mesh, in_specs=(P("a", "b"), P("a")), out_specs=(P("a", "b"), P("a")))
    _, amax = jax.jit(stages)(x, jnp.zeros(4, jnp.float32))
    np.testing.assert_array_equal(amax, np.abs(oracle.f64(x)).reshape(4, -1).max(-1))


def test_manual_amax_axes_can_be_named():
    x, mesh = normal((8, 64, 32)), make_mesh(AxisType.Auto, AxisType.Auto)

    def function(x):
        out = primitives.quantize(x, UNSEEDED, QuantizeSpec(format="e4m3", amax=True), amax_axes=("b",))
        return out.amax[None]

    amax = jax.shard_map(function, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a"))(x)
    np.testing.assert_array_equal(amax, np.abs(oracle.f64(x)).reshape(4, -1).max(-1))


def test_a_nan_on_one_shard_is_seen_by_all():
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    x = put(mesh, normal((8, 64, 32)).at[3, 40, 7].set(-jnp.nan), "a", "b")
    out = jax.jit(lambda x: primitives.quantize(x, UNSEEDED, FULL))(x)
    assert np.isnan(out.amax)
    assert out.scale == 1
    assert np.isnan(oracle.f64(out.data)).sum() == 1


def test_manual_gemm_is_one_devices_part():
    mesh = make_mesh(AxisType.Auto, AxisType.Auto)
    lhs, rhs = normal((64, 64)), normal((32, 64), seed=1)
    spec = GemmSpec(fp8=False, out_dtype="float32")

    def function(lhs, rhs):
        out, _ = primitives.gemm(lhs, rhs, spec)
        assert compat.varying_axes(out) == {"a", "b"}
        return jax.lax.psum(out, "b")

    mapped = jax.shard_map(function, mesh=mesh, in_specs=(P("a", "b"), P(None, "b")), out_specs=P("a"))
    got, text = compile_and_run(mapped, lhs, rhs)
    np.testing.assert_allclose(got, oracle.f64(lhs) @ oracle.f64(rhs).T, rtol=1e-4, atol=1e-3)
    (call,) = hlo.custom_calls(text)
    assert call.operands == (("bf16", (16, 32)), ("bf16", (32, 32)))


@pytest.mark.parametrize("rest", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_manual_over_some_axes(rest):
    x, mesh = normal((8, 64, 32)), make_mesh(rest, rest)

    def function(x):
        out = primitives.quantize(x, UNSEEDED, FULL)
        return out._replace(dbias=jax.lax.psum(out.dbias, "a"))

    specs = QuantizeOut(data=P("a"), data_t=P(None, "a"), scale=P(), scale_inv=P(), amax=P(), dbias=P())
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=P("a"), out_specs=specs, axis_names={"a"})
        got, text = compile_and_run(mapped, put(mesh, x, "a", "b"))
        # jax 0.10.2 gathers at the border of such a shard_map whatever is inside it, newer ones don't.
        plain = jax.shard_map(jnp.sin, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
        _, plain_text = compile_and_run(plain, put(mesh, x, "a", "b"))
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert set(hlo.count_collectives(text)) == {"all-reduce", *hlo.count_collectives(plain_text)}
    assert spec_of(got.data) == P("a", "b")
    # custom_partitioning does not work over Auto axes here, so the reference runs and XLA partitions it.
    local = {("bf16", (2, 32, 32))} if rest == AxisType.Explicit else set()
    assert {c.operands[0] for c in hlo.custom_calls(text)} == local


def test_explicit_and_auto_axes_mixed():
    x, mesh = normal((8, 64, 32)), make_mesh(AxisType.Explicit, AxisType.Auto)
    with jax.set_mesh(mesh):
        got, text = compile_and_run(lambda x: primitives.quantize(x, UNSEEDED, FULL), put(mesh, x, "a", "b"))
    assert_equal(got, primitives.quantize(x, UNSEEDED, FULL))
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert {c.operands[0] for c in hlo.custom_calls(text)} == {("bf16", (2, 32, 32))}
    assert spec_of(got.data) == P("a", "b")


@pytest.mark.parametrize("rows", [64, 8], ids=["custom call", "reference"])
def test_inside_auto_axes(rows):
    """An Explicit mesh whose axes are made Auto, as a chain of ops does for all of its steps at once."""
    x, mesh = normal((4, rows, 32)), make_mesh(AxisType.Explicit, AxisType.Explicit)

    def function(x):
        out = primitives.quantize(x, UNSEEDED, FULL)
        return primitives.dequantize(out.data, out.scale_inv, primitives.DequantizeSpec())

    with jax.set_mesh(mesh):
        got, text = compile_and_run(compat.auto_axes(function, out_sharding=P("a", "b")), put(mesh, x, "a", "b"))
    np.testing.assert_array_equal(oracle.f64(got), oracle.f64(function(x)))
    assert {c.operands[0][1] for c in hlo.custom_calls(text)} == {(1, rows // 2, 32)}
    written = [c for c in hlo.custom_calls(text) if c.target == "te_jax_quantize" and c.results[0][0] != "f32"]
    assert len(written) == (1 if rows == 64 else 0)
    assert set(hlo.count_collectives(text)) == {"all-reduce"}
    assert spec_of(got) == P("a", "b")


def test_regime():
    x = normal((8, 16))
    assert mesh_lib.regime(x).kind == mesh_lib.Kind.AUTO
    explicit = make_mesh(AxisType.Explicit, AxisType.Explicit)
    assert mesh_lib.regime(put(explicit, x, "a")).explicit == ("a", "b")
    with jax.set_mesh(make_mesh(AxisType.Auto, AxisType.Auto)):
        assert mesh_lib.regime(x).auto == ("a", "b")
        assert mesh_lib.manual_axes() == ()

    def inside(x):
        assert mesh_lib.regime(x).kind == mesh_lib.Kind.MANUAL
        assert mesh_lib.manual_axes() == ("a", "b")
        assert mesh_lib.amax_axes(x) == ("a",)
        return x

    jax.shard_map(inside, mesh=make_mesh(AxisType.Auto, AxisType.Auto), in_specs=P("a"), out_specs=P("a"))(x)
