"""Block scaling in the three mesh regimes: shards are whole blocks, programs are local, values those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import primitives
from te_jax.primitives import ActivationGradSpec, GemmSpec, NormSpec, QuantizeOut, QuantizeSpec
from te_jax.testing import blocks, hlo, oracle

ROWS, SQUARES = "block_1x128", "block_128x128"
FULL = QuantizeSpec(format="e4m3", data_t=True, dbias=True, scaling=ROWS, power_of_two=True)
KERNEL = QuantizeSpec(format="e4m3", data_t=True, scaling=SQUARES, power_of_two=True)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def make_mesh(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def run(function, kind, *operands):
    """(results, HLO) on a mesh of that kind; operands are (array, spec)."""
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in operands]
        compiled = jax.jit(function).lower(*placed).compile()
        return compiled(*placed), compiled.as_text()


def local_operands(text):
    return [call.operands[0][1] for call in hlo.custom_calls(text)]


def spec_of(x):
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


@KINDS
def test_quantize(kind):
    x = normal((8, 256, 144))
    got, text = run(lambda x: primitives.quantize(x, None, FULL), kind, (x, ("a", "b")))
    blocks.check(got, x, FULL)
    assert local_operands(text) == [(2, 128, 144)]
    assert set(hlo.count_collectives(text)) == {"all-reduce"}  # dbias; no amax of the whole tensor is needed
    assert spec_of(got.data) == P("a", "b")
    assert spec_of(got.data_t) == P(None, "a", "b")
    assert spec_of(got.scale_inv) == P(None, "a", "b")
    assert spec_of(got.scale_inv_t) == P("a", "b")


@KINDS
def test_features_and_both_dimensions_of_a_kernel_may_be_sharded_between_blocks(kind):
    x = normal((256, 512))
    got, text = run(lambda x: primitives.quantize(x, None, FULL), kind, (x, ("b", "a")))
    blocks.check(got, x, FULL)
    assert local_operands(text) == [(128, 128)]
    assert spec_of(got.scale_inv) == P("a", "b")
    assert spec_of(got.scale_inv_t) == P("b", "a")
    got, text = run(lambda x: primitives.quantize(x, None, KERNEL), kind, (x, ("b", "a")))
    blocks.check(got, x, KERNEL)
    assert local_operands(text) == [(128, 128)]
    assert not hlo.count_collectives(text)
    assert spec_of(got.scale_inv) == P("b", "a")
    assert spec_of(got.scale_inv_t) == P("a", "b")


@KINDS
@pytest.mark.parametrize(
    ("shape", "spec", "local"),
    [
        ((4, 128, 256), ("a", "b"), (1, 128, 256)),  # 64 tokens a shard: half a block
        ((4, 256, 144), ("a", None, "b"), (1, 256, 144)),  # 72 features
        ((8, 72, 256), ("a", "b"), (2, 72, 256)),  # padded to one block, which is not split
        ((8, 72, 256), (None, None, "a"), (8, 72, 256)),  # two blocks of features over four devices,
        ((2, 256, 768), ("b", None, "a"), (1, 256, 768)),  # six over four,
        ((2, 256, 512), (None, None, ("b", "a")), (2, 256, 512)),  # four over eight: Shardy splits an axis for them
    ],
)
def test_blocks_are_not_split(kind, shape, spec, local):
    x = normal(shape)
    got, text = run(lambda x: primitives.quantize(x, None, FULL), kind, (x, spec))
    blocks.check(got, x, FULL)
    assert local_operands(text) == [local]


@KINDS
def test_producers(kind):
    x, gamma, dy = normal((8, 256, 512)), normal(512, seed=1), normal((8, 256, 256), seed=2)
    norm = NormSpec(format="e4m3", data_t=True, hp=True, stats=True, scaling=ROWS, power_of_two=True)
    got, text = run(lambda x: primitives.norm(x, gamma, None, None, norm), kind, (x, ("a", "b")))
    blocks.check(got, got.hp, norm)
    assert local_operands(text) == [(2, 128, 512)]
    assert not hlo.count_collectives(text)
    grad = ActivationGradSpec(format="e4m3", data_t=True, hp=True, dbias=True, kind="swiglu", scaling=ROWS)
    got, text = run(
        lambda dy, x: primitives.activation_grad(dy, x, None, grad), kind, (dy, ("a", "b")), (x, ("a", "b"))
    )
    blocks.check(got, got.hp, grad)
    assert local_operands(text) == [(2, 128, 256)]
    assert set(hlo.count_collectives(text)) == {"all-reduce"}


# lhs spec, rhs spec, local lhs, local rhs, out spec, collectives
GEMMS = {
    "data parallel": (("a", "b"), (), (2, 32, 512), (256, 512), P("a", "b"), set()),
    "column parallel": (("a",), ("b",), (2, 64, 512), (128, 512), P("a", None, "b"), set()),
    "row parallel": (("a", None, "b"), (None, "b"), (2, 64, 256), (256, 256), P("a"), {"all-reduce"}),
}


@KINDS
@pytest.mark.parametrize("case", GEMMS.values(), ids=GEMMS)
def test_gemm(kind, case):
    lhs_spec, rhs_spec, local_lhs, local_rhs, out_spec, collectives = case
    x, w = normal((8, 64, 512)), normal((512, 256), seed=1)
    q, k = primitives.quantize(x, None, FULL), primitives.quantize(w, None, KERNEL)
    bias, c = normal(256, seed=2), normal((8, 64, 256), seed=3)
    spec = GemmSpec(bias=True, beta=1.0, lhs_scaling=ROWS, rhs_scaling=SQUARES)

    def function(lhs, rhs, a, b, bias, c):
        return primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b, bias=bias, c=c)[0]

    operands = (q.data, k.data_t, q.scale_inv, k.scale_inv_t, bias, c)
    want = function(*operands)
    features = lhs_spec[2:] or (None,)
    specs = (lhs_spec, rhs_spec, (*features, *lhs_spec[:2]), rhs_spec, tuple(out_spec)[2:], tuple(out_spec))
    got, text = run(function, kind, *zip(operands, specs, strict=True))
    # Partial sums of a sharded contraction are rounded to bfloat16 before they are added.
    np.testing.assert_allclose(oracle.f64(got), oracle.f64(want), rtol=0.02, atol=0.3)
    (call,) = hlo.custom_calls(text)
    assert call.operands[:2] == (("f8e4m3fn", local_lhs), ("f8e4m3fn", local_rhs))
    assert set(hlo.count_collectives(text)) == collectives
    assert spec_of(got) == out_spec


@KINDS
def test_wgrad_sums_over_the_data_axes(kind):
    x, dy = normal((8, 256, 48)), normal((8, 256, 32), seed=1)
    q, g = primitives.quantize(x, None, FULL), primitives.quantize(dy, None, FULL)
    spec = GemmSpec(contract_dims=2, out_dtype="float32", lhs_scaling=ROWS, rhs_scaling=ROWS)

    def function(lhs, rhs, a, b):
        return primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b)[0]

    operands = (q.data_t, g.data_t, q.scale_inv_t, g.scale_inv_t)
    specs = ((None, "a", "b"), (None, "a", "b"), ("a", "b"), ("a", "b"))
    got, text = run(function, kind, *zip(operands, specs, strict=True))
    np.testing.assert_allclose(got, function(*operands), rtol=1e-4, atol=1e-3)
    (call,) = hlo.custom_calls(text)
    assert call.operands[:2] == (("f8e4m3fn", (48, 2, 128)), ("f8e4m3fn", (32, 2, 128)))
    assert hlo.count_collectives(text) == {"all-reduce": 1}


@pytest.mark.parametrize("check_vma", [True, False])
def test_manual(check_vma):
    """Every device has its own part: tokens that aren't whole blocks are padded there."""
    x, mesh = normal((8, 144, 128)), make_mesh(AxisType.Auto)

    def function(x):
        out = primitives.quantize(x, None, FULL)
        return out._replace(dbias=jax.lax.psum(out.dbias, ("a", "b")))

    specs = QuantizeOut(
        data=P("a", "b"), data_t=P(None, "a", "b"), scale_inv=P(None, "a", "b"), scale_inv_t=P("a", "b"), dbias=P()
    )
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("a", "b"), out_specs=specs, check_vma=check_vma)
    compiled = jax.jit(mapped).lower(x).compile()
    got = compiled(x)
    assert local_operands(compiled.as_text()) == [(2, 72, 128)]
    halves = [QuantizeSpec(format="e4m3", data_t=True, scaling=ROWS, power_of_two=True)] * 2
    for half, spec in enumerate(halves):
        want = primitives.quantize(x[:, 72 * half : 72 * (half + 1)], None, spec)
        part = np.asarray(got.data_t)[..., 128 * half : 128 * (half + 1)]
        np.testing.assert_array_equal(oracle.codes(part), oracle.codes(want.data_t))
        np.testing.assert_array_equal(np.asarray(got.scale_inv_t)[:, half], np.asarray(want.scale_inv_t)[:, 0])


def test_vmap_is_a_loop():
    x = normal((3, 72, 144))
    got = jax.jit(jax.vmap(lambda x: primitives.quantize(x, None, FULL)))(x)
    for i in range(3):
        blocks.check(jax.tree.map(lambda leaf, i=i: leaf[i], got), x[i], FULL)
