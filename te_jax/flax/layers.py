"""What the modules share: names of norms and activations to ops."""

from __future__ import annotations

from typing import Any

from te_jax import ops
from te_jax.errors import check_type, check_value
from te_jax.ops.activation import ACTIVATIONS
from te_jax.primitives.spec import GATED_ACTIVATIONS

_NORMS = {"rmsnorm": ops.RMSNorm, "layernorm": ops.LayerNorm}
_ACTIVATIONS = {op.kind: op for op in ACTIVATIONS}


def norm_op(kind: str, epsilon: float, *, name: str, caller: str):
    """The norm op called ``kind``. Raises ValueError naming ``caller`` if there is none."""
    _check_known(caller, "norm", kind, _NORMS)
    return _NORMS[kind](epsilon=epsilon, name=name)


def activation_op(kind: str, *, name: str, caller: str, devices: int = 1):
    """The activation op called ``kind``; a gated one of x in the order of ``devices`` (te_jax.ops.device_order).

    Raises ValueError naming ``caller`` if there is none.
    """
    _check_known(caller, "activation", kind, _ACTIVATIONS)
    options: dict[str, Any] = {"devices": devices} if is_gated(kind) else {}
    return _ACTIVATIONS[kind](name=name, **options)


def is_gated(activation: str) -> bool:
    """Whether the activation halves its input."""
    return activation in GATED_ACTIVATIONS


def check_array(caller: str, x: Any) -> None:
    """Raises TypeError naming ``caller`` unless x has a shape and a dtype."""
    check_type(hasattr(x, "shape") and hasattr(x, "dtype"), caller, "x", "an array", type(x).__name__)


def _check_known(caller: str, argument: str, kind: str, known: dict) -> None:
    check_value(kind in known, caller, argument, f"one of {sorted(known)}", repr(kind))
