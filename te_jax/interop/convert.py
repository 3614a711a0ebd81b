"""Variables of another library as those of a te_jax model, and parameters back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from te_jax.errors import check_collections, check_type, check_value, message, warn
from te_jax.fusion import probe
from te_jax.fusion.run import Run
from te_jax.interop import rules as mapping
from te_jax.interop import scales
from te_jax.interop.rules import Part, Rules
from te_jax.quant.format import format_of
from te_jax.quant.state import COLLECTION, LEAVES
from te_jax.run_variables import GROUPED


def import_params(
    like: Any, source: Any, *, rules: Rules | None = None, ignore: Sequence[str] = (), cast: bool = False
) -> Any:
    """Parameters of a Flax model as those of a te_jax model.

    Args:
      like: the te_jax model's ``params``, arrays or ``jax.ShapeDtypeStruct`` (``jax.eval_shape`` of its ``init``).
      source: the other model's ``params``.
      rules: te_jax path -> other path, where names differ (te_jax/interop/rules.py says how).
      ignore: prefixes of source paths that are not used; anything else that is left over is an error.
      cast: whether floating-point dtypes may differ; ``like``'s are returned.

    Returns:
      A tree as ``like``.

    Raises:
      ValueError, TypeError: naming the parameter, what was expected and what the source has.
    """
    op, rules = "interop.import_params", {} if rules is None else rules
    mapping.check(op, rules)
    wanted, other = mapping.flatten(like), mapping.flatten(source)
    mapping.check_used(op, wanted, rules)
    out, used = [], set()
    for name, want in wanted.items():
        found = mapping.parts(op, name, other, rules)
        used.update(path for part in found for path in part.paths)
        out.append(mapping.gather(op, name, want, found, other, cast))
    left = [path for path in other if path not in used and not _below(path, ignore)]
    check_value(not left, op, "source", "every parameter to be used (or listed in ignore)", f"left over: {left[:6]}")
    structure = jax.tree.structure(like, is_leaf=lambda x: hasattr(x, "unbox"))
    return jax.tree.unflatten(structure, out)


def export_params(params: Any, like: Any, *, rules: Rules | None = None, cast: bool = False) -> Any:
    """Parameters of a te_jax model as those of a Flax model: the inverse of ``import_params``, with the same rules.

    Args:
      params: the te_jax model's; kernels in FP8 have to be ``te.dequantize_params``-ed before.
      like: the other model's ``params``, arrays or ``jax.ShapeDtypeStruct``.
      rules, cast: as for ``import_params``.

    Returns:
      A tree as ``like``, and nothing of FP8.

    Raises:
      ValueError, TypeError: naming the parameter; also where ``like`` has one that no te_jax parameter gives.
    """
    op, rules = "interop.export_params", {} if rules is None else rules
    mapping.check(op, rules)
    ours, other = mapping.flatten(params), mapping.flatten(like)
    mapping.check_used(op, ours, rules)
    out: dict[str, Any] = {}
    for name, value in ours.items():
        out |= mapping.scatter(op, name, value, mapping.parts(op, name, other, rules), other, cast)
    left = [path for path in other if path not in out]
    check_value(not left, op, "like", "parameters that the te_jax model has too", f"left over: {left[:6]}")
    structure = jax.tree.structure(like, is_leaf=lambda x: hasattr(x, "unbox"))
    return jax.tree.unflatten(structure, [out[path] for path in other])


def import_variables(
    module: nn.Module,
    source: Mapping[str, Any],
    *args: Any,
    rules: Rules | None = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Parameters and FP8 scales of another library as the variables of a te_jax model.

    Understood are Flax's ``fp8_ops`` (``_overwrite_with_gradient``: ``nn.Dense(dot_general_cls=...)``) and
    TransformerEngine for JAX (``fp8_metas``, or where its ``make_dot_general_cls`` puts them). The first step after it
    quantizes with the scales that the other library would have used. Linears that are one here and several there get
    the smallest of their scales. A history that is longer than the recipe's keeps its newest steps and its maximum.

    Args:
      module: the te_jax model.
      source: the other model's variables, with ``params``.
      *args, **kwargs: as for ``module.init`` without the key, for shapes; arrays or ``jax.ShapeDtypeStruct``.
      rules, ignore, cast: as for ``import_params``.

    Returns:
      What ``module.init`` makes, with the source's values. Quantizers that the source has no scales for are new: they
      start from the amax of their first tensor.

    Warns:
      UserWarning: FP8 state is made new, or the source's is dropped because the module's recipe keeps none.

    Raises:
      ValueError, TypeError: as ``import_params``; scales that the recipe would not give; a collection of another kind.
    """
    op, rules = "interop.import_variables", {} if rules is None else rules
    check_type(isinstance(module, nn.Module), op, "module", "a flax.linen module", type(module).__name__)
    check_collections(op, "source", source)
    check_value("params" in source, op, "source", "a 'params' collection", sorted(source))
    with probe.finding_runs() as runs:
        like = jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args, **kwargs), *args)
    others = sorted(set(like) - {"params", COLLECTION})
    check_value(not others, op, "module", "params and FP8 state alone", f"collections {others}")
    params = import_params(like["params"], source["params"], rules=rules, ignore=ignore, cast=cast)
    has_scales = any(jax.tree.leaves(source.get(name, {})) for name in (scales.FLAX, scales.TRANSFORMER_ENGINE))
    if COLLECTION not in like:
        if has_scales:
            got = "FP8 scales of the source, which are dropped"
            warn(message(op, "module", "a recipe that keeps state (DelayedScaling)", got))
        return {"params": params}
    state, new = _import_state(op, like[COLLECTION], source, runs, rules)
    if new:
        what = f"{new[:6]}{' ...' if len(new) > 6 else ''}, which start anew"
        warn(message(op, "source", "FP8 scales of every linear", f"none of {what}"))
    return {"params": params, COLLECTION: state}


def _import_state(
    op: str, like: Any, source: Mapping[str, Any], runs: Mapping[str, Run], rules: Rules
) -> tuple[Any, list[str]]:
    """The FP8 state, and the quantizers that the source has no scales of."""
    collections = {
        name: mapping.flatten(source[name])
        for name in (scales.FLAX, scales.TRANSFORMER_ENGINE, "params")
        if name in source
    }
    new: list[str] = []

    def leaves_of(path: tuple, shapes: Any) -> Any:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        parent = where.rpartition("/")[0]
        if where.endswith(GROUPED):  # neither library has scales of groups
            new.append(where)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        check_value(where in runs, op, f"{COLLECTION}/{where}", "the state of a chain of ops", "no chain there")
        rows: list[scales.Scales | None] = []
        for (link, role), quantizer in zip(runs[where].quantizers, probe.quantizers(runs[where]), strict=True):
            info = runs[where].links[link]
            rows.append(None)
            if "kernel" in info.op.roles:  # a linear; others are quantizers at places that only te_jax has
                found = mapping.parts(op, _join(parent, info.scope, "kernel"), collections["params"], rules)
                rows[-1] = _row(collections, found, role, format_of(quantizer.format).max)
            if rows[-1] is None:
                new.append(_join(parent, quantizer.name))
        if all(row is None for row in rows):
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        fp8_max = [format_of(q.format).max for q in probe.quantizers(runs[where])]
        made = scales.leaves(op, where, rows, fp8_max, runs[where].stateful_recipe)
        for name, leaf in shapes.items():
            got = list(made[name].shape)
            check_value(got == list(leaf.shape), op, f"{COLLECTION}/{where}/{name}", f"shape {list(leaf.shape)}", got)
        return made

    def is_run(node: Any) -> bool:
        return isinstance(node, Mapping) and set(node) == LEAVES

    return jax.tree_util.tree_map_with_path(leaves_of, like, is_leaf=is_run), new


def _row(collections: Mapping[str, Any], found: Sequence[Part], role: str, fp8_max: float) -> scales.Scales | None:
    """The scales of one quantizer, stacked over layers if the source has these apart."""
    parts = []
    for part in found:
        layers = [scales.find(collections, path, role, fp8_max) for path in part.paths]
        present = [layer for layer in layers if layer is not None]
        if len(present) < len(layers):
            return None
        stacked = scales.Scales(*(np.stack(values) for values in zip(*present, strict=True)))
        parts.append(stacked if part.stacked else present[0])
    return scales.combine(parts)


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(prefix + "/") for prefix in prefixes)
