"""A linear and the collective next to it as one product, which hides what travels under its GEMMs.

Forward   [AllGather, BasicLinear, Bias?]       column-parallel: rows are multiplied as they arrive
          [BasicLinear, ReduceScatter, Bias?]   row-parallel; a chain has the Bias behind the sum, so it counts once
          [BasicLinear, AllReduce, Bias?]       row-parallel: the same, and what it gives is gathered
Backward  [AllGather, BasicLinear, Bias?]       dgrad and the reduce-scatter of its result, then wgrad, which reads the
                                                gathered x
          [BasicLinear, ReduceScatter, Bias?]   the all-gather of dy and dgrad, then wgrad, which reads the gathered dy

Under Auto and Explicit axes values are whole, and a Bias is where it was put, before or behind the ReduceScatter or
AllReduce: it counts once anyway.

In FP8 operands are quantized before they are gathered: a byte for each element travels. A norm or activation before an
AllGather writes them, also where the AllGather is a step of its own (PRODUCER_THROUGH_GATHER).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import AxisType

from te_jax.collective.plan import Choice, Product, choose
from te_jax.collective.run import Along
from te_jax.errors import required
from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.fusion.rules.producer import ProducerQuantize
from te_jax.ops import collective_linear, linear
from te_jax.ops.activation import ACTIVATIONS
from te_jax.ops.base import LinkInfo, Op, tokens
from te_jax.ops.bias import Bias
from te_jax.ops.collective import AllGather, AllReduce, Collective, ReduceScatter
from te_jax.ops.linear import BasicLinear
from te_jax.ops.norm import NORMS
from te_jax.ops.residual import MakeExtraOutput
from te_jax.parallel import explicit, mesh
from te_jax.parallel.mesh import NamedAxis
from te_jax.quant.tensor import QTensor
from te_jax.recipe import BlockScaling

GATHERS, SCATTERS = "all_gather_matmul", "matmul_reduce_scatter"


def _why_apart(collective: LinkInfo, info: LinkInfo) -> str | None:
    """Why a linear has nothing to do with the collective next to it, whatever their size; None if it may have."""
    op, axis = collective.op, collective.mesh_axis
    assert isinstance(op, Collective)
    if axis is None:
        return f"no mesh with an axis {op.axis_name!r} is set here"
    if axis.mixed:
        return f"mesh axes beside {op.axis_name!r} are not {axis.kind.name}"
    if isinstance(op, AllGather | ReduceScatter) and _dimension(op, info) == len(info.x_type.shape) - 1:
        return "its dimension is that of the features"
    if info.quantized:
        if isinstance(info.recipe, BlockScaling):
            return "block scales: rows are not cut into pieces in the layout of their scales"
        axes = info.quantizing_recipe.amax_axes  # of Manual mode alone
        if axis.kind == AxisType.Manual and axes is not None and op.axis_name not in axes:
            return f"the recipe's amax_axes {axes} lack {op.axis_name!r}"
    return None


def _choice(collective: LinkInfo, info: LinkInfo, kind: str, *, backward: bool) -> Choice:
    """Which way the product of this linear, forward or its dgrad, runs with this collective.

    Of whole arrays the product is that of one device, if all other mesh axes split tokens: what XLA does with them
    isn't known while tracing.
    """
    op, axis = collective.op, collective.mesh_axis
    assert isinstance(op, Collective)
    if (reason := _why_apart(collective, info)) is not None:
        return Choice("plain", reason)
    assert axis is not None
    features_in, features_out, rows = info.x_type.shape[-1], info.y_type.shape[-1], tokens(info.x_type)
    if axis.kind != AxisType.Manual:
        if (reason := _why_not_split(op, axis, info)) is not None:
            return Choice("plain", reason)
        if isinstance(op, AllGather):
            features_out //= axis.size
        else:
            features_in //= axis.size
        rows = max(rows // axis.others // axis.size, 1) * axis.size
    product = Product(
        kind=kind,
        ranks=axis.size,
        rows=rows,
        contracted=features_out if backward else features_in,
        columns=features_in if backward else features_out,
        dtype="float8_e4m3fn" if info.quantized else jnp.dtype(info.x_type.dtype).name,
        out_dtype=linear.gemm_dtype(info.x_type.dtype) if info.quantized else jnp.dtype(info.x_type.dtype).name,
    )
    choice = choose(product, op.overlap, host=mesh.devices_of_a_host())
    if axis.kind == AxisType.Manual or axis.others == 1:
        return choice
    return dataclasses.replace(choice, reason=f"{choice.reason}, of tokens that all other mesh axes split")


def _why_not_split(op: Collective, axis: NamedAxis, info: LinkInfo) -> str | None:
    """Why the axis doesn't split whole arrays as these products need it; None if it does."""
    if isinstance(op, AllGather | ReduceScatter):
        dimension = _dimension(op, info)
        rows, what, parts = info.x_type.shape[dimension], f"dimension {dimension}", axis.size
    else:
        # However other axes split them.
        rows, what, parts = tokens(info.x_type), "tokens", axis.size * axis.others
    if rows % parts:
        return f"{what}: {rows} is not a multiple of {parts} devices"
    features = info.y_type.shape[-1] if isinstance(op, AllGather) else info.x_type.shape[-1]
    if features % axis.size:
        return f"{features} features are not a multiple of {axis.size} devices"
    return None


def _dimension(op: Collective, info: LinkInfo) -> int:
    """The dimension of [*lead, C], counted from the front, that is split."""
    return op.dimension % len(info.x_type.shape) if isinstance(op, AllGather | ReduceScatter) else 0


def _why_not_bias(info: LinkInfo, bias: LinkInfo | None) -> str | None:
    """Why a bias isn't added to the sums of this linear's product; None if it is, or if there is none."""
    if bias is None or not info.quantized or info.x_type.dtype == jnp.bfloat16:
        return None
    return f"an FP8 GEMM adds a bfloat16 bias only, the chain computes in {info.x_type.dtype}"


@dataclasses.dataclass(frozen=True)
class _CollectiveStep:
    """Base of the steps: where its links are, and how rows move."""

    linear: int
    collective: int
    bias: int | None
    quantized: bool
    along: Along
    choice: Choice

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(sorted(i for i in (self.linear, self.collective, self.bias) if i is not None))

    @property
    def name(self) -> str:
        raise NotImplementedError

    def __call__(self, contexts: list[Any], value: Any) -> Any:
        raise NotImplementedError

    @property
    def notes(self) -> tuple[str, ...]:
        return (str(self.choice),)

    @property
    def _plus_bias(self) -> str:
        return "" if self.bias is None else "+bias"

    @property
    def _bias_step(self) -> str:
        return "" if self.bias is None else "dbias+quantize+" if self.quantized else "dbias+"

    def _bias_of(self, contexts: list[Any]) -> Any:
        return None if self.bias is None else contexts[self.bias].params["bias"]

    def _remember(self, contexts: list[Any], x: Any) -> None:
        """What the collective behind the linear saves of the linear's result, which isn't made, of this x."""
        x, kernel = _data(x), contexts[self.linear].params["kernel"]
        *lead, _ = explicit.spec_entries(x)
        features = explicit.without(explicit.spec_entries(kernel)[-1], *explicit.axes(lead))
        contexts[self.collective].info.op.remember(contexts[self.collective], x, (*lead, features))


class GatherLinear(_CollectiveStep):
    @property
    def name(self) -> str:
        return f"all-gather+linear{self._plus_bias}"

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        op = contexts[self.collective].info.op
        keep, bias = op.keep_gathered, self._bias_of(contexts)
        op.remember(contexts[self.collective], _data(x))
        return collective_linear.gather_forward(contexts[self.linear], x, self.along, bias, keep=keep)


class LinearScatter(_CollectiveStep):
    @property
    def name(self) -> str:
        return f"linear+reduce-scatter{self._plus_bias}"

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        self._remember(contexts, x)
        return collective_linear.scatter_forward(contexts[self.linear], x, self.along, self._bias_of(contexts))


class LinearReduce(_CollectiveStep):
    @property
    def name(self) -> str:
        return f"linear+reduce-scatter{self._plus_bias}, all-gather"

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        self._remember(contexts, x)
        return collective_linear.reduce_forward(contexts[self.linear], x, self.along, self._bias_of(contexts))


class DgradScatter(_CollectiveStep):
    @property
    def name(self) -> str:
        return f"{self._bias_step}dgrad+reduce-scatter, wgrad"

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        ctx = contexts[self.linear]
        if self.bias is not None:
            bias_ctx = contexts[self.bias]
            dy, dbias = linear.quantize_operand(ctx, "dy", dy, bias=bias_ctx.params["bias"])
            bias_ctx.param_grads["bias"] = required(dbias, "linear", "dbias")
        dx, collective = collective_linear.gather_backward(ctx, dy, self.along), contexts[self.collective]
        return collective.info.op.backward(collective, dx) if self.along.whole else dx


class GatherDgrad(_CollectiveStep):
    @property
    def name(self) -> str:
        return f"{self._bias_step}all-gather+dgrad, wgrad of what was gathered"

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        bias_ctx = None if self.bias is None else contexts[self.bias]
        if bias_ctx is not None and not contexts[self.linear].info.quantized:
            dy, bias_ctx = bias_ctx.info.op.backward(bias_ctx, dy), None
        return collective_linear.scatter_backward(contexts[self.linear], dy, self.along, bias_ctx)


def _data(x: Any) -> Any:
    return x.data if isinstance(x, QTensor) else x


def _links(window: Window, kind: type[Op]) -> list[int]:
    """The links of the window whose op is one of these."""
    return [pick for pick in window.picks if pick is not None and isinstance(window.links[pick].op, kind)]


def _parts(window: Window) -> tuple[LinkInfo, LinkInfo, LinkInfo | None]:
    """The linear, the collective, and the bias if there is one."""
    linears, collectives, biases = (_links(window, kind) for kind in (BasicLinear, Collective, Bias))
    return window.links[linears[0]], window.links[collectives[0]], window.links[biases[0]] if biases else None


def _window_choice(window: Window, kind: str, *, backward: bool = False) -> Choice:
    info, collective, _ = _parts(window)
    return _choice(collective, info, kind, backward=backward)


def _step(step: type[_CollectiveStep], window: Window, choice: Choice) -> _CollectiveStep:
    info, collective, _ = _parts(window)
    op, axis = collective.op, collective.mesh_axis
    assert isinstance(op, Collective)
    assert axis is not None
    along = Along(
        op.axis_name,
        axis.size,
        _dimension(op, info),
        choice.path,
        always=op.overlap == "overlapped",
        whole=axis.kind != AxisType.Manual,
    )
    (linear_link,), (collective_link,) = _links(window, BasicLinear), _links(window, Collective)
    return step(linear_link, collective_link, next(iter(_links(window, Bias)), None), info.quantized, along, choice)


def _reason(window: Window, choice: Choice) -> str | None:
    """Why the window isn't one step, forward or backward; None if it is."""
    if choice.path == "plain":
        return choice.reason
    return "a bias on either side of the collective" if len(_links(window, Bias)) > 1 else None


def _between(window: Window) -> bool:
    """Whether the bias is between the linear and the collective, so that no window is without it."""
    biases, collectives, linears = (_links(window, kind) for kind in (Bias, Collective, BasicLinear))
    return bool(biases) and linears[0] < biases[0] < collectives[0]


def _forward_reason(window: Window, choice: Choice) -> str | None:
    info, collective, bias = _parts(window)
    if (reason := _reason(window, choice)) is not None:
        return reason
    assert isinstance(info.op, BasicLinear)
    axis = required(collective.mesh_axis, collective.label, "mesh_axis")
    if axis.kind != AxisType.Manual and info.op.out_sharding is not None and not isinstance(collective.op, AllGather):
        return "the linear has an out_sharding, of a result that is not made"
    return _why_not_bias(info, bias)


def _backward_reason(window: Window, choice: Choice) -> str | None:
    info, _, bias = _parts(window)
    if (reason := _reason(window, choice)) is not None:
        return reason
    alone = bias is not None and not info.quantized and not _between(window)
    return "the gradient of a bias is a by-product of quantizing dy, which is not quantized" if alone else None


def _gather_choice(window: Window) -> Choice:
    return _window_choice(window, GATHERS)


def _gather_condition(window: Window) -> str | None:
    return _forward_reason(window, _gather_choice(window))


def _gather_step(window: Window) -> _CollectiveStep:
    return _step(GatherLinear, window, _gather_choice(window))


ALL_GATHER_LINEAR = Rule(
    name="all-gather+linear+bias",
    pattern=(slot(AllGather), slot(BasicLinear), slot(Bias, optional=True)),
    condition=_gather_condition,
    step=_gather_step,
)


def _scatter_choice(window: Window) -> Choice:
    return _window_choice(window, SCATTERS)


def _scatter_condition(window: Window) -> str | None:
    return _forward_reason(window, _scatter_choice(window))


def _scatter_step(window: Window) -> _CollectiveStep:
    return _step(LinearScatter, window, _scatter_choice(window))


LINEAR_REDUCE_SCATTER = Rule(
    name="linear+reduce-scatter+bias",
    pattern=(slot(BasicLinear), slot(Bias, optional=True), slot(ReduceScatter), slot(Bias, optional=True)),
    condition=_scatter_condition,
    step=_scatter_step,
)


def _reduce_step(window: Window) -> _CollectiveStep:
    return _step(LinearReduce, window, _scatter_choice(window))


LINEAR_ALL_REDUCE = Rule(
    name="linear+all-reduce+bias",
    pattern=(slot(BasicLinear), slot(Bias, optional=True), slot(AllReduce), slot(Bias, optional=True)),
    condition=_scatter_condition,
    step=_reduce_step,
)


def _dgrad_scatter_choice(window: Window) -> Choice:
    return _window_choice(window, SCATTERS, backward=True)


def _dgrad_scatter_condition(window: Window) -> str | None:
    return _backward_reason(window, _dgrad_scatter_choice(window))


def _dgrad_scatter_step(window: Window) -> _CollectiveStep:
    return _step(DgradScatter, window, _dgrad_scatter_choice(window))


DGRAD_REDUCE_SCATTER = Rule(
    name="dgrad+reduce-scatter",
    pattern=ALL_GATHER_LINEAR.pattern,
    condition=_dgrad_scatter_condition,
    step=_dgrad_scatter_step,
)


def _gather_dgrad_choice(window: Window) -> Choice:
    return _window_choice(window, GATHERS, backward=True)


def _gather_dgrad_condition(window: Window) -> str | None:
    return _backward_reason(window, _gather_dgrad_choice(window))


def _gather_dgrad_step(window: Window) -> _CollectiveStep:
    return _step(GatherDgrad, window, _gather_dgrad_choice(window))


ALL_GATHER_DGRAD = Rule(
    name="all-gather+dgrad",
    pattern=LINEAR_REDUCE_SCATTER.pattern,
    condition=_gather_dgrad_condition,
    step=_gather_dgrad_step,
)


@dataclasses.dataclass(frozen=True)
class ProducerThroughGather(ProducerQuantize):
    """The step: the producer writes the linear's FP8 input, of which the AllGather between them has a part."""

    reader: ClassVar[str] = "the linear behind the gather"

    def quantizing(self, consumer: Any) -> dict[str, Any]:
        info = consumer.info
        amax = consumer.train and info.quantizing_recipe.stateful
        return linear.quantizing(info, "x") | {"data_t": False, "amax": amax}


def _through_condition(window: Window) -> str | None:
    return why_no_fp8_gemm(window.info(3)) or _why_apart(window.info(2), window.info(3))


def _through_step(window: Window) -> ProducerThroughGather:
    return ProducerThroughGather(window.link(0), window.picks[1], window.link(3))


PRODUCER_THROUGH_GATHER = Rule(
    name="producer+quantize through AllGather",
    pattern=(
        slot(*NORMS, *ACTIVATIONS),
        slot(MakeExtraOutput, optional=True),
        slot(AllGather, ahead=True),
        slot(BasicLinear, ahead=True),
    ),
    condition=_through_condition,
    step=_through_step,
)
