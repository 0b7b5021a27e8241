"""The process of a sweep's job: `python -m weldtrain.job SENTINEL RUN_DIR OVERRIDE…` does what `weldtrain OVERRIDE…` does."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from weldtrain.__main__ import main
from weldtrain.errors import one_line
from weldtrain.interruption import end_with_main_process
from weldtrain.sweep import write_summary
from weldtrain.telemetry.record import SUMMARY


def run(sentinel: int, run_dir: Path, overrides: list[str]) -> None:
    """Ends with the sweep's process, which has the other end of `sentinel`. An error before there was a run is told here."""
    end_with_main_process(sentinel)
    sys.argv[1:] = overrides
    try:
        main(quiet=True)
    except SystemExit as end:
        error = end.__cause__ or end.__context__
        if end.code and isinstance(error, Exception) and not (run_dir / SUMMARY).exists():
            with open(run_dir / "run.log", "a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            write_summary(run_dir, {"status": "failed", "error": one_line(str(error)), "exit_code": end.code})
        raise


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
