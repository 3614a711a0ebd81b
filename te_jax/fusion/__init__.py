"""Fusion rules as data: what a rule of one's own needs (docs/adding_an_op.md)."""

from te_jax.fusion.pattern import Rule as Rule
from te_jax.fusion.pattern import Slot as Slot
from te_jax.fusion.pattern import Step as Step
from te_jax.fusion.pattern import Window as Window
from te_jax.fusion.pattern import slot as slot
from te_jax.fusion.rules import BACKWARD_RULES as BACKWARD_RULES
from te_jax.fusion.rules import FORWARD_RULES as FORWARD_RULES
from te_jax.fusion.rules.linear import why_no_fp8_gemm as why_no_fp8_gemm
from te_jax.ops.linear import quantize_operand as quantize_operand
