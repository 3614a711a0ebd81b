"""Programs of several processes that find each other through ``jax.distributed``: started together, ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from te_jax.testing.compiling import xla_flags


@dataclasses.dataclass
class Process:
    """One of them: its exit status (None: it had to be killed) and everything that it printed."""

    returncode: int | None
    output: str


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stall_s: float | None = None,
    grace_s: float = 10.0,
    failure_ends_all: bool = True,
    echo: Callable[[int, str], None] | None = None,
) -> list[Process]:
    """Runs one process for each command and returns when all have ended. None outlives the call, nor a child of one.

    Args:
      commands: program and arguments of each.
      timeout_s: for all of them; whoever is left is killed.
      env: instead of this process's environment.
      stall_s: so long without a line from any of them counts as a timeout.
      grace_s: how long the others have after one has failed.
      failure_ends_all: False where one is meant to die.
      echo: called with (number of the process, line) of everything printed, as it comes, from several threads.
    """
    lines: list[list[str]] = [[] for _ in commands]
    heard = [time.monotonic()]

    def listen(number: int, stream) -> None:
        for line in stream:
            heard[0] = time.monotonic()
            lines[number].append(line)
            if echo is not None:
                echo(number, line)

    started: list[subprocess.Popen] = []
    listeners = []
    try:
        for number, command in enumerate(commands):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            started.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))
            listeners.append(threading.Thread(target=listen, args=(number, started[-1].stdout), daemon=True))
            listeners[-1].start()
        end = time.monotonic() + timeout_s
        while any(process.poll() is None for process in started):
            now = time.monotonic()
            if failure_ends_all and any(process.poll() for process in started):
                end = min(end, now + grace_s)
                failure_ends_all = False
            if now > end or (stall_s is not None and now > heard[0] + stall_s):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # its whole session, also where it has ended itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for listener in listeners:
            listener.join(timeout=5)
        for process in started:
            if process.stdout is not None:
                process.stdout.close()
    return [Process(code, "".join(printed)) for code, printed in zip(codes, lines, strict=True)]


def run_pair(program: Any, *arguments: Any, devices: int, timeout_s: float) -> None:
    """Runs ``python PROGRAM ARGUMENTS... PORT NUMBER`` for the numbers 0 and 1, on so many CPU devices each.

    Asserts that both end well and print "done" last.
    """
    command = [sys.executable, *map(str, (program, *arguments, free_port()))]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)}
    both = run_together([[*command, str(number)] for number in range(2)], timeout_s=timeout_s, env=env)
    printed = "\n\n".join(process.output for process in both)
    assert [process.returncode for process in both] == [0, 0], printed
    assert all(process.output.endswith("done\n") for process in both), printed
