"""``python -m te_jax.doctor``: what this machine has, which custom calls will be used, and why not if not."""

from __future__ import annotations

import importlib.metadata
import platform as host
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from te_jax import config
from te_jax.primitives import definition, gemm_algorithms, library, spec, support
from te_jax.quant import state
from te_jax.recipe import DelayedScaling
from te_jax.remat import offload, placement

_PACKAGES = ("te_jax", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "orbax-checkpoint", "optax", "numpy", "scipy")
_PLATFORMS = ("cpu", "cuda")
_COLLECTIVE = spec.CollectiveGemmSpec(kind="matmul_reduce_scatter", axis_name="tp", ranks=2, chunks=1)


def _samples() -> dict[str, tuple]:
    """For each primitive a spec and operands of a shape that its handlers take."""
    x, wide, scale = _shape(64, 32), _shape(64, 64), _shape(dtype=jnp.float32)
    data, weight = _shape(64, 32, dtype=jnp.float8_e4m3fn), _shape(16, 32, dtype=jnp.float8_e4m3fn)
    experts, weight_t = _shape(2, 16, 32, dtype=data.dtype), _shape(16, 32, dtype=jnp.float8_e5m2)
    sizes, scales = _shape(2, dtype=jnp.int32), _shape(2, dtype=jnp.float32)  # of two groups
    leaves = jax.eval_shape(lambda: state.init(2, DelayedScaling())).values()  # of two quantizers
    return {
        "quantize": (spec.QuantizeSpec(format="e4m3", data_t=True), x, scale),
        "dequantize": (spec.DequantizeSpec(), data, scale),
        "norm": (spec.NormSpec(format="e4m3"), x, _shape(32), scale),
        "norm_grad": (spec.NormGradSpec(), x, x, _shape(32), _shape(64, dtype=jnp.float32)),
        "activation": (spec.ActivationSpec(format="e4m3", kind="swiglu"), wide, scale),
        "activation_grad": (spec.ActivationGradSpec(format="e5m2", kind="swiglu"), x, wide, scale),
        "gemm": (spec.GemmSpec(), data, weight, scale, scale),
        "collective_gemm": (_COLLECTIVE, data, weight, scale, scale, _shape(2, dtype=jnp.int32)),
        "grouped_gemm": (spec.GroupedGemmSpec(), data, experts, sizes, scales, scales),
        "grouped_wgrad": (spec.GroupedWgradSpec(groups=2), data, weight_t, sizes, scales, scales),
        "scale_read": (spec.ScaleReadSpec(formats="e4m3 e5m2"), *leaves),
        "scale_write": (spec.ScaleWriteSpec(formats="e4m3 e5m2", used="11"), *leaves, scale, scale),
    }


def _shape(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _versions() -> Iterator[str]:
    yield f"Python {host.python_version()} on {host.system()} {host.machine()}"
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package}: not installed as a package"


def _devices() -> Iterator[str]:
    yield f"default platform: {jax.default_backend()}"
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        yield f"{device}: {device.device_kind}" + (f", compute capability {capability}" if capability else "")


def _native(platform: str) -> Iterator[str]:
    status = library.status(platform)
    yield f"{platform}: " + ("available" if status.available else f"not available: {status.reason}")
    if status.path is not None:
        yield f"  file: {status.path}"
    for key, value in status.build_info.items():
        text = ".".join(map(str, value)) if isinstance(value, tuple) else value
        yield f"  {key}: {', '.join(text) if isinstance(text, list) else text}"
    if platform == "cuda" and status.available:
        yield f"  cuBLASLt: {_cublaslt()}"


def _cublaslt() -> str:
    found = library.cublaslt_status()
    if found["version"] is None:
        return f"not found: {found['error']}"
    return f"{found['version']} ({found['path']})"


def _custom_calls(platform: str) -> Iterator[str]:
    samples = _samples()
    for name in (target.removeprefix("te_jax_") for target in definition.targets()):
        if name not in samples:
            yield f"{name}: unknown: this report has no sample of it"
            continue
        sample, *operands = samples[name]
        reason = library.status(platform).reason or support.why_not(sample, *operands, platform=platform)
        yield f"{name}: " + (f"jnp reference: {reason}" if reason else "custom call")


def _algorithms() -> Iterator[str]:
    for choice in gemm_algorithms.report():
        times = f"{choice.time_us:.1f} us, the heuristic's first {choice.first_us:.1f} us"
        yield f"{choice.device}: {choice.gemm}: {choice.source}, {choice.note or times}"


def _determinism() -> Iterator[str]:
    setting = gemm_algorithms.determinism()
    yield f"GEMM algorithms: {setting['gemm_algorithms']}, file: {setting['gemm_algorithms_file'] or 'none'}"
    flags = [f"{name}={value}" for name, value in setting["xla_flags"].items()]
    yield f"XLA_FLAGS about it: {' '.join(flags) or 'none: XLA autotunes anew in every process'}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(int(bool(value)))


def _attention() -> Iterator[str]:
    query, key = _shape(2, 128, 2, 4, 64), _shape(2, 128, 2, 64)
    for platform in _PLATFORMS:
        reason = support.why_not(spec.AttentionSpec(causal=True, scale=1.0), query, key, key, platform=platform)
        if platform == "cuda" and not library.has_cuda_backend():  # above, as if compiling for a GPU that isn't there
            reason = reason or "this process has no CUDA backend"
        yield f"{platform}: " + (f"XLA: {reason}" if reason else "cuDNN flash attention")


def _collectives() -> Iterator[str]:
    """docs/collective.md; which calls overlap is what a chain's plan says."""
    x = _shape(4096, 4096, dtype=jnp.float8_e4m3fn)
    operands = (x, x, *(_shape(dtype=jnp.float32),) * 2, _shape(2, dtype=jnp.int32))
    for platform in _PLATFORMS:
        reason = library.status(platform).reason or support.why_not(_COLLECTIVE, *operands, platform=platform)
        if platform == "cuda" and not library.has_cuda_backend():
            reason = reason or "this process has no CUDA backend"
        yield f"{platform}: " + (f"the GEMM, then the collective: {reason}" if reason else "one call")
    for channel in library.collective_channels():
        mib = channel["arena_bytes"] / 2**20
        yield f"cuda:{channel['device']}: rank {channel['rank']} of {channel['group']}: arena of {mib:.0f} MiB"


def _offload() -> Iterator[str]:
    kinds = placement.memory_kinds()
    reason = placement.why_impossible()
    yield f"memory: {', '.join(kinds)}: " + (f"can't offload: {reason}" if reason else "can offload")
    untested = offload.why_untested()
    yield "compiler options that hide copies: " + (f"not tested with this {untested}" if untested else "tested")
    exposed = placement.why_exposed()
    if jax.default_backend() != "gpu":
        yield "programs for this platform leave everything where it is; te.remat.jit is for those for CUDA"
    elif exposed:
        yield f"jax.jit: copies won't hide under compute: {exposed}; te.remat.jit has them"
    else:
        yield "jax.jit: XLA_FLAGS have the options"


def report() -> str:
    """The text that ``python -m te_jax.doctor`` prints. Initialises jax's backends."""
    running = library.runtime_ffi_api()
    sections = {
        "versions": _versions(),
        "devices": _devices(),
        "options": (f"{name}={_text(value)}" for name, value in config.describe().items()),
        f"native library (FFI API of this jaxlib: {'unknown' if running is None else '.'.join(map(str, running))})": (
            line for platform in _PLATFORMS for line in _native(platform)
        ),
    }
    for platform in _PLATFORMS:
        sections[f"what runs on {platform} (sizes permitting: multiples of 16)"] = _custom_calls(platform)
    sections["attention (bfloat16 or float16, head_dim a multiple of 8 up to 128; otherwise XLA)"] = _attention()
    sections["collective matmuls (docs/collective.md), and the memory that they hold in this process"] = _collectives()
    sections["activation offload (docs/offload.md)"] = _offload()
    sections["repeating bit for bit on CUDA (docs/numerics.md says what does; a CPU always does)"] = _determinism()
    sections["GEMM algorithms chosen by timing (none before a GEMM is run, but for those from a file)"] = _algorithms()
    return "\n".join(f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items())


def main() -> None:
    print(report())


if __name__ == "__main__":
    main()
