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
``custom_partitioning`` over several devices can't be exported. Mixed meshes: Explicit and Auto axes all become Auto;
Manual and Auto axes run the reference, because ``custom_partitioning`` is not told the names of the axes there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.ffi
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import compat, config, errors
from te_jax.parallel import mesh as mesh_lib
from te_jax.parallel.sharding import Reductions
from te_jax.primitives import cudnn, library
from te_jax.primitives.definition import DEFINITIONS, Definition
from te_jax.primitives.partitioned import partitioned, refuse_derivative
from te_jax.primitives.spec import Spec

NATIVE_PLATFORMS = ("cpu", "cuda")


class CustomCall:
    """The primitive of a :class:`Definition`, and the function that runs it under any mesh."""

    def __init__(self, definition: Definition):
        self.definition = definition
        self.primitive = _primitive(definition)
        # (spec, *operands) -> results, by whether a custom call is wanted where it can be had.
        self.bind = {wanted: functools.partial(self._bind, wanted) for wanted in (False, True)}
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

    def _bind(self, custom_call: bool, spec: Spec, *operands: jax.Array) -> tuple:
        """Binds the primitive. Operands are made to agree on the manual axes they vary over."""
        varying = self.definition.varying(spec, *operands)
        operands = tuple(compat.pvary(x, varying) for x in operands)
        return tuple(self.primitive.bind(*operands, spec=spec, custom_call=custom_call))

    def run(self, spec: Spec, amax_axes: tuple[str, ...], custom_call: bool, *operands: jax.Array) -> tuple:
        """Runs in the regime of the operands' mesh."""
        regime = mesh_lib.regime(*operands)
        custom_call = custom_call and not self.definition.left_to_jax(regime)
        if regime.explicit and regime.auto and not regime.manual:
            return self._all_auto(spec, custom_call, regime, *operands)
        if regime.explicit:
            return self._explicit(spec, amax_axes, custom_call, regime, *operands)
        if regime.manual:
            call = self.bind[custom_call]
            return self.definition.local(call, spec, Reductions(amax=amax_axes, manual=amax_axes), *operands)
        return partitioned(self.definition, self.bind[custom_call], spec)(*operands)

    def _explicit(self, spec, amax_axes, custom_call, regime, *operands) -> tuple:
        """``shard_map`` over the explicit axes. Axes that are already manual stay so."""
        rule, axes = self._explicit_axes(spec, regime, operands)
        reductions = rule.reductions(axes)
        reductions = Reductions(amax=amax_axes + reductions.amax, sums=reductions.sums, manual=amax_axes)

        def shard(*operands):
            call = self.bind[custom_call]
            return self.definition.local(call, spec, reductions, *operands)

        in_specs = rule.operand_specs(axes)
        return compat.shard_map(
            shard,
            mesh=regime.mesh,
            in_specs=in_specs,
            out_specs=rule.result_specs(axes),
            # All axes if all are explicit: vmap over a sharded dimension takes an axis away, without telling us.
            axis_names=set(regime.explicit) if regime.manual else set(),
            check_vma=compat.checks_varying_axes(),
        )(*map(_reshard, operands, in_specs))

    def _all_auto(self, spec, custom_call, regime, *operands) -> tuple:
        """``auto_axes`` for a mesh that is Explicit over some axes and Auto over others."""
        rule, axes = self._explicit_axes(spec, regime, operands)
        out_sharding = tuple(NamedSharding(regime.mesh, spec) for spec in rule.result_specs(axes))
        function = partitioned(self.definition, self.bind[custom_call], spec)
        return compat.auto_axes(function, axes=regime.explicit, out_sharding=out_sharding)(*operands)

    def _explicit_axes(self, spec, regime, operands):
        """The rule, and the explicit axes of each factor as the operands' types show them."""
        rule = self.definition.rule(spec, *map(jax.typeof, operands))
        sizes = {name: regime.mesh.shape[name] for name in regime.explicit}
        return rule, rule.axes([(x.shape, jax.typeof(x).sharding.spec) for x in operands], (), sizes)


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


def _reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Makes the type of x show ``spec``, moving data only if it shows another one."""
    current = tuple(jax.typeof(x).sharding.spec)
    wanted = tuple(spec)
    if current + (None,) * (x.ndim - len(current)) == wanted + (None,) * (x.ndim - len(wanted)):
        return x
    return compat.reshard(x, spec)


# The primitive


def _primitive(definition: Definition) -> compat.Primitive:
    primitive = compat.Primitive(definition.target)
    primitive.multiple_results = True

    @functools.cache
    def compiled(spec, custom_call):
        return jax.jit(functools.partial(primitive.bind, spec=spec, custom_call=custom_call))

    @primitive.def_impl
    def impl(*operands, spec, custom_call):
        with jax.disable_jit(False):  # under jax.disable_jit, bind would come back here for ever
            return compiled(spec, custom_call)(*operands)

    @primitive.def_abstract_eval
    def abstract_eval(*avals, spec, custom_call):
        varying = definition.varying(spec, *avals)
        return [compat.shaped_array(shape, dtype, avals, varying) for shape, dtype in definition.results(spec, *avals)]

    def batch(operands, dims, **params):
        in_batched = [d is not compat.not_mapped for d in dims]
        front = [jax.numpy.moveaxis(x, d, 0) if b else x for x, d, b in zip(operands, dims, in_batched, strict=True)]
        outs = definition.examples(functools.partial(primitive.bind, **params), in_batched, *front)
        return outs, [0] * len(outs)

    @compat.numpy_promotion()
    def reference(*operands, spec, custom_call):
        if custom_call and definition.plain is not None:
            return definition.plain(spec, *operands)
        return definition.reference(spec, *operands)

    fallback = compat.mlir.lower_fun(reference, multiple_results=True)

    def lower(platform, ctx, *operands, spec, custom_call):
        if not custom_call or why_not(definition, platform, spec, *ctx.avals_in):
            return fallback(ctx, *operands, spec=spec, custom_call=custom_call)
        if definition.library_call is not None:
            call = functools.partial(definition.library_call, spec)
            return compat.mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
        if platform == "cuda" and definition.on_device is not None:
            prepare = functools.partial(definition.on_device, spec)
            operands = _lower_function(prepare, ctx, *operands)
        extra = _workspace(definition, spec, ctx.avals_in) if platform == "cuda" else ()
        aliases = {operand: result + len(extra) for operand, result in definition.aliases(spec).items()}
        rule = jax.ffi.ffi_lowering(definition.target, operand_output_aliases=aliases)
        lowered = definition.lowered(spec, *ctx.avals_in)
        results = rule(ctx.replace(avals_out=[*extra, *ctx.avals_out]), *operands, spec=lowered.attributes())
        return results[len(extra) :]

    compat.ad.primitive_jvps[primitive] = refuse_derivative
    compat.batching.primitive_batchers[primitive] = batch
    compat.mlir.register_lowering(primitive, fallback)
    for platform in NATIVE_PLATFORMS:
        compat.mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    return primitive


@compat.numpy_promotion()
def _lower_function(function, ctx, *operands) -> list:
    """``function`` of the operands, whose results have the operands' types, lowered in front of a custom call."""
    rule = compat.mlir.lower_fun(function, multiple_results=True)
    return rule(ctx.replace(avals_out=list(ctx.avals_in)), *operands)


def _workspace(definition: Definition, spec: Spec, avals: Sequence) -> tuple[jax.core.ShapedArray, ...]:
    """The result in front of the others that a CUDA handler works in, if it needs one.

    A result, and not memory that the handler allocates: that is gone when the handler returns, so that a command buffer
    (a CUDA graph), which runs again what the handler queued, would write to memory that belongs to others.
    """
    if definition.workspace is None:
        return ()
    return (jax.core.ShapedArray((definition.workspace(spec, *avals),), np.dtype(np.uint8)),)


def native(platform: str) -> bool:
    """Whether a program lowered for ``platform`` calls the native library; registers the library's targets if so.

    A process without a CUDA backend lowers for CUDA only to look at the program or to compile it for a GPU that is
    elsewhere, so that gets the custom calls.
    """
    if platform == "cuda" and not library.has_cuda_backend():
        return True
    return library.ensure_registered(platform).available


def why_not(definition: Definition, platform: str, spec: Spec, *avals) -> str | None:
    """Why a program lowered for ``platform`` has no custom call for ``spec`` on operands like ``avals``; None if so."""
    return (
        definition.why_not(spec, *avals)
        or definition.why_not_on(platform, spec, *avals)
        or why_unavailable(definition, platform)
    )


def why_unavailable(definition: Definition, platform: str) -> str | None:
    """Why programs lowered for ``platform`` run the reference whatever the shapes; None if they don't."""
    if definition.library_call is not None:
        return cudnn.why_unavailable(platform)
    if platform not in NATIVE_PLATFORMS:
        return f"there are no custom calls for platform {platform}"
    return None if native(platform) else library.status(platform).reason
