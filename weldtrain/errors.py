"""The errors a user can meet. Each says in one line what happened, where, and how to fix it.

The entry point prints that line last and exits with `exit_code`; the traceback goes to `run.log`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class WeldtrainError(Exception):
    """`what` happened, `where` (file:line or config key), how to `fix` it. Pickles whole, so a worker can send it.

    `samples`, of any error of the loader or of a step, are those that it came with: as DetectionDataset.named gives them.
    """

    exit_code = 1
    samples: Sequence[Mapping[str, int | str]] = ()

    def __init__(self, what: str, where: object = "", fix: str = "") -> None:
        super().__init__(what, str(where), fix)

    def __str__(self) -> str:
        what, where, fix = self.args
        line = f"{where}: {what}" if where else what
        return one_line(f"{line}; {fix}" if fix else line)


class ConfigError(WeldtrainError):
    """The configuration is wrong."""

    exit_code = 2


class DataError(WeldtrainError):
    """The user's pictures, annotations, split file or checkpoint are wrong."""

    exit_code = 2


class PictureError(DataError):
    """A file that holds no whole picture of a sensible size. `dataset.bad_images` decides what it does to a run."""


class TrainingError(WeldtrainError):
    """The run itself failed: a non-finite loss, a lost worker, a full disk."""


class WorkerError(TrainingError):
    """A worker of the loader died or hangs; the run itself is whole."""


class HangError(TrainingError):
    """Nothing moves any more."""


IN_WORKER = "in a loader worker:"  # how the cause begins of an error that a worker sent


def origins(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(text: str) -> str:
    """Text from files and libraries as a terminal can show it: no line breaks, no control characters, no broken bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


def reason(error: BaseException) -> str:
    """The first sentence of a library's error; what follows is advice to programmers."""
    return one_line(str(error)).partition(". ")[0] or type(error).__name__
