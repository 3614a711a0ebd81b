"""Factors, mesh axes and specs of a sharding rule."""

import dataclasses

from jax.experimental.custom_partitioning import CompoundFactor
from jax.sharding import PartitionSpec as P

from te_jax.parallel.sharding import Reductions, ShardingRule, in_blocks

# out [l, r] = lhs [l, k] . rhs [r, k], and an amax
GEMM = ShardingRule(
    operands=(("l", "k"), ("r", "k"), ()),
    results=(("l", "r"), ()),
    contracted=("k",),
    amax=("l", "r"),
    sums=("k",),
)
SIZES = {"a": 4, "b": 2}


def axes_of(lhs, rhs, out=None, shapes=((16, 64), (32, 64), (16, 32))):
    operands = [(shapes[0], lhs), (shapes[1], rhs), ((), P())]
    return GEMM.axes(operands, [] if out is None else [(shapes[2], out), ((), P())], SIZES)


def test_specs_and_reductions_follow_from_the_factors():
    axes = axes_of(P("a", "b"), P())
    assert axes == {"l": ("a",), "k": ("b",)}
    assert GEMM.operand_specs(axes) == (P("a", "b"), P(None, "b"), P())
    assert GEMM.result_specs(axes) == (P("a", None), P())
    assert GEMM.reductions(axes) == Reductions(amax=("a",), sums=("b",))


def test_several_axes_on_one_dimension():
    axes = axes_of(P(("a", "b")), P())
    assert GEMM.result_specs(axes)[0] == P(("a", "b"), None)
    assert GEMM.reductions(axes).amax == ("a", "b")


def test_the_first_operand_wins_an_axis():
    assert axes_of(P("a"), P(None, "a")) == {"l": ("a",)}
    assert axes_of(P(None, "a"), P("a")) == {"k": ("a",)}


def test_results_decide_what_operands_leave_open():
    assert axes_of(P(), P(), P("a", "b")) == {"l": ("a",), "r": ("b",)}


def test_axes_that_do_not_divide_a_dimension_are_dropped():
    assert axes_of(P("a"), P("b"), shapes=((18, 64), (32, 64), (18, 32))) == {"r": ("b",)}


def test_replicated_factors_are_never_split_and_unknown_axes_ignored():
    norm = ShardingRule(operands=(("l", "c"), ("c",)), results=(("l", "c"),), replicated=("c",), amax=("l",))
    assert norm.axes([((8, 16), P("a", "b")), ((16,), P("b"))], [], SIZES) == {"l": ("a",)}
    assert norm.axes([((8, 16), P("z", None)), ((16,), P())], [], SIZES) == {}


def test_batch_dimensions_are_factors_that_nothing_is_reduced_over():
    rule = GEMM.batched([(True, False, False), (True, True, False)])
    assert rule.operands == (("b0", "b1", "l", "k"), ("b1", "r", "k"), ())
    assert rule.results == (("b0", "b1", "l", "r"), ("b0", "b1"))
    axes = rule.axes([((8, 2, 16, 64), P("a", None, "b")), ((2, 32, 64), P()), ((), P())], [], SIZES)
    assert rule.result_specs(axes) == (P("a", None, "b", None), P("a", None))
    assert rule.reductions(axes) == Reductions(amax=("b",))


def test_shardy_rule():
    rule = GEMM.shardy()
    assert rule.operand_mappings == (("l", "k"), ("r", "k"), ())
    assert rule.reduction_factors == ("k",)


# out [l, r] = lhs [l, k] . rhs [r, k] in blocks of k, with their scales
BLOCKS = ShardingRule(
    operands=(("l", "k"), ("r", "k"), (in_blocks("k"), "l"), (in_blocks("k"), "r")),
    results=(("l", "r"),),
    contracted=("k",),
    sums=("k",),
)


def test_a_factor_in_blocks_is_split_between_them():
    def axes(k, lhs, scales):
        operands = [((16, k), lhs), ((32, k), P()), ((k // 128, 16), scales), ((k // 128, 32), P())]
        return BLOCKS.axes(operands, [], SIZES)

    assert axes(512, P(None, "a"), P()) == {"k": ("a",)}
    assert axes(256, P(None, "a"), P()) == {}  # 64 a shard
    assert axes(256, P(None, "b"), P()) == {"k": ("b",)}
    assert axes(512, P(), P("a")) == {"k": ("a",)}  # the scales show it as well
    assert BLOCKS.operand_specs({"k": ("a",)}) == (P(None, "a"), P(None, "a"), P("a", None), P("a", None))


def test_shardy_rule_of_blocks():
    rule = BLOCKS.shardy()
    assert rule.operand_mappings[0] == ("l", CompoundFactor("k_blocks", "k_within"))
    assert rule.operand_mappings[2] == ("k_blocks", "l")
    assert rule.reduction_factors == ("k_blocks", "k_within")
    assert rule.factor_sizes == {"k_within": 128}
    whole = dataclasses.replace(BLOCKS, replicated=("k",)).shardy()
    assert whole.operand_mappings[0] == ("l", "k")
    assert whole.need_replication_factors == ("k", "k_blocks")
    assert whole.reduction_factors == ()
