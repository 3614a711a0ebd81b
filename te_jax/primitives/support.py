"""Whether an operation runs as a custom call, and if not, why: for plans, ``doctor`` and strict recipes."""

from __future__ import annotations

from te_jax import config
from te_jax.parallel import mesh
from te_jax.primitives import cudnn, custom_call, definition
from te_jax.primitives.quantizing import ALIGNMENT as ALIGNMENT
from te_jax.primitives.spec import Spec


def why_not(spec: Spec, *operands, platform: str | None = None) -> str | None:
    """Why ``spec`` on ``operands`` runs as the jnp reference instead of a custom call; None if it doesn't.

    Args:
      spec: of any primitive.
      operands: arrays, tracers or anything with shape and dtype, in the order of the custom call; local shapes.
      platform: "cpu" or "cuda" (or another, which has no custom calls); None: what holds whatever the platform.
    """
    operation = definition.DEFINITIONS[type(spec)]
    if not config.custom_calls_enabled():
        return "custom calls are disabled (TE_JAX_DISABLE_CUSTOM_CALLS)"
    regime = mesh.regime()
    if axes := operation.left_to_jax(regime):
        kind = "Auto" if axes == regime.auto else "not Manual"
        return f"mesh axes {axes} are {kind} inside a shard_map over {regime.manual}"
    if platform is None:
        return operation.why_not(spec, *operands)
    return custom_call.why_not(operation, platform, spec, *operands)


def why_not_fp8_linear(tokens: int, features_in: int, features_out: int) -> str | None:
    """Why the three GEMMs of a linear layer can't all run in FP8: each size is contracted or minor in one of them."""
    for name, size in (("tokens", tokens), ("input features", features_in), ("output features", features_out)):
        if size == 0:
            return f"{name}: 0"
        if size % ALIGNMENT:
            return f"{name}: {size} is not a multiple of {ALIGNMENT}"
    return None


def export_checks() -> list:
    """What ``jax.export.export(..., disabled_checks=export_checks())`` needs to let the custom calls pass.

    They promise no stability between versions of te_jax. A program over several devices whose mesh is Auto can't be
    exported and says so (NotImplementedError).
    """
    from jax import export

    return [
        export.DisabledSafetyCheck.custom_call(target)
        for target in (*definition.targets(), cudnn.FORWARD, cudnn.BACKWARD)
    ]
