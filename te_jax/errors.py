"""Errors that users see: one message format, naming op, argument, expected and got.

`ValueError` for shapes, values and places, `TypeError` for dtypes and Python types.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


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


def required(value: T | None, op: str, argument: str) -> T:
    """``value``, which must be there: an optional part of a tensor or of a result that the caller has asked for."""
    if value is None:
        raise ValueError(message(op, argument, "a value", None))
    return value
