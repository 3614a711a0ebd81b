"""Collective matmuls compiled for two H200: one call a product, and nothing of XLA's own between the devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.primitives import CollectiveGemmSpec, collective_gemm
from te_jax.primitives.collective_schedule import arena_bytes
from te_jax.primitives.library import registered_module
from te_jax.testing import aot, hlo

M, K, N = 8192, 4096, 8192


def layers(x, up, down, scale):
    """Column- then row-parallel; the gathered operand is a result."""
    first = CollectiveGemmSpec(kind="all_gather_matmul", axis_name="tp", keep_gathered=True)
    gathered = collective_gemm(x, up, first, lhs_scale_inv=scale[0], rhs_scale_inv=scale[0])
    second = CollectiveGemmSpec(kind="matmul_reduce_scatter", axis_name="tp", fp8=False)
    return collective_gemm(gathered.out, down, second).out, gathered.gathered[None], gathered.gathered_scale_inv


def test_two_products_are_two_calls():
    mesh = Mesh(np.array(aot.h200(2)), ("tp",))
    specs = P("tp"), P("tp"), P(None, "tp"), P("tp")
    shapes = (M, K), (N, K), (K, N), (2,)
    dtypes = jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    run = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=(P("tp"),) * 3))
    compiled = run.lower(*operands).compile(compiler_options=aot.COMPILER_OPTIONS)
    text = compiled.as_text()
    assert aot.custom_calls(compiled) == ["te_jax_collective_gemm"] * 2
    assert hlo.count_collectives(text).total() == 0
    # No copy and no conversion of a matrix: the one temporary is the result of the first product.
    assert compiled.memory_analysis().temp_size_in_bytes < M * N // 2 * 2 + (1 << 20)


def test_bytes_of_the_arena_are_those_of_the_native_library():
    module = registered_module("cuda")
    assert module.collective_channels() == []
    for ranks in (2, 3, 8, 16):
        for slot in (16, 1000, 1 << 26, 123456789):
            assert arena_bytes(ranks, slot) == module.collective_arena_bytes(ranks, slot)
