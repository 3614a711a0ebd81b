"""The fusion rules, in the order in which they are tried. A tuple of rules is a value: pass another one to a chain."""

from te_jax.fusion.pattern import Rule
from te_jax.fusion.rules.activation_grad import ACTIVATION_GRAD_QUANTIZE
from te_jax.fusion.rules.collective import (
    ALL_GATHER_DGRAD,
    ALL_GATHER_LINEAR,
    DGRAD_REDUCE_SCATTER,
    LINEAR_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
    PRODUCER_THROUGH_GATHER,
)
from te_jax.fusion.rules.grouped import GROUPED_ACTIVATION_GRAD_QUANTIZE, GROUPED_ACTIVATION_QUANTIZE
from te_jax.fusion.rules.linear import BACKWARD_LINEAR, FORWARD_LINEAR, FORWARD_LINEAR_DROPOUT
from te_jax.fusion.rules.norm_grad import NORM_GRAD_ADD
from te_jax.fusion.rules.producer import PRODUCER_QUANTIZE
from te_jax.fusion.rules.quantize import PRODUCER_THROUGH_QUANTIZE, QUANTIZE_BACKWARD, QUANTIZE_FORWARD

FORWARD_RULES: tuple[Rule, ...] = (
    ALL_GATHER_LINEAR,
    LINEAR_REDUCE_SCATTER,
    LINEAR_ALL_REDUCE,
    FORWARD_LINEAR_DROPOUT,
    FORWARD_LINEAR,
    PRODUCER_THROUGH_GATHER,
    PRODUCER_QUANTIZE,
    GROUPED_ACTIVATION_QUANTIZE,
    PRODUCER_THROUGH_QUANTIZE,
    QUANTIZE_FORWARD,
)
BACKWARD_RULES: tuple[Rule, ...] = (
    ACTIVATION_GRAD_QUANTIZE,
    GROUPED_ACTIVATION_GRAD_QUANTIZE,
    QUANTIZE_BACKWARD,
    DGRAD_REDUCE_SCATTER,
    ALL_GATHER_DGRAD,
    BACKWARD_LINEAR,
    NORM_GRAD_ADD,
)
