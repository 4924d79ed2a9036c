"""Ranks: the processes of one run, on one machine or several, and what they say to each other.

Takes the environment of torchrun, accelerate launch or srun; hands on a `Ranks` that adds, gathers
and broadcasts. Numbers of the host travel over gloo, so they never wait for a GPU and a dead rank
is noticed there; tensors go over nccl on GPUs. A store holds the few words that ranks leave for
each other without waiting.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hscache.errors import CacheMismatchError, ConfigError, HscacheError

log = logging.getLogger(__name__)

_BUCKET_ELEMENTS = 2**24
_SAY_S = 30.0


class RankLostError(HscacheError):
    """Another rank died or did not come within the time-out; nothing more can be exchanged."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Which process of how many this is, as its launcher says."""

    rank: int = 0
    num_ranks: int = 1


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Read the launcher's variables: RANK, WORLD_SIZE (torchrun, accelerate), SLURM_* (srun).

    Raises ConfigError when there are several processes and no address at which they could meet.
    """
    names = ("RANK", "WORLD_SIZE")
    if "WORLD_SIZE" not in environment and "SLURM_STEP_NUM_TASKS" in environment:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    num_ranks = int(environment.get(names[1], "1"))
    if num_ranks == 1:
        return Launch()
    missing = [n for n in (names[0], "MASTER_ADDR", "MASTER_PORT") if n not in environment]
    if missing:
        raise ConfigError(
            f"{names[1]} is {num_ranks}, and {', '.join(missing)} not set: the ranks cannot find "
            "each other. Start with torchrun or accelerate launch, or export host and port of the "
            "first node before srun."
        )
    rank = int(environment[names[0]])
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"{names[0]} is {rank}, expected 0 to {num_ranks - 1} ({names[1]} - 1).")
    return Launch(rank=rank, num_ranks=num_ranks)


class Ranks:
    """The ranks of a run; without arguments a run of one, which asks nobody.

    What is gathered comes in rank order. Every method that exchanges something raises RankLostError
    when a rank is gone, or late by more than the time-out.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        store: Any = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.timeout_s = timeout_s
        """How long one rank waits for another in an exchange."""
        self.wait_s = 0.0
        """Seconds in exchanges; on a GPU those of tensors go on after that."""
        self._store, self._group = store, group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.num_ranks == 1

    def join(self, device: torch.device) -> None:
        """Open the process group, once every rank has prepared; however long that takes.

        Until then no rank waits in a collective, so a slow start cannot run into the time-out.
        Raises RankLostError when another rank said that it `cannot_start`.
        """
        if self.alone or self._group is not None:
            return
        self.leave_word("ready")
        said_s = time.monotonic()
        while missing := [r for r in range(self.num_ranks) if not self.has_prepared("ready", r)]:
            time.sleep(0.05)
            if time.monotonic() - said_s > _SAY_S:
                said_s = time.monotonic()
                log.info("waiting for ranks %s to prepare", missing)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        with self._contact():
            dist.init_process_group(
                backend,
                store=self._store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=datetime.timedelta(seconds=self.timeout_s),
            )
        self._group = dist.group.WORLD

    def has_prepared(self, name: str, rank: int) -> bool:
        """Like `word`, before `join`; raises RankLostError when a rank has said `cannot_start`."""
        if failure := self.called("cannot-start"):
            raise RankLostError(failure)
        return self.word(name, rank)

    def cannot_start(self, error: Exception) -> None:
        """Tell the others, who would wait in `join`, that this rank does not come."""
        with contextlib.suppress(RankLostError):
            self.call("cannot-start", f"rank {self.rank} cannot start: {error}")

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers; exact for integers up to 2**53."""
        if self.alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        with self._exchange():
            dist.all_gather(found, mine, group=self._group)
        return [tensor.tolist() for tensor in found]

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, added in rank order."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, stacked along a new first axis; stays on the device."""
        if self.alone:
            return tensor[None]
        found = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self._exchange():
            dist.all_gather(found, tensor, group=self._group)
        return torch.stack(found)

    @torch.no_grad()
    def add_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks, several small ones at a time."""
        if self.alone:
            return
        with self._exchange():
            for bucket in buckets(tensors, _BUCKET_ELEMENTS):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0], group=self._group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self._group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def take_from_first_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        if self.alone:
            return
        with self._exchange():
            for tensor in tensors:
                dist.broadcast(tensor.data, group=self._group, group_src=0)

    def require_equal(self, number: int, what: str) -> None:
        """Raise CacheMismatchError on every rank unless all have the same number, below 2**53."""
        numbers = [int(found[0]) for found in self.gather([number])]
        if len(set(numbers)) > 1:
            others = [rank for rank, found in enumerate(numbers) if found != numbers[0]]
            raise CacheMismatchError(f"{what}: ranks {others} differ from rank 0.")

    def leave_word(self, name: str, text: str = "") -> None:
        """Leave a word for the others, who may look for it; waits for nobody."""
        if self._store is not None:
            with self._contact():
                self._store.set(f"{name}/{self.rank}", text)

    def word(self, name: str, rank: int) -> bool:
        """Say whether a rank has left that word."""
        with self._contact():
            return self._store is not None and self._store.check([f"{name}/{rank}"])

    def read_word(self, name: str, rank: int) -> str:
        """Return the text of a word that is there."""
        with self._contact():
            return self._store.get(f"{name}/{rank}").decode()

    def call(self, name: str, text: str) -> None:
        """Leave a word that any rank finds with `called`; of several the last stays."""
        if self._store is not None:
            with self._contact():
                self._store.set(name, text)

    def called(self, name: str) -> str | None:
        """Return what some rank left with `call`, None if none did."""
        if self._store is None:
            return None
        with self._contact():
            return self._store.get(name).decode() if self._store.check([name]) else None

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            with self._contact():
                yield
        finally:
            self.wait_s += time.perf_counter() - started_s

    @contextlib.contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # gloo: "[/path/file.cc:553] Connection closed by peer [host]:port. More words."
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0])
            raise RankLostError(
                f"lost contact with another of the {self.num_ranks} ranks "
                f"({reason.split('. ')[0].rstrip('.')})."
            ) from error


@contextlib.contextmanager
def connected(launch: Launch, timeout_s: float) -> Iterator[Ranks]:
    """Yield the ranks of a launch, who can leave words at once and exchange after `join`."""
    if launch.num_ranks == 1:
        yield Ranks()
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        rendezvous = dist.rendezvous(
            "env://", rank=launch.rank, world_size=launch.num_ranks, timeout=timeout
        )
        store, _, _ = next(iter(rendezvous))
    except (RuntimeError, OSError) as error:
        raise RankLostError(
            f"the {launch.num_ranks} ranks did not meet within {timeout_s:g} s ({error})."
        ) from error
    store.set_timeout(timeout)
    # After an error others may be in a collective that never ends, and closing would wait for it.
    yield Ranks(launch.rank, launch.num_ranks, store=store, timeout_s=timeout_s)
    if dist.is_initialized():
        dist.destroy_process_group()


def buckets(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Cut a list into runs of at most `limit` elements; a larger tensor is a run of its own."""
    bucket: list[torch.Tensor] = []
    num_elements = 0
    for tensor in tensors:
        if bucket and num_elements + tensor.numel() > limit:
            yield bucket
            bucket, num_elements = [], 0
        bucket.append(tensor)
        num_elements += tensor.numel()
    if bucket:
        yield bucket
