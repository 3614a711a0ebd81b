import dataclasses, functools, jax
from typing import Any
@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "data_t", "scale_inv"], meta_fields=["format", "scaling", "dtype"])
@dataclasses.dataclass(frozen=True)
class QTensor:
    data: Any
    data_t: Any
    scale_inv: Any
    format: str = "e4m3"
    scaling: str = "tensor"
    dtype: str = "bfloat16"
