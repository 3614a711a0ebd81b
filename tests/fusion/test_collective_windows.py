"""Windows with a collective, on 2, 4 and 8 devices: fused against unfused, values, gradients and FP8 state."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import te_jax as te
from te_jax import ops
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.ops.activation import ACTIVATIONS
from te_jax.ops.collective import REDUCTIONS, Collective
from te_jax.ops.norm import NORMS

P = PartitionSpec
BF16 = jnp.bfloat16
RECIPES = {
    "none": None,
    "delayed": te.DelayedScaling(amax_history_len=3),
    # Powers of two: one bfloat16 rounding more or less of the largest element must not move the whole scale.
    "current": te.CurrentScaling(power_of_two=True),
}
RANKS = (2, 4, 8)
WAYS = ("plain", "overlapped")  # tests/collective has the ring
BATCH, TOKENS = 2, 24  # of each device beside the axis; a rank has 12, 6 or 3 tokens of a sequence
RULES = [
    (rule, backward)
    for rules, backward in ((FORWARD_RULES, False), (BACKWARD_RULES, True))
    for rule in rules
    if any(issubclass(kind, Collective) for slot in rule.pattern for kind in slot.kinds)
]


def chains_of(rule):
    """Every way to fill the rule's slots, with one norm and one activation.

    Chains put a Bias before a sum behind it on Manual axes (tests/fusion/test_collective_meshes.py has others).
    """
    kept = {*ACTIVATIONS, *NORMS} - {ops.GELU, ops.RMSNorm}
    choices = [[k for k in slot.kinds if k not in kept] + [None] * slot.optional for slot in rule.pattern]
    filled = [tuple(kind for kind in kinds if kind is not None) for kinds in itertools.product(*choices)]
    return [k for k in filled if not any(a is ops.Bias and b in REDUCTIONS for a, b in itertools.pairwise(k))]


def make_op(kind, way, i):
    if kind is ops.BasicLinear:
        return ops.Linear(48, use_bias=False, name="linear")
    if kind is ops.Bias:
        return ops.Bias(jax.nn.initializers.normal(1.0), name="bias")
    return kind("tp", overlap=way) if issubclass(kind, Collective) else kind(name=f"op_{i}")


def make_module(rule, kinds, backward, recipe, way):
    rules = () if way == "plain" else (rule,)
    return te.Sequential(
        [make_op(kind, way, i) for i, kind in enumerate(kinds)],
        recipe=recipe,
        dtype=BF16,
        forward_rules=() if backward else rules,
        backward_rules=rules if backward else (),
    )


def specs_of(kinds):
    """How x and y are split, and each parameter."""
    column = ops.AllGather in kinds
    x = P("data", "tp") if column else P("data", None, "tp")
    y = P("data", None, "tp") if column else P("data", "tp") if ops.ReduceScatter in kinds else P("data")
    params = {"linear": {"kernel": P(None, "tp") if column else P("tp")}}
    params |= {"bias": {"bias": P("tp") if column else P()}} if ops.Bias in kinds else {}
    norms = {f"op_{i}": {"scale": P()} for i, kind in enumerate(kinds) if kind in NORMS}
    return x, y, params | norms


def run_of(module, x, weights):
    """A function of variables: results and gradients, and how often each step was planned."""

    def shard(variables, x, weights):
        def loss(variables, x):
            results = jax.tree.leaves(module.apply(variables, x))
            terms = [jnp.sum(y.astype(jnp.float32) * w) for y, w in zip(results, weights, strict=False)]
            return sum(terms), results

        (_, results), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return results, grads

    return shard


@functools.cache
def compare(rule, kinds, backward, recipe, ranks):
    """{way: (results, gradients)} of one program, and the plans."""
    recipe, devices = RECIPES[recipe], 8 if ranks == 8 else 2 * ranks
    mesh = jax.make_mesh((devices // ranks, ranks), ("data", "tp"), devices=jax.devices()[:devices])
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)
    x_spec, y_spec, param_specs = specs_of(kinds)
    column = ops.AllGather in kinds
    features = (32, 48 * ranks) if column else (48 * ranks, 48)
    keys = jax.random.split(jax.random.key(0), 8)
    lead = (BATCH * devices // ranks, TOKENS)
    x = jax.random.normal(keys[0], (*lead, features[0]), BF16)
    extra = [jax.random.normal(keys[2], x.shape)] if ops.MakeExtraOutput in kinds else []
    weights = [jax.random.normal(keys[1], (*lead, features[1])), *extra]
    params = {"linear": {"kernel": jax.random.normal(keys[3], features) / 8}}
    params |= {"bias": {"bias": jax.random.normal(keys[4], features[1:])}} if "bias" in param_specs else {}
    params |= {name: {"scale": jnp.ones(features[0])} for name in param_specs if name.startswith("op_")}
    variables, specs = {"params": params}, {"params": param_specs}
    if recipe is not None and recipe.stateful:
        # Of a linear of any size: its name is the module's, its leaves are three quantizers'.
        module = make_module(rule, kinds, backward, recipe, "plain")
        fp8 = te.state.split(module.init(keys[5], jnp.ones((16, 16), BF16)))[1]
        variables, specs = te.state.merge(variables, fp8), te.state.merge(specs, jax.tree.map(lambda _: P(), fp8))
    plans = {}

    def shard(variables, x, weights):
        out = {}
        for way in WAYS:
            module = make_module(rule, kinds, backward, recipe, way)
            plans[way] = module.plan(x)
            out[way] = run_of(module, x, weights)(variables, x, weights)
        return out

    y_specs = [y_spec, *([x_spec] if extra else [])]
    out_specs = dict.fromkeys(WAYS, (y_specs, (specs, x_spec)))
    program = jax.shard_map(shard, mesh=mesh, in_specs=(specs, x_spec, y_specs), out_specs=out_specs)
    # XLA may otherwise skip roundings to bfloat16 between steps that it sees through, but not before a custom call.
    program = jax.jit(program, compiler_options={"xla_allow_excess_precision": False})
    got = program(variables, x, weights)
    if recipe is not None and recipe.stateful:  # once more, with scales
        variables = te.state.merge(te.state.split(variables)[0], te.state.split(got["plain"][1][0])[1])
        got = program(variables, x, weights)
    return got, plans


CASES = [
    pytest.param(rule, kinds, backward, recipe, RANKS[i % 3], id=f"{rule.name}:{len(kinds)}-{recipe}-{RANKS[i % 3]}")
    for i, (rule, backward, recipe, kinds) in enumerate(
        (rule, backward, recipe, kinds)
        for recipe in RECIPES
        for rule, backward in RULES
        for kinds in chains_of(rule)
        if not (recipe == "none" and rule.pattern[0].kinds[0] in NORMS)
        if not (ops.GELU in kinds and len(kinds) < 4)
    )
]


@pytest.mark.parametrize(("rule", "kinds", "backward", "recipe", "ranks"), CASES)
def test_fused_equals_unfused(rule, kinds, backward, recipe, ranks):
    got, plans = compare(rule, kinds, backward, recipe, ranks)
    steps = {way: [step.name for step in (plan.backward if backward else plan.forward)] for way, plan in plans.items()}
    assert steps["overlapped"] != steps["plain"]
    got, want = got["overlapped"], got["plain"]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
        # Two roundings to bfloat16: partial sums, and the sum before a bias.
        assert error <= 2 * float(jnp.finfo(BF16).eps), (jax.tree_util.keystr(path), error)
