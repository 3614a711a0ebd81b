"""For every fusion rule: the chain that its pattern describes, with the rule and without any, values and gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES, NORM_GRAD_ADD
from te_jax.ops.activation import ACTIVATIONS
from te_jax.ops.collective import Collective
from te_jax.testing import hlo

BF16 = jnp.bfloat16
# Even and odd multiples of 16: tokens, features.
APPLIES = {
    "delayed": (te.DelayedScaling(amax_history_len=3), (2, 32), 64),
    # Powers of two: one bfloat16 rounding more or less of the largest element must not move the whole scale.
    "current": (te.CurrentScaling(power_of_two=True), (48,), 48),
    # Gated activations halve the features: blocks that belong to one half each.
    "block": (te.BlockScaling(), (2, 72), 256),
}
# Tokens in groups: of any number, some of none.
GROUP_SIZES = (9, 0, 17, 2)
GROUPED_APPLIES = {
    "delayed": (te.DelayedScaling(amax_history_len=3), (37,), 64),
    "current": (te.CurrentScaling(power_of_two=True), (48,), 48),
}
GROUPED_REFUSES = {
    "none": (None, (37,), 32),
    "block": (te.BlockScaling(), (37,), 32),
    "odd features": (te.CurrentScaling(), (37,), 24),
}
REFUSES = {
    "none": (None, (32,), 32),
    "odd tokens": (te.CurrentScaling(), (3, 5), 32),
    "odd features": (te.CurrentScaling(), (32,), 24),
    "odd features, blocks": (te.BlockScaling(), (32,), 24),
}


def make_op(kind, features):
    if kind is ops.GroupedLinear:
        return ops.GroupedLinear(len(GROUP_SIZES), features, use_bias=False)
    if kind is ops.BasicLinear:
        return ops.Linear(features, use_bias=False)
    if kind is ops.Bias:
        return ops.Bias(jax.nn.initializers.normal(1.0))
    if kind is ops.ConstantScale:
        return ops.ConstantScale(-0.5)
    if kind is ops.Quantize:
        return ops.Quantize(backward=True)
    return kind()


def chains_of(rule):
    """Every way to fill the rule's slots: optional ones there or not, each kind in its turn."""
    choices = [[*slot.kinds, *([None] if slot.optional else [])] for slot in rule.pattern]
    return [tuple(kind for kind in kinds if kind is not None) for kinds in itertools.product(*choices)]


def windows(cases):
    """Every whole window of every rule with every case; of the activations, which are all alike to a rule, two do that.

    The others, and windows without all of their optional ops, have one case each, in turn; so has a Quantize between a
    norm, or one of the two, and a linear.
    """
    for rules, backward in ((FORWARD_RULES, False), (BACKWARD_RULES, True)):
        for rule in rules:
            for number, kinds in enumerate(chains_of(rule)):
                if ops.GroupedLinear in kinds:
                    continue  # GROUPED_CASES
                if any(issubclass(kind, Collective) for kind in kinds):
                    continue  # test_collective_windows.py
                few = any(k in ACTIVATIONS and k not in (ops.GELU, ops.SwiGLU) for k in kinds)
                if few and ops.Quantize in kinds:
                    continue
                few = few or len(kinds) < len(rule.pattern) or (ops.Quantize in kinds and len(kinds) > 2)
                for case in [list(cases)[number % len(cases)]] if few else cases:
                    name = f"{rule.name}:{'-'.join(k.__name__ for k in kinds)}-{case}"
                    yield pytest.param(rule, kinds, backward, case, id=name)


# One activation: tests/primitives/test_grouped.py has what groups change in the pass, which is the same for all.
GROUPED_CASES = [
    pytest.param(rule, kinds, backward, id=rule.name)
    for rules, backward in ((FORWARD_RULES, False), (BACKWARD_RULES, True))
    for rule in rules
    for kinds in chains_of(rule)
    if {ops.GroupedLinear, ops.SwiGLU} <= set(kinds)
]


def build(rule, kinds, backward, recipe, lead, features, *, fused):
    """(module, x, extra inputs): the chain with this rule alone, or with none."""
    rules = (rule,) if fused else ()
    module = te.Sequential(
        [make_op(kind, features) for kind in kinds],
        recipe=recipe,
        dtype=BF16,
        forward_rules=() if backward else rules,
        backward_rules=rules if backward else (),
    )
    x = jax.random.normal(jax.random.key(0), (*lead, 2 * features), BF16)
    extras = [
        jnp.array(GROUP_SIZES)
        if k is ops.GroupedLinear
        else jax.random.normal(jax.random.key(3), (*lead, features), BF16)
        for k in kinds
        if k in (ops.AddExtraInput, ops.GroupedLinear)
    ]
    return module, x, extras


def gradients_of(module, variables, x, extras):
    """The compiled function of (variables, x, extras) that gives the result and all gradients."""
    shapes = jax.tree.leaves(jax.eval_shape(module.apply, variables, x, *extras))  # y, and extra outputs
    weights = [jax.random.normal(jax.random.key(2 + 7 * i), aval.shape) for i, aval in enumerate(shapes)]

    def loss(variables, x, extras):
        results = jax.tree.leaves(module.apply(variables, x, *extras))
        terms = [jnp.sum(y.astype(jnp.float32) * w) for y, w in zip(results, weights, strict=True)]
        return sum(terms), results

    # XLA may otherwise skip roundings to bfloat16 between steps that it sees through, but not before a custom call.
    options = {"xla_allow_excess_precision": False}
    grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    grad = jax.jit(grad, compiler_options=options)

    def result(variables, x, extras):
        (_, y), grads = grad(variables, x, extras)
        return {"y": y, "grads": grads}

    return result


def step_names(module, x, extras):
    plan = module.plan(x, *extras)
    return [(step.ops, step.name) for step in (*plan.forward, *plan.backward)]


def assert_close(got, want, path):
    """Two roundings to bfloat16 apart at the most (one of the product, one of the sum), relative to the norm."""
    assert got.dtype == want.dtype
    if got.dtype == jax.dtypes.float0:  # of integers
        return
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= 2 * float(jnp.finfo(BF16).eps), (path, error)


def assert_fused_equals_unfused(rule, kinds, backward, case, *, applies):
    fused, x, extras = build(rule, kinds, backward, *case, fused=True)
    unfused, _, _ = build(rule, kinds, backward, *case, fused=False)
    variables = jax.jit(unfused.init)(jax.random.key(1), x, *extras)
    assert (step_names(fused, x, extras) != step_names(unfused, x, extras)) == applies
    # One step first, so that delayed scaling has scales, the same for both.
    run_fused, run_unfused = (gradients_of(module, variables, x, extras) for module in (fused, unfused))
    new_state = run_unfused(variables, x, extras)["grads"][0]
    variables = te.state.merge(te.state.split(variables)[0], te.state.split(new_state)[1])
    got, want = run_fused(variables, x, extras), run_unfused(variables, x, extras)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, jax.tree_util.keystr(path))


@pytest.mark.parametrize(("rule", "kinds", "backward", "case"), list(windows(APPLIES)))
def test_rule_applies(rule, kinds, backward, case):
    # A linear alone has nothing to fuse with, and that is all that this rule has to say about it.
    assert_fused_equals_unfused(rule, kinds, backward, APPLIES[case], applies=len(kinds) > 1)


@pytest.mark.parametrize(("rule", "kinds", "backward", "case"), list(windows(REFUSES)))
def test_rule_refuses(rule, kinds, backward, case):
    if rule is NORM_GRAD_ADD and case != "none":  # needs a recipe, but no linear that is quantized
        assert_fused_equals_unfused(rule, kinds, backward, REFUSES[case], applies=True)
        return
    fused, x, extras = build(rule, kinds, backward, *REFUSES[case], fused=True)
    unfused, _, _ = build(rule, kinds, backward, *REFUSES[case], fused=False)
    assert step_names(fused, x, extras) == step_names(unfused, x, extras)


@pytest.mark.parametrize(
    "op",
    [ops.SwiGLU(gate="second"), ops.ClampedSwiGLU(limit=0.75, alpha=2.0, linear_offset=0.25, gate="second")],
    ids=lambda op: type(op).__name__,
)
def test_arguments_of_an_activation_reach_its_kernels(op):
    x = jax.random.normal(jax.random.key(0), (48, 64), BF16)
    chain = [ops.Linear(128), op, ops.Linear(64)]
    fused = te.Sequential(chain, recipe=te.CurrentScaling(power_of_two=True), dtype=BF16)
    calls = fused.plan(x).custom_calls
    assert (calls["te_jax_activation"], calls["te_jax_activation_grad"]) == (1, 1)
    unfused = fused.clone(forward_rules=(), backward_rules=())
    variables = jax.jit(unfused.init)(jax.random.key(1), x)
    got, want = (gradients_of(module, variables, x, ())(variables, x, ()) for module in (fused, unfused))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, jax.tree_util.keystr(path))


@pytest.mark.parametrize("case", GROUPED_APPLIES)
@pytest.mark.parametrize(("rule", "kinds", "backward"), GROUPED_CASES)
def test_grouped_rule_applies(rule, kinds, backward, case):
    assert_fused_equals_unfused(rule, kinds, backward, GROUPED_APPLIES[case], applies=True)


@pytest.mark.parametrize("case", GROUPED_REFUSES)
@pytest.mark.parametrize(("rule", "kinds", "backward"), GROUPED_CASES)
def test_grouped_rule_refuses(rule, kinds, backward, case):
    fused, x, extras = build(rule, kinds, backward, *GROUPED_REFUSES[case], fused=True)
    unfused, _, _ = build(rule, kinds, backward, *GROUPED_REFUSES[case], fused=False)
    assert step_names(fused, x, extras) == step_names(unfused, x, extras)


def test_grouped_mlp():
    """Both rules at once: the gated MLP of experts, its custom calls in a program for CUDA, and what keeps it apart."""

    def mlp(**fields):
        chain = [ops.GroupedLinear(4, 64, use_bias=False), ops.SwiGLU(), ops.GroupedLinear(4, 48, use_bias=False)]
        return te.Sequential(chain, recipe=te.DelayedScaling(amax_history_len=3), dtype=BF16, **fields)

    x, sizes = jax.random.normal(jax.random.key(0), (37, 48), BF16), jnp.array(GROUP_SIZES)
    fused, unfused = mlp(), mlp(forward_rules=(), backward_rules=())
    variables = jax.jit(unfused.init)(jax.random.key(1), x, sizes, sizes)
    runs = [gradients_of(module, variables, x, (sizes, sizes)) for module in (fused, unfused)]
    got, want = (run(variables, x, (sizes, sizes)) for run in runs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, jax.tree_util.keystr(path))

    step = jax.jit(jax.grad(lambda v, x: fused.apply(v, x, sizes, sizes).astype(jnp.float32).var(), argnums=(0, 1)))
    text = step.trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    calls = {"te_jax_quantize": 4, "te_jax_activation": 1, "te_jax_activation_grad": 1, "te_jax_grouped_gemm": 4}
    calls |= {"te_jax_grouped_wgrad": 2, "te_jax_scale_read": 2, "te_jax_scale_write": 2}
    assert hlo.count_custom_calls(text) == calls == fused.plan(x, sizes, sizes).custom_calls
    plan = str(fused.plan(x, sizes, sizes))
    assert "SwiGLU(ops_1): quantizes by group for the next linear, writes FP8 [te_jax_activation]" in plan
    assert "d-activation+quantize by group, for the linear before it, writes FP8 [te_jax_activation_grad]" in plan
    with_bias = te.Sequential([ops.GroupedLinear(4, 64), ops.SwiGLU()], recipe=te.CurrentScaling(), dtype=BF16)
    assert "the gradient of a bias of groups" in str(with_bias.plan(x, sizes))


@pytest.mark.parametrize("op", [ops.AddExtraInput, ops.MakeExtraOutput])
def test_in_place_false_keeps_the_sum_a_step_of_its_own(op):
    def names(**kwargs):
        chain = [ops.MakeExtraOutput(), ops.RMSNorm(), ops.Linear(32, use_bias=False), ops.AddExtraInput()]
        chain += [ops.MakeExtraOutput(), ops.Linear(32, use_bias=False), ops.AddExtraInput()]
        chain = [op(**kwargs) if type(link) is op else link for link in chain]
        module = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=BF16)
        x = jax.ShapeDtypeStruct((32, 32), BF16)
        plan = module.plan(x, x, x)
        return [step.name for step in (*plan.forward, *plan.backward)]

    assert sum("+add" in name for name in names()) == 4
    assert sum("+add" in name for name in names(in_place=False)) == 2
