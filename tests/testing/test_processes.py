"""Processes that are started together: none is left behind, whatever one of them does."""

import os
import sys
import time

import pytest

from te_jax.testing import processes

SLEEP = "import time; print('here', flush=True); time.sleep(100)"


def programs(*codes):
    return [[sys.executable, "-S", "-c", code] for code in codes]


def test_all_end_by_themselves():
    heard = []
    done = processes.run_together(
        programs("print('one')", "import sys; print('two', file=sys.stderr)"),
        timeout_s=60,
        echo=lambda number, line: heard.append((number, line)),
    )
    assert [(p.returncode, p.output) for p in done] == [(0, "one\n"), (0, "two\n")]
    assert sorted(heard) == [(0, "one\n"), (1, "two\n")]


def test_a_failure_ends_the_others():
    start = time.monotonic()
    done = processes.run_together(programs(SLEEP, "raise SystemExit(3)"), timeout_s=90, grace_s=0.2)
    assert [p.returncode for p in done] == [None, 3]
    assert time.monotonic() - start < 60


def test_one_that_is_meant_to_die_ends_nobody():
    late = "import time; time.sleep(1); print('still here')"
    done = processes.run_together(
        programs(late, "raise SystemExit(3)"), timeout_s=60, grace_s=0.0, failure_ends_all=False
    )
    assert [(p.returncode, p.output) for p in done] == [(0, "still here\n"), (3, "")]


@pytest.mark.parametrize("limit", [{"timeout_s": 2.0}, {"timeout_s": 90.0, "stall_s": 2.0}], ids=["timeout", "stall"])
def test_who_is_stuck_is_killed_with_its_children(limit):
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]); print(c.pid)"
    (done,) = processes.run_together(programs(parent + "; sys.stdout.flush(); c.wait()"), **limit)
    assert done.returncode is None
    child = next(int(line) for line in done.output.splitlines() if line.isdigit())
    for _ in range(100):  # until whoever inherits it has heard of its end
        try:
            os.kill(child, 0)
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    break
        except (ProcessLookupError, FileNotFoundError):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {child} is left")
