"""The checksum of an array in a checkpoint costs one pass over the array."""

import re

import jax
import jax.numpy as jnp
import pytest

from te_jax.checkpoint.checksums import _device_sums
from te_jax.testing import aot


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_reads_the_array_once(dtype):
    compiled = aot.compile_for_h200(_device_sums, (jax.ShapeDtypeStruct((4096, 14336), dtype),))
    text = compiled.as_text()
    (name,) = re.findall(r"(%[\w.]+) = \S+ parameter\(0\)", text[text.index("ENTRY") :])
    readers = re.findall(rf"\([^)]*{re.escape(name)}[,)]", text[text.index("ENTRY") :])
    assert len(readers) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
