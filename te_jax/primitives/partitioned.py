"""Auto meshes: ``custom_partitioning``, inlined where there is one device, and the batching rule that it lacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from te_jax import compat
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives.definition import Definition

Batched = tuple[tuple[bool, ...], ...]
"""For each batch dimension, the outermost first: which operands have it. All results have all of them, first."""


@dataclasses.dataclass(frozen=True)
class Partitionable:
    """What is partitioned, if it is no ``Definition``: those of its fields that are read here."""

    rule: Callable[..., ShardingRule]
    local: Callable[..., tuple]
    examples: Callable[..., tuple]


@functools.cache
def partitioned(
    definition: Definition | Partitionable, bind: Callable, spec: Any, batched: Batched = ()
) -> Callable[..., tuple]:
    """The function of operands that runs ``definition`` in an Auto mesh, in a loop over every batch dimension.

    A batch dimension is one more dimension that may be sharded: shards loop over their own examples.
    ``bind(spec, *operands)`` runs the primitive. Cached, so that JAX sees one function per spec.
    """
    function = custom_partitioning(_over_examples(definition, functools.partial(bind, spec), batched))
    function.def_partition(
        partition=functools.partial(_partition, definition, spec, bind, batched),
        sharding_rule=lambda mesh, operands, results: _rule(definition, spec, batched, operands).shardy(),
        decode_shardings=False,  # jax refuses a mesh axis that Shardy has split, before we are asked
    )

    @custom_vmap
    def batchable(*operands):
        return function(*_refuse_export(operands))

    @batchable.def_vmap
    def vmap_rule(axis_size, in_batched, *operands):
        outs = partitioned(definition, bind, spec, (tuple(in_batched), *batched))(*operands)
        return outs, (True,) * len(outs)

    return batchable


def _over_examples(definition: Definition | Partitionable, function: Callable, batched: Batched) -> Callable:
    for in_batched in reversed(batched):
        function = functools.partial(definition.examples, function, in_batched)
    return function


def _rule(definition: Definition | Partitionable, spec: Any, batched: Batched, operands: Sequence) -> ShardingRule:
    """The rule of the operation on one example, with a factor more for every batch dimension."""
    shapes = [operand.shape[sum(level[i] for level in batched) :] for i, operand in enumerate(operands)]
    rule = definition.rule(spec, *(jax.ShapeDtypeStruct(shape, jax.numpy.float32) for shape in shapes))
    return rule.batched(batched)


def _refuse_export(operands: tuple) -> tuple:
    """The operands; a program with ``custom_partitioning`` over several devices, lowered for export, is an error.

    JAX refuses it too, with a message about host callbacks.
    """
    return (*operands[:-1], _not_exported.bind(operands[-1]))


def _lower_not_exported(ctx, operand):
    module = ctx.module_context
    devices = getattr(module.axis_context, "num_devices", 1)
    if module.lowering_parameters.for_export and devices > 1:
        raise NotImplementedError(
            "te_jax: jax.export: expected a program for one device, or one whose mesh is Explicit or Manual, got one "
            f"for {devices} devices whose mesh is Auto (jax can't export custom_partitioning)"
        )
    return [operand]


def refuse_derivative(primals, tangents, **params):
    """The derivative of every primitive of te_jax."""
    del primals, tangents, params
    raise NotImplementedError(
        "te_jax: expected first derivatives in reverse mode (jax.grad, jax.vjp) of a chain or module, got a derivative "
        "of a quantized primitive or a second derivative; recipe=None has second derivatives, where there is attention "
        "with attention_implementation='xla'"
    )


_not_exported = compat.Primitive("te_jax_not_exported")
_not_exported.def_impl(lambda x: x)
_not_exported.def_abstract_eval(lambda x: x)
compat.mlir.register_lowering(_not_exported, _lower_not_exported)
compat.ad.primitive_jvps[_not_exported] = refuse_derivative


def _partition(
    definition: Definition | Partitionable, spec: Any, bind: Callable, batched: Batched, mesh, operands, results
):
    """The callback of ``custom_partitioning``: one shard's function, and the shardings that it needs and gives."""
    rule = _rule(definition, spec, batched, operands)
    operand_specs, result_specs = (
        [(x.shape, compat.decoded_spec(x.sharding, mesh)) for x in arrays]
        for arrays in (operands, jax.tree.leaves(results))
    )
    axes = rule.axes(operand_specs, result_specs, dict(mesh.shape))

    def shard(*operands):
        # The callback runs under the mesh of the program, which may be an Explicit one that was made Auto: jax 0.12
        # would type scalars by it and emit sharding constraints that nothing lowers (jax#34811).
        with compat.no_mesh():
            local = functools.partial(definition.local, bind, spec, rule.reductions(axes))
            return _over_examples(definition, local, batched)(*operands)

    shardings = [
        tuple(NamedSharding(mesh, spec) for spec in specs)
        for specs in (rule.result_specs(axes), rule.operand_specs(axes))
    ]
    return mesh, shard, *shardings
