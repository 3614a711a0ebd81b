"""The native library: finds the extension modules, checks them, registers their custom-call targets once.

Nothing here runs at import, and nothing needs CUDA or a native library to be there: ``status`` says what is missing.
A module that was built with newer FFI headers than the running jaxlib is refused before anything is registered,
because XLA would not initialise the whole backend otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from te_jax import config

# The platform names of jax's lowering -> (extension module, platform name of the FFI registry).
_MODULES = {
    "cpu": ("te_jax._native._te_jax_cpu", "cpu"),
    "cuda": ("te_jax._native._te_jax_cuda", "CUDA"),
}
_lock = threading.RLock()
_registered: set[str] = set()
_started: set[str] = set()  # platforms whose hooks have run
_hooks: list[Callable[[str, ModuleType], None]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeStatus:
    """What there is of the native library for one platform.

    Attributes:
      available: custom calls can be used on this platform in this process.
      reason: why not, as text for the user; empty if available.
      path: the extension module's file, or None if there is none.
      build_info: ``ffi_api`` (major, minor), ``architectures``, ``compiler``; empty where it was not loaded.
    """

    available: bool
    reason: str = ""
    path: pathlib.Path | None = None
    build_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def status(platform: str) -> NativeStatus:
    """Whether the native library serves ``platform`` ("cpu", "cuda", ...), and why not. Registers nothing.

    The CUDA module is not loaded in a process without a CUDA backend, unless ``register_cuda_targets`` was called.
    """
    if platform == "cuda" and platform not in _registered:
        path = _path(platform)
        if path is not None and not has_cuda_backend():
            return NativeStatus(available=False, reason="this process has no CUDA backend", path=path)
    found = _load(platform)[0]
    if platform == "cuda" and found.available and has_cuda_backend():
        capabilities = {str(device.compute_capability) for device in jax.devices("cuda")}
        reason = architecture_problem(found.build_info["architectures"], capabilities)
        found = dataclasses.replace(found, available=not reason, reason=reason)
    return found


def ensure_registered(platform: str) -> NativeStatus:
    """Registers the custom-call targets of ``platform`` if its library is available. Returns ``status(platform)``."""
    found = status(platform)
    if found.available:
        _register(platform)
    return found


def register_cuda_targets() -> NativeStatus:
    """Registers the CUDA targets without a CUDA backend, to compile for a GPU that is not there.

    Raises:
      RuntimeError: the CUDA module is not built or can't be used; the message says why.
    """
    found, _ = _load("cuda")
    if not found.available:
        raise RuntimeError(f"te_jax: no CUDA custom calls: {found.reason}")
    _register("cuda")
    return found


def registered_module(platform: str) -> ModuleType | None:
    """The extension module of ``platform``, if its targets are registered."""
    return _load(platform)[1] if platform in _registered else None


def when_registered(hook: Callable[[str, ModuleType], None]) -> None:
    """Has ``hook(platform, module)`` called when the targets of a platform have been registered."""
    _hooks.append(hook)


def cublaslt_status() -> Mapping[str, Any]:
    """The cuBLASLt that the CUDA module uses, loaded if it isn't yet.

    Returns:
      ``version`` (for example 130100; None if it can't be loaded), ``path``, and ``error``, the reason.
    """
    module = _load("cuda")[1]
    if module is None:
        return {"version": None, "path": "", "error": status("cuda").reason}
    return module.cublaslt_status()


def collective_channels() -> list[Mapping[str, Any]]:
    """The groups of devices that collective matmuls have connected in this process, one entry for each device in each.

    Returns:
      ``group`` (the mesh and the axis), ``rank``, ``device``, ``arena_bytes``; [] without a CUDA device.
    """
    module = _load("cuda")[1] if has_cuda_backend() else None
    return [] if module is None else module.collective_channels()


@functools.cache
def has_cuda_backend() -> bool:
    """Whether jax has a CUDA device in this process. Initialises jax's backends."""
    try:
        return len(jax.devices("cuda")) > 0
    except RuntimeError:
        return False


@functools.cache
def runtime_ffi_api() -> tuple[int, int] | None:
    """The FFI API version (major, minor) of the running jaxlib, read from its headers. None if they are missing."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if numbers[0] is None or numbers[1] is None:
        return None
    return int(numbers[0].group(1)), int(numbers[1].group(1))


def version_problem(built: tuple[int, int], running: tuple[int, int] | None) -> str:
    """Why a module built for FFI API ``built`` can't be registered with a jaxlib of ``running``; "" if it can."""
    if running is None:
        return "the running jaxlib does not tell its FFI API version"
    if built[0] != running[0] or built[1] > running[1]:
        text = [".".join(map(str, version)) for version in (built, running)]
        return f"it was built for FFI API {text[0]}, the running jaxlib has {text[1]}: rebuild with jaxlib 0.10.2"
    return ""


def architecture_problem(architectures: Sequence[str], capabilities: Iterable[str]) -> str:
    """Why GPUs of ``capabilities`` ("9.0", ..) don't run code built for ``architectures`` ("sm_90a", ..); "" if so.

    The suffix a is for features of one architecture: such code runs on no other, newer or older.
    """
    built = {f"{name[3:-2]}.{name[-2]}" for name in architectures if name.endswith("a")}
    missing = sorted(set(capabilities) - built)
    if not missing:
        return ""
    return f"it is built for {', '.join(architectures)}; a GPU here has compute capability {', '.join(missing)}"


def _path(platform: str) -> pathlib.Path | None:
    spec = importlib.util.find_spec(_MODULES[platform][0])
    return pathlib.Path(spec.origin) if spec is not None and spec.origin is not None else None


@functools.cache
def _load(platform: str) -> tuple[NativeStatus, ModuleType | None]:
    """Imports and checks the module of ``platform``; the module only if it can be used."""
    if platform not in _MODULES:
        return NativeStatus(available=False, reason=f"te_jax has no native library for {platform!r}"), None
    path = _path(platform)
    if path is None:
        how = "make cuda" if platform == "cuda" else "pip install -e ."
        return NativeStatus(available=False, reason=f"the {platform} module is not built ({how})"), None
    try:
        module = importlib.import_module(_MODULES[platform][0])
        info = module.build_info()
        reason = version_problem(tuple(info["ffi_api"]), runtime_ffi_api())
        if not reason and platform == "cpu":
            module.set_sgemm(_sgemm())
    except (ImportError, ValueError) as error:
        return NativeStatus(available=False, reason=f"{path.name} does not load: {error}", path=path), None
    found = NativeStatus(available=not reason, reason=reason, path=path, build_info=info)
    return found, module if found.available else None


def _sgemm() -> Any:
    """scipy's single precision matrix product, as a capsule of a C function pointer."""
    return importlib.import_module("scipy.linalg.cython_blas").__pyx_capi__["sgemm"]


def _register(platform: str) -> None:
    with _lock:
        module = _load(platform)[1]
        if platform in _started or module is None:
            return
        if platform not in _registered:
            options = {"command_buffers": config.command_buffers_enabled()} if platform == "cuda" else {}
            for name, type_registration in module.types().items():
                jax.ffi.register_ffi_type(name, type_registration, platform=_MODULES[platform][1])
            for name, handler in module.registrations(**options).items():
                jax.ffi.register_ffi_target(name, handler, platform=_MODULES[platform][1])
            _registered.add(platform)
        _started.add(platform)  # hooks may want the targets themselves
        try:
            for hook in _hooks:
                hook(platform, module)
        except BaseException:
            _started.discard(platform)  # what is wrong with the environment is an error the next time too
            raise
