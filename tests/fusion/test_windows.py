"""A table of all fusion rules: for each the whole window, the step as the plan prints it, and the custom calls of the
gradient's program lowered for CUDA. A rule without an entry fails."""

import collections
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import te_jax as te
from te_jax import compat, ops
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.testing import hlo

P = PartitionSpec
BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((2, 32, 256), BF16)
X64 = jax.ShapeDtypeStruct((64, 256), BF16)
RECIPES = {
    "none": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
}
STATE_CALLS = {"te_jax_scale_read": 1, "te_jax_scale_write": 1}


def linear():
    return ops.Linear(256, use_bias=False)


GROUPED = {"te_jax_grouped_gemm": 2, "te_jax_grouped_wgrad": 1}
BY_GROUP = {"unfused": {"none": GROUPED, "block": {}}, "inputs": (X64, jax.ShapeDtypeStruct((4,), jnp.int32))}


def grouped(features):
    return ops.GroupedLinear(4, features, use_bias=False)


@dataclasses.dataclass(frozen=True)
class Entry:
    """``calls``: of the chain's gradient with this rule alone, without those that read and write FP8 state.

    ``unfused``: by recipe under which the rule doesn't apply, the calls of the same chain. ``unquantized``: the calls
    without a recipe, of a rule that applies there too. ``ranks``: of the axis "tp" of a shard_map that it is in.
    """

    chain: tuple
    step: str
    calls: dict[str, int]
    unfused: dict[str, dict[str, int]] = dataclasses.field(default_factory=lambda: {"none": {}})
    unquantized: dict[str, int] | None = None
    ranks: int | None = None
    inputs: tuple | None = None  # default: X for the chain and for each of its extra inputs

    def __post_init__(self):
        if self.inputs is None:
            object.__setattr__(self, "inputs", (X,) * (1 + sum(op.num_extra_inputs for op in self.chain)))


ASKED = {"overlap": "overlapped"}
IN_SHARD_MAP = {"ranks": 2, "unfused": {"block": {"te_jax_quantize": 3, "te_jax_gemm": 3}}}
# The amax of what devices have parts of, x and dy here, is taken in a pass of its own.
TWO_GEMMS = {"te_jax_quantize": 5, "te_jax_gemm": 2}
TABLE = {
    "all-gather+linear+bias": Entry(
        (ops.AllGather("tp", **ASKED), linear(), ops.Bias()),
        "AllGather[tp](ops_0) + Linear(ops_1) + Bias(ops_2): all-gather+linear+bias "
        "[3 te_jax_quantize, te_jax_collective_gemm]\n      gathers over 'tp' (2 devices)\n"
        "      overlapped: copy, 1 piece; 0.017 GFLOP a device, asked for\n      accumulation: fprop ",
        {"te_jax_collective_gemm": 1, **TWO_GEMMS},
        unquantized={"te_jax_collective_gemm": 1},
        **IN_SHARD_MAP,
    ),
    "linear+reduce-scatter+bias": Entry(
        (linear(), ops.ReduceScatter("tp", **ASKED), ops.Bias()),
        "Linear(ops_0) + ReduceScatter[tp](ops_1) + Bias(ops_2): linear+reduce-scatter+bias "
        "[2 te_jax_quantize, te_jax_collective_gemm]\n      sums and scatters over 'tp' (2 devices)\n"
        "      overlapped: direct, 1 piece; 0.0084 GFLOP a device, asked for\n      accumulation: fprop ",
        {"te_jax_collective_gemm": 1, **TWO_GEMMS},
        unquantized={"te_jax_collective_gemm": 1},
        **IN_SHARD_MAP,
    ),
    "linear+all-reduce+bias": Entry(
        (linear(), ops.AllReduce("tp", **ASKED), ops.Bias()),
        "Linear(ops_0) + AllReduce[tp](ops_1) + Bias(ops_2): linear+reduce-scatter+bias, all-gather "
        "[2 te_jax_quantize, te_jax_collective_gemm]",
        {"te_jax_collective_gemm": 1, **TWO_GEMMS},
        unquantized={"te_jax_collective_gemm": 1},
        **IN_SHARD_MAP,
    ),
    "producer+quantize through AllGather": Entry(
        (ops.RMSNorm(), ops.MakeExtraOutput(), ops.AllGather("tp", **ASKED), linear()),
        "RMSNorm(ops_0) + MakeExtraOutput(ops_1): quantizes for the linear behind the gather, keeps the result, "
        "writes FP8 [te_jax_norm]",
        {"te_jax_norm": 2, "te_jax_norm_grad": 1, "te_jax_quantize": 3, "te_jax_gemm": 3},
        ranks=2,
        unfused={
            "none": {},
            "block": {"te_jax_norm": 1, "te_jax_norm_grad": 1, "te_jax_quantize": 3, "te_jax_gemm": 3},
        },
    ),
    "dgrad+reduce-scatter": Entry(
        (ops.AllGather("tp", **ASKED), linear(), ops.Bias()),
        "AllGather[tp](ops_0) + Linear(ops_1) + Bias(ops_2): dbias+quantize+dgrad+reduce-scatter, wgrad "
        "[2 te_jax_quantize, te_jax_collective_gemm, te_jax_gemm]",
        {"te_jax_collective_gemm": 1, **TWO_GEMMS},
        unquantized={"te_jax_collective_gemm": 1},
        **IN_SHARD_MAP,
    ),
    "all-gather+dgrad": Entry(
        (linear(), ops.ReduceScatter("tp", **ASKED), ops.Bias()),
        "Linear(ops_0) + ReduceScatter[tp](ops_1) + Bias(ops_2): dbias+quantize+all-gather+dgrad, wgrad of what was "
        "gathered [2 te_jax_quantize, te_jax_collective_gemm, te_jax_gemm]",
        {"te_jax_collective_gemm": 1, **TWO_GEMMS},
        unquantized={"te_jax_collective_gemm": 1},
        **IN_SHARD_MAP,
    ),
    "linear+scale+bias+add": Entry(
        (linear(), ops.ConstantScale(0.5), ops.Bias(), ops.AddExtraInput()),
        "Linear(ops_0) + ConstantScale(ops_1) + Bias(ops_2) + AddExtraInput(ops_3): linear+scale+bias+add "
        "[2 te_jax_quantize, te_jax_gemm]\n      accumulation: fprop ",
        {"te_jax_quantize": 3, "te_jax_gemm": 3},
    ),
    "linear+scale+bias+add, without the dropout between": Entry(
        (linear(), ops.Bias(), ops.Dropout(0.0), ops.AddExtraInput()),
        "Linear(ops_0) + Bias(ops_1) + Dropout(ops_2) + AddExtraInput(ops_3): linear+bias+add "
        "[2 te_jax_quantize, te_jax_gemm]\n      accumulation: fprop ",
        {"te_jax_quantize": 3, "te_jax_gemm": 3},
    ),
    "producer+quantize": Entry(
        (ops.RMSNorm(), ops.MakeExtraOutput(), linear()),
        "RMSNorm(ops_0) + MakeExtraOutput(ops_1): quantizes for the next linear, keeps the result, writes FP8 "
        "[te_jax_norm]",
        {"te_jax_norm": 1, "te_jax_norm_grad": 1, "te_jax_quantize": 2, "te_jax_gemm": 3},
    ),
    "d-activation+dbias+quantize": Entry(
        (linear(), ops.Bias(), ops.SwiGLU()),
        "Bias(ops_1) + SwiGLU(ops_2): d-activation+dbias+quantize, for the linear before it, writes FP8 "
        "[te_jax_activation_grad]",
        {"te_jax_activation_grad": 1, "te_jax_quantize": 2, "te_jax_gemm": 3},
    ),
    "dgrad+add, dbias+quantize": Entry(
        (ops.MakeExtraOutput(), linear(), ops.ConstantScale(0.5), ops.Bias()),
        "MakeExtraOutput(ops_0) + Linear(ops_1) + ConstantScale(ops_2) + Bias(ops_3): dbias+quantize+scaled dgrad+add"
        "+wgrad [te_jax_quantize, 2 te_jax_gemm]\n      accumulation: dgrad precise, wgrad precise",
        {"te_jax_quantize": 3, "te_jax_gemm": 3},
    ),
    "d-norm+add": Entry(
        (ops.MakeExtraOutput(), ops.LayerNorm()),
        "MakeExtraOutput(ops_0) + LayerNorm(ops_1): d-norm+add [te_jax_norm_grad]",
        {"te_jax_norm": 1, "te_jax_norm_grad": 1},
    ),
    "activation+quantize by group": Entry(
        (ops.GELU(), grouped(256)),
        "GELU(ops_0): quantizes by group for the next linear, writes FP8 [te_jax_activation]",
        {"te_jax_activation": 1, "te_jax_quantize": 2, **GROUPED},
        **BY_GROUP,
    ),
    "d-activation+quantize by group": Entry(
        (grouped(512), ops.SwiGLU()),
        "SwiGLU(ops_1): d-activation+quantize by group, for the linear before it, writes FP8 [te_jax_activation_grad]",
        {"te_jax_activation_grad": 1, "te_jax_quantize": 2, **GROUPED},
        **BY_GROUP,
    ),
    "quantize for the next linear": Entry(
        (ops.Quantize(), linear()),
        "Quantize(ops_0): quantizes x for the linear behind it, writes FP8 [te_jax_quantize]\n      boundary: x e4m3, ",
        {"te_jax_quantize": 3, "te_jax_gemm": 3},
    ),
    "producer+quantize through Quantize": Entry(
        (ops.RMSNorm(), ops.Quantize(), linear()),
        "RMSNorm(ops_0) + Quantize(ops_1): quantizes for the next linear, writes FP8 [te_jax_norm]",
        {"te_jax_norm": 1, "te_jax_norm_grad": 1, "te_jax_quantize": 2, "te_jax_gemm": 3},
    ),
    "quantize for the linear before": Entry(
        (linear(), ops.Quantize(forward=False, backward=True)),
        "Quantize(ops_1): quantizes dy for the linear before it, writes FP8 [te_jax_quantize]",
        {"te_jax_quantize": 3, "te_jax_gemm": 3},
    ),
}
RULES = [(rule, False) for rule in FORWARD_RULES] + [(rule, True) for rule in BACKWARD_RULES]


def module_of(rule, backward, recipe):
    rules = (
        {"forward_rules": (), "backward_rules": (rule,)}
        if backward
        else {"forward_rules": (rule,), "backward_rules": ()}
    )
    return te.Sequential(TABLE[rule.name].chain, recipe=RECIPES[recipe], dtype=BF16, **rules)


def plan_and_calls(module, entry):
    """What is planned, and the custom calls of the gradient's program, lowered for CUDA."""
    if entry.ranks is None:
        return module.plan(*entry.inputs, platform="cuda"), custom_calls(module, *entry.inputs)
    mesh = jax.make_mesh((entry.ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[: entry.ranks])
    variables = jax.eval_shape(module.init, jax.random.key(0), *entry.inputs)
    plans = []

    def shard(variables, *inputs):
        def loss(variables, *inputs):
            leaves = jax.tree.leaves(module.apply(variables, *inputs))
            return jax.lax.psum(sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves), "tp")

        inputs = [compat.pvary(x, ("tp",)) for x in inputs]
        plans.append(module.plan(*inputs, platform="cuda"))
        grads = jax.grad(loss, argnums=tuple(range(len(inputs) + 1)))(variables, *inputs)
        return jax.tree.map(lambda x: jax.lax.psum(compat.pvary(x, ("tp",)), "tp"), grads)

    step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P()))
    text = step.trace(variables, *entry.inputs).lower(lowering_platforms=("cuda",)).as_text()
    return plans[0], hlo.count_custom_calls(text)


def custom_calls(module, *inputs):
    """Of the program of the gradient, lowered for CUDA."""
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)

    def loss(variables, *inputs):
        leaves = jax.tree.leaves(module.apply(variables, *inputs))
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    floats = [i for i, x in enumerate(inputs, 1) if jnp.issubdtype(x.dtype, jnp.floating)]
    grad = jax.jit(jax.grad(loss, argnums=(0, *floats)))
    return hlo.count_custom_calls(grad.trace(variables, *inputs).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(("rule", "backward"), RULES, ids=[rule.name for rule, _ in RULES])
def test_every_rule(rule, backward):
    assert rule.name in TABLE, f"give the rule {rule.name!r} an entry in this file's table"
    entry = TABLE[rule.name]
    for recipe in RECIPES:
        module = module_of(rule, backward, recipe)
        plan, got = plan_and_calls(module, entry)
        applies = recipe not in entry.unfused
        has_state = recipe == "delayed" and any(isinstance(op, (ops.Linear, ops.GroupedLinear)) for op in entry.chain)
        want = (entry.calls if applies else entry.unfused[recipe]) | (STATE_CALLS if has_state else {})
        if recipe == "none" and entry.unquantized is not None:
            assert got == collections.Counter(plan.custom_calls) == entry.unquantized, str(plan)
            continue
        assert got == want, (recipe, str(plan))
        # Which values differ between devices, and so have an amax to be reduced, is nothing that a plan is told.
        passes = {"te_jax_quantize", "te_jax_norm"} if entry.ranks else set()
        planned = {name: n for name, n in plan.custom_calls.items() if name not in passes}
        assert planned == {name: n for name, n in got.items() if name not in passes}, (recipe, str(plan))
        assert (entry.step in str(plan)) == applies, (recipe, str(plan))


def test_a_dropout_between_is_named():
    """Where it isn't of rate 0, which linears of a chain are fused doesn't depend on a call's ``deterministic``."""
    chain = [ops.StartResidual(), linear(), ops.Dropout(0.1), ops.AddResidual()]
    plan = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=BF16).plan(jax.ShapeDtypeStruct((32, 256), BF16))
    assert "no linear+scale+bias+add, without the dropout between: Dropout(0.1) stands between" in str(plan)
    chain[2] = ops.Dropout(0.0)
    plan = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=BF16).plan(jax.ShapeDtypeStruct((32, 256), BF16))
    assert plan.forward[-1].name == "linear+add"


@pytest.mark.parametrize(("rule", "backward"), RULES, ids=[rule.name for rule, _ in RULES])
def test_main_gradients_in_every_window(rule, backward):
    """wgrad adds in whatever step it is: the plan says so, and makes the same custom calls."""
    entry = TABLE[rule.name]
    linears = sum(op.has_main_grad for one in entry.chain for op in one.expand())
    for recipe in RECIPES:
        module = module_of(rule, backward, recipe)
        plan = module.plan(*entry.inputs, platform="cuda", main_grad="add")
        assert plan.custom_calls == module.plan(*entry.inputs, platform="cuda").custom_calls
        assert str(plan).count("wgrad accumulates into main_grad") == linears
        by_xla = recipe == "none" or (recipe == "block" and entry.inputs == BY_GROUP["inputs"])
        assert str(plan).count("wgrad accumulates into main_grad, added by XLA") == linears * by_xla


def test_no_entry_without_a_rule():
    assert set(TABLE) == {rule.name for rule, _ in RULES}


def test_the_page_on_chains_has_every_file_of_rules():
    root = pathlib.Path(te.__file__).parents[1]
    page = (root / "docs" / "chains.md").read_text()
    files = {path.name for path in (root / "te_jax" / "fusion" / "rules").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if f"`{name}`" not in page} == set()


# A scale as a GEMM's alpha


@pytest.mark.parametrize(
    ("recipe", "factor", "fuses"),
    [
        (te.CurrentScaling(), 0.7, True),
        (te.CurrentScaling(power_of_two=True), 0.7, False),
        (te.CurrentScaling(power_of_two=True), -4.0, True),
        (te.BlockScaling(), 0.7, False),
        (te.BlockScaling(), 0.25, True),
        (te.BlockScaling(power_of_two=False), 0.7, True),
        (te.CurrentScaling(), 0.0, False),
        (te.CurrentScaling(), float("inf"), False),
        (te.CurrentScaling(), 2.0**100, False),
    ],
)
def test_where_a_scale_is_a_gemms_alpha(recipe, factor, fuses):
    """Backward, scales that are powers of two refuse a factor that isn't: dy would be quantized on another grid."""
    plan = te.Sequential([linear(), ops.ConstantScale(factor)], recipe=recipe, dtype=BF16).plan(X)
    assert ("scaled dgrad+wgrad" in str(plan)) == fuses
    if not fuses and 0 < factor < 1:
        assert plan.forward[-1].name == "linear+scale"
        assert "no dgrad+add, dbias+quantize: FP8 scales are powers of two, the factor 0.7 isn't" in str(plan)


@pytest.mark.parametrize("factor", [0.7, -3.0])
@pytest.mark.parametrize(
    "recipe", [te.DelayedScaling(amax_history_len=2, margin=1), te.CurrentScaling()], ids=lambda r: r.name
)
def test_a_scaled_gemm_is_as_near_to_fp64_as_an_unfused_one_and_has_its_state(recipe, factor):
    chain = [ops.MakeExtraOutput(), ops.Linear(48, use_bias=False), ops.ConstantScale(factor), ops.Bias()]
    chain += [ops.AddExtraInput()]
    x, extra, *weights = (
        jax.random.normal(jax.random.key(i), shape, BF16) for i, shape in enumerate([(64, 32), (64, 48)] * 2)
    )
    modules = [
        te.Sequential(chain, recipe=recipe, dtype=BF16),
        te.Sequential(chain, recipe=recipe, dtype=BF16, forward_rules=(), backward_rules=()),
    ]
    variables = jax.jit(modules[0].init)(jax.random.key(1), x, extra)

    def step_of(module):
        def results(variables, x):
            outputs, pullback = jax.vjp(lambda v, x: module.apply(v, x, extra), variables, x)
            return outputs[0], pullback((weights[1], weights[0]))

        return jax.jit(results, compiler_options={"xla_allow_excess_precision": False})

    kernel, *others = (np.asarray(a, np.float64) for a in (variables["params"]["ops_1"]["kernel"], x, extra, *weights))
    x64, extra64, dextra, dy = others
    exact = (factor * x64 @ kernel + extra64, factor * x64.T @ dy, factor * dy @ kernel.T + dextra)
    rest, state = te.state.split(variables)
    for _ in range(3):  # without history, and then with one
        errors, states = [], []
        for step in map(step_of, modules):
            y, (grads, dx) = step(te.state.merge(rest, state), x)
            got = (y, grads["params"]["ops_1"]["kernel"], dx)
            pairs = [(np.asarray(a, np.float64), b) for a, b in zip(got, exact, strict=True)]
            errors.append([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])
            np.testing.assert_allclose(grads["params"]["ops_3"]["bias"], dy.sum(0), rtol=1e-5, atol=1e-4)
            states.append(te.state.split(grads)[1])
        assert all(fused <= 1.05 * unfused < 0.06 for fused, unfused in zip(*errors, strict=True)), errors
        for a, b in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(a, b)
        state = te.state.apply(state, states[0])


def test_constant_scale_rounds_once():
    x = jax.random.normal(jax.random.key(0), (64, 64), BF16)
    module = te.Sequential([ops.ConstantScale(0.7)])
    want = (np.asarray(x, np.float64) * np.float32(0.7)).astype(np.float32)
    np.testing.assert_array_equal(module.apply({}, x), jnp.asarray(want).astype(BF16))
