"""Main gradients of te.nnx modules: those of te.accumulate_gradients, in buffers beside the kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
from te_jax import ops
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=2)
X = jax.random.normal(jax.random.key(0), (64, 16, 32))


def mlp(rngs, **options):
    return te.nnx.LayerNormMLP(32, 48, recipe=RECIPE, rngs=rngs, **options)


class Shared(nnx.Module):
    """A list of modules; a layer of nnx's own and a module that is called twice keep ordinary gradients."""

    def __init__(self, rngs):
        self.layers = nnx.List([te.nnx.Dense(32, 32, recipe=RECIPE, rngs=rngs) for _ in range(2)])
        self.other = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        first, second = self.layers
        return self.other(second(nnx.gelu(first(first(x)))))


MODELS = {  # and how many kernels have main gradients
    "mlp": (lambda rngs: mlp(rngs, use_bias=True), 2),
    "chain": (lambda rngs: te.nnx.Sequential([ops.Linear(48), mlp_of(48, rngs)], 32, recipe=RECIPE, rngs=rngs), 3),
    "shared": (Shared, 1),
    "layers": (lambda rngs: te.nnx.LayerStack(mlp, 2, rngs=rngs), 2),
    "layers with remat": (lambda rngs: te.nnx.LayerStack(mlp, 2, policy=te.remat.policy(("fc1",)), rngs=rngs), 2),
    "general": (lambda rngs: te.nnx.DenseGeneral(32, (4, 8), rngs=rngs), 1),
}


def mlp_of(width, rngs):
    return te.nnx.LayerNormMLP(width, 48, recipe=RECIPE, rngs=rngs)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_state(name):
    make, kernels = MODELS[name]

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def step(main_grad):
        model = make(nnx.Rngs(0))
        accumulate = functools.partial(te.nnx.accumulate_gradients, loss, num_microbatches=4, main_grad=main_grad)
        value, grads = nnx.jit(accumulate)(model, X)
        return value, nnx.to_pure_dict(grads), te.nnx.to_variables(model).get(te.state.COLLECTION, {})

    (got, got_grads, got_state), (want, want_grads, want_state) = step(True), step(False)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_trees_identical(got_state, want_state)
    assert jax.tree.structure(got_grads) == jax.tree.structure(want_grads)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max())

    graphdef, state = nnx.split(make(nnx.Rngs(0)))

    def pure(state, x):
        model = nnx.merge(graphdef, state)
        return nnx.to_pure_dict(te.nnx.accumulate_gradients(loss, model, x, num_microbatches=4, main_grad=True)[1])

    # Of the first microbatch and of those behind it.
    assert str(jax.make_jaxpr(pure)(state, X)).count(f"name={te.main_grad.MARK}") == 2 * kernels


def test_no_kernel_with_a_main_gradient():
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"main_grad: expected .*, got none: kernel: no te_jax linear took its buffer"):
        te.nnx.accumulate_gradients(lambda m, x: jnp.mean(m(x)), model, X, num_microbatches=2, main_grad=True)
