"""Ranks: the processes that train one model together, as `torchrun` starts them. Alone, every call here is the plain thing."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")

# A rank that fails ends its process, and torchrun then ends all; this is for one that waits for another's long first work.
_PATIENCE = timedelta(minutes=30)


class World(NamedTuple):
    """Which of how many ranks this process is."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0


def world() -> World:
    """This process's place."""
    if not dist.is_initialized():
        return World()
    return World(dist.get_rank(), dist.get_world_size())


def join() -> None:
    """Meets the other ranks, by the environment that torchrun sets."""
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    # After a failure torchrun may hand out the same store, which still holds the addresses of ranks that are gone.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=size,
                            timeout=_PATIENCE)


def leave() -> None:
    """Parts from the others. Not after a failure: they would be waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agreed(value: T) -> T:
    """The first rank's `value`, on every rank."""
    if world().size == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def gathered(value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank."""
    if world().size == 1:
        return [value]
    held: list[Any] = [None] * world().size
    dist.all_gather_object(held, value)
    return held


def in_turn(work: Callable[[], T]) -> T:
    """The first rank does it, then all others: what it made is there for them."""
    first = world().first
    done = work() if first else None
    if world().size > 1:
        dist.barrier()
    return done if first else work()


def summed(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of a small tensor."""
    if world().size > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def same_buffers(model: nn.Module) -> None:
    """Gives every rank the first one's buffers: statistics of a batch norm are each rank's own between steps."""
    if world().size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


class StopTogether:
    """Lets all ranks stop after the same step where one of them was asked to."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store() if world().size > 1 else None

    def ask(self, step: int, number: int) -> None:
        """Called between steps, on whichever rank the signal came to. No rank is more than a step ahead of another, for
        each waits for all gradients: so all can still stop after the next."""
        if self._store is not None:
            self._store.compare_set("weldtrain/stop", "", f"{step + 1} {number}")  # the first to ask decides

    def due(self, step: int) -> int | None:
        """The signal that ends all ranks after `step`, None if there is none."""
        if self._store is None or not self._store.check(["weldtrain/stop"]):
            return None
        after, number = map(int, self._store.get("weldtrain/stop").split())
        return number if step >= after else None
