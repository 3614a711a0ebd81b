"""What te.remat.policy accepts and refuses; warnings and errors where a program can't offload."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import te_jax as te
from te_jax import compat, doctor
from te_jax.remat import offload, placement

X = jnp.ones((16, 16))
SIZES_ARE_TOLD = jax.__version_info__ >= (0, 12) or not getattr(jax.config, "jax_remat3", False)


def gradient(policy, name="fc1"):
    layer = jax.checkpoint(lambda x: jnp.tanh(te.remat.name(jnp.sin(x), name)), policy=policy)
    return lambda x: jax.grad(lambda x: layer(x).sum())(x)


def test_policies_are_data():
    policy = te.remat.policy(("context",), ("fc1", "core_attn"))
    assert policy == te.remat.policy({"fc1": "offload", "context": "device", "core_attn": "offload", "act": "remat"})
    assert hash(policy) == hash(te.remat.policy(["context"], iter(("core_attn_input", "fc1_input"))))
    assert policy != te.remat.policy(("context",), ("fc1", "core_attn"), min_bytes=0)
    assert (policy.save, policy.offload) == ({"context"}, {"fc1_input", "core_attn_input"})


def test_maxtexts_names_are_those_of_the_same_tensors():
    maxtext = {"decoder_layer_input": "offload", "mlpwi_0": "device", "mlpwi_1": "device", "context": "offload"}
    assert te.remat.policy(maxtext) == te.remat.policy(("act",), ("attn_norm", "context"))


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({"query_proj": "remat", "key_proj": "device"}, "core_attn_input, got 'query_proj': 'remat', 'key_proj': 'dev"),
        ({"act": "device", "mlpwi": "remat"}, "act_input, got 'act': 'device', 'mlpwi': 'remat'"),
        ({"qkv_proj": "offload", "query_proj": "device"}, "core_attn_input, got 'qkv_proj': 'offload', 'query_proj':"),
        ({"fc1": "offload", "fc1_input": "remat", "act": "remat"}, "fc1_input, got 'fc1': 'offload', 'fc1_input': 'r"),
    ],
)
def test_names_of_one_tensor_that_disagree(places, named):
    with pytest.raises(ValueError, match=f"save: expected one place for names of one tensor, {named}"):
        te.remat.policy(places)


def test_a_whole_dictionary_of_maxtexts():
    """It has the names of fused and of separate projections, and of the sum before and behind a linear of its own."""
    names = ("qkv_proj", "query_proj", "key_proj", "value_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "context")
    rest = dict.fromkeys((*names, "out_proj", "attention_out", "decoder_layer_input"), "remat")
    assert te.remat.policy(rest) == te.remat.policy()
    apart = rest | dict.fromkeys(("query_proj", "key_proj", "value_proj"), "device")
    assert te.remat.policy(apart | {"mlpwi": "offload"}) == te.remat.policy(("core_attn",), ("act",))
    assert te.remat.policy(rest | {"attention_out": "device"}) == te.remat.policy(("mlp_norm",))


def test_names_that_a_program_lacks():
    """Said by te.remat.jit, once the program is traced, and by te.remat.report."""
    policy = te.remat.policy(("act", "fc1", "mine"), extra_names=("mine", "mine2"), min_bytes=1)
    expected = (
        r"remat.policy: save and offload: expected names .*, got none of act_input, mine, mine_input; there are fc1_"
    )
    with pytest.warns(te.remat.UnusedNamesWarning, match=expected) as caught:
        te.remat.jit(gradient(policy)).trace(X)
    assert caught[0].filename == __file__
    assert te.remat.report(policy) == {
        "act_input": "never met",
        "fc1_input": "on the device, 1024 bytes at most" if SIZES_ARE_TOLD else "on the device",
        "mine": "never met",
        "mine_input": "never met",
    }
    te.remat.jit(lambda x: gradient(policy, "mine")(x) + gradient(policy, "act")(x)).trace(X)  # now it has met all
    assert "never met" not in te.remat.report(policy)["mine"]
    te.remat.jit(lambda x: jax.checkpoint(jnp.sin, policy=te.remat.policy(("fc2",)))(x)).trace(X)  # no gradient
    with pytest.raises(TypeError, match=r"remat.report: policy: expected one of te.remat.policy\(...\)"):
        te.remat.report(jax.checkpoint_policies.everything_saveable)


@pytest.mark.skipif(not SIZES_ARE_TOLD, reason="jax 0.11 with jax_remat3 tells policies no sizes")
def test_a_size_that_no_tensor_has():
    policy = te.remat.policy(offload=("fc1",), min_bytes=1025)
    with pytest.warns(
        te.remat.UnusedNamesWarning, match="min_bytes: expected some .*, got 1025, where the largest has 1024"
    ):
        te.remat.jit(gradient(policy)).trace(X)
    assert te.remat.report(policy) == {"fc1_input": "on the device, 1024 bytes at most: below min_bytes"}
    large = te.remat.policy(offload=("fc1",), min_bytes=1024)
    te.remat.jit(gradient(large)).trace(X)
    assert te.remat.report(large) == {"fc1_input": "offloaded, 1024 bytes at most"}


def test_a_layer_in_a_stack_has_all_names():
    """Of a program that is traced again JAX asks about a part; what was met before counts."""
    names = ("attn_norm", "qkv_linear", "core_attn", "context", "attn_proj", "mlp_norm", "fc1", "act", "fc2")
    policy = te.remat.policy((*names, "fc1_kernel"))
    layer = te.flax.TransformerLayer(2, 32, recipe=te.CurrentScaling())
    model = te.flax.LayerStack(layer, 2, policy)
    x = jnp.ones((2, 16, 32))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    for scale in (1.0, 2.0):
        te.remat.jit(jax.grad(lambda v, x, scale=scale: scale * model.apply(v, x).sum())).trace(variables, x)
    assert not any(fate == "never met" for fate in te.remat.report(policy).values())


def test_modules_are_in_the_list_of_names():
    for name in ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "fc1", "act", "fc2", "router_fc1"):
        assert {name, f"{name}_input"} <= set(te.remat.NAMES)
    assert {"expert_fc1", "moe_act", "context", "fc1_kernel", "mlpwo"} <= set(te.remat.NAMES)
    assert list(te.remat.NAMES) == sorted(set(te.remat.NAMES))


def test_extra_names_are_modules_or_tensors():
    policy = te.remat.policy(
        offload=("up_proj", "mine"), save=("gate_kernel",), extra_names=("up_proj", "mine", "gate")
    )
    assert {"up_proj_input", "mine"} <= policy.offload
    assert policy.save == {"gate_kernel"}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"offload": ("fc3",)}, ValueError, r"offload: expected a name of te.remat.NAMES \(act, .*got 'fc3'; did you"),
        ({"save": ("up",), "extra_names": ("down",)}, ValueError, r"save: .*extra_names \(down\), got 'up'"),
        (
            {"save": ("fc1",), "offload": ("fc1_input",)},
            ValueError,
            "each tensor in one of them, got fc1_input in both",
        ),
        ({"save": ("query_proj",), "offload": ("core_attn",)}, ValueError, "core_attn_input in both"),
        (
            {"save": {"fc1": "host"}},
            ValueError,
            r"save\['fc1'\]: expected 'remat' or 'device' or 'offload', got 'host'",
        ),
        ({"save": {"contxt": "offload"}}, ValueError, r"save\['contxt'\]: .*got 'contxt'; did you mean 'context'"),
        ({"save": {"fc3": "remat"}}, ValueError, r"save\['fc3'\]: .*got 'fc3'; did you mean"),
        ({"save": {"fc1": "device"}, "offload": ("fc2",)}, ValueError, "nothing beside a dictionary"),
        ({"save": "fc1"}, TypeError, r"save: expected names, e.g. \('fc1',\), got 'fc1'"),
        ({"offload": (1,)}, TypeError, "offload: expected names, got 1"),
        ({"min_bytes": -1}, ValueError, "min_bytes: expected a number of bytes, got -1"),
    ],
)
def test_errors(arguments, error, match):
    with pytest.raises(error, match=match):
        te.remat.policy(**arguments)


@pytest.mark.parametrize("policy", ["fc1", {"fc1": "offload"}])
def test_a_stack_takes_a_policy_not_its_names(policy):
    expected = r"LayerStack: policy: expected None or a policy of te.remat.policy\(...\), got (?s:.*)fc1"
    with pytest.raises(TypeError, match=expected):
        te.flax.LayerStack(te.flax.Dense(16), 2, policy).init(jax.random.key(0), X)
    with pytest.raises(TypeError, match=rf"nnx.{expected}"):
        te.nnx.LayerStack(lambda rngs: te.nnx.Dense(16, 16, rngs=rngs), 2, policy=policy, rngs=nnx.Rngs(0))


def test_a_name_to_remat_has_to_be_known_too():
    with pytest.raises(ValueError, match="'fc9'"):
        te.remat.policy({"fc9": "remat"})


def test_a_device_without_pinned_memory(monkeypatch):
    monkeypatch.setattr(placement, "memory_kinds", lambda: ("device",))
    policy = te.remat.policy(offload=("fc1",), min_bytes=0)
    with pytest.raises(
        ValueError, match="offload of fc1_input: expected a device with pinned_host memory, got cpu rea"
    ):
        jax.jit(gradient(policy))(X)
    jax.jit(gradient(te.remat.policy(save=("fc1",))))(X)


def test_a_compiler_that_reads_another_layers_tensor(monkeypatch):
    policy = te.remat.policy(offload=("fc1",), min_bytes=0)
    monkeypatch.setattr(placement.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(placement.compat, "jaxlib_version", lambda: (0, 11, 0))
    with pytest.raises(ValueError, match=r"jaxlib 0.11.0 compiles scans that read another layer's tensor; 0.11.1"):
        jax.jit(gradient(policy))(X)


def test_host_operands_are_refused_by_name():
    """Of a chain and of the custom calls themselves."""
    dense = te.flax.Dense(32, recipe=te.CurrentScaling())
    variables = dense.init(jax.random.key(0), X)
    host = jax.device_put(X, jax.memory.Space.Host)
    with pytest.raises(ValueError, match="x: expected an array in device memory, got one in host memory"):
        jax.jit(lambda v, x: dense.apply(v, jax.device_put(x, jax.memory.Space.Host)))(variables, X)
    with pytest.raises(ValueError, match="x: expected an array in device memory, got one in host memory"):
        dense.apply(variables, host)


def on_a_gpu(monkeypatch, flags=""):
    monkeypatch.setattr(placement.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(placement.compat, "jaxlib_version", lambda: placement.RIGHT_SINCE)
    monkeypatch.setenv("XLA_FLAGS", flags)


def test_a_program_that_waits_for_its_copies_warns(monkeypatch):
    policy = te.remat.policy(offload=("fc1",), min_bytes=0)
    jax.jit(gradient(policy)).trace(X)  # nothing is copied on a CPU: filterwarnings makes a warning an error
    on_a_gpu(monkeypatch)
    with pytest.warns(
        te.remat.ExposedCopiesWarning, match="fc1_input is offloaded, but its copies won't hide .*remat.jit"
    ):
        jax.jit(gradient(policy)).trace(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.remat.jit(gradient(policy)).trace(X)
        with te.remat.hiding():
            jax.jit(gradient(policy)).trace(X)
        jax.jit(gradient(te.remat.policy(save=("fc1",)))).trace(X)
    on_a_gpu(monkeypatch, te.remat.xla_flags())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(gradient(policy)).trace(X)


def test_jit_is_jax_jit_with_options():
    def step(x, *, power):
        return x**power

    jitted = te.remat.jit(step, static_argnames="power", compiler_options={"xla_disable_hlo_passes": "dce"})
    assert jitted(X, power=2).sum() == 256
    assert str(inspect.signature(jitted)) == "(x, *, power)"
    assert te.remat.jit(lambda x: x + 1, donate_argnums=0)(jnp.ones(3)).sum() == 6


def test_options_are_known_to_the_running_compiler():
    """A flag with another name is an error of XLA; a pass with another name would be found by tests/aot."""
    for carry in (False, True):
        options = te.remat.compiler_options(carry=carry)
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
        assert "--xla_gpu_enable_pipelined_host_offloading=true" in te.remat.xla_flags(carry=carry).split()
        assert all(name in te.remat.xla_flags(carry=carry) for name in options)


def test_the_budget_of_a_layer():
    """The formula of docs/offload.md: 24 D link / (R b) tensors [T, D], of any number of tokens."""
    width, rate = 4096, 650e12
    for tokens in (1024, 16384):
        seconds = 24 * tokens * width**2 / rate
        assert te.remat.hideable_bytes(seconds) / (tokens * width * 2) == pytest.approx(4.16, rel=0.01)
    with pytest.raises(ValueError, match="seconds: expected a positive number, got 0"):
        te.remat.hideable_bytes(0)


def test_doctor_says_what_can_be_offloaded(monkeypatch):
    assert "can offload" in doctor.report()
    monkeypatch.setattr(placement, "memory_kinds", lambda: ("device",))
    monkeypatch.setattr(compat, "jaxlib_version", lambda: (0, 99, 0))
    lines = "\n".join(doctor._offload())
    assert "can't offload: cpu reaches no pinned_host memory, but device" in lines
    assert "not tested with this jaxlib 0.99.0; tested with 0.11.2" in lines
    assert offload.why_untested()
    on_a_gpu(monkeypatch)
    assert "jax.jit: copies won't hide under compute" in "\n".join(doctor._offload())
