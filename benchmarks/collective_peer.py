"""TransformerEngine's collective GEMMs for JAX (Userbuffers), a contestant of ``collective.py``: one process per GPU.

It overlaps only with one device in each process, and quantizes both operands in the call. Its scales are set to those
of all contestants; what its quantizers keep for delayed scaling is read and written as in training.
"""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
from collective_contestants import Contestant, waiting
from collective_problem import SCALE, Problem
from jax.sharding import NamedSharding, PartitionSpec

P = PartitionSpec


def bootstrap() -> None:
    """Once in a process, before anything is traced. Raises where TransformerEngine isn't to be had."""
    from transformer_engine.jax.cpp_extensions.gemm import collective_gemm_bootstrap

    processes = jax.process_count()
    collective_gemm_bootstrap(
        num_total_devices=processes,
        num_devices_per_process=1,
        process_id=jax.process_index(),
        tensor_parallel_size=processes,
    )


def contestants(problem: Problem) -> list[Contestant]:
    """Overlapped, and its unfused pair."""
    from transformer_engine.jax.cpp_extensions.gemm import CollectiveOp

    op = CollectiveOp.REDUCE_SCATTER if problem.op == "rs" else CollectiveOp.ALL_GATHER
    return [
        _contestant(problem, "TransformerEngine overlapped", op),
        _contestant(problem, "TransformerEngine plain", CollectiveOp.NONE),
    ]


def _contestant(problem: Problem, name: str, op) -> Contestant:
    import transformer_engine.jax.cpp_extensions as tex
    from transformer_engine.jax import quantize
    from transformer_engine.jax.sharding import MeshResource

    recipe = quantize.get_quantization_recipe("DelayedScaling") if problem.fp8 else None

    @contextlib.contextmanager
    def context():
        resource = MeshResource(dp_resource="data", tpsp_resource="tp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it wants the mesh of a context that jax deprecates
            mesh = contextlib.ExitStack()
            mesh.enter_context(problem.mesh)
        with mesh, quantize.autocast(enabled=problem.fp8, recipe=recipe, mesh_resource=resource):
            yield

    y_spec = P(None, *problem.specs["y"])  # [1, M, N]

    def multiply(x, arrays, zero):
        def scale(leaf):  # the one number of each quantizer; its history is longer
            return jnp.full_like(leaf, SCALE) + zero if leaf.size == 1 else leaf

        quantizers = quantize.noop_quantizer_set
        if problem.fp8:
            quantizers = jax.tree.map(scale, quantize.QuantizerFactory.create_set())
        sums = {"bias": arrays["b"], "contracting_dims": ((2,), (0,)), "collective_op": op}
        y = tex.gemm(x[None], arrays["w"], quantizer_set=quantizers, **sums)
        return jax.lax.with_sharding_constraint(y, NamedSharding(problem.mesh, y_spec))

    finish = {"finish": lambda y, arrays: y[0]}
    return waiting(problem, name, multiply, ("x", "w", "b"), y_spec, context=context, **finish)
