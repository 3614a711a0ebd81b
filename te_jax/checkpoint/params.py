"""Restoring the parameters of a checkpoint alone: for inference, in FP8 or in high precision."""

from __future__ import annotations

import os
from typing import Any

import jax
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from te_jax.checkpoint import document, reading, trees
from te_jax.errors import check_value, message
from te_jax.fp8_params import dequantize_params
from te_jax.fusion import inference


def restore_params(
    directory: str | os.PathLike[str], like: Any, *, step: int | None = None, dequantize: bool = False
) -> Any:
    """The ``params`` of a checkpoint, whatever recipe it was trained with.

    Args:
      directory: of the run, as for ``Manager``.
      like: the parameters wanted, arrays or ``jax.ShapeDtypeStruct`` with shardings: those of the model
        (``jax.eval_shape`` of its ``init``), or of ``te.quantize_params`` where the checkpoint holds FP8 kernels.
      step: the latest if None.
      dequantize: kernels that are stored in FP8 (``te.quantize_params``) become those of ``like``, float32(data) *
        scale_inv rounded to its dtype. Without it they are an error where ``like`` has kernels in high precision.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: names, shapes or dtypes differ, or what is stored is damaged. Nothing else is cast or filled in.
    """
    op = "checkpoint.restore_params"
    folder = _folder(op, directory, step)
    described = document.read(folder, op)
    check_value("params" in described["items"], op, "params", f"a stored item in {folder}", described["items"])
    wanted = _targets(op, reading.metadata(folder, "params", op), trees.abstract(like), dequantize, ())
    out = trees.restored(reading.read(folder, described, {"params": wanted}, op)["params"], wanted)
    if not dequantize:
        return out
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trees.abstract(like))
    return jax.jit(lambda params: dequantize_params(params, like), out_shardings=shardings)(out)


def _folder(op: str, directory: str | os.PathLike[str], step: int | None) -> epath.Path:
    path = os.fspath(directory)
    root = epath.Path(path if "://" in path else os.path.abspath(path))
    latest = max(document.steps(root), default=None) if step is None else step
    if latest is None:
        raise FileNotFoundError(message(op, "directory", "a complete step", f"none in {root}"))
    return root / str(latest)


def _targets(op: str, stored: Any, like: Any, dequantize: bool, path: tuple[str, ...]) -> Any:
    """``like``, with what is stored in the place of kernels that are to be dequantized."""
    if not isinstance(stored, dict):
        return like
    if inference.is_quantized(stored) and isinstance(like, jax.ShapeDtypeStruct):  # a QTensor is as it is stored
        expected = f"{like.dtype}{list(like.shape)} (or dequantize=True)"
        got = f"a kernel in FP8 with its scale, {sorted(stored)}"
        check_value(dequantize, op, "/".join(("params", *path)), expected, got)
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(name, leaf, like))
            for name, leaf in stored.items()
        }
    if not isinstance(like, dict):
        return like
    return {k: _targets(op, stored[k], v, dequantize, (*path, k)) if k in stored else v for k, v in like.items()}


def _sharding(name: str, stored: Any, like: jax.ShapeDtypeStruct) -> Any:
    """Where an FP8 leaf is read to: transposed as the kernel is; scales, and what is of another rank, everywhere."""
    if not isinstance(like.sharding, NamedSharding):
        return like.sharding
    entries = (*like.sharding.spec, *(None,) * (len(like.shape) - len(like.sharding.spec)))
    same_rank = name == inference.DATA and len(stored.shape) == len(like.shape)
    spec = PartitionSpec(*entries[:-2], entries[-1], entries[-2]) if same_rank else PartitionSpec()
    return NamedSharding(like.sharding.mesh, spec)
