"""The table of what people do to FP8 state (docs/numerics.md), row by row, with nnx: amaxes against NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import te_jax as te
from te_jax.quant.state import COLLECTION
from te_jax.testing.compare import assert_trees_identical

H = 4
RECIPE = te.DelayedScaling(amax_history_len=H)
HALF_OCTAVE = 2.0**0.5
FP8State = te.nnx.FP8State


def dense(recipe=RECIPE, seed=0):
    return te.nnx.Dense(16, 32, use_bias=False, recipe=recipe, rngs=nnx.Rngs(seed))


def batch(seed, size=1.0):
    """(x, c): the loss sum(y c) has the cotangent c."""
    keys = jax.random.split(jax.random.key(seed))
    return size * jax.random.normal(keys[0], (16, 16)), jax.random.normal(keys[1], (16, 32)) / size


def loss_fn(model, x, c):
    return (model(x) * c).sum()


def amax(array):
    return np.abs(np.asarray(array)).max()


def leaves_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, FP8State))["fp8_0"])


def history(model):
    """[3, H]: amaxes of x, kernel and dy, newest first; zeros where unused. Exact after single uses."""
    leaves = leaves_of(model)
    uses = leaves["uses"][:, :64].sum(1) + leaves["uses"][:, 65]
    return leaves["amax_history"] / np.where(uses == 0, 1, uses)[:, None]


def parity(model):
    return np.sign(leaves_of(model)["uses"][:, 64])


forward_grad = nnx.jit(nnx.grad(loss_fn))  # one program for all models of `dense`
exact_grad = nnx.jit(te.nnx.grad(loss_fn))
GRADS = {"nnx.grad": (nnx.grad, forward_grad), "te.nnx.grad": (te.nnx.grad, exact_grad)}


def trained(steps=2, grad=exact_grad):
    model = dense()
    for i in range(steps):
        grad(model, *batch(i))
    return model


@nnx.jit
def train_step(model, optimizer, x, c):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, c)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def exact_step(model, optimizer, x, c):
    loss, grads = te.nnx.value_and_grad(loss_fn)(model, x, c)
    optimizer.update(model, grads)
    return loss


# ------------------------------------------------------------------------------- who updates what


def test_optimizer_of_params_alone():
    """x and kernel have delayed scaling, dy current scaling; nothing is frozen, and te.state.check agrees."""
    model = dense()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    wanted = np.zeros((2, 0), np.float32)
    for i in range(H + 1):
        x, c = batch(i, size=1 + i)
        before = nnx.to_pure_dict(nnx.state(model, FP8State))
        newest = np.float32([[amax(x)], [amax(model.kernel.get_value())]])
        train_step(model, optimizer, x, c)
        scale = 448 / (wanted if i else newest).max(1)
        uses = leaves_of(model)["uses"][:2, :64].sum(1)
        np.testing.assert_allclose(leaves_of(model)["scale"][:2] / uses, scale, rtol=2e-7)
        wanted = np.concatenate([newest, wanted], 1)[:, :H]
        np.testing.assert_array_equal(history(model)[:2, : i + 1], wanted)
        assert (leaves_of(model)["uses"][2] == 0).all()
        te.state.check(before, nnx.to_pure_dict(nnx.state(model, FP8State)), allow_unused=True)


def test_gradients_have_current_scaling_for_dy():
    """As linen's, with the same state: x and kernel seeded, dy not."""
    model = trained(2, forward_grad)
    variables = te.nnx.to_variables(model)
    module = te.flax.Dense(32, use_bias=False, recipe=RECIPE)
    x, c = batch(7)
    got = forward_grad(model, x, c)
    want = jax.jit(jax.grad(lambda v: (module.apply(v, x) * c).sum()))(variables)
    assert_trees_identical(nnx.to_pure_dict(got), want["params"])


def test_te_grad_is_linens_gradient():
    """te.nnx.grad: parameters and state equal those of a linen loop to the bit, and the optimizer sees no state."""
    model = dense()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    module, variables = te.flax.Dense(32, use_bias=False, recipe=RECIPE), te.nnx.to_variables(model)

    @jax.jit
    def linen_step(variables, x, c):
        loss, grads = jax.value_and_grad(lambda v: (module.apply(v, x) * c).sum())(variables)
        params = jax.tree.map(lambda p, g: p - 1e-2 * g, variables["params"], grads["params"])
        return loss, {"params": params, COLLECTION: te.state.apply(variables[COLLECTION], grads[COLLECTION])}

    for i in range(3):
        x, c = batch(i)
        loss = exact_step(model, optimizer, x, c)
        want, variables = linen_step(variables, x, c)
        assert loss == want
        assert_trees_identical(te.nnx.to_variables(model)[COLLECTION], variables[COLLECTION])
    np.testing.assert_array_equal(history(model)[2, :3], [amax(batch(i)[1]) for i in (2, 1, 0)])
    grads = exact_grad(model, *batch(0))
    assert [type(v) for v in jax.tree.leaves(grads, is_leaf=lambda v: isinstance(v, nnx.Variable))] == [nnx.Param]


def test_te_grads_signature():
    """argnums, DiffState, aux and keywords as nnx.grad has them."""
    model, (x, c) = dense(), batch(0)

    def with_aux(c, model, x):
        y = model(x)
        return (y * c).sum(), y

    (loss, y), (dc, grads) = te.nnx.value_and_grad(with_aux, argnums=(0, 1), has_aux=True)(c, model, x=x)
    np.testing.assert_array_equal(dc, y)
    assert jnp.allclose(loss, (y * c).sum(), rtol=1e-5)
    want = forward_grad(dense(), x, c)
    assert_trees_identical(nnx.to_pure_dict(grads), nnx.to_pure_dict(want))
    nothing, _ = te.nnx.grad(with_aux, argnums=nnx.DiffState(1, nnx.BatchStat), has_aux=True)(c, model, x)
    assert not jax.tree.leaves(nothing)
    assert (history(model)[:, 1] > 0).all()
    with pytest.raises(TypeError, match="keyword arguments could not be resolved to positions"):
        te.nnx.grad(lambda model, x, *, c: loss_fn(model, x, c))(model, x, c=c)
    with pytest.raises(TypeError, match=r"nnx.grad: argnums: expected ints or nnx.DiffState, got str"):
        te.nnx.grad(with_aux, argnums=("x",))


def test_te_grad_of_modules_in_a_dict():
    models, (x, c) = {"a": dense(), "b": dense(seed=1)}, batch(0)

    def loss(models, x, c):
        return loss_fn(models["a"], x, c) + loss_fn(models["b"], 2 * x, c)

    with jax.checking_leaks():
        grads = nnx.jit(te.nnx.grad(loss))(models, x, c)
    np.testing.assert_array_equal([history(m)[0, 0] for m in models.values()], [amax(x), amax(2 * x)])
    assert [set(nnx.to_pure_dict(g)) for g in grads.values()] == [{"kernel"}] * 2
    want = exact_grad(dense(), x, c)
    np.testing.assert_allclose(grads["a"].kernel.get_value(), want.kernel.get_value(), rtol=1e-5, atol=1e-5)


def test_dy_is_not_frozen_when_its_gradient_is_no_longer_asked_for():
    model = trained(2)
    assert history(model)[2, 0] > 0
    x, c = batch(5)
    forward_grad(model, x, c)  # still with the scale that the last step left
    assert (history(model)[2] == 0).all()
    got = forward_grad(model, x, c)
    small = forward_grad(model, x, 1e-6 * c)  # a frozen scale would flush this to zero
    np.testing.assert_allclose(small.kernel.get_value(), 1e-6 * got.kernel.get_value(), rtol=1e-4)


def test_split_and_jax_grad():
    """By hand: the state's cotangent is its next value, and what the forward pass does to its copy goes nowhere."""
    model = trained(1)
    x, c = batch(1)
    graphdef, params, fp8 = nnx.split(model, nnx.Param, FP8State)
    grads = jax.jit(jax.grad(lambda p, s: loss_fn(nnx.merge(graphdef, p, s), x, c), argnums=(0, 1)))(params, fp8)
    assert_trees_identical(nnx.to_pure_dict(nnx.state(model, FP8State)), nnx.to_pure_dict(fp8))
    nnx.update(model, grads[1])
    other = trained(1)
    want = exact_grad(other, x, c)
    assert_trees_identical(nnx.to_pure_dict(grads[0]), nnx.to_pure_dict(want))
    assert_trees_identical(leaves_of(model), leaves_of(other))


# ------------------------------------------------------------------------- one step, several uses


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("grad", GRADS)
def test_a_module_used_twice(grad, jit):
    """Stepped once, to the larger amax; both uses quantize with the scale that the step began with."""
    grad, once = GRADS[grad]
    model = trained(1, once)
    first = history(model)
    (x1, c1), (x2, c2) = batch(1), batch(2, size=7)

    def loss(model, x1, c1, x2, c2):
        return loss_fn(model, x1, c1) + loss_fn(model, x2, c2)

    run = grad(loss)
    with jax.checking_leaks():
        (nnx.jit(run) if jit else run)(model, x1, c1, x2, c2)
    leaves = leaves_of(model)
    assert (parity(model)[:2] == -1).all()
    uses = np.abs(leaves["uses"][:, 64])
    np.testing.assert_allclose(leaves["scale"][:2] / uses[:2], 448 / first[:2, 0], rtol=2e-7)
    got = leaves["amax_history"] / np.where(uses == 0, 1, uses)[:, None]
    np.testing.assert_allclose(got[:2, 1], first[:2, 0], rtol=2e-7)
    newest = np.array([amax(x2), amax(model.kernel.get_value())])
    if grad is nnx.grad:
        np.testing.assert_array_equal(got[:2, 0], newest)
    else:
        scales = te_scales(model)
        np.testing.assert_array_less(scales, 448 / newest * 1.0001)
        np.testing.assert_array_less(448 / newest / HALF_OCTAVE, scales * 1.0001)


def te_scales(model):
    """The scales of x and kernel that the next step begins with, were there no older history."""
    leaves = {name: jnp.asarray(leaf) for name, leaf in leaves_of(model).items()}
    recipe = te.DelayedScaling(amax_history_len=H, amax_compute_algo="most_recent")
    from te_jax.quant import state

    return np.asarray(state.read(leaves, np.float32([448, 448, 57344]), recipe).scale)[:2]


def test_first_step_of_a_module_used_twice():
    """Without history each use derives its own scale; neither saturates."""

    class Twice(nnx.Module):
        def __init__(self):
            self.first = dense()
            self.second = self.first

        def __call__(self, x):
            return self.first(x) + self.second(100 * x)

    x, c = batch(0)
    model, plain = Twice(), dense(recipe=te.CurrentScaling())
    y, _ = nnx.jit(nnx.value_and_grad(lambda m: (m(x) * c).sum()))(model)
    want = ((plain(x) + plain(100 * x)) * c).sum()
    np.testing.assert_allclose(y, want, rtol=1e-6)
    np.testing.assert_allclose(history(model.first)[0, 0], amax(100 * x), rtol=0)


def test_unused_and_branches_not_taken_keep_their_state():
    model = trained(2)
    before = leaves_of(model)

    @nnx.jit
    def step(model, taken, x, c):
        def loss(model):
            return nnx.cond(taken, lambda m: loss_fn(m, x, c), lambda m: 0.0 * x.sum(), model)

        return te.nnx.value_and_grad(loss)(model)[0], nnx.value_and_grad(loss)(model)[0]

    x, c = batch(3)
    step(model, False, x, c)
    assert_trees_identical(leaves_of(model), before)
    step(model, True, x, c)  # a step of each kind
    np.testing.assert_array_equal(history(model)[0, :2], [amax(x), amax(x)])


# ------------------------------------------------------------------------------------ microbatches


@pytest.mark.parametrize("grad", GRADS)
def test_microbatches_in_calls_of_their_own(grad):
    """Every gradient is a step of the state; parameters get the mean, here by optax.MultiSteps."""
    model = dense()
    kernel = np.asarray(model.kernel.get_value())
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.1), 2), wrt=nnx.Param)
    batches, grads = [batch(i) for i in range(2)], []
    for x, c in batches:
        grads.append(GRADS[grad][1](model, x, c))
        optimizer.update(model, grads[-1])
    np.testing.assert_array_equal(history(model)[0, :2], [amax(x) for x, _ in batches[::-1]])
    if grad == "te.nnx.grad":
        np.testing.assert_array_equal(history(model)[2, :2], [amax(c) for _, c in batches[::-1]])
    mean = sum(np.asarray(g.kernel.get_value()) for g in grads) / 2
    np.testing.assert_allclose(model.kernel.get_value(), kernel - 0.1 * mean, rtol=1e-5, atol=1e-6)


def test_microbatches_in_a_scan():
    model = dense()
    x, c = (jnp.stack(leaves) for leaves in zip(*(batch(i) for i in range(3)), strict=True))

    @nnx.jit
    def step(model, x, c):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        def body(model, x, c):
            return model, te.nnx.grad(loss_fn)(model, x, c)

        return jax.tree.map(lambda g: g.mean(0), body(model, x, c)[1])

    step(model, x, c)
    np.testing.assert_array_equal(history(model)[0, :3], [amax(x[i]) for i in (2, 1, 0)])
    np.testing.assert_array_equal(history(model)[2, :3], [amax(c[i]) for i in (2, 1, 0)])


def test_accumulate_gradients():
    """One step of the state with the exact maximum; gradients and loss are those of the whole batch."""
    model, other = trained(1), trained(1)
    keys = jax.random.split(jax.random.key(3))
    x = jax.random.normal(keys[0], (64, 16)) * jnp.exp2(jnp.arange(64.0) % 4)[:, None]
    c = jax.random.normal(keys[1], (64, 32))

    def mean_loss(model, rows):
        return (model(rows[0]) * rows[1]).sum(-1).mean()

    run = nnx.jit(lambda m, x, c: te.nnx.accumulate_gradients(mean_loss, m, (x, c), num_microbatches=4))
    loss, grads = run(model, x, c)
    want, want_grads = nnx.jit(te.nnx.value_and_grad(mean_loss))(other, (x, c))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    # dy of a microbatch is four times as large, and so is what its scale is clipped at.
    np.testing.assert_allclose(grads.kernel.get_value(), want_grads.kernel.get_value(), rtol=0.1, atol=0.01)
    np.testing.assert_array_equal(history(model)[:2], history(other)[:2])
    np.testing.assert_allclose(history(model)[2, 0], amax(c) / 16, rtol=1e-6)
    np.testing.assert_array_equal(parity(model), [-1, -1, -1])

    dropout = te.nnx.LayerNormMLP(16, 16, dropout_rate=0.5, recipe=RECIPE, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"accumulate_gradients: loss_fn: .*got changes to rngs/count"):
        te.nnx.accumulate_gradients(lambda m, x: m(x).mean(), dropout, x, num_microbatches=4)


# --------------------------------------------------------------------------------- evaluation


def test_evaluation_leaves_the_state_alone():
    model = trained(2)
    before, (x, c) = leaves_of(model), batch(9, size=50)
    model.eval()
    y = model(x)
    forward_grad(model, x, c)
    assert_trees_identical(leaves_of(model), before)
    model.train()
    np.testing.assert_array_equal(model(x, use_running_average=True), y)
    np.testing.assert_array_equal(nnx.view(model, use_running_average=True)(x), y)
    assert_trees_identical(leaves_of(model), before)
    np.testing.assert_array_equal(model(x), y)  # the same numbers, and now the state has seen x
    np.testing.assert_array_equal(history(model)[0, 0], amax(x))
    model(2 * x)
    np.testing.assert_array_equal(history(model)[0, :2], [amax(2 * x), amax(x)])


def accumulated_grad(loss):
    def gradients(model, x, c):
        of_batch = lambda model, batch: loss(model, *batch)  # noqa: E731
        return te.nnx.accumulate_gradients(of_batch, model, (x, c), num_microbatches=1)[1]

    return gradients


@pytest.mark.parametrize("how", ["eval", "view", "argument"])
@pytest.mark.parametrize("grad", [te.nnx.grad, accumulated_grad], ids=["grad", "accumulate_gradients"])
def test_evaluation_leaves_the_state_alone_where_it_is_differentiated(how, grad):
    """Gradients of te.nnx are those of training mode: x, kernel and dy are quantized with the state's scales."""
    model, (x, c) = trained(2), batch(9, size=50)
    option = {"use_running_average": True} if how == "argument" else {}
    before, wanted = leaves_of(model), exact_grad(trained(2), x, c)
    evaluated = nnx.view(model, use_running_average=True) if how == "view" else model
    if how == "eval":
        model.eval()
    got = grad(lambda model, x, c: (model(x, **option) * c).sum())(evaluated, x, c)
    assert_trees_identical(leaves_of(model), before)
    assert_trees_identical(nnx.to_pure_dict(got), nnx.to_pure_dict(wanted))


def test_calls_that_quantize_nothing_leave_the_state_alone():
    model = trained(1)
    before = leaves_of(model)
    forward_grad(model, jnp.ones((3, 16)), jnp.ones((3, 32)))
    exact_grad(model, jnp.ones((3, 16)), jnp.ones((3, 32)))
    assert_trees_identical(leaves_of(model), before)


# ------------------------------------------------------------------------------- skipped steps


def test_the_state_of_a_step_that_is_not_taken_can_be_put_back():
    """As docs/nnx.md does it: x and kernel of the step have finite amaxes, which te.nnx.grad has written."""
    model, (x, c) = trained(2), batch(9)
    optimizer = nnx.Optimizer(model, optax.apply_if_finite(optax.sgd(0.1), 3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, c, put_back):
        before = nnx.to_pure_dict(nnx.state(model, FP8State))
        grads = te.nnx.grad(loss_fn)(model, x, c)
        optimizer.update(model, grads)
        finite = jnp.isfinite(optax.tree.norm(grads)) | ~put_back
        after = nnx.to_pure_dict(nnx.state(model, FP8State))
        nnx.update(model, jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before))

    before, kernel = leaves_of(model), np.asarray(model.kernel[...])
    step(model, optimizer, 100 * x, c.at[0, 0].set(jnp.inf), put_back=True)
    assert_trees_identical(leaves_of(model), before)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    step(model, optimizer, x, c, put_back=True)  # goes on: one step after `before`
    te.state.check({"run": before}, {"run": leaves_of(model)})
    np.testing.assert_array_equal(history(model)[0, 0], amax(x))
    assert (model.kernel[...] != kernel).any()
    step(model, optimizer, 100 * x, c.at[0, 0].set(jnp.inf), put_back=False)  # what is there to be put back
    np.testing.assert_array_equal(history(model)[0, 0], amax(100 * x))


# ------------------------------------------------------------------------------------- misuse


def step_over_the_state(optimizer):
    """(model, optimizer, step) of an optimizer that is given gradients of parameters and state alike."""
    model, wrt = dense(), nnx.Any(nnx.Param, FP8State)

    @nnx.jit
    def step(model, optimizer, x, c):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x, c)
        optimizer.update(model, grads)
        return loss

    return model, nnx.Optimizer(model, optimizer, wrt=wrt), step


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)], ids=["adam", "momentum"])
def test_an_optimizer_over_the_state_is_loud(optimizer):
    model, optimizer, step = step_over_the_state(optimizer)
    before = nnx.to_pure_dict(nnx.state(model, FP8State))
    losses = [step(model, optimizer, *batch(i)) for i in range(3)]
    assert np.isnan(losses[-1])
    with pytest.raises(ValueError, match=r"state.check: .*not linear"):
        te.state.check(before, nnx.to_pure_dict(nnx.state(model, FP8State)))
    assert np.isnan(loss_fn(model, *batch(0)))  # stays so
    assert np.isnan(loss_fn(model, *batch(0)))


def test_gradient_descent_over_the_state_is_linear():
    """The forward pass has left the new state s, and s - lr s reads as s does."""
    model, optimizer, step = step_over_the_state(optax.sgd(1e-3))
    for i in range(3):
        step(model, optimizer, *batch(i))
    uses = np.abs(leaves_of(model)["uses"][:, 64])
    got = leaves_of(model)["amax_history"][0] / uses[0]
    np.testing.assert_allclose(got[:3], [amax(batch(i)[0]) for i in (2, 1, 0)], rtol=1e-6)


def test_a_frozen_state_is_found():
    """Evaluation mode in training: te.state.check says that nothing was updated."""
    model = trained(1)
    model.eval()
    before = nnx.to_pure_dict(nnx.state(model, FP8State))
    forward_grad(model, *batch(1))
    with pytest.raises(ValueError, match="state that this step did not update"):
        te.state.check(before, nnx.to_pure_dict(nnx.state(model, FP8State)), allow_unused=True)
