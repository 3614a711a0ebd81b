"""Main gradients on CUDA: added in place, in stacks of layers too, and equal to what is added behind the GEMMs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import primitives as P
from te_jax.main_grad import COLLECTION
from te_jax.testing import oracle
from te_jax.testing.compare import assert_trees_identical

WIDTH, HIDDEN, TOKENS, N = 512, 1024, 1024, 4
BF16 = {"dtype": jnp.bfloat16}
RECIPES = {
    "none": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
}


@pytest.fixture
def cuda():
    return jax.devices("cuda")[0]


def mlp(recipe):
    return te.flax.LayerNormMLP(WIDTH, HIDDEN, recipe=recipe, **BF16)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def put(cuda, tree):
    return jax.device_put(tree, cuda)


def loss_of(module):
    def loss(variables, batch):
        x, y = batch
        return jnp.mean((module.apply(variables, x, *batch[2:]).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    return loss


@pytest.mark.parametrize("scaling", ["tensor", "block_1x128"])
def test_a_gemm_adds_in_place(cuda, scaling):
    """Against fp64, on operands whose products float32 holds exactly; twice, so that nothing is left of a first run."""
    m, n, k = 256, 384, 512
    lhs, rhs = (np.random.default_rng(seed).integers(-4, 5, size) for seed, size in enumerate([(m, k), (n, k)]))
    spec = P.GemmSpec(out_dtype="float32", beta=1.0, in_place=True, lhs_scaling=scaling, rhs_scaling=scaling)
    scale = [jnp.float32(0.5), jnp.float32(2.0)]
    if scaling != "tensor":
        scale = [jnp.full((k // 128, rows), value) for rows, value in ((m, 0.5), (n, 2.0))]
    f8 = [put(cuda, jnp.asarray(x, jnp.float8_e4m3fn)) for x in (lhs, rhs)]
    run = jax.jit(lambda a, b, c, s, t: P.gemm(a, b, spec, lhs_scale_inv=s, rhs_scale_inv=t, c=c)[0], donate_argnums=2)
    c = put(cuda, jnp.asarray(np.arange(m * n).reshape(m, n) % 100, jnp.float32))
    want, where = oracle.f64(c), c.unsafe_buffer_pointer()
    for _ in range(2):
        c = run(*f8, c, *put(cuda, scale))
        want = want + lhs.astype(np.float64) @ rhs.astype(np.float64).T
        assert c.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(oracle.f64(c), want)


def assert_close(got, want, eps):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = oracle.f64(a), oracle.f64(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= eps, (jax.tree_util.keystr(path), error)


def accumulated(module, variables, batch, n=N, **kwargs):
    step = te.remat.jit(functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=n, **kwargs))
    return step(variables, batch)


def test_groups(cuda):
    """A kernel for each group, one of them empty: the grouped wgrad adds in place."""
    sizes = np.array([300, 0, 500, 100], np.int32)
    layers = [te.ops.GroupedLinear(4, HIDDEN, use_bias=False), te.ops.SwiGLU(), te.ops.GroupedLinear(4, WIDTH)]
    module = te.Sequential(layers, recipe=RECIPES["delayed"], **BF16)
    x = put(cuda, jnp.asarray(normal(TOKENS, WIDTH), jnp.bfloat16))
    sizes = put(cuda, sizes)
    variables = put(cuda, module.init(jax.random.key(1), x, sizes, sizes))
    buffers = put(cuda, jax.tree.map(lambda b: b + 0.5, te.main_grad.init(variables["params"], "add")))

    def loss(variables, buffers):
        given = variables if buffers is None else {**variables, COLLECTION: buffers}
        return jnp.mean(module.apply(given, x, sizes, sizes).astype(jnp.float32) ** 2)

    want = jax.jit(jax.grad(loss))(variables, None)["params"]
    where = sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffers))
    got = jax.jit(jax.grad(loss, argnums=1), donate_argnums=1)(variables, buffers)
    assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(got)) == where
    for scope, nodes in got.items():
        kernel = oracle.f64(want[scope]["kernel"])
        np.testing.assert_allclose(nodes["kernel"].buffer, kernel + 0.5, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(nodes["kernel"].buffer[1], 0.5)


MODELS = {
    "mlp": mlp,
    "stack": lambda recipe: te.flax.LayerStack(mlp(recipe), 3),
    "stack, remat": lambda recipe: te.flax.LayerStack(mlp(recipe), 3, te.remat.policy()),
    "stack, offload": lambda recipe: te.flax.LayerStack(
        mlp(recipe), 3, te.remat.policy(offload=("fc1", "fc2"), min_bytes=0)
    ),
}
CASES = [*(("mlp", recipe) for recipe in RECIPES), *((model, "delayed") for model in MODELS if model != "mlp")]


@pytest.mark.parametrize(("model", "recipe"), [*CASES, ("stack", "block")])
def test_equal_to_gradients_that_are_added(cuda, model, recipe):
    """The same GEMMs, but for what is added inside of them: the rounding of float32. FP8 state bit for bit."""
    module = MODELS[model](RECIPES[recipe])
    batch = tuple(jnp.asarray(normal(TOKENS, WIDTH, seed=i), jnp.bfloat16) for i in range(2))
    variables = put(cuda, module.init(jax.random.key(1), batch[0][:16]))
    (_, want), (_, got) = (accumulated(module, variables, put(cuda, batch), main_grad=m) for m in (False, True))
    assert_close(te.state.split(got)[0], te.state.split(want)[0], 1e-5)
    assert_trees_identical(te.state.split(got)[1], te.state.split(want)[1])
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(got["params"]))


def test_equal_to_one_big_batch(cuda):
    """Of a linear in bfloat16, whose gradient is a sum over tokens: against fp64."""
    module = te.flax.Dense(WIDTH, use_bias=False, **BF16)
    x, dy = (jnp.asarray(normal(TOKENS, WIDTH, seed=i), jnp.bfloat16) for i in range(2))
    variables = put(cuda, module.init(jax.random.key(1), x[:16]))

    def loss(variables, batch):
        return jnp.mean(jnp.sum(module.apply(variables, batch[0]).astype(jnp.float32) * batch[1], 1))

    _, got = jax.jit(functools.partial(te.accumulate_gradients, loss, num_microbatches=N, main_grad=True))(
        variables, put(cuda, (x, dy.astype(jnp.float32)))
    )
    # The cotangent is dy / (rows of a microbatch), exactly representable: rows are a power of two.
    want = oracle.f64(x).T @ oracle.f64(dy) / TOKENS
    np.testing.assert_allclose(got["params"]["kernel"], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_buffers_stay_where_they_are(cuda):
    """A call that is given buffers to keep returns them in their own memory."""
    module = mlp(RECIPES["delayed"])
    batch = tuple(jnp.asarray(normal(TOKENS, WIDTH, seed=i), jnp.bfloat16) for i in range(2))
    variables = put(cuda, module.init(jax.random.key(1), batch[0][:16]))
    buffers = put(cuda, te.main_grad.init(variables["params"], "add"))

    def gradient(buffers, variables, batch):
        loss = lambda buffers: loss_of(module)({**variables, COLLECTION: buffers}, batch)  # noqa: E731
        return te.main_grad.following(jax.grad(loss)(buffers))

    step = jax.jit(gradient, donate_argnums=0)
    where = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffers)]
    for _ in range(2):
        buffers = step(buffers, variables, put(cuda, batch))
        assert sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffers)) == sorted(where)


def test_memory(cuda):
    """A stack of layers needs less by its gradients: read from the device, the smaller program first.

    Of two microbatches it would be half of that: XLA unrolls the loop over the second one, and runs its forward pass
    before the backward pass of the first.
    """
    module = te.flax.LayerStack(te.flax.LayerNormMLP(2048, 8192, recipe=RECIPES["delayed"], **BF16), 8)
    batch = tuple(jnp.asarray(normal(2048, 2048, seed=i), jnp.bfloat16) for i in range(2))
    variables = put(cuda, module.init(jax.random.key(1), batch[0][:16]))
    tree = sum(leaf.nbytes for leaf in jax.tree.leaves(variables["params"]))
    peaks = []
    for main_grad in (True, False):
        jax.block_until_ready(accumulated(module, variables, put(cuda, batch), main_grad=main_grad))
        peaks.append(cuda.memory_stats()["peak_bytes_in_use"])
    assert peaks[1] - peaks[0] >= 0.8 * tree, (peaks, tree)
