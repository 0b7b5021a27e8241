"""Jobs that submitit starts, on a Slurm cluster or on this machine: their ranks, and their end before their time is over."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from weldtrain import interruption


def submitted() -> bool:
    """Whether this process is such a job. What lies in its directory it wrote before it was queued again."""
    return "SUBMITIT_EXECUTOR" in os.environ


@contextlib.contextmanager
def place_in_cluster() -> Iterator[tuple[int, int]]:
    """This task's rank, of how many, told to what it starts as torchrun would. At the signal that comes before the time is over,
    or where a more urgent job needs the place, what happens inside is interrupted, and then the job is queued again."""
    if not submitted():
        yield 0, 1
        return
    import submitit
    from submitit.helpers import TorchDistributedEnvironment

    place = submitit.JobEnvironment()
    if place.num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    ending = getattr(signal, f"SIG{place.USR_SIG}")
    queue_again = signal.getsignal(ending)
    interruption.listen(ending)
    try:
        yield place.global_rank, place.num_tasks
    except interruption.Interrupted as asked:
        queue_again(asked.number, None)
