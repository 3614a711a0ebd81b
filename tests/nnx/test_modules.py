"""te.nnx modules against linen's, flax.nnx's own and plain jax.numpy; their variables, dropout and errors."""

import dataclasses
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION
from te_jax.testing import modules

DELAYED = te.DelayedScaling(amax_history_len=4)
K = 32
X = jax.random.normal(jax.random.key(0), (2, 16, K))
CHAIN = (ops.RMSNorm(), ops.Linear(64), ops.GELU(), ops.Linear(K, use_bias=False, name="out"), ops.AddExtraInput())

# name -> (nnx module, linen module, inputs)
CASES = {
    "Dense": (lambda **kw: te.nnx.Dense(K, 48, **kw), lambda **kw: te.flax.Dense(48, **kw), (X,)),
    "LayerNormDense": (
        lambda **kw: te.nnx.LayerNormDense(K, 48, norm="layernorm", **kw),
        lambda **kw: te.flax.LayerNormDense(48, norm="layernorm", **kw),
        (X,),
    ),
    "LayerNormMLP": (
        lambda **kw: te.nnx.LayerNormMLP(K, 48, use_bias=True, residual=True, **kw),
        lambda **kw: te.flax.LayerNormMLP(K, 48, use_bias=True, residual=True, **kw),
        (X,),
    ),
    "DenseGeneral": (
        lambda **kw: te.nnx.DenseGeneral((16, K), (4, 8), axis=(1, -1), **kw),
        lambda **kw: te.flax.DenseGeneral((4, 8), (1, -1), **kw),
        (jnp.broadcast_to(X[:, None], (2, 8, 16, K)).transpose(1, 2, 0, 3),),
    ),
    "GroupedDense": (
        lambda **kw: te.nnx.GroupedDense(3, K, 48, **kw),
        lambda **kw: te.flax.GroupedDense(3, 48, **kw),
        (X[0], jnp.array([5, 2, 9])),
    ),
    "TransformerLayer": (
        lambda **kw: te.nnx.TransformerLayer(K, 2, 48, **kw),
        lambda **kw: te.flax.TransformerLayer(2, 48, **kw),
        (X,),
    ),
    "MultiHeadAttention": (
        lambda **kw: te.nnx.MultiHeadAttention(K, 2, norm="layernorm", rope=True, residual=True, **kw),
        lambda **kw: te.flax.MultiHeadAttention(2, norm="layernorm", rope=True, residual=True, **kw),
        (X,),
    ),
    "Sequential": (
        lambda **kw: te.nnx.Sequential(CHAIN, K, **kw),
        lambda **kw: te.Sequential(CHAIN, **kw),
        (X, 0.5 * X),
    ),
}


def shapes_of(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", CASES)
def test_results_equal_linens(name):
    """The same paths, shapes, plan and results, and state in the same places."""
    make, make_linen, inputs = CASES[name]
    model, module = make(recipe=DELAYED, rngs=nnx.Rngs(0)), make_linen(recipe=DELAYED)
    variables = te.nnx.to_variables(model)
    assert shapes_of(variables) == shapes_of(jax.eval_shape(module.init, jax.random.key(0), *inputs))
    assert model.plan(*inputs, differentiate_state=True) == module.plan(*inputs)
    y = nnx.jit(lambda m, *inputs: m(*inputs))(model, *inputs)
    assert_close(y, jax.jit(module.apply)(variables, *inputs))
    uses = [leaf for leaf in jax.tree.leaves(te.nnx.to_variables(model)[COLLECTION]) if leaf.shape[-1] == 66]
    for leaf in uses:  # every x and kernel was used once, no dy
        counts = leaf.reshape(-1, 66)[:, 64]
        np.testing.assert_array_equal(counts * 2.0**64, [1, 1, 0] * (len(counts) // 3))


@pytest.mark.parametrize("name", ["LayerNormMLP", "GroupedDense", "Sequential"])
def test_gradients_equal_linens(name):
    make, make_linen, inputs = CASES[name]
    model, module = make(recipe=DELAYED, rngs=nnx.Rngs(0)), make_linen(recipe=DELAYED)
    want = jax.jit(jax.grad(lambda v: (module.apply(v, *inputs) ** 2).mean()))(te.nnx.to_variables(model))
    grads = nnx.jit(te.nnx.grad(lambda m: (m(*inputs) ** 2).mean()))(model)
    assert_close(nnx.to_pure_dict(grads), want["params"])
    assert_close(te.nnx.to_variables(model)[COLLECTION], want[COLLECTION])


def test_unquantized_equals_flax_and_numpy():
    rngs = nnx.Rngs(0)
    dense = te.nnx.Dense(K, 48, rngs=rngs)
    linear = nnx.Linear(K, 48, rngs=rngs)
    linear.kernel.set_value(dense.kernel.get_value())
    np.testing.assert_allclose(dense(X), linear(X), rtol=1e-5, atol=1e-6)
    general = te.nnx.DenseGeneral((16, K), (4, 8), axis=(1, 2), rngs=rngs)
    want = np.einsum("btk,tknm->bnm", X, general.kernel.get_value())
    np.testing.assert_allclose(general(X), want, rtol=1e-4, atol=1e-5)
    mlp = te.nnx.LayerNormMLP(K, 48, use_bias=True, rngs=rngs)
    want = modules.mlp(te.nnx.to_variables(mlp)["params"], X, "swiglu")
    np.testing.assert_allclose(mlp(X), want, rtol=1e-5, atol=1e-5)
    assert set(te.nnx.to_variables(mlp)) == {"params"}


def test_initial_values_are_those_of_the_initialisers():
    """lecun_normal, as nnx.Linear and nn.Dense have it; each module its own."""
    a, b = (te.nnx.Dense(256, 256, rngs=rngs) for rngs in [nnx.Rngs(0)] for _ in range(2))
    kernel = np.asarray(a.kernel.get_value())
    assert abs(kernel.std() * 16 - 1) < 0.02
    assert not np.array_equal(kernel, b.kernel.get_value())
    assert (a.bias.get_value() == 0).all()


def test_sequential_with_modules_and_functions():
    """An nnx module in the chain is an attribute, with state of its own; listed twice, an object is shared."""
    rngs = nnx.Rngs(0)
    norm, linear = nnx.BatchNorm(K, rngs=rngs), ops.Linear(K)
    chain = te.nnx.Sequential([linear, norm, jnp.tanh, linear, norm], K, recipe=DELAYED, rngs=rngs)
    assert chain.ops_1 is norm
    assert (norm.mean.get_value() == 0).all()  # making the variables has run nothing
    variables = te.nnx.to_variables(chain)
    assert set(variables["params"]) == {"ops_0", "ops_1"}
    assert set(variables[COLLECTION]) == {"fp8_0", "fp8_3"}

    before = nnx.clone(chain)
    y = nnx.jit(lambda m, x: m(x))(chain, X)
    assert (norm.mean.get_value() != 0).any()
    plain = nnx.BatchNorm(K, rngs=nnx.Rngs(0))
    dense = te.nnx.Dense(K, K, recipe=DELAYED, rngs=nnx.Rngs(0))
    te.nnx.update(
        dense, {"params": variables["params"]["ops_0"], COLLECTION: {"fp8_0": variables[COLLECTION]["fp8_0"]}}
    )
    other = nnx.clone(dense)
    want = plain(other(jnp.tanh(plain(dense(X)))))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.mean.get_value(), plain.mean.get_value(), rtol=1e-4, atol=1e-6)
    assert [step.ops for step in before.plan(X).forward if "ends a run" in step.name] == [
        ("BatchNorm",),
        ("tanh",),
        ("BatchNorm",),
    ]


def test_lists_inside_of_the_chain():
    """Paths are linen's; modules in lists are attributes too."""
    inner = [ops.RMSNorm(), ops.Linear(K, use_bias=False)]
    norm = nnx.LayerNorm(K, rngs=nnx.Rngs(0))
    chain = te.nnx.Sequential([ops.Linear(K), inner, [norm, inner]], K, recipe=DELAYED, rngs=nnx.Rngs(0))
    assert chain.ops_2_0 is norm
    variables = te.nnx.to_variables(chain)
    module = te.Sequential([ops.Linear(K), inner, [jnp.tanh, inner]], recipe=DELAYED)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X)
    del variables["params"]["ops_2_0"]
    assert shapes_of(variables) == shapes_of(shapes)
    assert chain(X).shape == X.shape


def test_sequential_takes_an_example_of_x():
    chain = [ops.Linear(K), ops.Reshape((2, 8 * K)), ops.Linear(16, use_bias=False)]
    model = te.nnx.Sequential(chain, jax.ShapeDtypeStruct((2, 8, K), jnp.float32), rngs=nnx.Rngs(0))
    assert model.ops_2.kernel.shape == (8 * K, 16)
    assert model(X[:, :8]).shape == (2, 16)


def test_dropout():
    model = te.nnx.LayerNormMLP(K, 48, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
    first, second = model(X), model(X)
    assert 0.4 < (np.asarray(first) == 0).mean() < 0.6
    assert not np.array_equal(first, second)  # the stream goes on
    given = [model(X, rngs=nnx.Rngs(dropout=7)) for _ in range(2)]
    np.testing.assert_array_equal(*given)
    want = model(X, deterministic=True)
    kept = np.asarray(first) != 0
    np.testing.assert_allclose(np.asarray(first)[kept], 2 * np.asarray(want)[kept], rtol=1e-6)
    model.eval()
    np.testing.assert_array_equal(model(X), want)
    assert te.nnx.LayerNormMLP(K, 48, rngs=nnx.Rngs(0)).rngs is None
    assert {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngState))} == {"rngs"}


def test_bfloat16():
    model = te.nnx.LayerNormMLP(K, 48, recipe=te.CurrentScaling(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert model(X).dtype == jnp.bfloat16
    assert model.fc1.kernel.dtype == jnp.float32
    assert not jax.tree.leaves(nnx.state(model, te.nnx.FP8State))


@pytest.mark.parametrize(
    "with_names",
    [nnx.with_partitioning, nn.with_partitioning, nn.with_logical_partitioning],
    ids=["nnx", "nn", "logical"],
)
def test_partitioning_metadata(with_names):
    """As nnx.Linear's parameters have it; linen's wrappers say the same."""
    init = with_names(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    as_nnx = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        dense = te.nnx.Dense(K, 48, kernel_init=init, recipe=DELAYED, rngs=nnx.Rngs(0))
        chain = te.nnx.Sequential([ops.Linear(48, kernel_init=init)], K, rngs=nnx.Rngs(0))
        linear = nnx.Linear(K, 48, kernel_init=as_nnx, rngs=nnx.Rngs(0))
    for kernel in (dense.kernel, chain.ops_0.kernel):
        got, want = ({k: v for k, v in p.get_metadata().items() if v is not None} for p in (kernel, linear.kernel))
        assert got == want
    spec = nnx.get_partition_spec(nnx.state(dense))
    assert spec["kernel"].get_value() == jax.sharding.PartitionSpec("embed", "mlp")
    assert dense(X).shape == (2, 16, 48)
    assert nnx.clone(dense)(X).shape == (2, 16, 48)


def test_partitioning_metadata_of_a_general_kernel():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b", "c"))
    with nnx.use_eager_sharding(False):
        model = te.nnx.DenseGeneral(K, (4, 8), kernel_init=init, rngs=nnx.Rngs(0))
    assert model.kernel.shape == (K, 4, 8)
    assert model.kernel.get_metadata("out_sharding") == ("a", "b", "c")


def test_linen_modules_through_flaxs_bridge():
    """Their state is FP8State too; te.nnx.grad updates it, and it is said while tracing that nnx.grad doesn't."""
    bridged = nnx.bridge.ToNNX(te.flax.Dense(48, recipe=DELAYED), rngs=nnx.Rngs(0)).lazy_init(X)
    assert te.nnx.FP8State.__name__ == COLLECTION  # what MaxText looks for
    variables = te.nnx.to_variables(bridged)
    assert set(variables) == {"params", COLLECTION}
    assert len(jax.tree.leaves(nnx.state(bridged, te.nnx.FP8State))) == 3
    bridged(X)  # nothing is differentiated, and nothing said
    with pytest.warns(
        UserWarning, match=r"te_jax\.Dense: FP8 state: expected te\.nnx\.grad in place of nnx\.grad"
    ) as said:
        nnx.jit(nnx.grad(lambda m: m(X).sum()))(bridged)
    assert {each.filename for each in said} == {__file__}
    with pytest.raises(ValueError, match="state that this step did not update"):
        te.state.check(variables[COLLECTION], te.nnx.to_variables(bridged)[COLLECTION])
    nnx.jit(te.nnx.grad(lambda m: m(X).sum()))(bridged)
    te.state.check(variables[COLLECTION], te.nnx.to_variables(bridged)[COLLECTION])


def test_flaxs_bridge_was_there_first():
    """A class that flax has made for the collection before te_jax was imported stays its class."""
    script = """
        import jax.numpy as jnp
        from flax import nnx
        first = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
        import te_jax as te
        assert issubclass(te.nnx.FP8State, first)
        dense = te.flax.Dense(16, use_bias=False, recipe=te.DelayedScaling(amax_history_len=2))
        x = jnp.ones((16, 16))
        model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(x)
        grads = nnx.jit(te.nnx.grad(lambda m: m(x).sum()))(model)
        assert type(model.fp8_0["uses"]) is first
        assert (te.nnx.to_variables(model)["_overwrite_with_gradient"]["fp8_0"]["uses"][:, 64] > 0).all()
        assert len(nnx.to_flat_state(nnx.state(grads))) == 1
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_errors():
    @dataclasses.dataclass(frozen=True)
    class NotData(ops.Identity):
        sizes: list = dataclasses.field(default_factory=list)

    rngs = nnx.Rngs(0)
    with pytest.raises(TypeError, match=r"NotData.*expected hashable fields"):
        te.nnx.Sequential([NotData()], 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"Dense: in_features: expected a positive int, got 0"):
        te.nnx.Dense(0, 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"features: expected a positive int, got -1"):
        te.nnx.Dense(16, -1, rngs=rngs)
    with pytest.raises(TypeError, match=r"Dense: rngs: expected nnx.Rngs, got PRNGKeyArray"):
        te.nnx.Dense(16, 16, rngs=jax.random.key(0))
    with pytest.raises(ValueError, match=r"Dense: x: expected \[\*lead, 16\], got \(2, 16, 32\)"):
        te.nnx.Dense(16, 16, rngs=rngs)(X)
    with pytest.raises(TypeError, match=r"Dense: recipe: expected None or a recipe object"):
        te.nnx.Dense(16, 16, recipe="fp8", rngs=rngs)
    with pytest.raises(ValueError, match=r"DenseGeneral: in_features: expected one size for each axis"):
        te.nnx.DenseGeneral((16, 2), 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"DenseGeneral: x: expected sizes \(16,\) to contract"):
        te.nnx.DenseGeneral(16, 16, rngs=rngs)(X)
    with pytest.raises(ValueError, match=r"GroupedLinear: num_groups: expected a positive int, got 0"):
        te.nnx.GroupedDense(0, K, 16, rngs=rngs)
    grouped = te.nnx.GroupedDense(2, K, 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"GroupedDense: x: expected \[tokens, 32\], got \(2, 16, 32\)"):
        grouped(X, jnp.array([5, 2]))
    with pytest.raises(ValueError, match=r"group_sizes: expected no negative size, got group_sizes\[1\] = -2"):
        grouped(X[0], np.array([5, -2]))
    with pytest.raises(TypeError, match=r"nnx.Sequential: ops\[0\]: expected an op, an nnx module .*ToNNX"):
        te.nnx.Sequential([nn.Dense(3)], 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"name of an op: expected a name that isn't an attribute.*'plan'"):
        te.nnx.Sequential([ops.Linear(16, name="plan")], 16, rngs=rngs)
    with pytest.raises(ValueError, match=r"nnx.Sequential: in_features: expected a positive int or"):
        te.nnx.Sequential([ops.Linear(16)], "16", rngs=rngs)
    with pytest.raises(ValueError, match=r"extra inputs: expected 1.*, got 0"):
        te.nnx.Sequential([ops.AddExtraInput()], 16, rngs=rngs)(X)
