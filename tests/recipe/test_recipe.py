"""Recipes: defaults, validation, JSON."""

import dataclasses
import json

import pytest

import te_jax.recipe as recipes
from te_jax.quant.format import E4M3, E5M2
from te_jax.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, recipe_from_json


def test_defaults():
    delayed, current, block = DelayedScaling(), CurrentScaling(), BlockScaling()
    assert (delayed.stateful, current.stateful, block.stateful) == (True, False, False)
    assert (delayed.name, current.name, block.name) == ("delayed", "current", "block")
    assert (delayed.margin, current.margin, block.margin) == (0, 0, 0)
    assert (delayed.power_of_two, current.power_of_two, block.power_of_two) == (False, False, True)
    assert (delayed.amax_history_len, delayed.amax_compute_algo) == (1024, "max")
    assert [delayed.format(role) for role in recipes.ROLES] == [E4M3, E4M3, E5M2]
    assert [block.format(role) for role in recipes.ROLES] == [E4M3, E4M3, E4M3]
    assert [delayed.fast_accumulation(gemm) for gemm in recipes.GEMMS] == [True, False, False]
    assert [block.fast_accumulation(gemm) for gemm in recipes.GEMMS] == [False, False, False]


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 1
    assert hash(DelayedScaling(margin=1)) == hash(DelayedScaling(margin=1))
    assert DelayedScaling(margin=1) != DelayedScaling()
    assert CurrentScaling() != DelayedScaling()


@pytest.mark.parametrize(
    ("kind", "fields", "error", "words"),
    [
        (DelayedScaling, {"x_format": "e3m4"}, ValueError, ("x_format", "e4m3", "'e3m4'")),
        (DelayedScaling, {"dgrad": "slow"}, ValueError, ("dgrad", "precise", "'slow'")),
        (DelayedScaling, {"amax_history_len": 0}, ValueError, ("amax_history_len", ">= 1", "0")),
        (DelayedScaling, {"amax_history_len": 16.0}, TypeError, ("amax_history_len", "int", "16.0")),
        (DelayedScaling, {"margin": -1}, ValueError, ("margin", "-1")),
        (DelayedScaling, {"margin": True}, TypeError, ("margin", "int", "True")),
        (DelayedScaling, {"amax_compute_algo": "mean"}, ValueError, ("amax_compute_algo", "most_recent", "'mean'")),
        (DelayedScaling, {"amax_axes": "data"}, TypeError, ("amax_axes", "tuple", "'data'")),
        (CurrentScaling, {"power_of_two": 1}, TypeError, ("power_of_two", "bool", "1")),
        (CurrentScaling, {"strict": "yes"}, TypeError, ("strict", "bool", "'yes'")),
        (
            CurrentScaling,
            {"x_format": "e5m2", "kernel_format": "e5m2"},
            ValueError,
            ("x_format and kernel_format", "fprop"),
        ),
        (CurrentScaling, {"x_format": "e5m2"}, ValueError, ("x_format and dy_format", "'e5m2'", "wgrad")),
        (DelayedScaling, {"kernel_format": "e5m2"}, ValueError, ("dy_format and kernel_format", "'e5m2'", "dgrad")),
        (BlockScaling, {"dy_format": "e5m2"}, ValueError, ("dy_format", "e4m3", "'e5m2'")),
        (BlockScaling, {"wgrad": "fast"}, ValueError, ("wgrad", "precise", "'fast'")),
        (Recipe, {}, TypeError, ("Recipe", "DelayedScaling")),
    ],
)
def test_invalid_fields_are_named(kind, fields, error, words):
    with pytest.raises(error) as caught:
        kind(**fields)
    for word in (kind.__name__, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("role", recipes.ROLES)
def test_any_one_role_may_be_e5m2(role):
    formats = {f"{other}_format": "e5m2" if other == role else "e4m3" for other in recipes.ROLES}
    assert CurrentScaling(**formats).format(role) == E5M2


def test_unknown_role_and_gemm():
    with pytest.raises(ValueError, match=r"role: expected one of .*'bias'"):
        CurrentScaling().format("bias")
    with pytest.raises(ValueError, match=r"gemm: expected one of .*'out'"):
        CurrentScaling().fast_accumulation("out")


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=16, margin=2, amax_compute_algo="most_recent", amax_axes=("data", "model")),
        CurrentScaling(power_of_two=True, strict=True, dy_format="e4m3"),
        BlockScaling(power_of_two=False),
    ],
)
def test_json_round_trip(recipe):
    assert recipe_from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ("version", "1", "2")),
        ({"recipe": "mxfp8"}, ("recipe", "delayed", "'mxfp8'")),
        ({"fields": {"history": 3}}, ("fields of delayed", "amax_history_len", "history")),
        ({"fields": {"margin": -3}}, ("margin", "-3")),
    ],
)
def test_json_errors(change, words):
    with pytest.raises(ValueError) as caught:
        recipe_from_json({**DelayedScaling().to_json(), **change})
    for word in words:
        assert word in str(caught.value)
