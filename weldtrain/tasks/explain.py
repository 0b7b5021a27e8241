"""task=explain: what an error message means and what to do, from the table that runs themselves go by; without one, the table."""

from __future__ import annotations

import itertools

from weldtrain.config import Config
from weldtrain.diagnosis import FAULTS, diagnosed
from weldtrain.errors import DataError, one_line


def run(cfg: Config, record: object) -> None:
    """Where a preset of one's own asks for it; from the command line it is called before any of that is made."""
    explain(cfg.error)


def explain(error: str | None) -> None:
    """Prints it; needs no run and writes nothing. Raises DataError for a message that the table does not know."""
    if not error:
        print(fault_tree())
        return
    fault = diagnosed(error)
    if fault is None:
        raise DataError("is not known", one_line(error)[:200], "give the last lines of the message; task=explain alone lists "
                        "what is known")
    print(f"{fault.area}: {fault.means}\nwhat to do: {fault.fix}")


def fault_tree() -> str:
    """All faults by area, each with what to do."""
    lines = []
    for area, faults in itertools.groupby(FAULTS, key=lambda fault: fault.area):
        lines.append(area)
        for fault in faults:
            lines += [f"  {fault.means}", f"    -> {fault.fix}"]
    return "\n".join(lines)
