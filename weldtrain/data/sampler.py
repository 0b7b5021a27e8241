"""EpochSampler: the order of samples, a function of `(seed, epoch)` alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class EpochSampler(Sampler[tuple[int, int]]):
    """Yields `(epoch, row)` for every row once, shuffled anew each epoch or in their own order."""

    def __init__(self, rows: np.ndarray, *, shuffle: bool, seed: int = 0) -> None:
        self.rows, self.shuffle, self.seed = rows, shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        rows = np.random.default_rng((self.seed, self.epoch)).permutation(self.rows) if self.shuffle else self.rows
        return ((self.epoch, int(row)) for row in rows)
