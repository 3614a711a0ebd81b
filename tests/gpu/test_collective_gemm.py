"""Collective matmuls of two processes, which find their memory through CUDA IPC. They may share one GPU."""

import os
import pathlib
import socket
import subprocess
import sys

SECONDS = 240  # for both; compiling takes most of it


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def test_two_processes():
    program = pathlib.Path(__file__).parents[1] / "primitives" / "collective_processes.py"
    port = free_port()
    both = []
    try:
        for process in range(2):
            environment = {
                **os.environ,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "NCCL_NVLS_ENABLE": "0",
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            }
            both.append(
                subprocess.Popen(
                    [sys.executable, str(program), str(port), str(process)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=SECONDS)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, output in zip(both, outputs, strict=True):
        assert process.returncode == 0, "\n\n".join(outputs)
        assert output.rstrip().endswith("done"), output
