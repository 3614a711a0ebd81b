"""One machine for every custom call: a JAX primitive that works in every mesh regime, under vmap, and everywhere.

An operation describes itself by a :class:`Definition`; :class:`CustomCall` makes of it

  * a primitive, lowered on cpu and cuda to the custom call of the same name, elsewhere (or where the native library
    is missing, or does not take the shapes) to the jnp reference; batched as a loop, so that amax is per example;
  * the wrapping for the mesh at hand (``te_jax/parallel/mesh.py``):

    ==========  ===================================================================================================
    Manual      bound as it is, on one device's part; amax reduced over the axes that the caller names
    Explicit    ``shard_map`` over the explicit axes, with the specs that the operands' types show
    Auto        ``custom_partitioning``, which is inlined where there is a single device; ``custom_vmap`` around it,
                because ``custom_partitioning`` has no batching rule
    ==========  ===================================================================================================

  In each of them a shard runs the same ``Definition.local``.

Explicit meshes use ``shard_map`` and not ``auto_axes`` around ``custom_partitioning``, because a program with
``custom_partitioning`` over several devices can't be exported. A mesh that is manual over some axes and Auto over
others runs the reference: ``custom_partitioning`` is not told the names of the axes there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.ffi
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import compat, config, errors
from te_jax.parallel import mesh as mesh_lib
from te_jax.parallel.sharding import Reductions, ShardingRule
from te_jax.primitives import library
from te_jax.primitives.spec import Spec

NATIVE_PLATFORMS = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, repr=False)
class Definition:
    """What a custom call is. ``spec`` decides everything static; avals are abstract values of the operands.

    Attributes:
      name: the public function's name; the custom call's target and the primitive are ``te_jax_<name>``.
      spec_type: the class of its specs.
      operands: spec -> the operands' names, in order.
      check: (spec, *avals) -> None; raises ValueError or TypeError naming the operand.
      results: (spec, *avals) -> (shape, dtype) of each result.
      reference: (spec, *arrays) -> tuple of results, in jnp.
      why_not: (spec, *avals) -> why the handlers don't take these shapes, or None if they do.
      rule: (spec, *avals) -> how dimensions are tied together.
      local: (call, spec, reductions, *arrays) -> results of one shard; ``call(spec, *arrays)`` runs the primitive.
      aliases: spec -> {operand index: result index} that share a buffer.
    """

    name: str
    spec_type: type[Spec]
    operands: Callable[[Spec], tuple[str, ...]]
    check: Callable[..., None]
    results: Callable[..., tuple]
    reference: Callable[..., tuple]
    why_not: Callable[..., str | None]
    rule: Callable[..., ShardingRule]
    local: Callable[..., tuple]
    aliases: Callable[[Spec], dict[int, int]] = lambda spec: {}

    @property
    def target(self) -> str:
        return f"te_jax_{self.name}"

    def __repr__(self) -> str:
        return self.target


DEFINITIONS: dict[type[Spec], Definition] = {}
"""Every operation by the class of its specs."""


def targets() -> tuple[str, ...]:
    """The names of all custom calls, which are those of their primitives too."""
    return tuple(definition.target for definition in DEFINITIONS.values())


class CustomCall:
    """The primitive of a :class:`Definition`, and the function that runs it under any mesh."""

    def __init__(self, definition: Definition):
        self.definition = definition
        self.primitive = _primitive(definition)
        DEFINITIONS[definition.spec_type] = definition

    def __call__(self, spec: Spec, *operands: jax.Array, amax_axes: tuple[str, ...] | None = None) -> tuple:
        """Checks the operands and runs; returns the tuple of results that ``spec`` asks for.

        ``amax_axes``: the manual axes over which amax is reduced; None: those that the first operand varies over and
        the scale, the last one, does not.
        """
        _check(self.definition, spec, operands)
        if not mesh_lib.manual_axes():
            amax_axes = ()
        elif amax_axes is None:
            amax_axes = mesh_lib.amax_axes(operands[0], operands[-1])
        return _jitted(self, spec, tuple(amax_axes), config.custom_calls_enabled(), *operands)

    def bind(self, custom_call: bool, spec: Spec, *operands: jax.Array) -> tuple:
        """Binds the primitive. Operands are made to agree on the manual axes they vary over."""
        varying = frozenset().union(*map(compat.varying_axes, operands))
        operands = tuple(compat.pvary(x, varying) for x in operands)
        return tuple(self.primitive.bind(*operands, spec=spec, custom_call=custom_call))

    def run(self, spec: Spec, amax_axes: tuple[str, ...], custom_call: bool, *operands: jax.Array) -> tuple:
        """Runs in the regime of the operands' mesh."""
        regime = mesh_lib.regime(*operands)
        if regime.manual:
            # custom_partitioning doesn't learn the axes' names here, a reference is partitioned by XLA as it is.
            custom_call = custom_call and not regime.auto
        if regime.explicit:
            return self._explicit(spec, amax_axes, custom_call, regime, *operands)
        if regime.manual:
            call = functools.partial(self.bind, custom_call)
            return self.definition.local(call, spec, Reductions(amax=amax_axes), *operands)
        return _partitioned(self, spec, custom_call)(*operands)

    def _explicit(self, spec, amax_axes, custom_call, regime, *operands):
        """``shard_map`` over the explicit axes. Axes that are already manual stay so."""
        rule = self.definition.rule(spec, *map(jax.typeof, operands))
        sizes = {name: regime.mesh.shape[name] for name in regime.explicit}
        axes = rule.axes([(x.shape, jax.typeof(x).sharding.spec) for x in operands], (), sizes)
        reductions = rule.reductions(axes)
        reductions = Reductions(amax=amax_axes + reductions.amax, sums=reductions.sums)

        def shard(*operands):
            call = functools.partial(self.bind, custom_call and not regime.auto)
            return self.definition.local(call, spec, reductions, *operands)

        in_specs = rule.operand_specs(axes)
        operands = tuple(_reshard(x, spec, regime.explicit) for x, spec in zip(operands, in_specs, strict=True))
        return compat.shard_map(
            shard,
            mesh=regime.mesh,
            in_specs=in_specs,
            out_specs=rule.result_specs(axes),
            # All axes if all are explicit: vmap over a sharded dimension takes an axis away, without telling us.
            axis_names=set(regime.explicit) if regime.auto or regime.manual else set(),
            check_vma=compat.checks_varying_axes(),
        )(*operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _jitted(call: CustomCall, spec: Spec, amax_axes: tuple[str, ...], custom_call: bool, *operands) -> tuple:
    # jit, so that eager calls on sharded arrays are partitioned too; inlined, so that a program doesn't show it.
    return call.run(spec, amax_axes, custom_call, *operands)


def _check(definition: Definition, spec: Spec, operands: Sequence) -> None:
    """Raises ValueError or TypeError for what no platform takes."""
    names = definition.operands(spec)
    errors.check_value(
        len(operands) == len(names), definition.name, "operands", f"{len(names)} ({', '.join(names)})", len(operands)
    )
    for name, operand in zip(names, operands, strict=True):
        errors.check_value(
            not compat.in_host_memory(operand),
            definition.name,
            name,
            "an array in device memory",
            "one in host memory (move it with jax.device_put)",
        )
    definition.check(spec, *map(jax.typeof, operands))


def _reshard(x: jax.Array, spec: PartitionSpec, explicit: Sequence[str]) -> jax.Array:
    """Makes the type of x show ``spec``, moving data only if it shows another one."""
    current = tuple(jax.typeof(x).sharding.spec)
    wanted = tuple(spec)
    if current + (None,) * (x.ndim - len(current)) == wanted + (None,) * (x.ndim - len(wanted)):
        return x
    return compat.reshard(x, spec)


# Auto meshes


@functools.lru_cache(maxsize=None)
def _partitioned(call: CustomCall, spec: Spec, custom_call: bool) -> Callable[..., tuple]:
    """The function for Auto meshes. Cached, so that JAX sees one function per spec."""
    bind = functools.partial(call.bind, custom_call)
    function = custom_partitioning(functools.partial(bind, spec))
    function.def_partition(
        partition=functools.partial(_partition, call.definition, spec, bind),
        sharding_rule=lambda mesh, operands, results: _shardy_rule(call.definition, spec, operands),
    )

    @custom_vmap
    def batched(*operands):
        return function(*_refuse_export(operands))

    @batched.def_vmap
    def loop(axis_size, in_batched, *operands):
        outs = _loop(batched, in_batched, operands)
        return tuple(outs), (True,) * len(outs)

    return batched


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
            f"te_jax: jax.export: expected a program for one device, or one whose mesh is Explicit or Manual, got one for "
            f"{devices} devices whose mesh is Auto (jax can't export custom_partitioning)"
        )
    return [operand]


_not_exported = compat.Primitive("te_jax_not_exported")
_not_exported.def_impl(lambda x: x)
_not_exported.def_abstract_eval(lambda x: x)
compat.mlir.register_lowering(_not_exported, _lower_not_exported)


def _shardy_rule(definition: Definition, spec: Spec, operand_types) -> object:
    shapes = [jax.ShapeDtypeStruct(t.shape, jax.numpy.float32) for t in operand_types]
    return definition.rule(spec, *shapes).shardy()


def _partition(definition: Definition, spec: Spec, bind, mesh, operands, results):
    """The callback of ``custom_partitioning``: one shard's function, and the shardings that it needs and gives."""
    rule = definition.rule(spec, *operands)
    axes = rule.axes(
        [(x.shape, x.sharding.spec) for x in operands],
        [(x.shape, x.sharding.spec) for x in jax.tree.leaves(results)],
        dict(mesh.shape),
    )
    shard = functools.partial(definition.local, bind, spec, rule.reductions(axes))
    shardings = [
        tuple(NamedSharding(mesh, spec) for spec in specs)
        for specs in (rule.result_specs(axes), rule.operand_specs(axes))
    ]
    return mesh, shard, *shardings


# The primitive


def _primitive(definition: Definition) -> compat.Primitive:
    primitive = compat.Primitive(definition.target)
    primitive.multiple_results = True

    @functools.lru_cache(maxsize=None)
    def compiled(spec, custom_call):
        return jax.jit(functools.partial(primitive.bind, spec=spec, custom_call=custom_call))

    @primitive.def_impl
    def impl(*operands, spec, custom_call):
        return compiled(spec, custom_call)(*operands)

    @primitive.def_abstract_eval
    def abstract_eval(*avals, spec, custom_call):
        return [compat.shaped_array(shape, dtype, avals) for shape, dtype in definition.results(spec, *avals)]

    def batch(operands, dims, **params):
        in_batched = [d is not compat.not_mapped for d in dims]
        front = [jax.numpy.moveaxis(x, d, 0) if b else x for x, d, b in zip(operands, dims, in_batched, strict=True)]
        outs = _loop(functools.partial(primitive.bind, **params), in_batched, front)
        return outs, [0] * len(outs)

    def reference(*operands, spec, custom_call):
        return definition.reference(spec, *operands)

    fallback = compat.mlir.lower_fun(reference, multiple_results=True)

    def lower(platform, ctx, *operands, spec, custom_call):
        if not custom_call or definition.why_not(spec, *ctx.avals_in) or not native(platform):
            return fallback(ctx, *operands, spec=spec, custom_call=custom_call)
        rule = jax.ffi.ffi_lowering(definition.target, operand_output_aliases=definition.aliases(spec))
        return rule(ctx, *operands, spec=spec.attributes())

    compat.batching.primitive_batchers[primitive] = batch
    compat.mlir.register_lowering(primitive, fallback)
    for platform in NATIVE_PLATFORMS:
        compat.mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    return primitive


def native(platform: str) -> bool:
    """Whether a program lowered for ``platform`` calls the native library; registers the library's targets if so.

    A process without a CUDA backend lowers for CUDA only to look at the program or to compile it for a GPU that is
    elsewhere, so that gets the custom calls.
    """
    if platform == "cuda" and not library.has_cuda_backend():
        return True
    return library.ensure_registered(platform).available


def _loop(function, in_batched: Sequence[bool], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """``function`` on each example in turn. Batched operands and all results have the batch dimension first."""

    def loop(*operands):
        def example(batched):
            batched = iter(batched)
            return tuple(function(*(next(batched) if b else x for x, b in zip(operands, in_batched, strict=True))))

        return list(jax.lax.map(example, tuple(x for x, b in zip(operands, in_batched, strict=True) if b)))

    batch = _batch_sharding(in_batched, operands)
    if batch is None:
        return loop(*operands)
    mesh, axes = batch
    split = PartitionSpec(axes)
    return compat.shard_map(
        loop,
        mesh=mesh,
        in_specs=tuple(split if b else PartitionSpec() for b in in_batched),
        out_specs=split,
        axis_names=set(axes),
        check_vma=compat.checks_varying_axes(),
    )(*operands)


def _batch_sharding(in_batched, operands):
    """(mesh, axes) over which the batch dimension is split in an Explicit mesh, where a loop can't go over it."""
    for x, b in zip(operands, in_batched, strict=True):
        sharding = jax.typeof(x).sharding
        entry = sharding.spec[0] if b and len(sharding.spec) else None
        if entry is not None:
            return sharding.mesh, (entry,) if isinstance(entry, str) else tuple(entry)
    return None
