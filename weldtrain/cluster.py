"""Jobs that submitit starts, on a Slurm cluster or on this machine: their ranks, and their end before their time is over."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from weldtrain import interruption


def submitted() -> bool:
    """Whether this process is such a job. Its directory is its own: what lies there it wrote before it was queued again."""
    return "SUBMITIT_EXECUTOR" in os.environ


@contextlib.contextmanager
def place_in_cluster() -> Iterator[None]:
    """Meets the job's other tasks as ranks. At the signal that comes before the time is over, or where a more urgent job needs
    the place, the run ends with a checkpoint and is queued again."""
    if not submitted():
        yield
        return
    import submitit
    from submitit.helpers import TorchDistributedEnvironment

    from weldtrain.engine import distributed

    if submitit.JobEnvironment().num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        distributed.join()
    ending = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
    queue_again = signal.getsignal(ending)
    interruption.listen(ending)
    try:
        yield
        distributed.leave()
    except interruption.Interrupted as asked:
        queue_again(asked.number, None)
