"""Chains on meshes: Auto, Explicit and Manual. Right values alone prove nothing, so the programs are read too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION
from te_jax.testing import hlo

P = PartitionSpec
RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
    "none": None,
}
REGIMES = ("auto", "explicit", "manual")
# What a chain of two linears makes besides the calls of one device (test_plan): in front of each of its four passes
# over activations, a pass that takes the amax of the shard where the quantizer has no history.
CALLS = {"te_jax_norm": 2, "te_jax_activation": 2, "te_jax_activation_grad": 2, "te_jax_quantize": 4, "te_jax_gemm": 6}
# Blocks have scales of their own.
BLOCK_CALLS = {name: n if name == "te_jax_gemm" else n // 2 for name, n in CALLS.items()} | {"te_jax_quantize": 3}
CALLS, BLOCK_CALLS = ({"te_jax_norm_grad": 1} | calls for calls in (CALLS, BLOCK_CALLS))


def module_of(recipe):
    chain = [ops.RMSNorm(), ops.Linear(256), ops.SwiGLU(), ops.Linear(64, use_bias=False)]
    return te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16)


def setup(recipe):
    module = module_of(recipe)
    x = jax.random.normal(jax.random.key(0), (8, 32, 64), jnp.bfloat16)
    # Shards of very different size: a scale from one shard alone would be wrong on the others.
    x = x * jnp.exp2(jnp.arange(8.0) - 4).astype(x.dtype)[:, None, None]
    return module, module.init(jax.random.key(1), x), x


def loss_of(module):
    return lambda variables, x: jnp.sum(module.apply(variables, x).astype(jnp.float32) ** 2)


def compile_step(module, variables, x, regime):
    """The compiled gradient of the loss on 8 devices, batch over `data`; and its sharded arguments."""
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Explicit}[regime]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    step = jax.value_and_grad(loss_of(module), argnums=(0, 1))
    if regime == "manual":

        def shard(variables, x):
            loss, grads = jax.value_and_grad(lambda v, x: jax.lax.psum(loss_of(module)(v, x), "data"), (0, 1))(
                variables, x
            )
            return loss, grads

        step = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), (P(), P("data"))))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    variables = jax.device_put(variables, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        return jax.jit(step).lower(variables, x).compile(), variables, x


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_data_parallel_equals_one_device(recipe, regime):
    module, variables, x = setup(RECIPES[recipe])
    want = jax.jit(jax.value_and_grad(loss_of(module), argnums=(0, 1)))(variables, x)
    compiled, variables, x = compile_step(module, variables, x, regime)
    text = compiled.as_text()
    collectives = hlo.count_collectives(text)
    assert set(collectives) == {"all-reduce"}, collectives
    calls = hlo.custom_calls(text)
    state = {"te_jax_scale_read": 1, "te_jax_scale_write": 1} if recipe == "delayed" else {}
    expected = {"none": {}, "block": BLOCK_CALLS}.get(recipe, CALLS | state)
    assert hlo.count_custom_calls(text) == expected
    activations = [dims for call in calls for _, dims in call.operands if len(dims) == 3]
    assert all(8 not in dims for dims in activations), activations  # local: one of eight examples

    got = compiled(variables, x)
    state, want_state = got[1][0].get(COLLECTION, {}), want[1][0].get(COLLECTION, {})
    # The state is one and the same, to the bit, and so on every device.
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(want_state), strict=True):
        for shard in a.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(b), err_msg=jax.tree_util.keystr(path))
    for a, b in zip(
        jax.tree.leaves((got[0], got[1][0]["params"], got[1][1])),
        jax.tree.leaves((want[0], want[1][0]["params"], want[1][1])),
        strict=True,
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("recipe", "features"),
    [(te.CurrentScaling(power_of_two=True), 32), (te.BlockScaling(), 128)],
    ids=["current", "block"],
)
def test_sharded_kernels(recipe, features, kind):
    """Column- and row-parallel kernels over `model`, batch over `data`: results are those of one device."""

    def module_with(out_sharding):
        last = ops.Linear(features, use_bias=False, out_sharding=out_sharding)
        chain = [ops.Linear(2 * features, use_bias=False), ops.GELU(), last]
        return te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16)

    one, module = module_with(None), module_with(P("data", None, None))
    x = jax.random.normal(jax.random.key(0), (4, 32, features), jnp.bfloat16)
    variables = one.init(jax.random.key(1), x)
    want = jax.jit(jax.value_and_grad(loss_of(one), argnums=(0, 1)))(variables, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    specs = {"params": {"ops_0": {"kernel": P(None, "model")}, "ops_2": {"kernel": P("model", None)}}}
    with jax.set_mesh(mesh):
        variables = jax.device_put(variables, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        compiled = jax.jit(jax.value_and_grad(loss_of(module), argnums=(0, 1))).lower(variables, x).compile()
        got = compiled(variables, x)
    assert "all-gather" not in hlo.count_collectives(compiled.as_text())
    if kind == AxisType.Explicit:
        assert [leaf.sharding.spec for leaf in jax.tree.leaves(got[1][0])] == [P(None, "model"), P("model", None)]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(("model", "data"))], ids=str)
def test_kernels_in_more_shards_than_blocks(spec, kind):
    """Parameters are sharded for memory alone: two blocks of them over four or eight devices."""
    module = te.Sequential([ops.RMSNorm(), ops.Linear(256, use_bias=False)], recipe=te.BlockScaling())
    x = jax.random.normal(jax.random.key(0), (8, 16, 256))
    variables = module.init(jax.random.key(1), x)
    step = jax.jit(jax.value_and_grad(loss_of(module), argnums=(0, 1)))
    want = step(variables, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(mesh, spec if p.ndim == 2 else P())), variables)
        got = step(placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((512, 64), P("data")),  # 64 tokens on a device: half a block of wgrad's
        ((2, 128, 64), P(None, "data")),
        ((8, 4, 64), P("data")),  # 4 tokens: the GEMM of a device is the reference's
    ],
)
def test_fewer_tokens_on_a_device_than_a_block_has(shape, spec, kind):
    chain = [ops.MakeExtraOutput(), ops.RMSNorm(), ops.Linear(128), ops.GELU(), ops.Linear(64, use_bias=False)]
    module = te.Sequential(chain, recipe=te.BlockScaling())
    x = jax.random.normal(jax.random.key(0), shape)
    variables = module.init(jax.random.key(1), x)

    def loss(variables, x):
        y, extra = module.apply(variables, x)
        return (y**2).sum() + (extra**3).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    want = step(variables, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, spec))
        variables = jax.device_put(variables, NamedSharding(mesh, P()))
        y, extra = jax.jit(module.apply)(variables, x)
        got = step(variables, x)
    if kind == AxisType.Explicit:
        assert tuple(y.sharding.spec)[: len(spec)] == tuple(extra.sharding.spec)[: len(spec)] == tuple(spec)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


def test_a_pipeline_stage_keeps_its_own_state():
    """State that varies over a manual axis isn't reduced over it: each stage has its own amax."""
    module = te.Sequential([ops.Linear(32, use_bias=False)], recipe=RECIPES["delayed"])
    mesh = jax.make_mesh((2, 4), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.random.normal(jax.random.key(0), (2, 4, 16, 32)) * jnp.array([1.0, 100.0])[:, None, None, None]
    variables = jax.jit(module.init)(jax.random.key(1), x[0, 0])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)

    def shard(variables, x):
        variables, x = jax.tree.map(lambda leaf: leaf[0], (variables, x))
        grads = jax.grad(lambda v: jax.lax.psum(module.apply(v, x).sum(), "data"))(variables)
        return jax.tree.map(lambda leaf: leaf[None], grads)

    with jax.set_mesh(mesh):
        specs = (P("stage"), P("stage", "data"))
        arguments = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((stacked, x), specs, strict=True)]
        got = jax.jit(jax.shard_map(shard, in_specs=specs, out_specs=P("stage")))(*arguments)
    whole = jax.jit(jax.grad(lambda v, x: module.apply(v, x).sum()))
    for stage in range(2):
        want = whole(variables, x[stage])[COLLECTION]
        for a, b in zip(jax.tree.leaves(got[COLLECTION]), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[stage], b)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("regime", ["manual", "explicit"])
def test_export(regime, recipe):
    from jax import export

    from te_jax.primitives import support

    module, variables, x = setup(RECIPES[recipe])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    apply = module.apply
    if regime == "manual":
        apply = jax.shard_map(module.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    variables = jax.device_put(variables, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        fn = jax.jit(apply)
        exported = export.export(fn, disabled_checks=support.export_checks())(variables, x)
        got = export.deserialize(exported.serialize()).call(variables, x)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(fn(variables, x), np.float32))
