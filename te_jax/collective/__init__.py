"""Matrix products with the collective of tensor parallelism next to them (docs/collective.md).

``te.collective.matmul_reduce_scatter`` and ``te.collective.all_gather_matmul``, on first use: they are chains of ops,
which are built on this package's other modules.
"""

import importlib

CALLS = ("all_gather_matmul", "matmul_reduce_scatter")


def __getattr__(name: str):
    if name in CALLS:
        return getattr(importlib.import_module("te_jax.collective.calls"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *CALLS})
