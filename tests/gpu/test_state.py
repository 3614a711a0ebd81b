"""FP8 state on CUDA: bit for bit that of the CPU handlers, whatever was done to it."""

import jax
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.testing import state_cases
from te_jax.testing.bits import assert_same_bits

Q = state_cases.QUANTIZERS


@pytest.mark.parametrize("history", [1, 2, 37, 1024, 5000])
@pytest.mark.parametrize(("margin", "most_recent"), [(0, False), (3, True)])
def test_equal_to_cpu(on, history, margin, most_recent):
    read = P.ScaleReadSpec(formats=state_cases.FORMATS, margin=margin, most_recent=most_recent)
    write = P.ScaleWriteSpec(formats=read.formats, margin=margin, most_recent=most_recent, used="1" * Q)

    def step(leaves, amaxes):
        return P.scale_read(leaves, read), P.scale_write(leaves, list(amaxes), write)

    # One program over all cases: each is so small that nothing but launches would be timed otherwise.
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *state_cases.cases(history))
    over_cases = lambda *args: jax.lax.map(lambda case: step(*case), args)  # noqa: E731
    cpu, cuda = (on(platform, over_cases, *stacked) for platform in ("cpu", "cuda"))
    for path, leaf in jax.tree.leaves_with_path(cpu):
        got = dict(jax.tree.leaves_with_path(cuda))[path]
        assert_same_bits(got, leaf, jax.tree_util.keystr(path))


def test_more_quantizers_than_fit_in_one_kernel(on):
    many = 300
    write = P.ScaleWriteSpec(formats=" ".join(["e5m2"] * many), used="01" * (many // 2))
    leaves = {"amax_history": np.zeros((many, 9)), "scale": np.zeros(many), "uses": np.zeros((many, 66))}
    leaves = {name: leaf.astype(np.float32) for name, leaf in leaves.items()}
    amax = np.arange(1, many // 2 + 1, dtype=np.float32)

    def step(leaves, amax):
        new = P.scale_write(leaves, list(amax), write)
        return new, P.scale_read(new, P.ScaleReadSpec(formats=write.formats))

    for cpu, cuda in zip(*(jax.tree.leaves(on(p, step, leaves, amax)) for p in ("cpu", "cuda")), strict=True):
        assert_same_bits(cuda, cpu)
