"""Checkpoints as past versions wrote them, in tests/data/checkpoint_v<format version>.tar.gz.

Run once for every format version, with the code that writes it; what is stored is never written again:

  python tests/checkpoint/stored_checkpoints.py
"""

import pathlib
import tarfile
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from te_jax.quant import state
from te_jax.quant.tensor import QTensor
from te_jax.recipe import DelayedScaling

DATA = pathlib.Path(__file__).parents[1] / "data"
RECIPE = DelayedScaling(amax_history_len=4, margin=1)
STEP = 20


def training_state():
    """(variables, opt_state, extras): values that need no random numbers, and FP8 state as two quantizers wrote it."""
    kernel = jnp.asarray(np.arange(16 * 16).reshape(16, 16) / 8, jnp.bfloat16)
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(jnp.float8_e4m3fn)  # all of them
    params = {
        "ops_0": {"kernel": kernel, "bias": jnp.asarray(np.arange(16) / 3, jnp.float32)},
        "frozen": QTensor(data=jnp.asarray(codes), scale_inv=jnp.float32(0.25)),
    }
    uses = np.zeros((2, 66), np.float32)
    uses[0, 1] = uses[1, 60] = 1  # the half octaves of 3 and of 0.5, modulo 64, from the bits of float32
    uses[:, state.PARITY] = [1, -1]
    history = np.array([[3, 2, 7, 1], [0.5, 0.25, 0.0, 0.0]], np.float32)
    leaves = {"amax_history": history, "scale": np.array([32, 512], np.float32), "uses": uses}
    variables = {
        "params": params,
        "batch_stats": {"mean": jnp.asarray([1.5, -2.5], jnp.float32)},
        state.COLLECTION: {"fp8_0": {name: jnp.asarray(leaf * np.float32(state.W)) for name, leaf in leaves.items()}},
    }
    opt_state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), optax.adam(1e-3).init({"ops_0": params["ops_0"]}))
    extras = {"position": 17, "loss": 0.1, "done": False, "seen": np.arange(3, dtype=np.int16)}
    return variables, opt_state, {**extras, "key": jax.random.key(5)}


def main():
    from te_jax import checkpoint

    variables, opt_state, extras = training_state()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, STEP, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)
        with tarfile.open(DATA / f"checkpoint_v{checkpoint.FORMAT_VERSION}.tar.gz", "x:gz") as archive:
            archive.add(pathlib.Path(folder) / str(STEP), str(STEP))


if __name__ == "__main__":
    main()
