"""What a custom call is: everything that the machine of ``custom_call.py`` has to know about one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from te_jax.compat import varying_axes
from te_jax.parallel.mesh import Regime
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives.batching import loop_over_examples
from te_jax.primitives.spec import Spec


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
      workspace: (spec, *avals) -> bytes of device memory that the CUDA handler works in, an uint8[bytes] that is the
        custom call's first result there and is dropped; None: it needs none. CPU handlers allocate what they need.
      on_device: (spec, *arrays) -> the operands that the CUDA handler is given instead, in jnp: for values that are an
        error in a CPU handler, and that a CUDA handler can't see. None: the operands as they are.
      examples: (function, in_batched, *operands) -> results of ``function`` on a batch; batch dimensions come first.
      library_call: (spec, *arrays) -> tuple of results, through custom calls of a library that XLA knows and instead of
        one of te_jax's; on CUDA only, elsewhere the reference runs. None: the custom calls are te_jax's.
      plain: (spec, *arrays) -> tuple of results, of other primitives: what runs instead of the handler where custom
        calls are wanted and there is none for it. None: the reference.
      why_not_on: (platform, spec, *avals) -> why the handler isn't used on that platform alone, or None if it is.
      all_manual: whether the handler runs only where every mesh axis is Manual: it has to know which device it is on.
      varying: (spec, *operands) -> the manual axes that results vary over; None: all that any operand does.
      lowered: (spec, *avals) -> the spec that the handler is given, with what is chosen from shapes filled in.
    """

    name: str
    spec_type: type[Spec]
    operands: Callable[[Any], tuple[str, ...]]
    check: Callable[..., None]
    results: Callable[..., tuple]
    reference: Callable[..., tuple]
    why_not: Callable[..., str | None]
    rule: Callable[..., ShardingRule]
    local: Callable[..., tuple]
    aliases: Callable[[Any], dict[int, int]] = lambda spec: {}
    workspace: Callable[..., int] | None = None
    on_device: Callable[..., tuple] | None = None
    examples: Callable[..., tuple] = loop_over_examples
    library_call: Callable[..., tuple] | None = None
    plain: Callable[..., tuple] | None = None
    why_not_on: Callable[..., str | None] = lambda platform, spec, *avals: None
    all_manual: bool = False
    varying: Callable[..., frozenset[str]] = lambda spec, *operands: frozenset().union(*map(varying_axes, operands))
    lowered: Callable[..., Spec] = lambda spec, *avals: spec

    def left_to_jax(self, regime: Regime) -> tuple[str, ...]:
        """The axes of that mesh because of which no handler runs inside its ``shard_map``: the reference does."""
        if not regime.manual:
            return ()
        # custom_partitioning isn't told the names of Auto axes here; a reference is partitioned by XLA as it is.
        return regime.auto + (regime.explicit if self.all_manual else ())

    @property
    def target(self) -> str:
        return f"te_jax_{self.name}"

    def __repr__(self) -> str:
        return self.target


DEFINITIONS: dict[type[Spec], Definition] = {}
"""Every operation by the class of its specs."""


def targets() -> tuple[str, ...]:
    """The names of te_jax's custom calls, which are those of their primitives too."""
    return tuple(definition.target for definition in DEFINITIONS.values() if definition.library_call is None)
