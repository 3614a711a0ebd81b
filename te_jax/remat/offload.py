"""Programs whose copies to and from host memory hide under compute.

Left to itself XLA waits for them in a scan over layers (docs/design/0007): it captures the loop's body in a command
buffer that runs copies and kernels one after the other, it reloads a tensor right before it is read, and it queues
copies of weights on the device behind those to the host. ``compiler_options`` turn all three off, where the layers are
a scan of one layer an iteration, rematerialized with ``prevent_cse=False``: ``scan``, ``te.flax.LayerStack`` and
``te.nnx.LayerStack`` are such scans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from te_jax import compat
from te_jax.errors import check_value
from te_jax.remat import met, placement
from te_jax.remat.policies import Policy

HOST_LINK = 55e9
"""Bytes a second of copies between an H200 and pinned host memory, in each direction (PCIe 5, 16 lanes)."""

TESTED = ((0, 11, 2),)
"""Versions of jaxlib whose programs are read in tests (tests/aot/test_offload.py)."""

_PASSES = "xla_disable_hlo_passes"
_OPTIONS: dict[str, bool | str] = {
    placement.PIPELINING: True,  # a tensor is reloaded one iteration ahead
    "xla_gpu_enable_command_buffer": "",  # whose nodes run one after the other
}
# Slices of stacked weights, copied by streams of their own, would queue behind the copies to the host there.
_ALWAYS_DISABLED = "dynamic-slice-copy-fusion-async-wrapper"
# The second pass of this name (the first is that of collectives) makes a copy to the host wait for the kernel that
# overwrites its source in the next iteration. Of a carry, which this iteration overwrites, it makes a copy first.
_FORWARD_PIPELINING = "collective-pipeliner-forward:1"


def why_untested() -> str | None:
    """Why the options may not do what they do in tests; None if they were tested with this jaxlib."""
    version = compat.jaxlib_version()
    tested = ", ".join(".".join(map(str, v)) for v in TESTED)
    return None if version in TESTED else f"jaxlib {'.'.join(map(str, version))}; tested with {tested}"


def compiler_options(*, carry: bool = False) -> dict[str, bool | str]:
    """XLA's options for programs that offload: ``jax.jit(step, compiler_options=te.remat.compiler_options())``.

    They belong to the outermost ``jax.jit``; ``te.remat.jit`` adds them. Other platforms than CUDA take no notice.

    Args:
      carry: whether what is offloaded is mostly the carry of the scan, and little is computed before it is
        overwritten. Not in a transformer layer, whose attention runs before its residual is overwritten.
    """
    disabled = _ALWAYS_DISABLED if carry else f"{_FORWARD_PIPELINING},{_ALWAYS_DISABLED}"
    return _OPTIONS | {_PASSES: disabled}


_compiler_options = compiler_options  # an argument of ``jit`` has this name


def xla_flags(*, carry: bool = False) -> str:
    """The same options as ``XLA_FLAGS``, for all programs of a process."""
    options = compiler_options(carry=carry)
    text = {name: value if isinstance(value, str) else str(value).lower() for name, value in options.items()}
    return " ".join(f"--{name}={value}" for name, value in text.items())


def jit(
    function: Callable, *, compiler_options: dict[str, Any] | None = None, carry: bool = False, **options: Any
) -> Any:
    """``jax.jit`` with ``te.remat.compiler_options()``, and with warnings of names that a policy has for nothing.

    Args:
      function, **options: as for ``jax.jit``.
      compiler_options: further ones, which win over those of te_jax; passes to disable are added to its own.
      carry: as for ``te.remat.compiler_options``.
    """
    ours, given = _compiler_options(carry=carry), dict(compiler_options or {})
    if _PASSES in given:
        given[_PASSES] = f"{ours[_PASSES]},{given[_PASSES]}"

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with placement.hiding(), met.asking() as policies:
            results = function(*args, **kwargs)
        met.warn_of(policies)
        return results

    return jax.jit(traced, compiler_options=ours | given, **options)


def scan(layer: Callable, carry: Any, xs: Any, *, policy: Policy | None, length: int | None = None) -> tuple[Any, Any]:
    """``jax.lax.scan(layer, carry, xs)`` over layers that keep what ``policy`` says, in the form whose copies hide.

    Args:
      layer: (carry, x) -> (carry, y), with names on what it keeps (ops of te_jax have them, ``te.remat.name``).
      carry: what goes from layer to layer.
      xs: of every layer, stacked: parameters, FP8 state.
      policy: of ``te.remat.policy``; None: nothing is rematerialized.
      length: number of layers, if xs doesn't say it.
    """
    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)  # the loop itself keeps XLA from merging
    return jax.lax.scan(layer, carry, xs, length=length)


def hideable_bytes(seconds: float, *, link: float = HOST_LINK) -> float:
    """Bytes a layer may offload: what the link copies while the layer's forward pass takes ``seconds``.

    The forward pass is the shorter of the two, so what it hides the backward pass hides too. A forward pass of F
    floating-point operations at R of them a second takes F / R. That of a transformer layer of width D has about
    24 T D^2 for T tokens, so it hides 24 D link / (R b) tensors [T, D] of b bytes an element, however many tokens there
    are (docs/offload.md).
    """
    for name, value in {"seconds": seconds, "link": link}.items():
        check_value(value > 0, "remat.hideable_bytes", name, "a positive number", value)
    return seconds * link
