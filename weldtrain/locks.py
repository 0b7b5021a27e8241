"""Locks of open files between processes, which end with the process that has them."""

from __future__ import annotations


def lock(fd: int, *, exclusive: bool, wait: bool = True) -> bool | None:
    """Whether it was taken: not where another process has it and there is no `wait`; None where there are no locks, as on
    Windows and on some network file systems."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
