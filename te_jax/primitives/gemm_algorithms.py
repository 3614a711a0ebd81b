"""Which algorithms cuBLASLt runs for the GEMMs of this process: looked at, kept in a file, taken from one.

On CUDA the algorithm of a GEMM is chosen once in a process, when it is first run with its shapes, dtypes, epilogue and
alignment; all GPUs of one kind share the choice. With ``TE_JAX_GEMM_ALGORITHMS=first`` it is the first that
cuBLASLt's heuristic offers, which is the same in every process; with ``timed`` the fastest of at most 16 and of
te_jax's own kernels, the first unless another beats it by more than 1%. Algorithms differ in the order of their sums,
so processes that time may differ in the last bits: what has to repeat bit for bit uses ``first``, or the choices of an
earlier process, from a file (``TE_JAX_GEMM_ALGORITHMS_FILE``, or :func:`load`) or a checkpoint, which holds them.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import uuid
import warnings
from collections.abc import Generator, Mapping
from types import ModuleType
from typing import Any

from te_jax import config, errors
from te_jax.primitives import library

FORMAT = 1
_KEPT = ("algorithm", "time_us", "first_us", "candidates")

_setting: str | None = None  # what `use` said last


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmAlgorithm:
    """The choice for one GEMM.

    Attributes:
      device: the kind of GPU.
      gemm: m, n, k, dtypes, epilogue and alignment, as text.
      algorithm: cuBLASLt's description of the algorithm, or a kernel of te_jax, in hexadecimal digits.
      source: "timed" in this process; "loaded" from another one's choices; "first": the heuristic's first, see note.
      time_us, first_us: microseconds of the algorithm and of the heuristic's first, where they were timed; 0 otherwise.
      candidates: how many were timed.
      note: why the heuristic's first was taken without timing.
    """

    device: str
    gemm: str
    algorithm: str
    source: str
    time_us: float
    first_us: float
    candidates: int
    note: str


def use(algorithms: str) -> None:
    """Chooses by "timed" or "first" from now on, for GEMMs that are run or captured in a command buffer later.

    The environment variable TE_JAX_GEMM_ALGORITHMS says the same for the whole process.
    """
    known = config.GEMM_ALGORITHMS
    errors.check_value(algorithms in known, "gemm_algorithms.use", "algorithms", " or ".join(known), repr(algorithms))
    global _setting
    module = _register()
    _setting = algorithms
    if module is not None:
        module.set_gemm_timing(algorithms == "timed")


def determinism() -> dict[str, Any]:
    """What decides whether this process repeats another one's results bit for bit on CUDA, as JSON can hold it.

    Returns:
      "gemm_algorithms": "timed" or "first"; "gemm_algorithms_file": a path or None; "xla_flags": {name: value} of the
      flags of XLA_FLAGS that choose what XLA's autotuning does. docs/numerics.md says which settings repeat.
    """
    return {
        "gemm_algorithms": _setting or config.gemm_algorithms(),
        "gemm_algorithms_file": config.gemm_algorithms_file(),
        "xla_flags": config.xla_flags_of_determinism(),
    }


def report() -> list[GemmAlgorithm]:
    """The choices made by timing in this process, or loaded into it. Empty without CUDA custom calls."""
    module = _module()
    return [] if module is None else [GemmAlgorithm(**choice) for choice in module.gemm_algorithms()]


def table() -> dict[str, Any]:
    """The choices of this process as JSON can hold them, with the versions that they are good for."""
    devices: dict[str, dict[str, Any]] = {}
    for choice in report():
        if choice.source != "first":
            devices.setdefault(choice.device, {})[choice.gemm] = {name: getattr(choice, name) for name in _KEPT}
    return {"format": FORMAT, "cublaslt": _cublaslt(), "devices": devices}


def load_table(choices: Mapping[str, Any]) -> int:
    """Takes the choices of :func:`table`, also for GEMMs that have been run; returns how many are new here.

    A program that is captured in a command buffer goes on as it was captured. Choices made with another cuBLASLt are
    not taken, with a RuntimeWarning. Without CUDA custom calls none is.

    Raises:
      ValueError: they are not such choices; then none is taken.
    """
    module = _register()
    if module is None:
        return 0
    reason = why_foreign(choices, _cublaslt())
    if reason:
        warnings.warn(f"te_jax: GEMM algorithms are not loaded: {reason}", RuntimeWarning, stacklevel=2)
        return 0
    found = _choices(choices)  # all of them are looked at before the first is taken
    return sum(module.load_gemm_algorithm(device, gemm, **choice) for device, gemm, choice in found)


def _choices(choices: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(device, gemm, what is kept of it) of a table; raises ValueError for anything else."""
    problem = errors.message("gemm_algorithms", "choices", "those of gemm_algorithms.table()", "something else")
    errors.check(_is_table(choices), problem)
    found = []
    for device, gemms in choices["devices"].items():
        for gemm, choice in gemms.items():
            kept = choice if isinstance(choice, Mapping) else {}
            ok = re.fullmatch("[0-9a-f]{128}", str(kept.get("algorithm"))) and type(kept.get("candidates")) is int
            ok = ok and 0 <= kept["candidates"] < 2**31
            ok = ok and all(type(kept.get(name)) in (int, float) for name in ("time_us", "first_us"))
            errors.check(bool(ok), errors.message("gemm_algorithms", f"{device}/{gemm}", f"{_KEPT}", repr(choice)))
            found.append((device, gemm, {name: kept[name] for name in _KEPT}))
    return found


def _is_table(found: Any) -> bool:
    """Whether that has the structure of a table, whatever its choices."""
    devices = found.get("devices") if isinstance(found, Mapping) else None
    return isinstance(devices, Mapping) and all(isinstance(gemms, Mapping) for gemms in devices.values())


def why_foreign(choices: Mapping[str, Any], cublaslt: int) -> str:
    """Why choices of :func:`table` are of no use to cuBLASLt version ``cublaslt``; "" if they are."""
    if choices.get("format") != FORMAT:
        return f"expected format {FORMAT}, got {choices.get('format')!r}"
    if choices.get("cublaslt") != cublaslt:
        return f"expected those of cuBLASLt {cublaslt}, which runs here, got those of {choices.get('cublaslt')!r}"
    return ""


def save(path: str | os.PathLike[str]) -> None:
    """Writes the choices of this process to a JSON file, keeping what is there of other GEMMs and GPUs.

    What is there of another cuBLASLt is replaced. Processes may save to one file at the same time.
    """
    path = pathlib.Path(path)
    ours = table()
    with _locked(path):
        merged = merge(_read(path), ours)
        # Not a temporary file, which only its owner could read: the file may be one of several users.
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
        try:
            new.write_text(json.dumps(merged, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def load(path: str | os.PathLike[str]) -> int:
    """``load_table`` of a file that :func:`save` wrote. Returns how many choices were taken.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a JSON file of this kind.
    """
    data = pathlib.Path(path).read_bytes()
    try:
        return load_table(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"te_jax: {path}: expected GEMM algorithms that te_jax saved, got {error!r}") from error


def merge(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """``new``, and what ``old`` has of other GEMMs and GPUs if both are of the same format and cuBLASLt."""
    if old is None or why_foreign(old, new["cublaslt"]):
        return dict(new)
    devices = {device: dict(gemms) for device, gemms in old["devices"].items()}
    for device, gemms in new["devices"].items():
        devices.setdefault(device, {}).update(gemms)
    return {**new, "devices": devices}


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Generator[None]:
    """Holds the lock of ``path`` against other processes, on systems that have such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """The choices in a file; None if there is no such file or it holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if _is_table(found) else None


def _module() -> ModuleType | None:
    return library.registered_module("cuda")


def _register() -> ModuleType | None:
    """The CUDA module, registered now if there is a GPU for it."""
    library.ensure_registered("cuda")
    return _module()


def _cublaslt() -> int:
    module = _module()
    return 0 if module is None else module.cublaslt_version()


def _start(platform: str, module: ModuleType) -> None:
    """Does what the environment says, once the CUDA targets are registered."""
    if platform != "cuda":
        return
    module.set_gemm_timing(config.gemm_algorithms() == "timed")
    path = config.gemm_algorithms_file()
    if path is None or not library.has_cuda_backend():
        return
    if os.path.exists(path):
        load(path)
    atexit.register(_save_at_exit, path)


def _save_at_exit(path: str) -> None:
    if any(choice.source == "timed" for choice in report()):
        try:
            save(path)
        except OSError as error:
            warnings.warn(f"te_jax: GEMM algorithms are not saved: {error}", RuntimeWarning, stacklevel=1)


library.when_registered(_start)
