"""Format versions of checkpoints: every past one is read, by bringing its document to the present version.

| version | what it added |
|---|---|
| 1 | items of orbax, recipe, GEMM algorithms, what wrote it |
| 2 | checksums of every leaf and of the document; which settings of determinism the run had |
| 3 | FP8 state of chains whose ops have names is under these names, where it was under places alone |

A new version adds a function here, that makes its document from the one before, and a stored checkpoint to tests/data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from te_jax.checkpoint.runs import BY_PLACE
from te_jax.errors import message

FORMAT_VERSION = 3

Document = dict[str, Any]


def _from_1(document: Document) -> Document:
    """Nothing is known of the checksums (none is compared) and of the settings (null)."""
    return {**document, "checksums": {}, "determinism": None}


def _from_2(document: Document) -> Document:
    return {**document, "fp8_state_names": BY_PLACE}


MIGRATIONS: Mapping[int, Callable[[Document], Document]] = {1: _from_1, 2: _from_2}


def is_newer(document: Any) -> bool:
    """Whether a newer te_jax wrote this document, of which nothing else is known then."""
    version = document.get("format_version") if isinstance(document, Mapping) else None
    return type(version) is int and version > FORMAT_VERSION


def upgrade(document: Document, where: Any, op: str = "checkpoint.restore") -> Document:
    """The document in the present version.

    Raises:
      ValueError: it is of a newer version, or of none.
    """
    version = document.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        got = f"{version!r}" + (": written by a newer te_jax, which can read it" if is_newer(document) else "")
        known = f"1 to {FORMAT_VERSION}"
        raise ValueError(message(op, f"format version of {where}", known, got))
    for past in range(version, FORMAT_VERSION):
        document = {**MIGRATIONS[past](document), "format_version": past + 1}
    return document
