"""What a CUDA handler works in is checked before anything is queued."""

import jax
import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("spec", [P.QuantizeSpec(format="e4m3"), P.GemmSpec()], ids=["quantize", "gemm"])
def test_too_small_a_workspace_is_named(on, spec):
    one = np.float32(1)
    gemm = isinstance(spec, P.GemmSpec)
    operands = (np.zeros((32, 64), E4M3), np.zeros((48, 64), E4M3), one, one) if gemm else (np.zeros((32, 64)), one)
    operands = tuple(x.astype(np.float32) if x.dtype == np.float64 else x for x in operands)
    results = [((32, 48), ml_dtypes.bfloat16)] if gemm else [((32, 64), E4M3), ((), np.float32), ((), np.float32)]

    def run(*operands):
        types = [jax.ShapeDtypeStruct(*result) for result in [((1024,), np.uint8), *results]]
        name = "te_jax_gemm" if gemm else "te_jax_quantize"
        return jax.ffi.ffi_call(name, types)(*operands, spec=spec.attributes())

    needed = "33554432" if gemm else "2048"
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"workspace .*expected {needed} bytes, got 1024"):
        on("cuda", run, *operands)
