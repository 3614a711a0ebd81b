"""QTensor: a quantized tensor as a pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.quant.block_reference import (
    BLOCKS,
    SCALINGS,
    dequantize_block,
    from_gemm_layout,
    gemm_scale_shape,
    transposed_shape,
)
from te_jax.quant.format import format_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
    """An FP8 tensor [*lead, C] with the scales that give back its values: x ~ float32(data) * scale_inv.

    At least one of `data` and `data_t` is there. They hold the same values in per-tensor scaling; in block scaling
    each is quantized in blocks along its own last dimensions.

    Attributes:
      data: FP8 [*lead, C], or None.
      data_t: FP8 [C, *lead], or None: the copy that a GEMM contracting over lead reads. In 1x128 blocks its last
        dimension is padded with 0 to whole blocks.
      scale_inv: f32[] for "tensor"; for blocks the scales of `data`, as a GEMM reads them (shapes in
        `te_jax.quant.block_reference`).
      scale_inv_t: the scales of `data_t`, only in block scaling.
      format: "e4m3" or "e5m2".
      scaling: "tensor", "block_1x128" or "block_128x128".
      dtype: name of the dtype that was quantized, which `dequantize` returns.
    """

    data: jax.Array | None = None
    data_t: jax.Array | None = None
    scale_inv: jax.Array | None = None
    scale_inv_t: jax.Array | None = None
    format: str = dataclasses.field(default="e4m3", metadata={"static": True})
    scaling: str = dataclasses.field(default="tensor", metadata={"static": True})
    dtype: str = dataclasses.field(default="bfloat16", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[*lead, C]; with the padding of `data_t` where there is nothing else."""
        if self.data is not None:
            return tuple(self.data.shape)
        if self.data_t is not None:
            return (*self.data_t.shape[1:], self.data_t.shape[0])
        raise ValueError(errors.message("QTensor", "data", "data or data_t", "neither"))

    @property
    def data_t_scale_inv(self) -> jax.Array | None:
        """The scales of ``data_t``: the tensor's one, or those of its own blocks."""
        return self.scale_inv if self.scaling == "tensor" else self.scale_inv_t

    def dequantize(self, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """The values, [*lead, C], in `dtype` (default: the dtype that was quantized)."""
        self.check()
        dtype = jnp.dtype(dtype or self.dtype)
        if self.scaling == "tensor":
            assert self.scale_inv is not None
            if self.data is not None:
                data = self.data
            else:
                assert self.data_t is not None
                data = jnp.moveaxis(self.data_t, 0, -1)
            return (data.astype(jnp.float32) * self.scale_inv).astype(dtype)
        block = BLOCKS[self.scaling]
        if self.data is not None:
            assert self.scale_inv is not None
            return dequantize_block(self.data, from_gemm_layout(self.scale_inv, block), block, dtype)
        assert self.data_t is not None
        assert self.scale_inv_t is not None
        scale_inv = from_gemm_layout(self.scale_inv_t, block, self.data_t.ndim - 1)
        return jnp.moveaxis(dequantize_block(self.data_t, scale_inv, block, dtype), 0, -1)

    def check(self) -> None:
        """Raises unless dtypes and shapes are those that the class promises.

        Not called on construction: a pytree's leaves may be anything while JAX transforms it.
        """
        op = "QTensor"
        fmt = format_of(self.format)
        errors.check_value(self.scaling in SCALINGS, op, "scaling", f"one of {SCALINGS}", repr(self.scaling))
        shape = self.shape
        for name in ("data", "data_t"):
            value = getattr(self, name)
            dtype = fmt.dtype if value is None else value.dtype
            errors.check_type(dtype == fmt.dtype, op, name, fmt.dtype, dtype)
        if self.data is not None and self.data_t is not None:
            block = BLOCKS.get(self.scaling)
            expected = (shape[-1], *shape[:-1]) if block is None else transposed_shape(shape, block)
            errors.check_value(self.data_t.shape == expected, op, "data_t", expected, self.data_t.shape)
        if self.scaling == "tensor":
            self._check_scale("scale_inv", ())
            return
        block = BLOCKS[self.scaling]
        if self.data is not None:
            self._check_scale("scale_inv", gemm_scale_shape(shape, block))
        if self.data_t is not None:
            self._check_scale("scale_inv_t", gemm_scale_shape(self.data_t.shape, block, self.data_t.ndim - 1))

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        value = getattr(self, name)
        got = "None" if value is None else f"{value.dtype}{list(value.shape)}"
        ok = value is not None and value.dtype == np.float32 and value.shape == shape
        errors.check_value(ok, "QTensor", name, f"float32{list(shape)}", got)
