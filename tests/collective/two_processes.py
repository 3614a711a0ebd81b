"""One of two processes with two CPU devices each, all four along one axis, that multiply together.

python two_processes.py PORT PROCESS
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.testing import cases, hlo

CALLS = {  # how x, kernel, bias and y are split
    "matmul_reduce_scatter": (P(None, "tp"), P("tp"), P(), P("tp")),
    "all_gather_matmul": (P("tp"), P(None, "tp"), P("tp"), P(None, "tp")),
}
SHAPES = {"x": (48, 64), "kernel": (64, 128), "bias": (128,), "dy": (48, 128)}


def check(name, specs, mesh):
    function, (x_spec, kernel_spec, bias_spec, y_spec) = getattr(te.collective, name), specs
    splits = {"x": x_spec, "kernel": kernel_spec, "bias": bias_spec, "dy": y_spec}
    rng = np.random.default_rng(0)
    whole = {key: cases.exact(rng, shape) for key, shape in SHAPES.items()}

    def shard(x, kernel, bias, dy):
        def loss(x, kernel, bias):
            y = function(x, kernel, "tp", bias=bias, recipe=te.CurrentScaling(), overlap="overlapped")
            return jnp.sum(y * dy), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, kernel, bias)
        return y, grads

    in_specs = tuple(splits.values())
    step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=in_specs, out_specs=(y_spec, in_specs[:3])))
    args = [
        jax.make_array_from_callback(a.shape, NamedSharding(mesh, splits[key]), lambda index, a=a: a[index])
        for key, a in whole.items()
    ]
    compiled = step.lower(*args).compile()
    calls, collectives = (count(compiled.as_text()) for count in (hlo.count_custom_calls, hlo.count_collectives))
    assert "te_jax_collective_gemm" not in calls, calls
    assert collectives["collective-permute"] >= 6, collectives  # three of each product
    y, (dx, dw, db) = compiled(*args)
    x, kernel, bias, dy = (a.astype(np.float64) for a in whole.values())
    for got, want in ((y, x @ kernel + bias), (dx, dy @ kernel.T), (dw, x.T @ dy), (db, dy.sum(0))):
        for piece in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(piece.data), want[piece.index])
    print(f"{name}: right", flush=True)


def main():
    port, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process, initialization_timeout=60)
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    for name, specs in CALLS.items():
        check(name, specs, mesh)
    print("done", flush=True)


if __name__ == "__main__":
    main()
