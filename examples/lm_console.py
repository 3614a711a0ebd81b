"""What the user sees while training: a progress bar on a terminal, plain lines elsewhere; and stopping on a signal."""

from __future__ import annotations

import signal
import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StopOnSignal:
    """Turns the first Ctrl-C or SIGTERM into ``received`` (the signal's number), so that the loop can save; a second
    one has its usual effect."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._usual: dict[int, object] = {}

    def __enter__(self) -> StopOnSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info) -> None:
        self._restore()

    def _note(self, number: int, frame) -> None:
        del frame
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)


class Console:
    """``update(step, loss)`` as often as wanted; shows loss and tokens per second."""

    def __init__(self, name: str, start: int, steps: int, tokens_per_step: int) -> None:
        self._name, self._steps, self._tokens_per_step = name, steps, tokens_per_step
        self._last = (start, time.perf_counter())
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(name, total=steps, completed=start, loss=float("nan"), rate=0.0)

    def __enter__(self) -> Console:
        self._bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float) -> None:
        """``step`` steps are done and the last one had ``loss``."""
        last_step, last_time = self._last
        now = time.perf_counter()
        rate = (step - last_step) * self._tokens_per_step / max(now - last_time, 1e-9)
        self._last = (step, now)
        if self._bar.disable:
            print(f"{self._name}: step {step}/{self._steps}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)
        else:
            self._bar.update(self._task, completed=step, loss=loss, rate=rate)
