"""Parameters and FP8 scales from and to other libraries: Flax, Flax's `fp8_ops`, TransformerEngine for JAX."""

from te_jax.interop.convert import export_params, import_params, import_variables

__all__ = ["export_params", "import_params", "import_variables"]
