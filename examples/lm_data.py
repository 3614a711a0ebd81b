"""Real text that every machine has: the sources of the running Python's standard library, as bytes."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
import zlib

import numpy as np

VOCABULARY = 256
HELD_OUT_ONE_IN = 20  # files
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out``: uint8 [n], no file in both."""

    train: np.ndarray
    held_out: np.ndarray

    def batch(self, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
        """int32 [batch, seq + 1] at random places: a pure function of (seed, step), so that a resumed run sees the
        batches that an uninterrupted one would."""
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - seq, size=batch)
        return self.train[starts[:, None] + np.arange(seq + 1)].astype(np.int32)

    def held_out_batches(self, count: int, batch: int, seq: int) -> np.ndarray:
        """int32 [count, batch, seq + 1]: the same windows every time, spread evenly over the held-out bytes."""
        starts = np.linspace(0, len(self.held_out) - seq - 1, count * batch).astype(np.int64)
        return self.held_out[starts[:, None] + np.arange(seq + 1)].astype(np.int32).reshape(count, batch, seq + 1)

    def unigram_entropy(self) -> float:
        """Nats per byte that a model knowing only byte frequencies would reach: what training has to beat."""
        counts = np.bincount(self.train, minlength=VOCABULARY) + 1
        return float(-np.mean(np.log(counts / counts.sum())[self.held_out]))


def load(root: str | None = None) -> Corpus:
    """All .py files under ``root`` (default: the standard library), split into train and held-out by file name."""
    folder = pathlib.Path(root or sysconfig.get_path("stdlib"))
    train, held_out = [], []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if NOT_STDLIB.isdisjoint(name.parts):
            split = held_out if zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0 else train
            split.append(path.read_bytes())
    if not train or not held_out:
        raise ValueError(f"load: root: expected a folder with many .py files, got {folder} with {len(train)}")
    return Corpus(_join(train), _join(held_out))


def _join(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(files), dtype=np.uint8)
