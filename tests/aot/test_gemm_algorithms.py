"""The table of GEMM algorithms in the CUDA module, which needs no GPU to be filled and read."""

import subprocess
import sys

PROGRAM = """
from te_jax.primitives import gemm_algorithms, library
library.register_cuda_targets()
module = library.registered_module("cuda")
choice = {"algorithm": "0123456789abcdef" * 8, "time_us": 1.5, "first_us": 2.0, "candidates": 3}
assert module.load_gemm_algorithm("GPU", "m=16", **choice)
assert not module.load_gemm_algorithm("GPU", "m=16", **choice)
(found,) = gemm_algorithms.report()
assert (found.device, found.gemm, found.source, found.note) == ("GPU", "m=16", "loaded", ""), found
assert {name: getattr(found, name) for name in choice} == choice, found
assert gemm_algorithms.table()["devices"] == {"GPU": {"m=16": choice}}
try:
    module.load_gemm_algorithm("GPU", "m=32", **{**choice, "algorithm": "0123"})
except ValueError as error:
    assert "expected 128 hexadecimal digits, got 0123" in str(error)
else:
    raise AssertionError("a wrong algorithm was taken")
print("done")
"""


def test_choices_are_kept():
    """In a process of its own: the table stays for the rest of one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
