"""The JAX primitives of te_jax: one custom call each, with a jnp reference. Contract: docs/design/0001."""

from te_jax.primitives import definition as _definition
from te_jax.primitives import gemm_algorithms as gemm_algorithms
from te_jax.primitives import library as library
from te_jax.primitives import support as support
from te_jax.primitives.activation import activation as activation
from te_jax.primitives.activation import activation_grad as activation_grad
from te_jax.primitives.attention import attention as attention
from te_jax.primitives.attention import attention_grad as attention_grad
from te_jax.primitives.collective_gemm import CollectiveGemmOut as CollectiveGemmOut
from te_jax.primitives.collective_gemm import collective_gemm as collective_gemm
from te_jax.primitives.gemm import gemm as gemm
from te_jax.primitives.grouped_gemm import grouped_gemm as grouped_gemm
from te_jax.primitives.grouped_gemm import grouped_wgrad as grouped_wgrad
from te_jax.primitives.norm import norm as norm
from te_jax.primitives.norm_grad import NormGradOut as NormGradOut
from te_jax.primitives.norm_grad import norm_grad as norm_grad
from te_jax.primitives.norm_grad import norm_grad_reference as norm_grad_reference
from te_jax.primitives.quantize import dequantize as dequantize
from te_jax.primitives.quantize import quantize as quantize
from te_jax.primitives.quantizing import QuantizeOut as QuantizeOut
from te_jax.primitives.spec import ActivationGradSpec as ActivationGradSpec
from te_jax.primitives.spec import ActivationSpec as ActivationSpec
from te_jax.primitives.spec import AttentionGradSpec as AttentionGradSpec
from te_jax.primitives.spec import AttentionSpec as AttentionSpec
from te_jax.primitives.spec import CollectiveGemmSpec as CollectiveGemmSpec
from te_jax.primitives.spec import DequantizeSpec as DequantizeSpec
from te_jax.primitives.spec import GemmSpec as GemmSpec
from te_jax.primitives.spec import GroupedGemmSpec as GroupedGemmSpec
from te_jax.primitives.spec import GroupedWgradSpec as GroupedWgradSpec
from te_jax.primitives.spec import NormGradSpec as NormGradSpec
from te_jax.primitives.spec import NormSpec as NormSpec
from te_jax.primitives.spec import QuantizeSpec as QuantizeSpec
from te_jax.primitives.spec import ScaleReadSpec as ScaleReadSpec
from te_jax.primitives.spec import ScaleWriteSpec as ScaleWriteSpec
from te_jax.primitives.state import scale_read as scale_read
from te_jax.primitives.state import scale_write as scale_write

TARGETS = _definition.targets()
"""The names of all custom calls: those of the primitives in a jaxpr, and of the targets in a lowered program."""
