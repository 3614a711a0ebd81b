"""jit, vmap, scan, remat, cond and export around the primitives."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import config, primitives
from te_jax.primitives import GemmSpec, QuantizeSpec
from te_jax.testing import hlo, oracle

UNSEEDED = np.float32(0)
SPEC = QuantizeSpec(format="e4m3", data_t=True, amax=True)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def quantize(x, scale=UNSEEDED):
    return primitives.quantize(x, scale, SPEC)


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(oracle.f64(a), oracle.f64(b))


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_is_a_loop(axis):
    x = normal((3, 3, 16, 32)) * jnp.arange(1.0, 4.0)[:, None, None, None].astype(jnp.bfloat16)
    got = jax.jit(jax.vmap(jax.vmap(quantize), in_axes=axis))(x)
    examples = [quantize(jnp.moveaxis(x, axis, 0)[i, j]) for i in range(3) for j in range(3)]
    assert_equal(got, jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(3, 3, *leaves[0].shape), *examples))
    assert len(np.unique(got.amax)) > 1  # per example


def test_vmap_of_some_operands():
    lhs, rhs = normal((3, 16, 32)), normal((16, 32), seed=1)
    spec = GemmSpec(fp8=False, out_dtype="float32")

    def function(lhs, rhs):
        return primitives.gemm(lhs, rhs, spec)[0]

    got = jax.vmap(function, in_axes=(0, None))(lhs, rhs)
    assert_equal(got, jnp.stack([function(x, rhs) for x in lhs]))
    swapped = jax.vmap(function, in_axes=(None, 0))(rhs, lhs)
    assert_equal(swapped, jnp.stack([function(rhs, x) for x in lhs]))


def test_vmap_inside_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = normal((8, 2, 16, 32))
    mapped = jax.shard_map(
        lambda x: jax.vmap(lambda x: quantize(x).amax)(x[0]), mesh=mesh, in_specs=P("a"), out_specs=P()
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), np.abs(oracle.f64(x)).max((0, 2, 3)))


@pytest.mark.parametrize("axes", [(8,), (4, 2)], ids=["batch", "batch and rows"])
def test_vmap_over_a_sharded_dimension_of_an_explicit_mesh(axes):
    mesh = jax.make_mesh(axes, ("a", "b")[: len(axes)], axis_types=(AxisType.Explicit,) * len(axes))
    x = normal((8, 32, 32))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P(*("a", "b")[: len(axes)])))
        compiled = jax.jit(jax.vmap(quantize)).lower(sharded).compile()
        got = compiled(sharded)
    assert_equal(got, jax.vmap(quantize)(x))
    if len(axes) == 1 or jax.__version_info__ >= (0, 11):  # 0.10.2 gathers at the border of every nested shard_map
        assert "all-gather" not in hlo.count_collectives(compiled.as_text())
    local = ("bf16", (32 // (2 if len(axes) == 2 else 1), 32))
    assert {c.operands[0] for c in hlo.custom_calls(compiled.as_text())} == {local}


def test_vmap_over_a_sharded_dimension_of_an_auto_mesh():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, w = normal((8, 3, 64, 32)), normal((48, 32), seed=1)
    spec = GemmSpec(fp8=False)

    def function(x):
        return primitives.gemm(x, w, spec)[0], quantize(x).data, quantize(x).amax

    twice = jax.vmap(jax.vmap(function))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("a", None, "b")))
        compiled = jax.jit(twice).lower(sharded).compile()
        got = compiled(sharded)
    assert_equal(got, twice(x))
    np.testing.assert_array_equal(got[2], np.abs(oracle.f64(x)).max((2, 3)))
    assert got[1].sharding.spec[0] == "a"
    calls = hlo.custom_calls(compiled.as_text())
    assert {c.operands[0] for c in calls} == {("bf16", (32, 32))}
    assert set(hlo.count_collectives(compiled.as_text())) == {"all-reduce"}  # of amax, over the rows


def test_scan():
    x = normal((4, 16, 32))

    def body(scale, x):
        out = quantize(x, scale)
        return out.scale * 2, (out.data, out.amax)

    scale, (data, amax) = jax.jit(lambda x: jax.lax.scan(body, UNSEEDED, x))(x)
    first = quantize(x[0])
    assert scale == first.scale * 16
    np.testing.assert_array_equal(amax, np.abs(oracle.f64(x)).max((1, 2)))
    assert_equal(data[0], first.data)
    assert_equal(data[2], quantize(x[2], first.scale * 4).data)


def test_scan_inside_shard_map_keeps_the_carrys_type():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def body(x, _):
        return primitives.dequantize(quantize(x).data, np.float32(1), primitives.DequantizeSpec()), None

    mapped = jax.shard_map(
        lambda x: jax.lax.scan(body, x, None, length=2)[0], mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    assert jax.jit(mapped)(normal((128, 32))).shape == (128, 32)


def test_cond_and_while():
    x = normal((16, 32))
    function = jax.jit(lambda x, on: jax.lax.cond(on, lambda x: quantize(x).amax, lambda x: jnp.float32(-1), x))
    assert function(x, True) == np.abs(oracle.f64(x)).max()
    assert function(x, False) == -1
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, s: quantize(x, s).scale, UNSEEDED))
    assert looped(x) == quantize(x).scale


@jax.custom_vjp
def matmul(x, w):
    return _forward(x, w)[0]


def _forward(x, w):
    x_q, w_q = quantize(x), quantize(w)
    x_q = x_q._replace(data=checkpoint_name(x_q.data, "x_q"))
    y, _ = primitives.gemm(x_q.data, w_q.data, GemmSpec(), lhs_scale_inv=x_q.scale_inv, rhs_scale_inv=w_q.scale_inv)
    return y, (x_q.data_t, x_q.scale_inv, w)


def _backward(saved, dy):
    x_t, x_scale_inv, _ = saved
    dy_q = quantize(dy)
    dw, _ = primitives.gemm(dy_q.data_t, x_t, GemmSpec(), lhs_scale_inv=dy_q.scale_inv, rhs_scale_inv=x_scale_inv)
    return jnp.zeros((dy.shape[0], dw.shape[1]), dy.dtype), dw


matmul.defvjp(_forward, _backward)


@pytest.mark.parametrize("saveable", ["nothing", "everything"])
def test_grad_of_a_custom_vjp_with_remat(saveable):
    policy = getattr(jax.checkpoint_policies, f"{saveable}_saveable")
    x, w = normal((16, 32)), normal((48, 32), seed=1)

    def loss(w, matmul):
        return jnp.sum(matmul(x, w).astype(jnp.float32) ** 2)

    want = jax.grad(functools.partial(loss, matmul=matmul))(w)
    rematted = jax.jit(jax.grad(functools.partial(loss, matmul=jax.checkpoint(matmul, policy=policy))))
    assert_equal(rematted(w), want)
    lowered = rematted.trace(w).lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.count_custom_calls(lowered)["te_jax_quantize"] == {"nothing": 4, "everything": 3}[saveable]


def test_config_retraces():
    x = normal((16, 32))
    function = jax.jit(quantize)
    for enabled in (True, False, True):
        with config.custom_calls(enabled):
            text = function.lower(x).compile().as_text()
            assert hlo.count_custom_calls(text).total() == enabled


def export(function, *operands, **kwargs):
    checks = primitives.support.export_checks()
    exported = jax.export.export(jax.jit(function), disabled_checks=checks, **kwargs)(*operands)
    return jax.export.deserialize(exported.serialize())


def test_export_single_device():
    x = normal((16, 32))

    def function(x):
        out = quantize(x)
        return out.data, out.scale

    exported = export(function, jax.ShapeDtypeStruct(x.shape, x.dtype), platforms=("cpu", "cuda"))
    assert "te_jax_quantize" in exported.mlir_module()
    assert_equal(jax.jit(exported.call)(x), function(x))


def sharded_case(kind):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
    return mesh, jax.device_put(normal((256, 32)), NamedSharding(mesh, P("a")))


@pytest.mark.parametrize("kind", ["explicit", "manual"])
def test_export_over_several_devices(kind):
    mesh, x = sharded_case(AxisType.Explicit if kind == "explicit" else AxisType.Auto)

    def function(x):
        out = quantize(x)
        return out.data, out.amax

    if kind == "manual":
        function = jax.shard_map(function, mesh=mesh, in_specs=P("a"), out_specs=(P("a"), P()))
    with jax.set_mesh(mesh):
        exported = export(function, x)
        got = jax.jit(exported.call)(x)
    want = quantize(np.asarray(x))
    assert_equal(got, (want.data, want.amax))


def test_export_of_an_auto_program_over_several_devices_is_refused_by_name():
    mesh, x = sharded_case(AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="8 devices whose mesh is Auto"):
        export(lambda x: quantize(x).data, x)
