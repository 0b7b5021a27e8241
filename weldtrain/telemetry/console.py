"""What a person sees while it runs and at its end: one progress line, one table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class ProgressLine:
    """A bar over all steps with loss, images/s and data wait; silent where the screen is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, epoch: str) -> None:
        self._progress.update(self._task, advance=1, epoch=epoch)

    def show(self, figures: str) -> None:
        """Loss, images/s and data wait since the last log step."""
        self._progress.update(self._task, figures=figures)


@contextlib.contextmanager
def progress_line(total: int) -> Iterator[ProgressLine]:
    """The bar, on standard error, for the time of the `with` block."""
    console = Console(stderr=True)
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressLine(progress, progress.add_task("", total=total, epoch="1", figures=""))


def ap_table(title: str, metrics: Mapping[str, Any]) -> None:
    """Prints AP by class and over all, as COCO defines it; `n/a` where there is no truth to find."""
    table = Table()
    for heading in ("class", "AP50", "AP"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, ap in metrics["per_class_ap"].items():
        table.add_row(Text(name), figure(metrics["per_class_ap_50"][name]), figure(ap))
    table.add_section()
    table.add_row("all", figure(metrics["map_50"]), figure(metrics["map"]))
    console = Console()
    console.print(Text(title))  # a table's own title would wrap at its width
    console.print(table)


def figure(value: float | None) -> str:
    """Three decimals, or n/a."""
    return "n/a" if value is None else f"{value:.3f}"
