"""The compiled extension modules. Loaded only by ``te_jax.primitives.library``."""
