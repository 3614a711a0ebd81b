"""Linen's transformations hand the FP8 state on, or say what they lack. Those of nnx: tests/nnx/test_transforms.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
from te_jax.quant.state import COLLECTION, PARITY

RECIPE = te.DelayedScaling(amax_history_len=2)
X = jnp.ones((16, 16))
OPTIONS = {"use_bias": False, "recipe": RECIPE}


class Inside(nn.Module):
    """A Dense that is called by ``call(dense, x)``."""

    call: object

    @nn.compact
    def __call__(self, x):
        dense = te.flax.Dense(16, **OPTIONS)
        return dense(x) if self.is_initializing() else self.call(dense, x)


def custom_vjp(dense, x):
    both = ("params", COLLECTION)
    forward = lambda m, x: nn.vjp(lambda m, x: m(x), m, x, vjp_variables=both)  # noqa: E731
    return nn.custom_vjp(lambda m, x: m(x), forward, lambda vjp, dy: vjp(dy), grad_vars=both)(dense, x)


def mapped(collection):
    same = {"trans_in_fn": lambda tree: tree, "trans_out_fn": lambda tree: tree}
    return nn.map_variables(te.flax.Dense, collection, init=True, **same)(16, **OPTIONS)


MODULES = {
    "cond": Inside(lambda dense, x: nn.cond(True, lambda m, x: m(x), lambda m, x: 0 * x, dense, x)),
    "switch": Inside(lambda dense, x: nn.switch(1, [lambda m, x: 0 * x, lambda m, x: m(x)], dense, x)),
    "custom_vjp": Inside(custom_vjp),
    "map_variables of params": mapped("params"),
    "map_variables of the state": mapped(COLLECTION),
    "jit": nn.jit(te.flax.Dense)(16, **OPTIONS),
    "remat": nn.remat(te.flax.Dense)(16, **OPTIONS),
    "an nnx module": nnx.bridge.ToLinen(te.nnx.Dense, args=(16, 16), kwargs=nn.FrozenDict(OPTIONS)),
}


def test_linens_transformations_hand_the_state_on():
    variables = {name: jax.eval_shape(module.init, jax.random.key(0), X) for name, module in MODULES.items()}
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) + (leaf.shape == (16, 16)), variables)

    @jax.jit
    def states(variables):  # one program for all
        grads = {
            name: jax.grad(lambda v, m=module: m.apply(v, X).sum())(variables[name]) for name, module in MODULES.items()
        }
        return {name: grad[COLLECTION] for name, grad in grads.items()}

    for name, state in states(variables).items():
        (uses,) = (leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if path[-1].key == "uses")
        np.testing.assert_array_equal(uses[:, PARITY] * 2.0**64, [1, 1, 1], err_msg=name)


@pytest.mark.parametrize("lift", ["scan", "vmap"])
def test_what_they_lack_is_said(lift):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return te.flax.Dense(16, **OPTIONS)(x), None

    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    if lift == "scan":
        lifted = nn.scan(Layer, length=2, **options)()
    else:
        lifted = nn.vmap(Layer, in_axes=(0, None), out_axes=(0, None), axis_size=2, **options)()
    with pytest.raises(
        ValueError, match=r"nn\.scan and nn\.vmap need '_overwrite_with_gradient' in their variable_axes"
    ):
        jax.eval_shape(lifted.init, jax.random.key(0), X if lift == "scan" else jnp.stack([X, X]), None)
