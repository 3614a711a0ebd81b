"""Everything that differs between the supported jax versions (0.10.2 to 0.12), and JAX's less known corners by name.

Other files take these names from here, so that a new jax version is one diff in one file.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core
from jax import ad_checkpoint
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

not_mapped = None  # how batching rules mark an operand without a batch dimension
shard_map = jax.shard_map
auto_axes: Callable[..., Any] = jax.sharding.auto_axes  # typed as a decorator or a function
get_abstract_mesh = jax.sharding.get_abstract_mesh


def jaxlib_version() -> tuple[int, ...]:
    """The version of jaxlib, with which XLA's compiler for CUDA comes: (0, 11, 2)."""
    import jaxlib

    return tuple(int(part) for part in jaxlib.__version__.split(".")[:3])


def checkpoint_name(x: Any, name: str) -> Any:
    """``jax.ad_checkpoint.checkpoint_name`` of a tree, for FP8 too.

    With ``JAX_REMAT3=1`` what is saved goes through ``reduce_precision``, which takes the largest numbers of
    float8_e4m3fn for infinite and leaves NaN (jax 0.11.2): there FP8 is named as bytes.
    """

    def named(leaf: jax.Array) -> jax.Array:
        if not getattr(jax.config, "jax_remat3", False) or leaf.dtype.itemsize > 1 or leaf.dtype.kind in "iub":
            return ad_checkpoint.checkpoint_name(leaf, name)
        bits = ad_checkpoint.checkpoint_name(jax.lax.bitcast_convert_type(leaf, jax.numpy.uint8), name)
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(named, x)


def _on_its_mesh(x: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """The spec as jax takes it for x: with the mesh of x's type where no mesh is set, which jax wants then."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.NamedSharding(mesh, spec) if get_abstract_mesh().empty and not mesh.empty else spec


def reshard(x: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """``jax.sharding.reshard``, on the mesh that is set, or else on that of x's type."""
    return jax.sharding.reshard(x, _on_its_mesh(x, spec))


def with_sharding_constraint(x: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """``jax.lax.with_sharding_constraint``, on the mesh that is set, or else on that of x's type."""
    return jax.lax.with_sharding_constraint(x, _on_its_mesh(x, spec))


def no_mesh() -> AbstractContextManager:
    """A context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def all_manual(mesh: jax.sharding.AbstractMesh) -> AbstractContextManager:
    """A context in which all axes of ``mesh`` are Manual, for code that runs on one device's part of what it has."""
    kinds = (jax.sharding.AxisType.Manual,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds))


@contextlib.contextmanager
def numpy_promotion() -> Generator[None]:
    """NumPy's promotion rules for te_jax's own arithmetic: jax_numpy_{dtype,rank}_promotion are for the user's.

    Also a decorator.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which ``x`` (an array or an abstract value) may differ between devices.

    Always empty outside of ``shard_map`` and inside of one with ``check_vma=False``.
    """
    return frozenset(_aval(x).manual_axis_type.varying)


def pvary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """``x``, typed as varying over ``axes`` as well. No data moves; axes that it already varies over are skipped."""
    missing = tuple(axis for axis in sorted(axes) if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def zeros_like(x: jax.Array, dtype: Any) -> jax.Array:
    """Zeros of the shape and sharding of ``x``, varying over the manual axes that it varies over."""
    return pvary(jax.numpy.zeros_like(x, dtype=dtype), varying_axes(x))


def shaped_array(shape, dtype, operands, varying: frozenset[str]) -> jax.core.ShapedArray:
    """The abstract value of a result of ``operands`` (abstract values) that varies over the axes ``varying``.

    Not sharded over explicit axes; in device memory.
    """
    if not varying:
        return jax.core.ShapedArray(shape, dtype)
    mesh = next(x.sharding.mesh for x in operands if varying_axes(x))
    return jax.core.ShapedArray(
        shape,
        dtype,
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(shape))),
        manual_axis_type=jax.sharding.ManualAxisType(varying=varying),
    )


def decoded_spec(sharding: Any, mesh: jax.sharding.Mesh) -> jax.sharding.PartitionSpec:
    """The spec of a sharding that ``custom_partitioning(decode_shardings=False)`` shows; P() where no spec says it.

    Shardy may split a mesh axis: half of it over the two blocks of a dimension, the rest over nothing.
    """
    from jax._src.sharding_impls import parse_flatten_op_sharding

    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.spec
    try:
        (spec,) = parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
    except (ValueError, LookupError, NotImplementedError, AssertionError):  # it finds out in many places
        return jax.sharding.PartitionSpec()
    return spec


def in_host_memory(x) -> bool:
    """Whether ``x`` (an array or an abstract value) lives in host memory."""
    aval = _aval(x)
    return isinstance(aval, jax.core.ShapedArray) and aval.memory_space == jax.memory.Space.Host


def checks_varying_axes() -> bool:
    """Whether the surrounding ``shard_map`` tracks varying axes (``check_vma=True``). True outside of ``shard_map``."""
    axes = get_abstract_mesh().manual_axes
    if not axes:
        return True
    probe = jax.lax.pcast(jax.numpy.float32(0), tuple(axes), to="varying")
    return bool(varying_axes(probe))


def cudnn_version() -> int | None:
    """The version of the cuDNN that jax's CUDA plugin loads, e.g. 91400; None if there is none."""
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
        return None
    try:
        return int(cuda_versions.cudnn_get_version())
    except RuntimeError:
        return None


def key_value_store() -> Any:
    """The client of the store that the processes of ``jax.distributed`` share; None in a program of one process."""
    from jax._src import distributed

    return distributed.global_state.client


def is_literal(var: Any) -> bool:
    """Whether an operand of an equation of a jaxpr is a constant in it, not a variable."""
    return isinstance(var, jax.extend.core.Literal)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(the number of constants, of carried values) of a scan in a jaxpr."""
    if "num_carry" in eqn.params:  # jax < 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def _aval(x):
    return x if isinstance(x, jax.core.ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(x)


def running(*functions: Callable[..., Any]) -> Iterator[Mapping[str, Any]]:
    """The local variables of every call of these functions that is running in this thread, the innermost first.

    For what a library that calls back says nowhere else. Functions are found by their code, also decorated ones.
    """
    codes = {inspect.unwrap(function).__code__ for function in functions}
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            yield frame.f_locals
        frame = frame.f_back


def nnx_bridges() -> Iterator[Mapping[str, Any]]:
    """The calls of ``nnx.bridge.ToNNX`` that are running."""
    from flax.nnx import bridge

    return running(bridge.ToNNX.__call__)


def nnx_scan_bodies() -> Iterator[Mapping[str, Any]]:
    """The bodies of ``nnx.scan`` that are being traced: ``self.in_axes`` says what becomes of changes to ``args``."""
    from flax.nnx.transforms import iteration

    names = ("ScanFn", "SimpleScanFn")  # with graph updates, and without (new in flax 0.12)
    return running(*(getattr(iteration, name).__call__ for name in names if hasattr(iteration, name)))


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that ``checkpoint_name`` gives in an equation of a jaxpr; None: it is something else."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    made = eqn.params.get("_prim")  # with jax_remat3
    return made.params["name"] if type(made).__name__ in ("CheckpointName", "CheckpointNameFwd") else None
