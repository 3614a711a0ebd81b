"""What users do wrong with chains and modules, and unusual settings of jax: a clear error, or the right value."""

import dataclasses
import pathlib
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops, primitives
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES

RECIPE = te.DelayedScaling(amax_history_len=4)
X = jnp.asarray(np.random.default_rng(0).normal(size=(32, 32)), jnp.bfloat16)
HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def init(*chain, x=X, **kwargs):
    return te.Sequential(chain, recipe=RECIPE, **kwargs).init(jax.random.key(0), x)


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (ops.Linear(32, name="fc"), ops.Linear(32, name="fc"), "fc"),
        (ops.Linear(32, name="fc"), ops.RMSNorm(name="fc"), "fc"),
        (ops.Linear(32, name="ops_1"), ops.Linear(32), "ops_1"),
        (ops.Linear(32, name="ops_1"), nn.Dense(32), "ops_1"),
        (ops.Linear(32, name=""), ops.RMSNorm(name=""), ""),
    ],
)
@pytest.mark.parametrize("between", [(), (jnp.tanh,)])
def test_two_ops_of_one_name_do_not_share_parameters_silently(first, second, name, between):
    if between and name == "ops_1":
        pytest.skip("the second is not at place 1 then")
    with pytest.raises(ValueError, match=rf"ops\[{1 + len(between)}\].*'{name}', which ops\[0\]"):
        init(first, *between, second)


@pytest.mark.parametrize("name", ["a.b", "a/b", "fp8_0", 3])
def test_names_that_a_checkpoint_would_confuse(name):
    with pytest.raises(ValueError, match=r"name of ops\[0\]"):
        init(ops.Linear(32, name=name))


def test_a_shared_op_has_one_shape_in_all_runs():
    shared = ops.Linear(32)
    with pytest.raises(
        ValueError, match=r"ops_0/kernel of ops\[3\] \(Linear\): expected shape \(48, 32\), got \(32, 32\)"
    ):
        init(shared, ops.Linear(48), jnp.tanh, shared)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ((ops.GELU,), r"ops\[0\]: expected an op"),
        ((nn.Dense,), r"ops\[0\]: expected an op"),
        ((lambda x: (x, x), ops.Linear(32)), r"the result of ops\[0\] \(<lambda>\): expected an array, got tuple"),
        (
            (lambda x: x.astype(jnp.int32), ops.Linear(32)),
            r"the result of ops\[0\] \(<lambda>\): expected dtype .*, got int32",
        ),
    ],
)
def test_what_is_not_an_op_or_an_array(chain, message):
    with pytest.raises(TypeError, match=message):
        init(*chain)
    with pytest.raises(TypeError, match=message):
        te.Sequential(chain, recipe=RECIPE).plan(X)


@pytest.mark.parametrize(
    "attributes",
    [
        {"recipe": "delayed"},
        {"recipe": te.DelayedScaling},
        {"dtype": jnp.int32},
        {"dtype": jnp.float64},
        {"param_dtype": jnp.float8_e4m3fn},
        {"param_dtype": None},
        {"forward_rules": (1,)},
    ],
)
def test_attributes_of_the_wrong_type(attributes):
    module = te.Sequential([ops.Linear(32)], **attributes)
    for call in (lambda: module.init(jax.random.key(0), X), lambda: module.plan(X)):
        with pytest.raises(TypeError, match=rf"te_jax.Sequential: {next(iter(attributes))}: expected"):
            call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: te.Sequential(ops.Linear(32)), "Sequential: ops"),
        (lambda: ops.ConstantScale(jnp.float32(2)), "ConstantScale: scale"),
        (lambda: ops.Dropout("half"), "Dropout: rate"),
        (lambda: ops.Reshape(4), "Reshape: shape"),
        (lambda: ops.Linear(32, kernel_init="ones"), "Linear: initialiser"),
    ],
)
def test_arguments_of_the_wrong_type(make, message):
    with pytest.raises(TypeError, match=rf"te_jax.{message}: expected"):
        make()


@pytest.mark.parametrize("chain", [(ops.Reshape(()), ops.RMSNorm()), (lambda x: x.sum(), ops.RMSNorm())])
def test_scalars_inside_a_chain(chain):
    with pytest.raises(ValueError, match=r"at least one dimension"):
        init(*chain, x=X[:1, :1])


def test_no_features():
    with pytest.raises(ValueError, match=r"Linear: x: expected at least one feature, got shape \(32, 0\)"):
        init(ops.Linear(32), x=X[:, :0])


@pytest.mark.parametrize("arguments", [(), (X, X), ([1.0],)])
def test_plan_checks_what_the_call_checks(arguments):
    with pytest.raises((ValueError, TypeError), match=r"te_jax.Sequential.plan: "):
        te.Sequential([ops.Linear(32)], recipe=RECIPE).plan(*arguments)


def test_a_module_is_hashable_and_reads_a_generator_once():
    module = te.Sequential((op for op in [ops.RMSNorm(), ops.Linear(32)]), recipe=RECIPE)
    assert hash(module) == hash(module.clone())
    assert module.bind({}).unbind()[0] == module
    for _ in range(2):
        assert set(module.init(jax.random.key(0), X)["params"]) == {"ops_0", "ops_1"}
    apply = jax.jit(lambda m, v: m.apply(v, X), static_argnums=0)
    assert apply(module, module.init(jax.random.key(0), X)).shape == X.shape


def test_what_is_printed_is_short():
    module = te.flax.LayerNormMLP(features=32, hidden_features=64, recipe=te.DelayedScaling())
    assert len(repr(module)) < 800
    assert "hidden_features = 64" in repr(module)
    assert "Rule(" not in repr(module)
    assert module != module.clone(forward_rules=())  # what isn't printed counts all the same


def test_names_of_the_package():
    public = [name for name in dir(te) if not name.startswith("_")]
    assert public == sorted(set(te.__all__))
    source = pathlib.Path(te.__file__).read_text()
    assert set(re.findall(r"^from te_jax\S* import (\w+) as \1$", source, re.M)) <= set(public)
    assert all(hasattr(te, name) for name in public)
    readme = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text()
    assert set(re.findall(r"\bte\.([A-Za-z]\w*)", readme)) <= set(public)


def test_rules_can_be_pickled():
    rules = (*FORWARD_RULES, *BACKWARD_RULES)
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_captured_intermediates_are_results():
    module = te.Sequential([ops.RMSNorm(), ops.Linear(32)], recipe=RECIPE)
    variables = module.init(jax.random.key(0), X)
    y, captured = module.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    assert list(captured["intermediates"]) == ["__call__"]
    np.testing.assert_array_equal(captured["intermediates"]["__call__"][0], y)


def test_scan_without_the_state_collection_says_what_to_add():
    scanned = nn.scan(lambda m, x, _: (m(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scanned(te.Sequential([ops.Linear(32)], recipe=RECIPE, dtype=jnp.bfloat16), x, None)[0]

    with pytest.raises(ValueError, match=r"need '_overwrite_with_gradient' in their variable_axes"):
        Model().init(jax.random.key(0), X)


@pytest.mark.parametrize("collection", ["params", "_overwrite_with_gradient"])
@pytest.mark.parametrize("recipe", [RECIPE, None])
def test_variables_in_host_memory(collection, recipe):
    module = te.Sequential([ops.RMSNorm(), ops.Linear(32)], recipe=recipe)
    variables = module.init(jax.random.key(0), X)
    if collection not in variables:
        pytest.skip("no such collection without a recipe")
    variables = {**variables, collection: jax.device_put(variables[collection], HOST)}
    with pytest.raises(ValueError, match=rf"{collection}/.*: expected an array in device memory"):
        module.apply(variables, X)


@pytest.mark.parametrize("derivative", ["second", "of a primitive"])
def test_derivatives_that_there_are_not(derivative):
    module = te.Sequential([ops.Linear(32)], recipe=RECIPE, dtype=jnp.float32)
    x = X.astype(jnp.float32)
    variables = module.init(jax.random.key(0), x)
    first = jax.grad(lambda x: module.apply(variables, x).sum())
    spec = primitives.spec.QuantizeSpec(format="e4m3")
    function = {
        "second": lambda x: first(x).sum(),
        "of a primitive": lambda x: primitives.quantize(x, jnp.float32(1), spec).data.astype(jnp.float32).sum(),
    }[derivative]
    with pytest.raises(NotImplementedError, match=r"te_jax: expected first derivatives in reverse mode"):
        jax.grad(function)(x)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.debug_nans(True),
    ],
    ids=["strict", "rank", "nans"],
)
@pytest.mark.parametrize("recipe", [RECIPE, te.BlockScaling()], ids=["delayed", "block"])
def test_settings_of_jax_change_nothing(setting, recipe):
    train = training(recipe)
    with setting():
        got = train()
    jax.tree.map(np.testing.assert_array_equal, got, train())


@pytest.mark.parametrize("recipe", [RECIPE, te.BlockScaling()], ids=["delayed", "block"])
def test_without_jit(recipe):
    """Op by op every result is rounded to bfloat16, which XLA leaves out inside of a program."""
    train = training(recipe)
    with jax.disable_jit():
        got = train()
    for a, b in zip(jax.tree.leaves(got["params"]), jax.tree.leaves(train()["params"]), strict=True):
        assert np.linalg.norm(a - b) <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.linalg.norm(b)


def training(recipe):
    """A function that makes one training step, with all that goes with it, and returns the gradients."""
    layer = te.flax.LayerNormMLP(32, 32, norm="layernorm", use_bias=True, recipe=recipe, dtype=jnp.bfloat16)
    x = X
    variables = layer.init(jax.random.key(0), x)

    def train():
        layer.init(jax.random.key(0), x)
        grads = jax.grad(lambda v: layer.apply(v, x).astype(jnp.float32).sum())(variables)
        old, new = te.state.split(variables)[1], te.state.split(grads)[1]
        if old:
            te.state.check(old, te.state.apply(old, te.state.accumulate(new, new)))
        layer.plan(x)
        return grads

    return train


def test_block_scaling_of_small_values():
    module = te.Sequential([ops.Linear(64, use_bias=False)], recipe=te.BlockScaling(), dtype=jnp.float32)
    x = jnp.full((16, 64), 2.0**-110)
    kernel = jnp.full((64, 64), 2.0**-16)
    y = module.apply({"params": {"ops_0": {"kernel": kernel}}}, x)
    np.testing.assert_array_equal(y, np.full((16, 64), 2.0**-120))


@pytest.mark.parametrize("positions", [jnp.arange(15), jnp.arange(1), jnp.int32(3), jnp.zeros((3, 16), jnp.int32)])
@pytest.mark.parametrize("rope", [True, False])
def test_positions_that_do_not_fit(positions, rope):
    attention = te.flax.MultiHeadAttention(num_heads=2, rope=rope)
    with pytest.raises(ValueError, match=r"MultiHeadAttention: positions: expected shape"):
        attention.init(jax.random.key(0), X.reshape(2, 16, 32), positions=positions)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: te.flax.MultiHeadAttention(num_heads=0), "num_heads"),
        (lambda: te.flax.MultiHeadAttention(num_heads=2.0), "num_heads"),
        (lambda: te.flax.MultiHeadAttention(num_heads=2, head_dim=0), "head_dim"),
        (lambda: te.flax.DenseGeneral((4, 0)), "features"),
        (lambda: te.flax.DenseGeneral(4.0), "features"),
    ],
)
def test_sizes_of_flax_modules(make, argument):
    with pytest.raises(ValueError, match=rf"{argument}: expected"):
        make().init(jax.random.key(0), X)


@pytest.mark.parametrize(
    "module",
    [
        te.flax.MultiHeadAttention(num_heads=2),
        te.flax.TransformerLayer(num_heads=2, hidden_features=32),
        te.flax.LayerNormMLP(32, 32, residual=True),
        te.flax.DenseGeneral(32),
        te.flax.Dense(32),
    ],
    ids=lambda module: type(module).__name__,
)
def test_flax_modules_take_arrays(module):
    with pytest.raises(TypeError, match=r"x: expected an array, got list"):
        module.init(jax.random.key(0), [1.0])


class Hidden(ops.Op):
    """No dataclass: its factor is in no field, so two of them would share one cached program."""

    def __init__(self, factor):
        self.factor = factor


@dataclasses.dataclass(frozen=True)
class Listed(ops.Op):
    factors: list = dataclasses.field(default_factory=lambda: [2.0])


@dataclasses.dataclass(frozen=True)
class Careless(ops.Op):
    """Forgets what it is told to."""

    mistake: str = ""

    def params(self, x):
        return (ops.ParamSpec("scale", (x.shape[-1],), jax.nn.initializers.ones),)

    def forward(self, ctx, x):
        y = x[..., :16] if self.mistake == "forward shape" else x
        return y.astype(jnp.float32) if self.mistake == "forward dtype" else y

    def backward(self, ctx, dy):
        if self.mistake != "no gradient":
            ctx.param_grads["scale"] = jnp.zeros(dy.shape[-1] - (self.mistake == "gradient shape"))
        dx = dy[..., :16] if self.mistake == "backward shape" else dy
        return dx.astype(jnp.float32) if self.mistake == "backward dtype" else dx


def test_ops_that_are_not_data():
    with pytest.raises(TypeError, match=r"ops\[0\] \(Hidden\): expected a @dataclasses.dataclass.*got \['factor'\]"):
        te.Sequential([Hidden(2.0)]).init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=r"ops\[0\] \(Listed\): expected hashable fields .*unhashable type: 'list'"):
        te.Sequential([Listed()]).init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        ("forward shape", ValueError, r"Careless\(ops_1\): forward: expected a result of shape \(16, 32\)"),
        ("forward dtype", TypeError, r"Careless\(ops_1\): forward: expected a result of dtype bfloat16, got float32"),
        ("backward shape", ValueError, r"Careless\(ops_1\): backward: expected a result of shape \(16, 32\)"),
        ("backward dtype", TypeError, r"Careless\(ops_1\): backward: expected a result of dtype bfloat16, got float32"),
        ("no gradient", ValueError, r"ctx.param_grads\['scale'\] after backward: expected an array of shape \(32,\)"),
        ("gradient shape", ValueError, r"ctx.param_grads\['scale'\] after backward: expected .*got \(31,\)"),
    ],
)
def test_ops_that_break_their_promise(mistake, error, message):
    linear = ops.Linear(32, use_bias=False)
    module = te.Sequential([linear, Careless(mistake), ops.Linear(32)], recipe=te.CurrentScaling(), dtype=jnp.bfloat16)
    x = jnp.ones((16, 32), jnp.bfloat16)
    good = te.Sequential([linear, Careless(), ops.Linear(32)], recipe=te.CurrentScaling(), dtype=jnp.bfloat16)
    variables = good.init(jax.random.key(0), x)
    with pytest.raises(error, match=message):
        jax.grad(lambda v: module.apply(v, x).astype(jnp.float32).sum())(variables)
