"""``te.collective``: the collective matmuls for people without a chain. Each is the run of ops that one would have."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from te_jax import compat, ops
from te_jax.collective.run import Along
from te_jax.errors import check_type, check_value
from te_jax.fusion.execute import execute
from te_jax.fusion.rules import BACKWARD_RULES, FORWARD_RULES
from te_jax.fusion.run import SHARED, Run, Wiring, read_scales
from te_jax.ops import collective_linear
from te_jax.ops.base import ForwardContext, LinkInfo, Op, TensorType
from te_jax.ops.collective import check_fields
from te_jax.parallel import mesh as mesh_lib
from te_jax.quant import state as fp8_state
from te_jax.quant.state import LEAVES
from te_jax.recipe import BlockScaling, Recipe

_SCOPE = "linear"
_FP8 = tuple(jnp.dtype(dtype) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2))
_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))

State = Mapping[str, Array]


def all_gather_matmul(
    x: Array,
    kernel: Array,
    axis_name: str,
    *,
    bias: Array | None = None,
    recipe: Recipe | None = None,
    state: State | None = None,
    out_dtype: Any = None,
    out_scale: Array | None = None,
    dimension: int = -2,
    keep_gathered: bool = True,
    overlap: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Array:
    """y [..., M, N/t] = x [..., M/t, K], gathered from t devices, times kernel [K, N/t] (+ bias [N/t]).

    The column-parallel linear of sequence parallelism, for one device's parts inside ``shard_map``; outside of one, for
    whole arrays: x [..., M, K] split over ``axis_name`` in ``dimension``, kernel [K, N] and bias [N] split over it in
    their last dimension, y [..., M, N] too.

    Differentiable once, in reverse mode, in x, kernel, bias and state. The backward pass multiplies and sums dx as
    ``matmul_reduce_scatter`` does.

    Args:
      x, kernel, bias: bfloat16, float16 or float32; the product is in x's dtype.
      axis_name: the mesh axis.
      recipe: of FP8; None: multiplied as they are.
      state: with ``DelayedScaling`` only: ``te.state.init(3, recipe)``, of x, kernel and dy. Its "gradient" is its next
        value.
      out_dtype: of y, to which it is cast; default: x's. An FP8 one, float8_e4m3fn unless the recipe has x or kernel in
        e5m2, is for a recipe of scales for whole tensors, and not differentiable; y is then multiplied by
        ``out_scale``, the same on all devices, and rounded once.
      out_scale: f32[], with an FP8 ``out_dtype`` only.
      dimension: of x, that is gathered; not the last.
      keep_gathered: gathered x is kept for the gradient of kernel; False keeps x and gathers again.
      overlap: "auto", "overlapped", "ring" or "plain", as for ``te.ops.AllGather``.
      mesh, x_spec: outside of ``shard_map`` where the axis is Auto: the mesh (default: the one that is set), and how x
        is split. An Explicit axis is read from x's type.

    Raises:
      ValueError: a shape, axis or spec that doesn't fit, naming the argument; TypeError: a dtype that doesn't.
    """
    fields = {"axis_name": axis_name, "dimension": dimension, "overlap": overlap, "keep_gathered": keep_gathered}
    options = _Options("all_gather_matmul", ops.AllGather, fields, recipe, out_dtype, mesh, x_spec)
    return options.call(x, kernel, bias, state, out_scale)


def matmul_reduce_scatter(
    x: Array,
    kernel: Array,
    axis_name: str,
    *,
    bias: Array | None = None,
    recipe: Recipe | None = None,
    state: State | None = None,
    out_dtype: Any = None,
    out_scale: Array | None = None,
    dimension: int = -2,
    overlap: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    x_spec: PartitionSpec | None = None,
) -> Array:
    """y [..., M/t, N] = rows of the sum over t devices of x [..., M, K/t] times kernel [K/t, N] (+ bias [N]).

    The row-parallel linear of sequence parallelism, for one device's parts inside ``shard_map``; outside of one, for
    whole arrays: x [..., M, K] split over ``axis_name`` in its last dimension, kernel [K, N] in its first, and y
    [..., M, N] in ``dimension``. The bias is the same on all devices and added once. M has to be a multiple of t.

    Differentiable once, in reverse mode, in x, kernel, bias and state. The backward pass gathers and multiplies dy as
    ``all_gather_matmul`` does, and the gradient of kernel reads what was gathered.

    Args, errors: as for ``all_gather_matmul``; ``x_spec`` is that of x, ``dimension`` that of y.
    """
    fields = {"axis_name": axis_name, "dimension": dimension, "overlap": overlap}
    options = _Options("matmul_reduce_scatter", ops.ReduceScatter, fields, recipe, out_dtype, mesh, x_spec)
    return options.call(x, kernel, bias, state, out_scale)


class _Options:
    """Arguments of a call that are no arrays, checked."""

    def __init__(self, name: str, op: Any, fields: dict[str, Any], recipe: Any, out_dtype: Any, mesh: Any, x_spec: Any):
        self.name, self.recipe, self.mesh, self.x_spec = f"collective.{name}", recipe, mesh, x_spec
        check_fields(self.name, fields)  # the op checks them too, but in its own name
        self.op, self.gathers = op(**fields), op is ops.AllGather
        ok = recipe is None or isinstance(recipe, Recipe)
        check_type(ok, self.name, "recipe", "None or a recipe object, such as CurrentScaling()", repr(recipe))
        ok = mesh is None or isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh)
        check_type(ok, self.name, "mesh", "None or a jax.sharding.Mesh", repr(mesh))
        ok = x_spec is None or isinstance(x_spec, PartitionSpec)
        check_type(ok, self.name, "x_spec", "None or a jax.sharding.PartitionSpec", repr(x_spec))
        self.out_dtype = None if out_dtype is None else _dtype(out_dtype)
        names = ", ".join(dtype.name for dtype in (*_DTYPES, *_FP8))
        ok = out_dtype is None or self.out_dtype in (*_DTYPES, *_FP8)
        check_type(ok, self.name, "out_dtype", names, repr(out_dtype))
        ok = not self.fp8 or (recipe is not None and not isinstance(recipe, BlockScaling))
        check_value(ok, self.name, "out_dtype", "FP8 with DelayedScaling or CurrentScaling only", self.out_dtype)

    @property
    def fp8(self) -> bool:
        return self.out_dtype in _FP8

    def call(
        self, x: Array, kernel: Array, bias: Array | None, state: State | None, out_scale: Array | None = None
    ) -> Array:
        self._check(x, kernel, bias, state)
        if self.fp8:
            check_value(out_scale is not None, self.name, "out_scale", "float32[] with an FP8 out_dtype", None)
            ok = isinstance(out_scale, float | int | np.generic | np.ndarray | Array)
            check_type(ok, self.name, "out_scale", "float32[]", repr(out_scale))
            out_scale = jnp.asarray(out_scale, jnp.float32)
            check_value(out_scale.shape == (), self.name, "out_scale", "shape ()", out_scale.shape)
        else:
            check_value(out_scale is None, self.name, "out_scale", "None without an FP8 out_dtype", out_scale)
        axis = mesh_lib.named_axis(self.name, self.op.axis_name, x)
        if axis is None or self.mesh is not None or axis.kind != AxisType.Manual:
            return self._outside(x, kernel, bias, state, out_scale)
        expected = "None inside of shard_map, where x is a device's part"
        check_value(self.x_spec is None, self.name, "x_spec", expected, self.x_spec)
        return self._local(x, kernel, bias, state, out_scale)

    def _check(self, x: Array, kernel: Array, bias: Array | None, state: State | None) -> None:
        names = ", ".join(dtype.name for dtype in _DTYPES)
        for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
            ok = array is None or getattr(array, "dtype", None) in _DTYPES
            check_type(ok, self.name, name, f"an array of {names}", getattr(array, "dtype", type(array).__name__))
        check_value(x.ndim >= 2, self.name, "x", "at least two dimensions", f"shape {x.shape}")
        dimension = self.op.dimension
        inside = -x.ndim <= dimension < x.ndim and dimension % x.ndim != x.ndim - 1
        check_value(inside, self.name, "dimension", "one of x's, which is not its last", f"{dimension}, x {x.shape}")
        ok = kernel.ndim == 2 and kernel.shape[0] == x.shape[-1]
        expected = f"shape [{x.shape[-1]}, features], x is {x.shape}"
        check_value(ok, self.name, "kernel", expected, f"shape {kernel.shape}")
        ok = bias is None or bias.shape == kernel.shape[1:]
        check_value(ok, self.name, "bias", f"shape {kernel.shape[1:]}", None if bias is None else f"shape {bias.shape}")
        stateful = self.recipe is not None and self.recipe.stateful
        expected = "the leaves of te.state.init(3, recipe)" if stateful else "None: the recipe keeps no state"
        check_type(state is None or isinstance(state, Mapping), self.name, "state", expected, type(state).__name__)
        got = "None" if state is None else sorted(state)
        check_value(got == (sorted(LEAVES) if stateful else "None"), self.name, "state", expected, got)
        if state is not None and self.recipe is not None:
            shapes = (jax.eval_shape(lambda: fp8_state.init(3, self.recipe)), state)
            wanted, found = ({name: jnp.shape(leaf) for name, leaf in sorted(tree.items())} for tree in shapes)
            check_value(found == wanted, self.name, "state", f"{expected}, shapes {wanted}", found)

    def _local(
        self, x: Array, kernel: Array, bias: Array | None, state: State | None, out_scale: Array | None = None
    ) -> Array:
        """On one device's parts."""
        axis, dimension = self.op.mesh_axis(), self.op.dimension % x.ndim
        ranks = 1 if axis is None or self.gathers else axis.size
        expected = f"a multiple of {ranks} (axis {self.op.axis_name!r}) in dimension {dimension}"
        check_value(x.shape[dimension] % ranks == 0, self.name, "x", expected, f"shape {x.shape}")
        linear = (ops.BasicLinear(kernel.shape[1]),)
        chain: list[Op] = [self.op, *linear] if self.gathers else [*linear, self.op]
        chain += [] if bias is None else [ops.Bias()]
        links, x_type = [], TensorType(x.shape, x.dtype)
        for i, op in enumerate(chain):
            why = op.why_unquantized(x_type, self.recipe)
            ok = why is None or self.recipe is None or not self.recipe.strict
            check_value(ok, self.name, "recipe", "sizes that can be quantized (strict=True)", why)
            links.append(LinkInfo(op, (i,), _SCOPE, x_type, self.recipe, _SCOPE, op.mesh_axis(), why))
            x_type = op.out_type(x_type)
        wiring = Wiring(((),) * len(chain), ())
        run = Run(tuple(links), self.recipe, FORWARD_RULES, BACKWARD_RULES, wiring)
        params = {_SCOPE: {"kernel": kernel} | ({} if bias is None else {"bias": bias})}
        run_state = {} if state is None else {SHARED: dict(state)}
        if out_scale is not None:
            return self._fp8_result(run, params, run_state, x, out_scale)
        nothing = (None,) * len(chain)
        y, _, _ = execute(run, params, run_state, nothing, nothing, x, (), {})
        return y if self.out_dtype is None else y.astype(self.out_dtype)

    def _fp8_result(self, run: Run, params: Any, state: Any, x: Array, out_scale: Array) -> Array:
        """Of one device: the product by itself, as no op has a result in FP8."""
        number = 1 if self.gathers else 0
        info = run.links[number]
        check_value(info.quantized, self.name, "out_dtype", "FP8 of sizes that can be quantized", info.why_unquantized)
        axis = self.op.mesh_axis()
        assert axis is not None
        along = Along(self.op.axis_name, axis.size, self.op.dimension % x.ndim, always=self.op.overlap == "overlapped")
        context = ForwardContext(info, params[_SCOPE], train=False, scales=read_scales(run, state)[number])
        bias = params[_SCOPE].get("bias")
        return collective_linear.fp8_result(context, x, along, bias, self.out_dtype, out_scale, gathers=self.gathers)

    def _outside(
        self, x: Array, kernel: Array, bias: Array | None, state: State | None, out_scale: Array | None
    ) -> Array:
        """On whole arrays: ``shard_map`` over all axes of their mesh, with the splits that x's type or spec shows."""
        mesh, spec = self._mesh_and_spec(x)
        axis, dimension = self.op.axis_name, self.op.dimension % x.ndim
        entries = [_names(entry) for entry in (*spec, *(None,) * (x.ndim - len(spec)))]
        others = [tuple(name for name in names if name != axis) for names in entries]
        split = [*others]
        split[dimension] = (*others[dimension], axis)
        features = (*others[:-1], (axis,))
        x_names, y_names = (split, features) if self.gathers else (features, [*split[:-1], ()])
        found = entries[dimension]
        ok = axis not in found or found[-1] == axis
        check_value(ok, self.name, "x", f"a dimension {dimension} that {axis!r} splits last", f"split over {found}")
        kernel_spec, bias_spec = (
            (PartitionSpec(None, axis), PartitionSpec(axis)) if self.gathers else (PartitionSpec(axis), PartitionSpec())
        )
        operands = {"x": x, "kernel": kernel, "bias": bias, "state": state, "out_scale": out_scale}
        specs = {"x": _spec(x_names), "kernel": kernel_spec, "bias": bias_spec}
        specs |= {"state": PartitionSpec(), "out_scale": PartitionSpec()}
        for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
            if array is not None:
                self._check_split(name, array.shape, specs[name], mesh)
        given = {name: value for name, value in operands.items() if value is not None}
        in_specs = {name: specs[name] for name in given}
        if mesh_lib.regime(x).explicit:
            given = {
                name: jax.tree.map(functools.partial(_resharded, spec=in_specs[name]), value)
                for name, value in given.items()
            }

        def shard(given):
            return self._local(*(given.get(name) for name in operands))

        return compat.shard_map(shard, mesh=mesh, in_specs=(in_specs,), out_specs=_spec(y_names))(given)

    def _check_split(self, argument: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Any) -> None:
        for i, entry in enumerate(spec):
            devices = math.prod(mesh.shape[name] for name in _names(entry))
            expected = f"a multiple of {devices} in dimension {i}, which {entry!r} splits"
            check_value(shape[i] % devices == 0, self.name, argument, expected, f"shape {shape}")

    def _mesh_and_spec(self, x: Array) -> tuple[Any, tuple[Any, ...]]:
        regime = mesh_lib.regime(x)
        mesh = regime.mesh if self.mesh is None else self.mesh
        found = not mesh.empty and self.op.axis_name in mesh.axis_names
        expected = f"one with an axis {self.op.axis_name!r}: an argument, jax.set_mesh, or the call inside of shard_map"
        check_value(found, self.name, "mesh", expected, tuple(mesh.axis_names) or "none")
        if self.x_spec is not None:
            names = [name for entry in self.x_spec for name in _names(entry)]
            ok = len(self.x_spec) <= x.ndim and all(name in mesh.axis_names for name in names)
            expected = f"at most {x.ndim} entries, of axes {tuple(mesh.axis_names)}"
            check_value(ok, self.name, "x_spec", expected, self.x_spec)
            return mesh, tuple(self.x_spec)
        check_value(
            bool(regime.explicit), self.name, "x_spec", "a PartitionSpec, as the axis is not Explicit", self.x_spec
        )
        return mesh, tuple(jax.typeof(x).sharding.spec)


def _dtype(dtype: Any) -> Any:
    """The dtype; None if it is none."""
    try:
        return jnp.dtype(dtype)
    except TypeError:
        return None


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _spec(names: Any) -> PartitionSpec:
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in names))


def _resharded(x: Array, spec: PartitionSpec) -> Array:
    return compat.reshard(x, spec)
