"""Where outputs of programs come from, and scans that update stacked buffers in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from te_jax import programs

X = jnp.arange(6.0).reshape(2, 3)


def scanned(f, *stacks, carry=0.0, reverse=False):
    return lax.scan(lambda c, x: (c + 1, f(*x)), carry, stacks, reverse=reverse)[1]


MARKED = functools.partial(checkpoint_name, name="mark")


def both(f):
    """A value as two outputs, of which one is made from it by f; and what else is made of it."""

    def made(x, p):
        value = MARKED(x * 2)
        return value, *f(value, x)

    return made


OUTPUTS = {
    "the same": (both(lambda m, x: (m,)), "alone"),
    "cast and back": (both(lambda m, x: (m.astype(jnp.bfloat16).astype(jnp.float32),)), "alone"),
    "a term": (both(lambda m, x: (jnp.sin(x) + m,)), "in a sum"),
    "in a scan": (lambda x, p: scanned(lambda r: (MARKED(r * 2).reshape(3, 1),) * 2, x), "alone"),
    "in jit and remat": (lambda x, p: jax.jit(jax.checkpoint(lambda x: both(lambda m, x: (m,))(x, 0)))(x), "alone"),
    "a term in a scan": (lambda x, p: scanned(lambda r: both(lambda m, r: (m + r,))(r, p), x), "in a sum"),
    "twice": (both(lambda m, x: (m + m,)), None),
    "scaled": (both(lambda m, x: (m * 2,)), None),
    "zero": (both(lambda m, x: (jnp.zeros_like(m),)), None),
    "another's": (both(lambda m, x: (MARKED(x * 2),)), None),
    "another call's": (lambda x, p: [jax.jit(MARKED)(x), jax.jit(MARKED)(x * 2)], None),
    "read by another output": (both(lambda m, x: (m, m @ x.T)), None),
    "read in a scan": (lambda x, p: scanned(lambda r: both(lambda m, r: (m, m.sum()))(r, p), x), None),
    "another output too": (both(lambda m, x: (m, m)), None),
    "carried too": (lambda x, p: (lambda c, o: (*o, c))(*lax.scan(
        lambda c, r: (lambda m: (m, (m, m)))(MARKED(c + r)), x[0], x)), None),
    "another name": (lambda x, p: (checkpoint_name(x, "other"),) * 2, None),
    "a sum": (lambda x, p: (MARKED(x) + MARKED(x * 2),) * 2, None),
    "carried": (lambda x, p: (lax.scan(lambda c, r: (MARKED(c + r), None), x[0], x)[0],) * 2, None),
    "a branch": (lambda x, p: (lax.cond(p, lambda x: MARKED(x), jnp.zeros_like, x),) * 2, None),
    "an argument": (lambda x, p: (x, x), None),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_where_an_output_goes(name):
    function, kind = OUTPUTS[name]
    program, _ = programs.trace(function, X, True)
    assert program.only_result(0, 1, "mark") == kind


def update(buffer, x):
    return MARKED(buffer + x)


CASES = {
    "scan": lambda b, x: scanned(update, b, x),
    "reverse, with a carry and other outputs": lambda b, x: lax.scan(
        lambda c, v: (c * 2 + v[1].sum(), (v[1] * c, update(*v), c)), 1.0, (b, x), reverse=True
    )[1][1],
    "in jit": lambda b, x: jax.jit(lambda b, x: scanned(update, b, x))(b, x),
    "remat in it": lambda b, x: scanned(jax.checkpoint(update), b, x),
    "two levels": lambda b, x: scanned(
        lambda b, x: scanned(update, b, x), b.reshape(2, 3, 1), x.reshape(2, 3, 1)
    ).reshape(2, 3),
    "no scan": update,
    "nothing that is known": lambda b, x: lax.map(lambda v: v[0] + v[1], (b[::-1], x))[::-1],
}


@pytest.mark.parametrize("name", CASES)
def test_in_place(name):
    """The values of the function itself; the scans that update the buffer carry it and neither take nor give it."""
    function = lambda other, b, x: (other + 1, CASES[name](b, x))  # noqa: E731
    program, _ = programs.trace(function, 1.0, X, X * 10)
    run = functools.partial(program.in_place, updates={1: 1})
    for got, want in zip(run(1.0, X, X * 10), function(1.0, X, X * 10), strict=True):
        np.testing.assert_array_equal(got, want)
    if name not in ("two levels", "no scan", "nothing that is known"):
        (scan,) = [eqn for eqn in jax.make_jaxpr(run)(1.0, X, X * 10).jaxpr.eqns if eqn.primitive.name == "scan"]
        body = scan.params["jaxpr"].jaxpr
        assert [v.aval.shape for v in body.outvars].count((2, 3)) == 1  # the whole stack, carried
        assert "dynamic_update_slice" in str(body)
