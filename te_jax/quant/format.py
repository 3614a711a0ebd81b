"""FP8 formats: facts only.

E4M3 is ``float8_e4m3fn`` (no infinities, max 448), E5M2 is IEEE-like (max 57344). Both round to nearest even.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

MAX_SCALE = 2.0**126
"""No scale is larger, so that neither the scale of a tiny amax is infinite nor its inverse subnormal."""

NAN_CODE = 0x7F
"""The byte written for NaN, in either format and without a sign, as the hardware's conversions do."""


@dataclasses.dataclass(frozen=True)
class Format:
    """An FP8 format.

    Attributes:
      name: ``"e4m3"`` or ``"e5m2"``, as specs and recipes spell it.
      dtype: the numpy dtype.
      max: the largest finite value.
    """

    name: str
    dtype: np.dtype
    max: float


E4M3 = Format("e4m3", np.dtype(jnp.float8_e4m3fn), 448.0)
E5M2 = Format("e5m2", np.dtype(jnp.float8_e5m2), 57344.0)
FORMATS = (E4M3, E5M2)


def is_fp8(dtype) -> bool:
    """Whether ``dtype`` is one of the two formats."""
    return np.dtype(dtype) in (E4M3.dtype, E5M2.dtype)


def format_of(name_or_dtype) -> Format:
    """The format with that name or dtype. Raises ValueError for any other."""
    if isinstance(name_or_dtype, Format):
        return name_or_dtype
    for fmt in FORMATS:
        if name_or_dtype == fmt.name:
            return fmt
    try:
        dtype = np.dtype(name_or_dtype)
    except TypeError:
        dtype = None
    for fmt in FORMATS:
        if dtype == fmt.dtype:
            return fmt
    raise ValueError(f"te_jax: FP8 format: expected e4m3, e5m2 or one of their dtypes, got {name_or_dtype!r}")
