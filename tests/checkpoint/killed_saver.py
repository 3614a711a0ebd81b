"""A training run that is killed while it saves, again and again, and goes on from what it finds.

  python killed_saver.py DIRECTORY ROUNDS SEED

Imports once and forks a saver for every round, before jax has a backend: importing takes longer than all else. A saver
restores the newest step, compares it with what that step must hold, and saves one step after the other until it is
killed (-9) at a random moment. Prints a line of JSON for every round.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from te_jax import checkpoint
from te_jax.checkpoint import document
from te_jax.quant import state
from te_jax.recipe import DelayedScaling
from te_jax.testing.compare import assert_trees_identical

RECIPE = DelayedScaling(amax_history_len=4)
KEEP = 2
SECONDS = 60  # after which a saver that hangs ends


def content(step):
    """(variables, opt_state, extras) of a step: a function of its number."""
    rng = np.random.default_rng(step)
    kernel = rng.standard_normal((32, 64)).astype(np.float32)
    leaves = {
        name: rng.standard_normal(shape) for name, shape in (("amax_history", (3, 4)), ("scale", 3), ("uses", (3, 66)))
    }
    variables = {
        "params": {"a": {"kernel": kernel.astype(jnp.bfloat16)}, "b": {"kernel": kernel.astype(jnp.float8_e4m3fn)}},
        state.COLLECTION: {"fp8_0": {name: leaf.astype(np.float32) for name, leaf in leaves.items()}},
    }
    return jax.tree.map(jnp.asarray, (variables, {"mu": kernel, "count": np.int32(step)})), {"position": step}


def newest(directory):
    """The newest step, which must hold what it was saved with; -1 if there is none."""
    if checkpoint.latest_step(directory) is None:
        return -1
    (variables, opt_state), extras = content(0)
    out = checkpoint.restore(directory, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)
    assert_trees_identical(((out.variables, out.opt_state), out.extras), content(out.step))
    return out.step


def save_until_killed(directory, async_save, say):
    first = newest(directory) + 1
    say(f"restored {first - 1}")
    with checkpoint.Manager(directory, recipe=RECIPE, max_to_keep=KEEP, async_save=async_save) as manager:
        for step in itertools.count(first):
            (variables, opt_state), extras = content(step)
            say(f"begins {step}")
            manager.save(step, variables, opt_state=opt_state, extras=extras)
            if not async_save:
                say(f"saved {step}")
            elif step > first:
                say(f"saved {step - 1}")  # the one before: a save waits for it


def one_round(directory, number, rng, durations):
    """Forks a saver, kills it in its first, second or third save, and tells what it said."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            save_until_killed(directory, number % 2 == 1, lambda text: os.write(writing, f"{text}\n".encode()))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    said, begun = [], []
    with os.fdopen(reading) as lines:
        saves = rng.randint(1, 3)
        for line in lines:
            said.append(line.split())
            if said[-1][0] == "begins":
                begun.append(time.monotonic())
                if len(begun) == saves:
                    break
        durations += np.diff(begun).tolist()
        time.sleep(rng.uniform(0, 1.2 * float(np.median(durations[-20:]))))
        os.kill(pid, signal.SIGKILL)
        said += [line.split() for line in lines]
    _, status = os.waitpid(pid, 0)
    steps = {what: [int(words[1]) for words in said if words[0] == what] for what in ("restored", "begins", "saved")}
    return {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "restored": steps["restored"][0] if steps["restored"] else None,
        "begun": max(steps["begins"], default=-1),
        "saved": max(steps["saved"], default=-1),
        "half_written": any("tmp" in name for name in os.listdir(directory)),
        "half_deleted": any(document.is_half_deleted(folder) for folder in epath.Path(directory).iterdir()),
    }


def main():
    directory, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    durations = [0.1]  # of saves, in seconds, so that a kill falls into one on a busy machine too
    for number in range(rounds):
        print(json.dumps(one_round(directory, number, rng, durations)), flush=True)


if __name__ == "__main__":
    main()
