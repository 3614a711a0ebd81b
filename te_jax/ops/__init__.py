"""The ops of a chain. A name here is what a user puts into ``te.Sequential([...])``."""

from te_jax.ops.activation import GEGLU as GEGLU
from te_jax.ops.activation import GELU as GELU
from te_jax.ops.activation import ReLU as ReLU
from te_jax.ops.activation import SiLU as SiLU
from te_jax.ops.activation import SwiGLU as SwiGLU
from te_jax.ops.base import BackwardContext as BackwardContext
from te_jax.ops.base import ForwardContext as ForwardContext
from te_jax.ops.base import Op as Op
from te_jax.ops.base import ParamSpec as ParamSpec
from te_jax.ops.bias import Bias as Bias
from te_jax.ops.linear import BasicLinear as BasicLinear
from te_jax.ops.linear import Linear as Linear
from te_jax.ops.misc import ConstantScale as ConstantScale
from te_jax.ops.misc import Dropout as Dropout
from te_jax.ops.misc import Identity as Identity
from te_jax.ops.misc import Reshape as Reshape
from te_jax.ops.norm import LayerNorm as LayerNorm
from te_jax.ops.norm import RMSNorm as RMSNorm
from te_jax.ops.residual import AddExtraInput as AddExtraInput
from te_jax.ops.residual import AddResidual as AddResidual
from te_jax.ops.residual import MakeExtraOutput as MakeExtraOutput
from te_jax.ops.residual import StartResidual as StartResidual
