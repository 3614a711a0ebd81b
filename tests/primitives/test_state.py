"""scale_read and scale_write against their reference, bit for bit, whatever was done to the state."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import compat, config, primitives
from te_jax.primitives import ScaleReadSpec, ScaleWriteSpec
from te_jax.quant import state
from te_jax.recipe import DelayedScaling
from te_jax.testing import hlo, state_cases

pytestmark = pytest.mark.skipif(
    not primitives.library.status("cpu").available, reason="the CPU module is not built: there is no custom call"
)

Q = state_cases.QUANTIZERS


def read_spec(**fields):
    return ScaleReadSpec(formats=state_cases.FORMATS, **fields)


def write_spec(used="1" * Q, **fields):
    return ScaleWriteSpec(formats=state_cases.FORMATS, used=used, **fields)


def both(function, *args):
    """The results of the custom calls and of the reference."""
    out = []
    for enabled in (True, False):
        with config.custom_calls(enabled):
            compiled = jax.jit(function).lower(*args).compile()
            assert bool(hlo.count_custom_calls(compiled.as_text())) == enabled
            out.append(jax.tree.map(np.asarray, compiled(*args)))
    return out


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("history", [1, 2, 37, 1024])
@pytest.mark.parametrize(("margin", "most_recent"), [(0, False), (3, True)])
def test_equal_to_the_reference(history, margin, most_recent):
    fields = {"margin": margin, "most_recent": most_recent}

    def step(leaves, amaxes):
        read = primitives.scale_read(leaves, read_spec(**fields))
        return read, primitives.scale_write(leaves, list(amaxes), write_spec(**fields))

    seen = collections.Counter()
    compiled = None
    for leaves, amaxes in state_cases.cases(history):
        if compiled is None:
            compiled = []
            for enabled in (True, False):
                with config.custom_calls(enabled):
                    compiled.append(jax.jit(step).lower(leaves, amaxes).compile())
                    assert hlo.count_custom_calls(compiled[-1].as_text()).total() == 2 * enabled
        native, reference = (jax.tree.map(np.asarray, run(leaves, amaxes)) for run in compiled)
        assert_same_bits(native, reference)
        seen.update("nan" if np.isnan(s) else "unseeded" if s == 0 else "seeded" for s in native[0])
    assert min(seen[kind] for kind in ("nan", "unseeded", "seeded")) > 5  # the cases are not all of a kind


def test_rows_that_were_not_used_are_zero():
    leaves, amaxes = next(iter(state_cases.cases(8)))
    used = "101100"

    def write(leaves):
        rows = [i for i in range(Q) if used[i] == "1"]
        spec = write_spec(used)
        return primitives.scale_write(leaves, [amaxes[i] for i in rows], spec)

    native, reference = both(write, leaves)
    assert_same_bits(native, reference)
    for leaf in native.values():
        np.testing.assert_array_equal(leaf[[1, 4, 5]], 0)
    assert (native["uses"][[0, 2, 3]] != 0).any(-1).all()


def test_leaves_of_another_dtype_are_read_in_float32_and_written_in_theirs():
    leaves, amaxes = next(iter(state_cases.cases(8)))
    halves = {name: leaf.astype(jnp.bfloat16) for name, leaf in leaves.items()}
    wide = {name: leaf.astype(jnp.float32) for name, leaf in halves.items()}

    def step(leaves):
        scale = primitives.scale_read(leaves, read_spec())
        return scale, primitives.scale_write(leaves, list(amaxes), write_spec())

    (scale, new), (want_scale, want) = step(halves), step(wide)
    assert_same_bits(scale, want_scale)
    for name, leaf in new.items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, want[name].astype(jnp.bfloat16))


def test_nothing_is_sliced_or_stacked_around_them():
    leaves, _ = next(iter(state_cases.cases(8)))

    def step(leaves, *amaxes):
        return primitives.scale_read(leaves, read_spec()), primitives.scale_write(leaves, amaxes, write_spec())

    text = jax.jit(step).lower(leaves, *(jnp.float32(1),) * Q).compile().as_text()
    opcodes = set(re.findall(r" ([a-z][\w-]*)\(", text[text.index("ENTRY") :].partition("\n")[2]))
    assert opcodes <= {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_replicated_in_a_mesh(kind):
    leaves, amaxes = next(iter(state_cases.cases(8)))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))

    def step(leaves, amaxes):
        read = primitives.scale_read(leaves, read_spec())
        return read, primitives.scale_write(leaves, list(amaxes), write_spec())

    want = jax.jit(step)(leaves, amaxes)
    with jax.set_mesh(mesh):
        everywhere = jax.device_put((leaves, amaxes), NamedSharding(mesh, P()))
        compiled = jax.jit(step).lower(*everywhere).compile()
        assert_same_bits(compiled(*everywhere), want)
    assert hlo.count_custom_calls(compiled.as_text()) == {"te_jax_scale_read": 1, "te_jax_scale_write": 1}
    assert not hlo.count_collectives(compiled.as_text())


def test_pipeline_stages_keep_their_own():
    """In a shard_map the state may vary over an axis; scales vary with it, and over nothing else."""
    cases = [leaves for leaves, _ in state_cases.cases(8)][:4]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

    def step(leaves):
        leaves = {name: leaf[0] for name, leaf in leaves.items()}
        scales = primitives.scale_read(leaves, read_spec())
        assert {compat.varying_axes(scale) for scale in scales} == {frozenset({"stage"})}
        new = primitives.scale_write(leaves, [jnp.float32(2)] * Q, write_spec())
        return jnp.stack(scales)[None], {name: leaf[None] for name, leaf in new.items()}

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"))
    scales, new = jax.jit(mapped)(stacked)
    for i, leaves in enumerate(cases):
        want = primitives.scale_read(leaves, read_spec())
        np.testing.assert_array_equal(scales[i], np.stack(want))
        wanted = primitives.scale_write(leaves, [jnp.float32(2)] * Q, write_spec())
        assert_same_bits({name: leaf[i] for name, leaf in new.items()}, wanted)


def test_vmap_scan_and_remat():
    cases = list(state_cases.cases(8))[:3]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)

    def step(leaves, amaxes):
        read = primitives.scale_read(leaves, read_spec())
        return jnp.stack(read), primitives.scale_write(leaves, list(amaxes), write_spec())

    want = [jax.jit(step)(*case) for case in cases]
    mapped = jax.jit(jax.vmap(step))(*stacked)
    scanned = jax.jit(lambda s: jax.lax.scan(lambda c, case: (c, jax.checkpoint(step)(*case)), 0, s)[1])(stacked)
    for i, one in enumerate(want):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], mapped), one)
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], scanned), one)


LEAVES = state.init(2, DelayedScaling(amax_history_len=4))
ONE = jnp.float32(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: primitives.scale_read(LEAVES, ScaleReadSpec(formats="e4m3")),
            r"scale_read: amax_history: expected shape \(1, at least 1\), got \(2, 4\)",
        ),
        (
            lambda: primitives.scale_read({**LEAVES, "uses": jnp.zeros((2, 3))}, ScaleReadSpec(formats="e4m3 e4m3")),
            r"scale_read: uses: expected shape \(2, 66\), got \(2, 3\)",
        ),
        (
            lambda: primitives.scale_read({"scale": ONE}, ScaleReadSpec(formats="e4m3")),
            r"scale_read: leaves: expected \['amax_history', 'scale', 'uses'\], got \['scale'\]",
        ),
        (
            lambda: primitives.scale_write(LEAVES, [ONE], ScaleWriteSpec(formats="e4m3 e4m3", used="11")),
            r"scale_write: amaxes: expected 2 \(one for each used\), got 1",
        ),
        (
            lambda: primitives.scale_write(LEAVES, [ONE], ScaleWriteSpec(formats="e4m3 e4m3", used="1")),
            r"scale_write: used: expected 0 or 1 for each of 2 quantizers, got '1'",
        ),
        (
            lambda: primitives.scale_write(LEAVES, [jnp.ones(2)], ScaleWriteSpec(formats="e4m3 e4m3", used="01")),
            r"scale_write: amaxes\[1\]: expected shape \(\), got \(2,\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
