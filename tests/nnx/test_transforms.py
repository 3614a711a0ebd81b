"""te.nnx modules in nnx's transformations: same numbers, and one step of the state for one step of training."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import te_jax as te
from te_jax.testing import hlo
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=4)
LAYERS = 3


def mlp(rngs, recipe=RECIPE):
    return te.nnx.LayerNormMLP(32, 32, activation="gelu", residual=True, recipe=recipe, rngs=rngs)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


X = jax.random.normal(jax.random.key(0), (2, 16, 32))


class Loop(nnx.Module):
    """Layers one after the other, each by itself."""

    def __init__(self, rngs):
        self.layers = nnx.List([mlp(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scan(nnx.Module):
    """The same layers, stacked and scanned over."""

    def __init__(self, loop, remat):
        states = [nnx.split(layer)[1] for layer in loop.layers]
        graphdef = nnx.split(loop.layers[0])[0]
        self.layers = nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        self.remat = remat

    def __call__(self, x):
        def body(x, layer):
            return layer(x)

        body = nnx.remat(body) if self.remat else body
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def stacked(state):
    """Variables of `Loop` as those of `Scan`."""
    layers = nnx.to_pure_dict(state)["layers"]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in range(LAYERS)))}


@pytest.mark.parametrize(
    ("grad", "remat"), [(nnx.grad, False), (nnx.grad, True), (te.nnx.grad, True)], ids=["saved", "remat", "te remat"]
)
def test_scan_over_layers(grad, remat):
    """Per-layer state, stepped once a step even where the forward pass is computed again."""
    loop = Loop(nnx.Rngs(0))
    graphdef, state = nnx.split(Scan(loop, remat))
    loop_step = nnx.jit(lambda model, x: grad(loss_fn)(model, x))

    def scan_step(state, x):
        model = nnx.merge(graphdef, state)
        grads = grad(loss_fn)(model, x)
        return nnx.split(model)[1], grads

    compiled = jax.jit(scan_step).lower(state, X).compile()
    for i in range(2):
        want = loop_step(loop, (i + 1) * X)
        state, got = compiled(state, (i + 1) * X)
    got_state, _ = nnx.split_state(state, te.nnx.FP8State, ...)
    assert_trees_identical(nnx.to_pure_dict(got_state), stacked(nnx.state(loop, te.nnx.FP8State)))
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(got)), jax.tree.leaves(stacked(want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert hlo.count_custom_calls(compiled.as_text())["te_jax_scale_write"] == 1


def test_layers_created_by_vmap():
    """The usual way of stacking, and what a scan does to stacked modules eagerly."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return mlp(rngs)

    layers = nnx.jit(create)(nnx.Rngs(0))
    assert layers.fc1.kernel.shape == (LAYERS, 32, 32)
    assert not np.array_equal(layers.fc1.kernel[0], layers.fc1.kernel[1])
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(nnx.state(layers, te.nnx.FP8State))} == {(LAYERS, 6)}

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    nnx.jit(te.nnx.grad(lambda layers, x: forward(x, layers).sum()))(layers, X)
    assert (np.asarray(layers.fp8_0.uses.get_value())[:, :2, 64] != 0).all()


def test_vmap_over_an_ensemble():
    """Each member has its own amaxes, as in a loop."""
    members = [te.nnx.Dense(32, 16, recipe=RECIPE, rngs=nnx.Rngs(i)) for i in range(2)]
    graphdef = nnx.split(members[0])[0]
    ensemble = nnx.merge(graphdef, jax.tree.map(lambda *a: jnp.stack(a), *(nnx.split(m)[1] for m in members)))
    nnx.jit(nnx.grad(lambda m, x: nnx.vmap(loss_fn, in_axes=(0, 0))(m, x).sum()))(ensemble, X)
    one = nnx.jit(nnx.grad(loss_fn))
    for i, member in enumerate(members):
        one(member, X[i])
        got = jax.tree.map(lambda leaf, i=i: leaf[i], nnx.to_pure_dict(nnx.state(ensemble, te.nnx.FP8State)))
        assert_trees_identical(got, nnx.to_pure_dict(nnx.state(member, te.nnx.FP8State)))


def test_vmap_over_examples_with_the_state_shared():
    """te.nnx.grad sums the uses of all examples; in evaluation nothing is written."""
    model = te.nnx.Dense(32, 16, recipe=RECIPE, rngs=nnx.Rngs(0))
    over_examples = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))
    nnx.jit(te.nnx.grad(lambda m, x: over_examples(m, x).sum()))(model, X)
    leaves = nnx.to_pure_dict(nnx.state(model, te.nnx.FP8State))["fp8_0"]
    assert (np.abs(leaves["uses"][:, 64]) == 2 * 2.0**-64).all()
    model.eval()
    want = jnp.stack([model(x) for x in X])
    np.testing.assert_array_equal(over_examples(model, X), want)


def test_remat_of_a_module_used_twice():
    """Every nnx.remat is a step of its own for nnx.grad; te.nnx.grad knows that they are one."""

    def loss(model, x):
        once = nnx.remat(lambda m, x: m(x))
        return once(model, x).sum() + once(model, 3 * x).sum()

    model, other = (te.nnx.Dense(32, 16, recipe=RECIPE, rngs=nnx.Rngs(0)) for _ in range(2))
    nnx.jit(nnx.grad(loss))(model, X)
    history = model.fp8_0.amax_history.get_value() * 2.0**64
    amax = float(jnp.abs(X).max())
    np.testing.assert_allclose(history[0], [3 * amax, amax, 0, 0], rtol=1e-6)
    nnx.jit(te.nnx.grad(loss))(other, X)
    uses = other.fp8_0.uses.get_value() * 2.0**64
    assert (uses[:, 64] == 2).all()
    assert (uses[:, :64].sum(1) == 2).all()


def test_scan_with_one_layer_for_all_steps():
    """Given as nnx.Carry it is stepped every time; as a constant nnx drops what is written, which is said."""
    x = X[0]

    def loss(model, x, axes):
        if axes is None:
            return nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3)(x, model).sum()
        body = nnx.scan(lambda c: (c[0], c[0](c[1])), in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)
        return body((model, x))[1].sum()

    model = te.nnx.Dense(32, 32, use_bias=False, recipe=RECIPE, rngs=nnx.Rngs(0))
    nnx.jit(nnx.grad(loss), static_argnums=2)(model, x, nnx.Carry)
    assert (model.fp8_0.amax_history.get_value()[0] > 0).sum() == 3
    before = te.nnx.to_variables(model)[te.state.COLLECTION]
    with pytest.warns(
        UserWarning, match=r"nnx.Dense: FP8 state: expected te\.nnx\.grad in place .*in_axes=None"
    ) as said:
        nnx.jit(nnx.grad(loss), static_argnums=2)(model, x, None)
    assert {each.filename for each in said} == {__file__}
    with pytest.raises(ValueError, match="state that this step did not update"):
        te.state.check(before, te.nnx.to_variables(model)[te.state.COLLECTION], allow_unused=True)
    nnx.jit(te.nnx.grad(loss), static_argnums=2)(model, x, None)
    np.testing.assert_array_equal(jnp.abs(model.fp8_0.uses.get_value()[:, 64]), 3 * 2.0**-64)


@pytest.mark.parametrize("remat", [False, True], ids=["alone", "in remat"])
@pytest.mark.parametrize(
    "options", [{}, {"graph": False}, {"graph_updates": False}], ids=["graph", "tree", "no updates"]
)
def test_what_a_scan_drops_is_said(options, remat):
    """While tracing, in all of flax's modes and through what is between; and nothing where nothing is dropped."""
    if set(options) - set(inspect.signature(nnx.scan).parameters):
        pytest.skip("flax has no such mode yet")
    block = {"shared": te.nnx.Dense(32, 32, use_bias=False, recipe=RECIPE, rngs=nnx.Rngs(0))}

    def applied(model, x, axes):
        call = lambda m, x: m["shared"](x)  # noqa: E731
        call = nnx.remat(call, **options) if remat else call
        body = lambda x, m: call(m, x)  # noqa: E731
        return nnx.scan(body, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, length=2, **options)(x, model)

    def shape(axes, model=block):
        graphdef, leaves = nnx.split(model)
        return jax.eval_shape(lambda: applied(nnx.merge(graphdef, leaves, copy=True), X[0], axes))

    with pytest.warns(UserWarning, match=r"a constant of nnx\.scan"):
        shape(None)
    if not options:
        with pytest.warns(UserWarning, match=r"a constant of nnx\.scan"):
            shape(nnx.StateAxes({te.nnx.FP8State: None, ...: None}))
    block["shared"].eval()
    shape(None)
    block["shared"].train()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), nnx.split(block)[1])
    shape(0, nnx.merge(nnx.split(block)[0], stacked))


def test_jit_traces_once():
    """What a step does to the state doesn't change the static part of the model."""
    model, traces = mlp(nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(loss_fn)(model, x))
        optimizer.update(model, te.nnx.grad(loss_fn)(model, x))
        return loss_fn(model, x)

    losses = [step(model, optimizer, X) for _ in range(4)]
    assert len(traces) == 1
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("options", [{"graph": False}, {"graph_updates": False}], ids=["tree", "no graph updates"])
def test_flaxs_other_modes(options):
    """Modules as pytrees: nnx.grad then differentiates the state too; calls and te.nnx.grad update it as ever."""
    model, other = mlp(nnx.Rngs(0)), mlp(nnx.Rngs(0))
    grads = nnx.jit(lambda m, x: nnx.grad(loss_fn, **options)(m, x), **options)(model, X)
    want = nnx.jit(te.nnx.grad(loss_fn))(other, X)
    np.testing.assert_allclose(grads.fc1.kernel.get_value(), want.fc1.kernel.get_value(), rtol=1e-4, atol=1e-7)
    as_state = nnx.to_pure_dict(nnx.state(grads, te.nnx.FP8State))
    assert_trees_identical(as_state, nnx.to_pure_dict(nnx.state(other, te.nnx.FP8State)))
    np.testing.assert_array_equal(model.fp8_0.uses.get_value()[:, 64] * 2.0**64, [1, 1, 0, 1, 1, 0])
    nnx.jit(lambda m, x: te.nnx.grad(loss_fn)(m, x), **options)(model, X)
    np.testing.assert_array_equal(model.fp8_0.uses.get_value()[:, 64] * 2.0**64, [-1, -1, 1, -1, -1, 1])


def test_split_merge_clone():
    model = mlp(nnx.Rngs(0))
    te.nnx.grad(loss_fn)(model, X)
    merged, cloned = nnx.merge(*nnx.split(model)), nnx.clone(model)
    for other in (merged, cloned):
        assert nnx.split(other)[0] == nnx.split(model)[0]
        np.testing.assert_array_equal(other(X), nnx.view(model, use_running_average=True)(X))
    abstract = nnx.eval_shape(lambda: mlp(nnx.Rngs(0)))
    want = jax.tree.map(lambda a: (a.shape, a.dtype), te.nnx.to_variables(model))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), te.nnx.to_variables(abstract)) == want


def test_plan_is_the_program():
    model = mlp(nnx.Rngs(0))
    graphdef, params, fp8 = nnx.split(model, nnx.Param, te.nnx.FP8State)

    def forward_updates(params, fp8, x):
        model = nnx.merge(graphdef, params, fp8)
        grads, dx = nnx.grad(loss_fn, argnums=(0, 1))(model, x)
        return nnx.state(grads), dx, nnx.state(model, te.nnx.FP8State)

    def differentiated(params, fp8, x):
        return jax.grad(lambda p, s, x: loss_fn(nnx.merge(graphdef, p, s), x), argnums=(0, 1, 2))(params, fp8, x)

    for function, differentiate in ((forward_updates, False), (differentiated, True)):
        text = jax.jit(function).lower(params, fp8, X).compile().as_text()
        plan = model.plan(X, differentiate_state=differentiate)
        assert hlo.count_custom_calls(text) == plan.custom_calls
        assert ("dy: current scaling" in str(plan)) is not differentiate
    assert "scale_write" not in str(model.plan(X, train=False))
