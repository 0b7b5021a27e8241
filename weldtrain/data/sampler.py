"""Order: which pictures make up each batch of each epoch, a function of `(seed, epoch)` alone; InOrder: each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Key = tuple[int, int, int]  # (epoch, row, repeat): all that a sample depends on, besides the seed


class Order:
    """The batches of any epoch, of the same number in each; `share` says which of how many ranks' they are.

    Every rank's batches together are those of one process with the larger batch.
    """

    def __init__(
        self, rows: np.ndarray, batch_size: int, *, shuffle: bool, drop_last: bool = False, seed: int = 0,
        expected: np.ndarray | None = None, shapes: np.ndarray | None = None, share: tuple[int, int] = (0, 1),
    ) -> None:
        """rows int64 [n] of the index. `expected` float [n] is how often each shall come in an epoch on average, by default
        once; `shapes` float [n] are aspect ratios by which batches are put together, by default regardless of them."""
        self.rows, self.batch_size, self.shuffle, self.drop_last, self.seed = rows, batch_size, shuffle, drop_last, seed
        self.share = share
        self._total = len(rows) if expected is None else round(float(expected.sum()))
        self._expected = None if expected is None else expected * (self._total / expected.sum())
        self._groups = None if shapes is None else _aspect_groups(shapes)

    def __len__(self) -> int:
        """Batches of an epoch of this rank: of every rank as many, but for a last one that is too small for all."""
        return self.rounds - (self.rounds > 0 and self.pictures(self.rounds - 1) <= self.share[0])

    @property
    def rounds(self) -> int:
        """Batches of an epoch of the rank that has most."""
        together = self._together
        return self._total // together if self.drop_last else -(-self._total // together)

    def pictures(self, i: int) -> int:
        """How many the ith round holds, over all ranks."""
        return min(self._together, self._total - i * self._together)

    @property
    def _together(self) -> int:
        return self.batch_size * self.share[1]

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[Key]]:
        """The keys of each batch of an epoch from the `start`th on."""
        rng = np.random.default_rng((self.seed, epoch))
        picks = rng.permutation(len(self.rows)) if self.shuffle else np.arange(len(self.rows))
        repeats = np.zeros(len(picks), np.int64)
        if self._expected is not None:
            picks, repeats = self._repeated(picks, rng)
        together = self._together
        if self._groups is not None:
            if self.drop_last:  # by chance, and not what fills no batch of its own shape
                picks = picks[: self.rounds * together]
            by_group = self._grouped(picks)
            picks, repeats = picks[by_group], repeats[by_group]
        rows = self.rows[picks]
        rank, ranks = self.share
        for i in range(start, len(self)):
            part = slice(i * together + rank, min((i + 1) * together, len(rows)), ranks)
            yield [(epoch, row, repeat) for row, repeat in zip(rows[part].tolist(), repeats[part].tolist())]

    def epochs(self, epoch: int, start: int = 0, until: int | None = None) -> Iterator[list[Key]]:
        """The keys of all batches from the `start`th of `epoch` on, to the end of the epoch before `until`, or for ever."""
        while until is None or epoch < until:
            yield from self.batches(epoch, start)
            epoch, start = epoch + 1, 0

    def _repeated(self, picks: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Each pick as often as expected, rounded up or down so that the sum is exact: systematic sampling (Madow 1949)."""
        ends = np.cumsum(self._expected[picks])
        ends *= self._total / ends[-1]
        ends[-1] = self._total
        times = np.diff(np.floor(ends + rng.random() * (1 - 1e-9)), prepend=0).astype(np.int64)
        times[-1] += self._total - times.sum()
        repeated = np.repeat(picks, times)
        repeats = np.arange(len(repeated)) - np.repeat(np.cumsum(times) - times, times)
        mixed = rng.permutation(len(repeated)) if self.shuffle else np.arange(len(repeated))
        return repeated[mixed], repeats[mixed]

    def _grouped(self, picks: np.ndarray) -> np.ndarray:
        """The same picks in an order in which batches hold one group: a batch stands where its group filled it.

        What fills none comes at the end, group by group, and is shared out among mixed batches.
        """
        together = self._together
        groups = self._groups[picks]
        full, rest = [], []
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            whole = len(places) // together * together
            full += list(places[:whole].reshape(-1, together))
            rest.append(places[whole:])
        full.sort(key=lambda places: places[-1])
        return np.concatenate([picks[:0], *full, *rest])


class InOrder:
    """Every row once, in order, whole batches dealt out to ranks. A batch ends where the size changes, so that padding, and with
    it what is found in a picture, depends neither on the pictures around it nor on the batch size nor on the ranks."""

    def __init__(self, rows: np.ndarray, sizes: np.ndarray, batch_size: int, share: tuple[int, int] = (0, 1)) -> None:
        """rows int64 [n] of the index; sizes int [n,2] of their batches if they were alone."""
        self.rows, self.batch_size, self.share = rows, batch_size, share
        runs = np.flatnonzero((sizes[1:] != sizes[:-1]).any(1)) + 1
        ends = [*runs.tolist(), len(rows)]
        self._parts = [slice(at, min(at + batch_size, end)) for start, end in zip([0, *ends], ends)
                       for at in range(start, end, batch_size)][share[0] :: share[1]]

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._parts)

    def epochs(self, epoch: int, start: int = 0, until: int | None = None) -> Iterator[list[Key]]:
        """The keys of the batches from the `start`th on: once, whatever epochs follow."""
        for part in self._parts[start:]:
            yield [(epoch, row, 0) for row in self.rows[part].tolist()]


def repeat_factors(classes: Sequence[np.ndarray], count: int, threshold: float) -> np.ndarray:
    """float64 [count]: how often each picture comes in an epoch so that rare defects come more often.

    `classes` holds for each class the positions of the pictures that show it. max(1, sqrt(threshold / f)), where f is the
    share of pictures that show the rarest class of the picture (Gupta, Dollár, Girshick 2019, LVIS, section 5).
    """
    factors = np.ones(count)
    for shown in classes:
        if len(shown):
            factors[shown] = np.maximum(factors[shown], np.sqrt(threshold * count / len(shown)))
    return factors


def balancing(classes: Sequence[np.ndarray], count: int) -> np.ndarray:
    """float64 [count] of sum `count`: each class's pictures, and those without defects, come equally often.

    A picture that shows several classes counts as one of its rarest.
    """
    share = np.zeros(count)
    for shown in [np.setdiff1d(np.arange(count), np.concatenate([[], *classes])), *classes]:
        if len(shown):
            share[shown] = np.maximum(share[shown], 1 / len(shown))
    return share * (count / share.sum())


def _aspect_groups(shapes: np.ndarray) -> np.ndarray:
    """Portrait or landscape, and how elongated: steps of a factor 1.5."""
    return np.rint(np.log(shapes) / np.log(1.5)).astype(np.int64)
