"""What a person sees while it runs and at its end: one progress line, one table."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, track
from rich.table import Table
from rich.text import Text

from weldtrain.errors import one_line

T = TypeVar("T")

log = logging.getLogger(__name__)


_PLAIN_EVERY_S = 30.0
_FILE_WIDTH = 200  # of a table that is written into a file


class ProgressLine:
    """A bar over all steps with loss, images/s and data wait; where the screen is no terminal a plain line now and then."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self._told_s = progress, task, time.monotonic()

    def advance(self, epoch: str) -> None:
        self._progress.update(self._task, advance=1, epoch=epoch)

    def show(self, figures: str) -> None:
        """Loss, images/s and data wait since the last log step."""
        self._progress.update(self._task, figures=figures)
        if self._progress.disable and time.monotonic() - self._told_s > _PLAIN_EVERY_S:
            task, self._told_s = self._progress.tasks[0], time.monotonic()
            log.info("epoch %s  step %d/%d  %s", task.fields["epoch"], task.completed + 1, task.total, figures)


@contextlib.contextmanager
def progress_line(total: int, done: int = 0) -> Iterator[ProgressLine]:
    """The bar, on standard error, for the time of the `with` block; of which `done` was done by an earlier process."""
    console = Console(stderr=True)
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressLine(progress, progress.add_task("", total=total, completed=done, epoch="1", figures=""))


def followed(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The same items, with a bar of how far they are."""
    console = Console(stderr=True)
    yield from track(items, what, total, console=console, transient=True, disable=not console.is_terminal)


def ap_table(title: str, metrics: Mapping[str, Any]) -> None:
    """Prints AP by class and over all, as COCO defines it; `n/a` where there is no truth to find."""
    rows = [(name, figure(metrics["per_class_ap_50"][name]), figure(ap)) for name, ap in metrics["per_class_ap"].items()]
    table(title, ("class", "AP50", "AP"), rows, ("all", figure(metrics["map_50"]), figure(metrics["map"])))


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], last: Sequence[object] = ()) -> None:
    """Prints rows below headings, numbers to the right; `last` is set apart."""
    grid = Table()
    rows = [[str(cell) for cell in row] for row in rows]
    for i, heading in enumerate(headings):
        is_text = any(row[i][:1].isalpha() and row[i] != "n/a" for row in rows)
        grid.add_column(_text(heading), justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        grid.add_row(*map(_text, row))
    if last:
        grid.add_section()
        grid.add_row(*map(_text, last))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH  # else it would wrap at 80
    console.print(_text(title))  # a table's own title would wrap at its width
    console.print(grid)


def _text(cell: object) -> Text:
    """As it is written: a class named `[red]` is no markup, and no control character reaches the screen."""
    return Text(one_line(str(cell)))


def figure(value: float | None) -> str:
    """Three decimals, or n/a."""
    return "n/a" if value is None else f"{value:.3f}"
