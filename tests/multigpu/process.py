"""One of two processes, each with a device, that multiply together until one of them is killed.

python process.py PLATFORM PORT PROCESS
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.primitives import CollectiveGemmSpec, collective_gemm
from te_jax.testing import cases, hlo

SPECS = {  # how x, kernel, bias and y are split
    "matmul_reduce_scatter": (P(None, "tp"), P("tp"), P(), P("tp")),
    "all_gather_matmul": (P("tp"), P(None, "tp"), P("tp"), P(None, "tp")),
}
RECIPES = {"none": None, "delayed": te.DelayedScaling(), "current": te.CurrentScaling()}
SHAPES = {"x": (96, 64), "kernel": (64, 96), "bias": (96,), "dy": (96, 96)}
TIMEOUT_MS = 3000


def put(mesh, array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def check(kind, recipe_name, mesh, platform):
    """y and all gradients, exactly, of integers that no quantization changes; again and again, the same bits."""
    function, recipe, (x_spec, w_spec, b_spec, y_spec) = getattr(te.collective, kind), RECIPES[recipe_name], SPECS[kind]
    rng = np.random.default_rng(0)
    whole = {name: cases.exact(rng, shape) for name, shape in SHAPES.items()}
    state = [te.state.init(3, recipe)] if recipe_name == "delayed" else []

    def local(x, kernel, bias, dy, *state):
        def loss(x, kernel, bias, *state):
            given = {"state": state[0]} if state else {}
            y = function(x, kernel, "tp", bias=bias, recipe=recipe, overlap="overlapped", **given)
            return jnp.sum(y * dy), y

        (_, y), grads = jax.value_and_grad(loss, tuple(range(3 + len(state))), has_aux=True)(x, kernel, bias, *state)
        return y, *grads

    specs = (x_spec, w_spec, b_spec, y_spec, *[P() for _ in state])
    outs = (y_spec, x_spec, w_spec, b_spec, *[P() for _ in state])
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs))
    operands = [put(mesh, whole[name], spec) for name, spec in zip(SHAPES, specs, strict=False)]
    calls = hlo.count_custom_calls(step.lower(*operands, *state).as_text())
    # CPU devices of several processes share no memory: the ring.
    assert calls["te_jax_collective_gemm"] == (2 if platform == "cuda" else 0), calls
    x, kernel, bias, dy = (array.astype(np.float64) for array in whole.values())
    want = (x @ kernel + bias, dy @ kernel.T, x.T @ dy, dy.sum(0))
    for _ in range(5):
        got = step(*operands, *state)
        state = got[4:]
        for name, result, expected in zip(("y", "dx", "dw", "db"), got, want, strict=False):
            for piece in result.addressable_shards:
                np.testing.assert_array_equal(np.asarray(piece.data), expected[piece.index], err_msg=name)
    print(f"{kind} {recipe_name}: right", flush=True)


def multiply(mesh):
    """(a call that gives up after TIMEOUT_MS, its operands)."""
    spec = CollectiveGemmSpec(
        kind="matmul_reduce_scatter", axis_name="tp", fp8=False, chunks=2, timeout_ms=TIMEOUT_MS, out_dtype="float32"
    )

    def local(lhs, rhs):
        return collective_gemm(lhs, rhs, spec).out

    split = P(None, "tp")
    lhs, rhs = (put(mesh, np.ones((64, 64), np.float32), split) for _ in range(2))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, split), out_specs=P("tp"))), (lhs, rhs)


def survive(mesh, platform):
    """The other process is dead: NaN, then an error that names it on a GPU; an error at once on CPU devices."""
    run, operands = multiply(mesh)
    np.testing.assert_array_equal(run(*operands).addressable_shards[0].data, 64.0)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    start = time.monotonic()
    try:
        out = np.asarray(run(*operands).addressable_shards[0].data)
        assert platform == "cuda"
        assert np.isnan(out).all(), out
        jax.block_until_ready(run(*operands))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        message = str(error)
    else:
        raise AssertionError("expected an error, got a result")
    took = time.monotonic() - start
    assert took < 60, took
    if platform == "cuda":
        assert "ABORTED" in message, message
        assert "rank 0 of tp=2: tp, group 0 waited in vain" in message, message
    print(f"an error after {took:.1f} s: {message.splitlines()[0]}", flush=True)


def main():
    platform, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=process,
        local_device_ids=[process] if platform == "cuda" else [0],
        initialization_timeout=60,
    )
    assert (jax.device_count(), jax.local_device_count()) == (2, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",), axis_types=(AxisType.Auto,))
    for kind in SPECS:
        for recipe in RECIPES if platform == "cuda" else ("delayed",):
            check(kind, recipe, mesh, platform)
    survive(mesh, platform)
    print("done", flush=True)
    os._exit(0)  # jax.distributed would wait for the other at exit


if __name__ == "__main__":
    main()
