"""What people do to gradients, FP8 state among them, and what happens: the rows of docs/numerics.md's table.

Each row is a training loop of three steps on a quantized linear, in every regime: the steps in a jitted `lax.scan` with
the loss recomputed in the backward pass, and jitted steps, data parallel on 8 devices in Auto, Explicit and Manual
meshes. What the state must hold follows from NumPy's maxima of what the linear saw. Rows that can't be right have to
be loud.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale, train_state
from regimes import FP8_MAX, MODULE, REGIMES, RUN, STEPS, data, loss, read, replicas, total, train, variables

import te_jax as te

COLLECTION = te.state.COLLECTION
SGD = optax.sgd(1e-3)
HALF_OCTAVE = 2.0**0.5

# What the state must hold of a step's true maximum: relative error of its newest amax (below, above) and of older ones.
EXACT = (0.0, 0.0, 0.0)
ROUNDED = (2.0**-22, 2.0**-22, 2.0**-22)  # a factor that is no power of two
WITHIN = (1 - 1 / HALF_OCTAVE + 2.0**-22, HALF_OCTAVE - 1 + 2.0**-22, 2.0**-22)  # half an octave
BFLOAT16 = (WITHIN[0] + 2.0**-7, WITHIN[1] + 2.0**-6, 2.0**-7)


class Row(NamedTuple):
    """A way of training.

    Attributes:
      what: what is done, as in the table.
      start: variables -> what is carried from step to step: a TrainState, or a tuple that starts with the variables.
      step: (carry, x [USES, ...], dy [USES, ...], regime) -> the next carry.
      state: how well the state knows the maxima, or "NaN": the loss is NaN after two steps and te.state.check says
        why; or "check": te.state.check says that nothing was updated.
      uses: of the linear in a step: 1, the first of the batch; 2: both.
      factor: what the loss is multiplied by in each step, and so dy.
      inf_in_step: the step in which dy has an infinity, which is skipped.
      sgd: whether the parameters are those of SGD of the first use, as in the first row.
    """

    what: str
    start: Callable
    step: Callable
    state: object = EXACT
    uses: int = 1
    factor: tuple = (1, 1, 1)
    inf_in_step: int | None = None
    sgd: bool = True


def first(v, x, dy):
    return loss(v, x[0], dy[0])


def overwrite(v, grads, tx=SGD):
    """Stateless SGD of the parameters; the state is overwritten, as flax does."""
    updates, _ = tx.update(grads["params"], tx.init(v["params"]), v["params"])
    return {"params": optax.apply_updates(v["params"], updates), COLLECTION: grads[COLLECTION]}


def with_treatment(treatment):
    """A step whose gradients, those of the state among them, are treated before the parameters are stepped."""

    def step(carry, x, dy, regime):
        (v,) = carry
        return (overwrite(v, treatment(jax.grad(total(regime, first))(v, x, dy))),)

    return step


def of_two(combine):
    """A step with the gradients of both uses, combined."""

    def step(carry, x, dy, regime):
        (v,) = carry
        grads = [jax.grad(total(regime, loss))(v, x[i], dy[i]) for i in range(2)]
        return (overwrite(v, combine(*grads)),)

    return step


def with_optax(tx):
    """start and step of an optax optimizer for the whole of the variables."""

    def step(carry, x, dy, regime):
        v, opt_state = carry
        updates, opt_state = tx.update(jax.grad(total(regime, first))(v, x, dy), opt_state, v)
        return optax.apply_updates(v, updates), opt_state

    return (lambda v: (v, tx.init(v))), step


def with_train_state(cls, tx):
    def step(ts, x, dy, regime):
        return ts.apply_gradients(grads=jax.grad(total(regime, first))(ts.params, x, dy))

    return (lambda v: cls.create(apply_fn=MODULE.apply, params=v, tx=tx)), step


def start(v):
    return (v,)


def by_hand(carry, x, dy, regime):
    """The loop of docs/numerics.md."""
    v, opt_state = carry
    params, fp8 = te.state.split(v)
    grads, new_fp8 = te.state.split(jax.grad(total(regime, first))(v, x, dy))
    updates, opt_state = SGD.update(grads, opt_state, params)
    return te.state.merge(optax.apply_updates(params, updates), te.state.apply(fp8, new_fp8)), opt_state


def masked(carry, x, dy, regime):
    v, opt_state = carry
    grads = jax.grad(total(regime, first))(v, x, dy)
    updates, opt_state = MASKED.update(grads, opt_state, v)
    return {**optax.apply_updates(v, updates), COLLECTION: grads[COLLECTION]}, opt_state


def mask(tree):
    return {name: name != COLLECTION for name in tree}


MASKED = optax.masked(SGD, mask)


def clip_by_hand(grads):
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads)))
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), grads)


def clip(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def loss_scaling(carry, x, dy, regime):
    (v,) = carry
    grads = jax.grad(total(regime, lambda *a: 1000 * first(*a)))(v, x, dy)
    return (overwrite(v, jax.tree.map(lambda leaf: leaf / 1000, grads)),)


def with_dynamic_scale(carry, x, dy, regime):
    """As in flax's examples: a step with an infinity is not taken, and the scale is halved."""
    v, scale = carry
    scale, finite, _, grads = scale.value_and_grad(total(regime, first))(v, x, dy)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), overwrite(v, grads), v), scale


def applied_twice(carry, x, dy, regime):
    (v,) = carry
    both = total(regime, lambda v, x, dy: loss(v, x[0], dy[0]) + loss(v, x[1], dy[1]))
    return (overwrite(v, jax.grad(both)(v, x, dy)),)


def pmean(carry, x, dy, regime):
    (v,) = carry
    return (overwrite(v, replicas(regime, jax.grad(loss))(v, x, dy)),)


def accumulate(a, b):
    _, fp8 = te.state.split(a)
    _, more = te.state.split(b)
    params = jax.tree.map(jnp.add, a["params"], b["params"])
    return {"params": params, COLLECTION: te.state.accumulate(fp8, more)}


def accumulate_gradients(ts, x, dy, regime):
    batch = [jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:]) for a in (x, dy)]  # rows 0, 2, ... are the first use's
    _, grads = ts.accumulate_gradients(lambda v, b: total(regime, loss)(v, *b), batch, num_microbatches=2)
    return ts.apply_gradients(grads=grads)


def of_params_only(carry, x, dy, regime):
    (v,) = carry
    grads = jax.grad(lambda params: total(regime, first)({**v, "params": params}, x, dy))(v["params"])
    return ({**v, "params": jax.tree.map(lambda p, g: p - 1e-3 * g, v["params"], grads)},)


def halved_in_bfloat16(carry, x, dy, regime):
    (v,) = carry
    grads = [jax.grad(total(regime, loss))(v, x[i], dy[i]) for i in range(2)]
    grads = jax.tree.map(lambda a, b: ((a + b) / 2).astype(jnp.bfloat16), *grads)
    fp8 = te.state.apply(v[COLLECTION], grads[COLLECTION])  # in float32 again
    return (overwrite(v, {**grads, COLLECTION: fp8}),)


FROZEN = optax.chain(
    MASKED, optax.masked(optax.set_to_zero(), lambda tree: {name: name == COLLECTION for name in tree})
)
WRAPPED, MULTI = te.state.optimizer(SGD), optax.MultiSteps(SGD, 1)
SKIPS = dict(inf_in_step=1, sgd=False)
TABLE = [
    # right, and exact
    Row("the loop of docs/numerics.md: te.state.split, apply, merge", lambda v: (v, SGD.init(v)), by_hand),
    Row("flax's TrainState", *with_train_state(train_state.TrainState, SGD)),
    Row("te.TrainState", *with_train_state(te.TrainState, SGD)),
    Row("te.state.optimizer(tx)", *with_optax(WRAPPED)),
    Row("te.state.optimizer(optax.MultiSteps(tx, 1))", *with_optax(te.state.optimizer(MULTI))),
    Row("optax.masked, state overwritten by hand", lambda v: (v, MASKED.init(v)), masked),
    Row("te.state.accumulate", start, of_two(accumulate), uses=2, sgd=False),
    Row(
        "te.accumulate_gradients",
        lambda v: te.TrainState.create(apply_fn=None, params=v, tx=SGD),
        accumulate_gradients,
        uses=2,
        sgd=False,
    ),
    # skipped steps: state as it was
    Row("te.TrainState with apply_if_finite", *with_train_state(te.TrainState, optax.apply_if_finite(SGD, 9)), **SKIPS),
    Row(
        "te.state.optimizer(apply_if_finite(tx))",
        *with_optax(te.state.optimizer(optax.apply_if_finite(SGD, 9))),
        **SKIPS,
    ),
    Row(
        "te.state.optimizer(MultiSteps(tx, should_skip_update_fn))",
        *with_optax(te.state.optimizer(optax.MultiSteps(SGD, 1, should_skip_update_fn=optax.skip_not_finite))),
        **SKIPS,
    ),
    Row(
        "flax's DynamicScale",
        lambda v: (v, dynamic_scale.DynamicScale(scale=jnp.float32(1024))),
        with_dynamic_scale,
        factor=(1024, 1024, 512),
        **SKIPS,
    ),
    # right, to the rounding of what was done
    Row("unscaled, by a factor that is no power of two", start, loss_scaling, ROUNDED, factor=(1000,) * 3),
    Row("clipped by global norm, state among it", start, with_treatment(clip), ROUNDED, sgd=False),
    Row("clipped by global norm by hand", start, with_treatment(clip_by_hand), ROUNDED, sgd=False),
    Row("optax.chain(clip, te.state.optimizer(tx))", *with_optax(optax.chain(optax.clip(1.0), WRAPPED)), sgd=False),
    # right, the newest amax within half an octave
    Row("a layer applied twice", start, applied_twice, WITHIN, uses=2, sgd=False),
    Row("microbatches summed", start, of_two(lambda *g: jax.tree.map(jnp.add, *g)), WITHIN, uses=2, sgd=False),
    Row("averaged", start, of_two(lambda *g: jax.tree.map(lambda a, b: (a + b) / 2, *g)), WITHIN, uses=2, sgd=False),
    Row("cast to bfloat16", start, halved_in_bfloat16, BFLOAT16, uses=2, sgd=False),
    Row("lax.pmean of all gradients", start, pmean, WITHIN, uses=2, sgd=False),
    # wrong, and loud
    Row("the whole tree in SGD", *with_optax(SGD), "NaN"),
    Row("the whole tree in Adam", *with_optax(optax.adam(1e-3)), "NaN"),
    Row("the whole tree in MultiSteps", *with_optax(optax.MultiSteps(optax.adam(1e-3), 1)), "NaN"),
    Row("optax.masked, the rest added", *with_optax(MASKED), "NaN"),
    Row("loss differentiated in params only", start, of_params_only, "check"),
    Row("optax.masked, the rest set to zero", *with_optax(FROZEN), "check"),
]


def variables_of(carry):
    return carry.params if isinstance(carry, train_state.TrainState) else carry[0]


@functools.cache
def trained(row, regime):
    """(kernels, states): of each step the kernel it used, and the state after it."""

    def step(carry, batch):
        kernel = variables_of(carry)["params"]["ops_0"]["kernel"]
        carry = row.step(carry, *batch, regime)
        return carry, (kernel, variables_of(carry)[COLLECTION][RUN])

    _, results = train(regime, step, row.start(variables()), data(row.inf_in_step))
    return jax.device_get(results)


def maxima(row, kernels):
    """f64[steps taken, 3]: the amax of x, kernel and dy."""
    x, dy = data(row.inf_in_step)
    found = []
    for i in range(STEPS):
        if i != row.inf_in_step:
            used = slice(row.uses)
            amax = [np.abs(a, dtype=np.float64).max() for a in (x[i, used], kernels[i], dy[i, used])]
            found.append(amax * np.array([1, 1, row.factor[i]]))
    return np.array(found)


value = jax.jit(loss)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("row", [row for row in TABLE if isinstance(row.state, tuple)], ids=lambda row: row.what)
def test_right(row, regime):
    kernels, states = trained(row, regime)
    below, above, older = row.state
    taken = [i for i in range(STEPS) if i != row.inf_in_step]
    view = read(states)
    true = maxima(row, kernels)
    for n, i in enumerate(taken, start=1):
        assert not view.bad[i].any()
        np.testing.assert_array_equal(view.parity[i], (-1.0) ** n)  # updated once in each step that was taken
        newest = np.asarray(view.history[i, :, 0], np.float64)
        assert (newest >= true[n - 1] * (1 - below)).all(), (newest, true[n - 1])
        assert (newest <= true[n - 1] * (1 + above)).all(), (newest, true[n - 1])
        if n > 1:
            before = view.history[taken[n - 2], :, :-1]
            np.testing.assert_allclose(view.history[i, :, 1:], before, rtol=older, atol=0)
        np.testing.assert_allclose(view.scale[i], FP8_MAX / view.history[i].max(-1), rtol=2.0**-22)
    if row.inf_in_step is not None:
        jax.tree.map(
            lambda leaf: np.testing.assert_array_equal(leaf[row.inf_in_step], leaf[row.inf_in_step - 1]), states
        )
    assert np.isfinite(kernels).all()
    if row.sgd:
        np.testing.assert_allclose(kernels, trained(TABLE[0], regime)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("row", [row for row in TABLE if not isinstance(row.state, tuple)], ids=lambda row: row.what)
def test_loud(row, regime):
    kernels, states = trained(row, regime)
    first_state = variables()[COLLECTION]
    after = [{RUN: jax.tree.map(lambda leaf, i=i: leaf[i], states)} for i in range(STEPS)]
    if row.state == "NaN":
        x, dy = (a[2, 0] for a in data())
        v = {"params": {"ops_0": {"kernel": kernels[2]}}, COLLECTION: after[1]}
        assert np.isfinite(kernels[2]).all()
        assert np.isnan(value(v, x, dy))  # of the step after two updates
        with pytest.raises(ValueError, match=r"state.check: .*te.state.split"):
            te.state.check(first_state, after[1])
    else:
        with pytest.raises(ValueError, match=r"state.check: .*differentiate the loss with respect to it"):
            te.state.check(first_state, after[0])
