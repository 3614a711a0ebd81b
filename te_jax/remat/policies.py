"""Remat policies by name: what of a layer is kept on the device, what in host memory; the rest is recomputed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from te_jax.errors import check_type, check_value, message
from te_jax.remat import met, placement
from te_jax.remat import names as known

_PLACES = ("remat", "device", "offload")


@dataclasses.dataclass(frozen=True)
class Policy:
    """What ``te.remat.policy`` returns: a policy for ``jax.checkpoint``, ``nn.remat`` and ``nnx.remat``. Plain data.

    Attributes:
      save: the tensors that stay on the device.
      offload: the tensors that go to pinned host memory, where they have ``min_bytes``.
      min_bytes: below, a tensor of ``offload`` stays on the device.
    """

    save: frozenset[str]
    offload: frozenset[str]
    min_bytes: int

    def __call__(self, primitive: Any, *types: Any, **params: Any) -> Any:
        """What jax asks of a policy: whether the result of this equation is saved, offloaded or recomputed."""
        tensor = params.get("name")
        if not isinstance(tensor, str):  # no equation of checkpoint_name
            return _of_jax((), ())(primitive, *types, **params)
        size = _bytes(types[0]) if types else None  # jax 0.11 with JAX_REMAT3=1 tells no types
        met.record(self, tensor, size)
        large = size is None or size >= self.min_bytes
        if large and tensor in self.offload:
            placement.check_can_offload(tensor)
            placement.warn_if_exposed(tensor)
            return _of_jax((), (tensor,))(primitive, *types, **params)
        return _of_jax((tensor,) if self.keeps(tensor) else (), ())(primitive, *types, **params)

    def keeps(self, tensor: str) -> bool:
        """Whether a tensor of that name is kept, wherever."""
        kept = self.save | self.offload
        return tensor in kept or known.are_stats(tensor) or any(tensor == known.scale_of(of) for of in kept)


@functools.cache
def _of_jax(save: tuple[str, ...], offload: tuple[str, ...]) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=save,
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst=placement.PINNED,
    )


def policy(
    save: Iterable[str] | Mapping[str, str] = (),
    offload: Iterable[str] = (),
    *,
    min_bytes: int = 1 << 20,
    extra_names: Iterable[str] = (),
) -> Policy:
    """A remat policy: ``save`` stays on the device, ``offload`` goes to host memory, everything else is recomputed.

    The scales, amaxes and statistics of a tensor stay on the device wherever it goes, so that nothing is quantized
    again for them.

    Args:
      save: names of modules (their inputs are meant) or of tensors (``te.remat.NAMES``); or, as MaxText has it, a
        dictionary of names to "remat", "device" or "offload".
      offload: names, with ``save`` as names.
      min_bytes: smaller tensors of ``offload`` stay on the device: their copies cost more than they free. The size is
        that of the whole array, of one device's part inside of ``shard_map``. (With ``JAX_REMAT3=1`` jax 0.11 doesn't
        tell policies about sizes: everything named in ``offload`` is offloaded.)
      extra_names: names of your own, which ``save`` and ``offload`` may have too: of modules in a chain
        (``<name>_input`` is what they save first) or of ``jax.ad_checkpoint.checkpoint_name``.

    Names that no tensor of a program has, and a ``min_bytes`` that is above all of them, are seen when it is traced:
    ``te.remat.jit`` warns (``te.remat.UnusedNamesWarning``), ``te.remat.report`` says what a policy has met.

    Returns:
      A policy, for ``jax.checkpoint(..., policy=)`` and its like. Two that were made alike are equal.

    Raises:
      ValueError: a name that is unknown, a tensor that is to be in both places, names of one tensor with different
        places in a dictionary. When a program is traced: a name to offload on a platform without pinned host memory.
      TypeError: names that are no strings.
    """
    extra = _names("extra_names", extra_names)
    if isinstance(save, Mapping):
        check_value(not tuple(offload), "remat.policy", "offload", "nothing beside a dictionary", repr(offload))
        for name in _names("save", save.keys()):
            _check_known(f"save[{name!r}]", (name,), extra)
        _check_agreement(save, extra)
        save, offload = _from_mapping(save)
    saved, offloaded = _names("save", save), _names("offload", offload)
    for argument, asked in (("save", saved), ("offload", offloaded)):
        _check_known(argument, asked, extra)
    on_device, on_host = (frozenset(_tensors(asked, extra)) for asked in (saved, offloaded))
    both = sorted(on_device & on_host)
    check_value(
        not both, "remat.policy", "save and offload", "each tensor in one of them", f"{', '.join(both)} in both"
    )
    ok = isinstance(min_bytes, int) and not isinstance(min_bytes, bool) and min_bytes >= 0
    check_value(ok, "remat.policy", "min_bytes", "a number of bytes", repr(min_bytes))
    return Policy(on_device, on_host, min_bytes)


def report(policy: Policy) -> dict[str, str]:
    """What a policy has met in all programs that this process has traced gradients of, and what becomes of it.

      jax.jit(step).trace(state, batch)
      print(*te.remat.report(policy).items(), sep="\\n")

    Sizes are those of ``min_bytes``. Policies that were made alike are one.

    Returns:
      tensor -> "on the device", "offloaded", "recomputed" (with the most bytes that one had), or "never met".

    Raises:
      TypeError: not a policy of ``te.remat.policy``.
    """
    check_type(isinstance(policy, Policy), "remat.report", "policy", "one of te.remat.policy(...)", repr(policy))
    sizes, missing = met.of(policy), set(met.unmet(policy))
    found = {name: _fate(policy, name, size) for name, size in sizes.items()}
    return dict(sorted((found | dict.fromkeys(missing, "never met")).items()))


def _fate(policy: Policy, tensor: str, size: int | None) -> str:
    large = size is None or size >= policy.min_bytes
    most = "" if size is None else f", {size} bytes at most"
    if tensor in policy.offload:
        return f"offloaded{most}" if large else f"on the device{most}: below min_bytes"
    return f"{'on the device' if policy.keeps(tensor) else 'recomputed'}{most}"


def _names(argument: str, asked: Any) -> tuple[str, ...]:
    ok = isinstance(asked, Iterable) and not isinstance(asked, str | bytes | Mapping)
    check_type(ok, "remat.policy", argument, "names, e.g. ('fc1',)", repr(asked))
    asked = tuple(asked)
    for name in asked:
        check_type(isinstance(name, str), "remat.policy", argument, "names", repr(name))
    return asked


def _from_mapping(places: Mapping[str, str]) -> tuple[list[str], ...]:
    """The names of a dictionary that are to stay on the device, and those to be offloaded."""
    for name, place in places.items():
        check_value(place in _PLACES, "remat.policy", f"save[{name!r}]", " or ".join(map(repr, _PLACES)), repr(place))
    return tuple([name for name, place in places.items() if place == wanted] for wanted in ("device", "offload"))


def _check_agreement(places: Mapping[str, str], extra: tuple[str, ...]) -> None:
    """Raises ValueError where names of one tensor are to be in several places.

    Not for "remat" of another spelling of MaxText's for what is kept: its dictionaries have all spellings.
    """
    asked: dict[str, dict[str, str]] = {}
    for name, place in places.items():
        for tensor in _tensors((name,), extra):
            asked.setdefault(tensor, {})[name] = place
    for tensor, named in asked.items():
        kept = [name for name, place in named.items() if place != "remat"]
        said = {name: place for name, place in named.items() if place != "remat" or not _is_filler(name, kept)}
        got = ", ".join(f"{name!r}: {place!r}" for name, place in said.items())
        expected = f"one place for names of one tensor, {tensor}"
        check_value(len(set(said.values())) <= 1, "remat.policy", "save", expected, got)


def _is_filler(name: str, kept: Iterable[str]) -> bool:
    """Whether the name says nothing beside those that are kept."""
    return any(name in one and any(k in other for k in kept) for one, other in known.ALTERNATIVES)


def _check_known(argument: str, asked: Iterable[str], extra: tuple[str, ...]) -> None:
    of_extra = {f"{name}_{tensor}" for name in extra for tensor in ("input", "kernel")}
    for name in asked:
        if name in known.NAMES or name in extra or name in of_extra:
            continue
        near = difflib.get_close_matches(name, (*known.NAMES, *extra), n=1)
        names, others = ", ".join(known.NAMES), ", ".join(extra) or "none"
        hint = f"; did you mean {near[0]!r}?" if near else ""
        expected = f"a name of te.remat.NAMES ({names}) or of extra_names ({others})"
        raise ValueError(message("remat.policy", argument, expected, f"{name!r}{hint}"))


def _tensors(asked: Iterable[str], extra: tuple[str, ...]) -> Iterable[str]:
    """The tensors that the names mean: one of ``extra_names`` may be a module's or a tensor's."""
    for name in asked:
        yield known.tensor_of(name)
        if name in extra:
            yield f"{name}_input"


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
