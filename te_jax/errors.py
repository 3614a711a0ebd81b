"""Errors that users see: one message format, naming op, argument, expected and got.

`ValueError` for shapes, values and places, `TypeError` for dtypes and Python types.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_BETWEEN = ("te_jax", "jax", "flax")  # packages that a call goes through


def message(op: str, argument: str, expected: object, got: object) -> str:
    """``te_jax.gemm: rhs: expected contracted dimensions (32,), got (48,)``."""
    return f"te_jax.{op}: {argument}: expected {expected}, got {got}"


def check(condition: bool, text: str) -> None:
    """Raises ``ValueError(text)`` unless ``condition``. ``text`` should come from :func:`message`."""
    if not condition:
        raise ValueError(text)


def check_value(condition: bool, op: str, argument: str, expected: object, got: object) -> None:
    """Raises a ``ValueError`` in the format of :func:`message` unless ``condition``."""
    if not condition:
        raise ValueError(message(op, argument, expected, got))


def check_type(condition: bool, op: str, argument: str, expected: object, got: object) -> None:
    """Raises a ``TypeError`` in the format of :func:`message` unless ``condition``."""
    if not condition:
        raise TypeError(message(op, argument, expected, got))


def check_collections(op: str, argument: str, variables: Any) -> None:
    """Raises a ``TypeError`` unless ``variables`` is a dict of collections; says where those of other objects are."""
    got = type(variables).__name__
    if hasattr(variables, "params") and hasattr(variables, "opt_state"):  # Flax's TrainState and its like
        got += ", whose .params are to be given"
    elif any(base.__module__.startswith("flax.nnx") for base in type(variables).__mro__):
        got += " (te.nnx.to_variables makes one of an nnx model)"
    check_type(isinstance(variables, Mapping), op, argument, "a dict of collections", got)


def required(value: T | None, op: str, argument: str) -> T:
    """``value``, which must be there: an optional part of a tensor or of a result that the caller has asked for."""
    if value is None:
        raise ValueError(message(op, argument, "a value", None))
    return value


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn`` at the user's line that made the call, however deep in te_jax, jax and flax it is said."""
    level, frame = 2, sys._getframe(1)  # Python 3.11 has no skip_file_prefixes
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
