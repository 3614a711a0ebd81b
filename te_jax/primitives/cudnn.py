"""cuDNN's flash attention, as the custom calls that XLA's GPU compiler makes graphs of.

``jax.nn.dot_product_attention(implementation="cudnn")`` emits the same ones. It is not used because it decides while
tracing: it raises where the process has no cuDNN, although the program may be for another machine, and has no rules for
Explicit meshes. The text of the configuration is compared with jax's in ``tests/primitives/test_attention.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from te_jax import compat
from te_jax.primitives import library

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
_MAX_HEAD_DIM = 128  # on every architecture; Hopper takes more, but not backward in every version
_OLDEST = (8, 0)  # compute capability

# Physically [B, T, H, D], whatever the order of the logical dimensions [B, H, T, D] that cuDNN's results have.
_BTHD = (0, 2, 1, 3)


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float, stats: bool) -> Sequence:
    """out [B, T, H, D] of q [B, T, H, D], k and v [B, S, G, D]; and f32[B, H, T], log of the denominators, if stats."""
    batch, tokens, heads, head_dim = q.shape
    results = [jax.ShapeDtypeStruct((batch, heads, tokens, head_dim), q.dtype)]
    if stats:
        results.append(jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32))
    layouts = (_BTHD, *((0, 1, 2),) * stats)
    config = _config(q, k, causal=causal, scale=scale, backward=False)
    out, *more = _call(FORWARD, results, layouts, config)(q, k, v)
    return out.transpose(_BTHD), *more


def flash_attention_grad(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stats: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    *,
    causal: bool,
    scale: float,
) -> Sequence:
    """The cotangents of q, k, v in their shapes; stats and out are results of ``flash_attention``."""
    shapes = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
    results = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in shapes]
    config = _config(q, k, causal=causal, scale=scale, backward=True)
    grads = _call(BACKWARD, results, (_BTHD,) * 3, config)(q, k, v, stats, dout, out)
    return tuple(grad.transpose(_BTHD) for grad in grads)


def why_not_flash_attention(dtype: np.dtype, head_dim: int, size: int, lengths: tuple[int, int]) -> str | None:
    """Why cuDNN doesn't take queries of this dtype, head dimension and number of elements; None if it does.

    ``lengths`` are those of the sequences of queries and of keys.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype).name} is not bfloat16 or float16"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 8, at most {_MAX_HEAD_DIM}"
    if lengths == (1, 1):
        return "a single query and a single key"
    return "there is no element" if size == 0 else None


def why_unavailable(platform: str) -> str | None:
    """Why programs lowered for ``platform`` in this process don't call cuDNN; None if they do.

    As with te_jax's own custom calls, a program lowered for CUDA where there is none is for a GPU that is elsewhere.
    """
    if platform != "cuda":
        return "cuDNN is for CUDA only"
    if not library.has_cuda_backend():
        return None
    if compat.cudnn_version() is None:
        return "jax found no cuDNN (nvidia-cudnn-cu13)"
    oldest = min(tuple(map(int, str(device.compute_capability).split("."))) for device in jax.devices("cuda"))
    return None if oldest >= _OLDEST else f"compute capability {'.'.join(map(str, oldest))} is older than 8.0"


def _call(target: str, results: list, layouts: Sequence[Sequence[int]], config: str):
    """The custom call; its last result is the workspace, whose size XLA puts in once cuDNN has told it."""
    results = [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)]
    call = jax.ffi.ffi_call(
        target,
        results,
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    return lambda *operands: call(*operands)[:-1]


def _dimension_numbers(contracting: tuple[int, int], batch: tuple[tuple[int, int], tuple[int, int]]) -> dict:
    sides = zip(("lhs", "rhs"), contracting, batch, strict=True)
    return {
        key: value
        for side, contracted, dims in sides
        for key, value in (
            (f"{side}_contracting_dimensions", [str(contracted)]),
            (f"{side}_batch_dimensions", [str(d) for d in dims]),
        )
    }


# Q, K, V, O and their gradients are [B, T, H, D]; P, the probabilities, [B, H, T, S].
_HEADS, _P_LHS = ((0, 2), (0, 2)), ((0, 1), (0, 2))
_FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": _dimension_numbers((3, 3), _HEADS),  # P = Q K^T
    "bmm2_dot_dimension_numbers": _dimension_numbers((3, 1), _P_LHS),  # O = P V
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": _dimension_numbers((2, 1), _P_LHS),  # dK = dP^T Q
    "bmm1_grad_gemm2_dot_dimension_numbers": _dimension_numbers((3, 1), _P_LHS),  # dQ = dP K
    "bmm2_grad_gemm1_dot_dimension_numbers": _dimension_numbers((2, 1), _P_LHS),  # dV = P^T dO
    "bmm2_grad_gemm2_dot_dimension_numbers": _dimension_numbers((3, 3), _HEADS),  # dP = dO V^T
}


def _config(q: jax.Array, k: jax.Array, *, causal: bool, scale: float, backward: bool) -> str:
    """The configuration, JSON of XLA's ``GpuBackendConfig``."""
    batch, tokens, heads, _ = q.shape
    probabilities = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
        "dimensions": [str(n) for n in (batch, heads, tokens, k.shape[1])],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False, False, False, False],
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    fmha = {
        "algorithm": algorithm,
        "fmha_scale": scale,
        "intermediate_tensor_shape": probabilities,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        **(_BACKWARD_PRODUCTS if backward else _FORWARD_PRODUCTS),
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": fmha})
