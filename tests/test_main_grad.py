"""Main gradients: wgrad GEMMs accumulate in buffers, and an optimizer sees every weight gradient once."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.main_grad import COLLECTION, MainGrad
from te_jax.testing import hlo
from te_jax.testing.compare import assert_trees_identical

DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = {"none": None, "delayed": DELAYED, "current": te.CurrentScaling(), "block": te.BlockScaling()}
BF16 = {"dtype": jnp.bfloat16}
ROWS, WIDTH, N = 128, 64, 4
AXES = {"params": 0, te.state.COLLECTION: 0, te.state.KERNELS: 0, COLLECTION: 0}


def chain(recipe, **kwargs):
    """Norm-fused, with a bias and plain."""
    layers = [ops.RMSNorm(), ops.Linear(128), ops.SwiGLU(), ops.Linear(WIDTH, use_bias=False)]
    return te.Sequential(layers, recipe=recipe, **(BF16 | kwargs))


def data(rows=ROWS, seed=0):
    return tuple(jax.random.normal(jax.random.key(seed), (2, rows, WIDTH), jnp.bfloat16))


def loss_of(module):
    def loss(variables, batch):
        x, y = batch
        return jnp.mean((module.apply(variables, x).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    return loss


def accumulated(loss, variables, batch, n=N, **kwargs):
    return te.remat.jit(functools.partial(te.accumulate_gradients, loss, num_microbatches=n, **kwargs))(
        variables, batch
    )


def quiet(fn, *args, **kwargs):
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fn(*args, **kwargs)


def both(loss, variables, batch, n=N):
    """(loss, gradients) without and with main gradients."""
    return accumulated(loss, variables, batch, n), quiet(accumulated, loss, variables, batch, n, main_grad=True)


def assert_equal_but_for_order(got, want):
    """A sum of products is one GEMM's where it was two and an addition: the rounding of float32."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        eps = 2e-6 if a.dtype == jnp.float32 else 2e-2
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=eps, atol=eps * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


# ---------------------------------------------------------------------------------------------------- one use, by hand


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["overwrite", "add"])
def test_the_cotangent_is_the_next_buffer(recipe, mode):
    """Overwritten: equal to the ordinary gradient, whatever was in the buffer. Added to: the sum."""
    module, (x, y) = chain(RECIPES[recipe]), data(32)
    variables = module.init(jax.random.key(1), x)
    want = jax.jit(jax.grad(loss_of(module)))(variables, (x, y))
    was = jnp.nan if mode == "overwrite" else 2.0**-10
    buffers = te.main_grad.init(variables["params"], mode)
    buffers = jax.tree.map(lambda buffer: jnp.full_like(buffer, was), buffers)
    got = jax.jit(jax.grad(loss_of(module)))({**variables, COLLECTION: buffers}, (x, y))
    assert sorted(got[COLLECTION]) == ["ops_1", "ops_3"]
    for scope, nodes in got[COLLECTION].items():
        kernel, buffer = np.asarray(want["params"][scope].pop("kernel")), nodes["kernel"].buffer
        assert buffer.dtype == jnp.float32
        assert not got["params"][scope].pop("kernel").any()  # its gradient is in the buffer
        if mode == "overwrite":
            np.testing.assert_array_equal(buffer, kernel)
        else:
            np.testing.assert_allclose(buffer, kernel + was, rtol=1e-6, atol=1e-9)
    del got[COLLECTION]
    assert_trees_identical(got, want)  # biases, norm scales, FP8 state


def test_against_fp64():
    """Two microbatches through one linear, against NumPy in double precision."""
    module = te.Sequential([ops.Linear(32, use_bias=False)], dtype=jnp.float32)
    x, dy = (np.asarray(part, np.float64) for part in jax.random.normal(jax.random.key(3), (2, 2, 16, 48)))
    dy = dy[..., :32]
    variables = module.init(jax.random.key(0), x[0].astype(np.float32))
    buffers = te.main_grad.init(variables["params"])
    for part, cotangent in zip(x, dy, strict=True):

        def loss(variables, part=part, cotangent=cotangent):
            return jnp.sum(module.apply(variables, part.astype(np.float32)) * cotangent.astype(np.float32))

        grads = jax.grad(loss)({**variables, COLLECTION: buffers})
        buffers = te.main_grad.following(grads[COLLECTION])
    want = np.einsum("btk,btn->kn", x, dy)
    np.testing.assert_allclose(buffers["ops_0"]["kernel"].buffer, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3])
def test_an_optimizer_sees_each_gradient_once(n):
    """By hand: the first microbatch overwrites, the others add. SGD makes the steps of plain Flax's gradients."""
    module, batch = chain(None, dtype=jnp.float32), data(96)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), batch)
    variables = module.init(jax.random.key(1), batch[0])
    loss, sgd = jax.jit(jax.grad(loss_of(module))), optax.sgd(0.1)
    buffers, sums = jax.tree.map(lambda b: b + jnp.inf, te.main_grad.init(variables["params"])), None
    want = None
    for i in range(n):
        part = jax.tree.map(lambda x, i=i: x[i::n], batch)
        grads = loss({**variables, COLLECTION: buffers}, part)
        buffers = te.main_grad.following(grads.pop(COLLECTION))
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        ordinary = loss(variables, part)
        want = ordinary if want is None else jax.tree.map(jnp.add, want, ordinary)
    merged = te.main_grad.merge(sums, buffers)
    assert jax.tree.structure(merged) == jax.tree.structure(want)
    steps = [sgd.update(tree["params"], sgd.init(variables["params"]))[0] for tree in (merged, want)]
    assert_equal_but_for_order(*steps)


def test_a_second_use_is_an_error():
    module, (x, _) = chain(DELAYED), data(32)
    variables = module.init(jax.random.key(1), x)
    variables = {**variables, COLLECTION: te.main_grad.init(variables["params"], "add")}
    message = (
        "Sequential: main_grad/ops_1/kernel: main_grad: expected one use in a differentiated call, .*, got a second"
    )
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda v: module.apply(v, module.apply(v, x)).astype(jnp.float32).sum())(variables)
    for _ in range(2):  # a use in each of two calls
        jax.grad(lambda v: module.apply(v, x).astype(jnp.float32).sum())(variables)

    linear = ops.Linear(WIDTH, use_bias=False)
    tied = te.Sequential([linear, ops.GELU(), linear], recipe=DELAYED, **BF16)
    variables = tied.init(jax.random.key(1), x)
    variables = {**variables, COLLECTION: te.main_grad.init(variables["params"], "add")}
    with pytest.raises(ValueError, match="main_grad/ops_0/kernel: main_grad: expected one use"):
        jax.grad(lambda v: tied.apply(v, x).astype(jnp.float32).sum())(variables)


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (jnp.zeros((64, 32)), ValueError, r"main_grad: expected shape \(64, 64\), got \(64, 32\)"),
        (jnp.zeros((64, 64), jnp.bfloat16), TypeError, "main_grad: expected dtype float32, got bfloat16"),
    ],
)
def test_a_buffer_that_does_not_fit(buffer, error, message):
    module, (x, _) = te.flax.Dense(64, **BF16), data(32)
    variables = module.init(jax.random.key(1), x)
    with pytest.raises(error, match=message):
        module.apply({**variables, COLLECTION: {"kernel": MainGrad(buffer)}}, x)
    with pytest.raises(ValueError, match=r"MainGrad: mode: expected 'overwrite' or .*, got 'sum'"):
        MainGrad(jnp.zeros(3), "sum")


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups(recipe):
    """A kernel for each of three groups, one of them empty: its part of the buffer stays as it is."""
    chain = [ops.GroupedLinear(3, 128, use_bias=False), ops.SwiGLU(), ops.GroupedLinear(3, WIDTH)]
    module, (x, _) = te.Sequential(chain, recipe=RECIPES[recipe], **BF16), data(48)
    sizes = jnp.array([20, 0, 23], jnp.int32)
    variables = module.init(jax.random.key(1), x, sizes, sizes)

    def loss(variables):
        return jnp.mean(module.apply(variables, x, sizes, sizes).astype(jnp.float32) ** 2)

    want = jax.jit(jax.grad(loss))(variables)
    buffers = jax.tree.map(lambda buffer: buffer + 0.5, te.main_grad.init(variables["params"], "add"))
    step = jax.jit(jax.grad(loss))
    got = step({**variables, COLLECTION: buffers})
    for scope, nodes in got.pop(COLLECTION).items():
        kernel = np.asarray(want["params"][scope].pop("kernel"))
        assert not got["params"][scope].pop("kernel").any()
        np.testing.assert_allclose(nodes["kernel"].buffer, kernel + 0.5, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(nodes["kernel"].buffer[1], 0.5)
    assert_trees_identical(got, want)
    lowered = step.trace({**variables, COLLECTION: buffers}).lower(lowering_platforms=("cuda",)).as_text()
    wgrads = [line for line in lowered.splitlines() if "@te_jax_grouped_wgrad" in line and "accumulate = true" in line]
    assert len(wgrads) == (2 if recipe in ("delayed", "current") else 0)
    assert all("output_operand_alias" in line for line in wgrads)


# ----------------------------------------------------------------------------------------------- accumulate_gradients


class Layer(nn.Module):
    recipe: te.Recipe | None

    @nn.compact
    def __call__(self, x, _):
        layers = [ops.StartResidual(), chain(self.recipe).ops, ops.AddResidual()]
        return te.Sequential(layers, recipe=self.recipe, **BF16)(x), None


class Model(nn.Module):
    """Layers in a scan, a layer of Flax, and a linear with features of two dimensions."""

    recipe: te.Recipe | None
    remat: bool = False
    axes: tuple = tuple(AXES.items())

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(layer, length=3, variable_axes=dict(self.axes), split_rngs={"params": True})
        x, _ = scan(self.recipe, name="layers")(x, None)
        x = nn.Dense(WIDTH, **BF16)(x)
        return te.flax.DenseGeneral((2, WIDTH // 2), recipe=self.recipe, **BF16)(x).reshape(x.shape)


def stack(recipe):
    """Layers of which the inputs of linears go to the host: as FP8 under a recipe."""
    layer = te.flax.LayerNormMLP(WIDTH, 128, recipe=recipe, **BF16)
    return te.flax.LayerStack(layer, 2, te.remat.policy(offload=("fc1", "fc2"), min_bytes=0))


KINDS = {
    "plain": lambda recipe: chain(recipe),
    "bfloat16 parameters": lambda recipe: chain(recipe, param_dtype=jnp.bfloat16),
    "scan": Model,
    "remat": lambda recipe: Model(recipe, remat=True),
    "offload": stack,
}


@pytest.mark.parametrize(("kind", "recipe"), [*(("plain", recipe) for recipe in RECIPES), ("scan", "delayed")])
def test_equal_to_summed_gradients(recipe, kind):
    module, batch = KINDS[kind](RECIPES[recipe]), data()
    variables = module.init(jax.random.key(1), batch[0][:16])
    (want_loss, want), (got_loss, got) = both(loss_of(module), variables, batch)
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6)
    assert_equal_but_for_order(te.state.split(got)[0], te.state.split(want)[0])
    assert_trees_identical(te.state.split(got)[1], te.state.split(want)[1])  # the exact maximum (test_accumulate.py)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "scan")])
def test_kinds_of_models(kind):
    module, batch = KINDS[kind](DELAYED), data()
    variables = module.init(jax.random.key(1), batch[0][:16])
    (_, want), (_, got) = both(loss_of(module), variables, batch)
    assert_equal_but_for_order(te.state.split(got)[0], te.state.split(want)[0])
    assert_trees_identical(te.state.split(got)[1], te.state.split(want)[1])
    if kind == "offload":
        step = functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=N, main_grad=True)
        text = te.remat.jit(step).trace(variables, batch).lower(lowering_platforms=("cuda",)).as_text()
        placed = [line for line in text.splitlines() if "annotate_device_placement" in line]
        assert sum("pinned_host" in line for line in placed) == 4  # two tensors, in the first microbatch and in others
        assert not any("f32" in line for line in placed)  # the buffers stay


@pytest.mark.parametrize("n", [1, 2, N])
def test_equal_to_one_big_batch(n):
    """To jax.grad of plain jax.numpy, and so is a training step."""
    module = te.Sequential([ops.Linear(128), ops.GELU(), ops.Linear(WIDTH)], dtype=jnp.float32)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), data())
    variables = module.init(jax.random.key(1), batch[0])

    def plain(variables, batch):
        p, (x, y) = variables["params"], batch
        hidden = jax.nn.gelu(x @ p["ops_0"]["kernel"] + p["ops_0"]["bias"])
        return jnp.mean((hidden @ p["ops_2"]["kernel"] + p["ops_2"]["bias"] - y) ** 2)

    want_loss, want = jax.value_and_grad(plain)(variables, batch)
    got_loss, got = quiet(accumulated, loss_of(module), variables, batch, n, main_grad=True)
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))
    state = te.TrainState.create(apply_fn=module.apply, params=variables, tx=optax.sgd(1.0))
    _, grads = state.accumulate_gradients(loss_of(module), batch, num_microbatches=n, main_grad=True)
    assert_equal_but_for_order(grads, got)


def test_which_kernels_have_buffers():
    """Of the program: wgrads of te_jax's linears add in place, in the first microbatch none; kernels quantized once."""
    module, batch = chain(DELAYED), data()
    variables = module.init(jax.random.key(1), batch[0][:16])

    def step(variables, batch):
        variables = te.quantize_kernels(module, variables, batch[0][: ROWS // N])
        return te.accumulate_gradients(loss_of(module), variables, batch, num_microbatches=N, main_grad=True)

    text = jax.jit(step).trace(variables, batch).lower(lowering_platforms=("cuda",)).as_text()
    gemms = [line for line in text.splitlines() if "@te_jax_gemm" in line]
    in_place = [line for line in gemms if "in_place = true" in line]
    assert (len(gemms), len(in_place)) == (12, 2)
    assert all("beta = 1.0" in line and "output_operand_alias" in line for line in in_place)
    assert hlo.count_custom_calls(text)["te_jax_quantize"] == 2 + 2  # two kernels, and a dy in each part
    plain = accumulated(loss_of(module), variables, batch)
    assert_equal_but_for_order(jax.jit(step)(variables, batch)[1]["params"], plain[1]["params"])


class NamedKernel(nn.Module):
    """A linear whose name is that of its kernel."""

    @nn.compact
    def __call__(self, x):
        return te.flax.Dense(WIDTH, name="kernel", **BF16)(x)


def test_a_linear_of_the_name_of_its_kernel():
    module, batch = NamedKernel(), data()
    variables = module.init(jax.random.key(1), batch[0][:16])
    plain, main = both(loss_of(module), variables, batch)
    assert_equal_but_for_order(main, plain)


class Twice(nn.Module):
    """A chain with a linear that is listed twice, called twice itself; a scan whose steps share a kernel."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        linear = ops.Linear(WIDTH, use_bias=False)
        tied = te.Sequential([linear, ops.GELU(), ops.Linear(WIDTH), linear], recipe=DELAYED, **BF16)
        once = te.flax.Dense(WIDTH, recipe=DELAYED, **BF16)
        module = (nn.remat(te.flax.Dense) if self.remat else te.flax.Dense)(WIDTH, recipe=DELAYED, **BF16)
        shared = nn.scan(
            lambda module, x, _: (te.flax.Dense(WIDTH, recipe=te.CurrentScaling(), **BF16)(x), None),
            length=2, variable_broadcast=("params", COLLECTION), split_rngs={"params": False},
        )  # fmt: skip
        x, _ = shared(self, once(tied(x)), None)
        return module(jnp.tanh(module(x)))


@pytest.mark.parametrize("remat", [False, True])
def test_shared_kernels_keep_ordinary_gradients(remat):
    module, batch = Twice(remat), data()
    variables = module.init(jax.random.key(1), batch[0])
    (_, want), (_, got) = both(loss_of(module), variables, batch)
    assert_equal_but_for_order(got["params"], want["params"])
    text = jax.jit(
        functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=N, main_grad=True)
    ).trace(variables, batch).lower(lowering_platforms=("cuda",)).as_text()  # fmt: skip
    in_place = [line for line in text.splitlines() if "@te_jax_gemm" in line and "in_place = true" in line]
    assert len(in_place) == 2  # ``once``, and the linear in ``tied`` that isn't


def test_what_else_a_loss_does_with_a_kernel():
    """A penalty on a kernel, a kernel that a loss doesn't use, a linear in a branch that isn't always taken."""
    module, batch = chain(DELAYED), data()
    branch = te.flax.Dense(WIDTH, recipe=te.CurrentScaling(), **BF16)
    params = {"chain": module.init(jax.random.key(1), batch[0])}
    params["branch"], params["unused"] = (branch.init(jax.random.key(i), batch[0])["params"] for i in range(2))
    fp8 = params["chain"].pop(te.state.COLLECTION)
    variables = {"params": params | {"chain": params["chain"]["params"]}, te.state.COLLECTION: fp8}

    def loss(variables, batch):
        buffers = variables.get(COLLECTION, {})
        collections = (("params", variables["params"]), (COLLECTION, buffers))
        given = {name: {c: v[name] for c, v in collections if name in v} for name in params}
        x, y = batch
        x = jax.lax.cond(
            jnp.sum(x[0, :3]) > 0, lambda x: branch.apply(given["branch"], x), lambda x: x, x
        )  # fmt: skip
        out = module.apply({**given["chain"], te.state.COLLECTION: variables[te.state.COLLECTION]}, x)
        penalty = jnp.sum(variables["params"]["chain"]["ops_1"]["kernel"] ** 2)
        return jnp.mean((out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2) + 1e-2 * penalty

    taken = [bool(jnp.sum(batch[0][i, :3].astype(jnp.bfloat16)) > 0) for i in range(N)]
    assert set(taken) == {False, True}
    (_, want), (_, got) = both(loss, variables, batch)
    assert_equal_but_for_order(got["params"], want["params"])
    assert not np.any(got["params"]["unused"]["kernel"])
    assert np.any(got["params"]["branch"]["kernel"])


def changed_by_a_custom_vjp(params):
    half = jax.custom_vjp(lambda params: params)
    half.defvjp(lambda params: (params, None), lambda _, grads: (jax.tree.map(lambda g: g / 2, grads),))
    return half(params)


KERNELS = {
    "scaled": lambda p: p | {"ops_0": jax.tree.map(lambda w: 2 * w, p["ops_0"])},
    "frozen": lambda p: p | {"ops_0": jax.lax.stop_gradient(p["ops_0"])},
    "low rank": lambda p: p | {"ops_0": {"kernel": p["ops_0"]["kernel"] + p["a"] @ p["b"]}},
    "exchanged": lambda p: p | {"ops_0": p["ops_2"], "ops_2": p["ops_0"]},
    "custom_vjp": lambda p: p | {"ops_0": changed_by_a_custom_vjp(p["ops_0"])},
}


@pytest.mark.parametrize("kind", KERNELS)
def test_a_linear_whose_kernel_is_made_from_parameters(kind):
    """Its gradient is not that of the parameter in the place of its buffer."""
    linears = [ops.Linear(WIDTH, use_bias=False), ops.GELU(), ops.Linear(WIDTH, use_bias=False), ops.Linear(WIDTH)]
    module, batch = te.Sequential(linears, dtype=jnp.float32), data(32)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), batch)
    variables = module.init(jax.random.key(1), batch[0])
    a, b = jax.random.normal(jax.random.key(2), (2, WIDTH, 4)) / 8
    variables = {"params": variables["params"] | {"a": a, "b": b.T}}

    def loss(variables, batch):
        return loss_of(module)({**variables, "params": KERNELS[kind](variables["params"])}, batch)

    (_, want), (_, got) = both(loss, variables, batch, 2)
    assert_equal_but_for_order(got, want)


def test_a_second_call_that_is_not_differentiated():
    """Of a head's kernels, as targets; those of the rest have buffers."""
    head = te.Sequential([ops.Linear(WIDTH, use_bias=False)], dtype=jnp.float32)
    body = te.Sequential([ops.Linear(WIDTH, use_bias=False)], dtype=jnp.float32)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), data(32))
    params = {name: head.init(jax.random.key(i), batch[0])["params"] for i, name in enumerate(("head", "body"))}

    def loss(variables, batch):
        h, b = ({c: tree[name] for c, tree in variables.items() if name in tree} for name in ("head", "body"))
        x, y = batch
        return jnp.mean((head.apply(h, body.apply(b, x)) - jax.lax.stop_gradient(head.apply(h, y))) ** 2)

    (_, want), (_, got) = both(loss, {"params": params}, batch, 2)
    assert_equal_but_for_order(got, want)


def test_linears_without_a_buffer_are_named():
    module, batch = Model(DELAYED, axes=tuple((k, v) for k, v in AXES.items() if k != COLLECTION)), data()
    variables = module.init(jax.random.key(1), batch[0])
    message = r"main_grad=True: .*Sequential/ops_1_1/kernel, .*: no buffer is handed down .*nn.scan and nn.vmap need"
    with pytest.warns(UserWarning, match=message):
        _, got = accumulated(loss_of(module), variables, batch, main_grad=True)
    _, want = accumulated(loss_of(module), variables, batch)
    assert_equal_but_for_order(got["params"], want["params"])


def test_errors_of_accumulate_gradients():
    module, batch = nn.Dense(WIDTH), data()
    variables = module.init(jax.random.key(1), batch[0])
    run = functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=2)
    with pytest.raises(
        ValueError,
        match=r"main_grad: expected a loss of at least one te_jax linea.*none: kernel: no te_jax linear took",
    ):
        run(variables, batch, main_grad=True)
    with pytest.raises(ValueError, match=r"main_grad: .*got variables without a kernel: no parameter in params"):
        te.accumulate_gradients(
            lambda v, b: jnp.mean(v["params"]["scale"] * b[0].astype(jnp.float32)),
            {"params": {"scale": jnp.ones(())}}, batch, num_microbatches=2, main_grad=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="accumulate_gradients: variables: expected no 'main_grad'"):
        run({**variables, COLLECTION: te.main_grad.init(variables["params"])}, batch)


def test_why_no_kernel_has_a_main_gradient():
    """Of each kernel, where none has one: an error, as the step would be slower than it was asked to be."""
    linear, batch = ops.Linear(WIDTH, use_bias=False), data(32)
    module = te.Sequential([linear, ops.GELU(), linear, ops.Linear(WIDTH, use_bias=False)], dtype=jnp.float32)
    params = module.init(jax.random.key(1), batch[0])["params"] | {"other": {"kernel": jnp.ones(4)}}

    def loss(variables, batch):
        own = dict(variables["params"])
        other = own.pop("other")["kernel"].sum()
        own["ops_3"] = jax.tree.map(lambda w: 2 * w, own["ops_3"])
        return loss_of(module)({**variables, "params": own}, batch) + other

    expected = (
        "got none: ops_0/kernel: more than one call of a linear uses it; ops_3/kernel: the loss does something else "
        "with it too, or gives the linear something that is computed from it; other/kernel: no te_jax linear took its"
    )
    with pytest.raises(ValueError, match=expected):
        te.accumulate_gradients(loss, {"params": params}, batch, num_microbatches=2, main_grad=True)


# ------------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("regime", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_data_and_tensor_parallel(regime, recipe):
    """dW is summed over the data axis before it is added, on every device: equal to one device, buffers included."""
    module, batch = chain(RECIPES[recipe]), data()
    variables = module.init(jax.random.key(1), batch[0])
    kind = AxisType.Auto if regime == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])

    def loss(variables, batch):
        value = loss_of(module)(variables, batch)
        return jax.lax.pmean(value, "data") if regime == "manual" else value

    step = functools.partial(te.accumulate_gradients, loss, num_microbatches=2, main_grad=True)
    if regime == "manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    _, want = accumulated(loss_of(module), variables, batch, 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
        everywhere = jax.device_put(variables, NamedSharding(mesh, P()))
        compiled = jax.jit(step).lower(everywhere, sharded).compile()
        _, got = compiled(everywhere, sharded)
    assert set(hlo.count_collectives(compiled.as_text())) == {"all-reduce"}
    for (path, a), b in zip(jax.tree.leaves_with_path(got["params"]), jax.tree.leaves(want["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))
    assert_trees_identical(te.state.split(got)[1], te.state.split(want)[1])


def test_windows_with_a_collective():
    """Kernels split over an axis: every device's wgrad adds to its part of the buffer."""
    chain = [
        ops.AllGather("model"),
        ops.Linear(WIDTH, use_bias=False),
        ops.GELU(),
        ops.Linear(WIDTH, use_bias=False),
        ops.ReduceScatter("model"),
    ]
    module = te.Sequential(chain, recipe=te.CurrentScaling(power_of_two=True), **BF16)
    kernels = jax.random.normal(jax.random.key(2), (2, 2 * WIDTH, WIDTH)) / 8
    (x, y), specs = data(), (P(None, "model"), P("model"))

    def step(first, second, batch, *, main_grad):
        variables = {"params": {"ops_1": {"kernel": first}, "ops_3": {"kernel": second}}}

        def loss(variables, batch):
            return jax.lax.psum(loss_of(module)(variables, batch), "model")

        _, grads = te.accumulate_gradients(loss, variables, batch, num_microbatches=2, main_grad=main_grad)
        return grads["params"]["ops_1"]["kernel"], grads["params"]["ops_3"]["kernel"]

    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    results = []
    for main_grad in (False, True):
        local = functools.partial(step, main_grad=main_grad)
        sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(*specs, P("model")), out_specs=specs))
        arrays = (kernels[0].T, kernels[1], (x, y))
        results.append(sharded(*arrays))
    text = sharded.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    in_place = [line for line in text.splitlines() if "@te_jax_gemm" in line and "in_place = true" in line]
    assert len(in_place) == 2
    assert_equal_but_for_order(results[1], results[0])


def test_buffers_of_each_shard():
    """Buffers that vary over the data axis: nothing is summed before it is added, the GEMM adds; then one sum."""
    module, batch = te.flax.Dense(WIDTH, use_bias=False, recipe=te.CurrentScaling(), **BF16), data()
    variables = module.init(jax.random.key(1), batch[0])
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])

    def step(variables, batch):
        kernel = variables["params"]["kernel"]
        buffer = jax.lax.pcast(jnp.zeros(kernel.shape), ("data",), to="varying")
        buffers = {"kernel": MainGrad(buffer)}
        for part in (batch, batch):

            def loss(buffers, part=part):
                return loss_of(module)({**variables, COLLECTION: buffers}, part)

            buffers = te.main_grad.following(jax.grad(loss)(buffers))
        return jax.lax.psum(buffers["kernel"].buffer, "data")

    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    compiled = sharded.lower(variables, jax.device_put(batch, NamedSharding(mesh, P("data")))).compile()
    sums = [
        line for line in compiled.as_text().splitlines() if " all-reduce(" in line and f"f32[{WIDTH},{WIDTH}]" in line
    ]
    assert len(sums) == 1
    want = jax.grad(loss_of(module))(variables, batch)["params"]["kernel"]
    got = sharded(variables, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got, 8 * want, rtol=0.02, atol=0.02 * float(8 * abs(want).max()))


# -------------------------------------------------------------------------------------- what must not see the buffers


def test_buffers_are_no_parameters_and_no_state(tmp_path):
    module, (x, _) = chain(DELAYED), data(32)
    variables = module.init(jax.random.key(1), x)
    with_buffers = {**variables, COLLECTION: te.main_grad.init(variables["params"])}
    assert_trees_identical(te.state.merge(*te.state.split(with_buffers)), variables)
    with pytest.raises(ValueError, match=r"TrainState: params: expected the collections .*, got .*'main_grad'"):
        te.TrainState.create(apply_fn=module.apply, params=with_buffers, tx=optax.adam(1e-3))
    te.checkpoint.save(tmp_path, 0, with_buffers, recipe=DELAYED)
    restored = te.checkpoint.restore(tmp_path, variables, recipe=DELAYED).variables
    assert_trees_identical(restored, variables)
    assert_trees_identical(
        te.quantize_kernels(module, with_buffers, x)[te.state.KERNELS],
        te.quantize_kernels(module, variables, x)[te.state.KERNELS],
    )


def test_the_plan_says_what_happens():
    (x, _) = data(32)
    for recipe, added in (("none", ", added by XLA"), ("delayed", "")):
        module = chain(RECIPES[recipe])
        plans = {mode: module.plan(x, platform="cuda", main_grad=mode) for mode in (None, "overwrite", "add")}
        assert "main_grad" not in str(plans[None])
        for mode, note in (
            ("overwrite", "wgrad overwrites main_grad"),
            ("add", f"wgrad accumulates into main_grad{added}"),
        ):
            assert str(plans[mode]).count(f"      {note}\n") == 2
            assert plans[mode].custom_calls == plans[None].custom_calls
        assert len({str(plan) for plan in plans.values()}) == 3
    with pytest.raises(ValueError, match=r"Sequential.plan: main_grad: expected None or one of .*, got 'sum'"):
        module.plan(x, main_grad="sum")
