"""Keep the GPU in the forward: its packs run ahead while earlier ones are checked and written.

Takes shards, hands on their documents as `hscache.produce.fill` wants them. Forwards go to one
stream, a few packs ahead. When one has ended, a second stream measures its states, splits them into
planes and copies them into a page-locked buffer, while the next forward runs; then the host writes
them. Nothing is given to the second stream before: a stream that waits takes about a thousand
kernels, and the host that gives it more waits too, with the next forward in its hands. At most
`AHEAD` + 1 packs are on their way, so that memory is bounded.

Axes: T tokens of a pack, L captured layers, H hidden, N documents of a pack.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hscache.clock import gpu_monitor
from hscache.content import Facts
from hscache.errors import HscacheError
from hscache.measures import Measures, document_facts, document_sums, measure, split_into
from hscache.plan import Plan
from hscache.planes import Codec
from hscache.shard_work import ShardWork
from hscache.target import Target
from hscache.writer import StateSums

log = logging.getLogger(__name__)

AHEAD = 2
"""Packs that are computed while one is written: a shard's end is waited for by one, a slow disk by
the other."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A document's states, with what the check and the statistics need.

    They lie in a buffer that is used again after the next document is asked for.
    """

    facts: Facts
    sums: StateSums
    arrays: dict[str, np.ndarray]
    """as a shard stores them; or, for codecs that the host encodes, their `bits` alone"""
    encoded: bool


def cut(documents: Sequence[int], lengths: np.ndarray, token_budget: int) -> list[list[int]]:
    """Cut documents, in order, into packs of at most `token_budget` tokens.

    `lengths` are those of all plan rows. A document longer than the budget is a pack of its own.
    """
    packs: list[list[int]] = []
    tokens = token_budget + 1
    for document in documents:
        length = int(lengths[document])
        if tokens + length > token_budget:
            packs.append([])
            tokens = 0
        packs[-1].append(document)
        tokens += length
    return packs


@dataclass(frozen=True)
class _Launched:
    shard: int
    documents: list[int]
    offsets: list[int]
    states_TLH: torch.Tensor
    begins: Any
    """marks around the forward"""
    ends: Any


class Stages:
    """Yields the documents of shards; computes ahead of whoever writes them.

    `likely_next` names the shard that will probably be asked for after this one, or None: its
    first packs run while the current shard is published. A wrong guess is thrown away.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        codec: Codec,
        token_budget: int,
        *,
        poll: Callable[[], None] = lambda: None,
        likely_next: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.token_budget = token_budget
        """Halved when the GPU's memory does not suffice."""
        self._plan = plan
        self._target = target
        self._codec = codec
        self._poll = poll
        self._likely_next = likely_next
        self._cuda = target.device.type == "cuda"
        self._todo: deque[tuple[int, list[int]]] = deque()
        self._launched: deque[_Launched] = deque()
        self._page_locked: torch.Tensor | None = None
        self._copies = torch.cuda.Stream(target.device, priority=-1) if self._cuda else None
        self._work = ShardWork()
        self._report: dict[str, Any] = {}
        self._warned = False
        self._warm_up()

    def states(self, shard: int) -> Iterator[tuple[int, Measured]]:
        """Yield (document, states) of a shard, in order.

        Raises HscacheError, naming pack and documents, if the GPU fails or one document alone does
        not fit its memory.
        """
        self._take_up(shard)
        self._work.publish_s = time.perf_counter() - self._work.started_s
        with gpu_monitor(self._target.device) as gpu:
            while self._has(shard):
                self._poll()
                self._launch_more()
                for found in self._documents():
                    before_s = time.perf_counter()
                    yield found
                    self._work.write_s += time.perf_counter() - before_s
        self._report = self._work.report(gpu, self.token_budget)
        self._work = ShardWork()

    def report(self) -> dict[str, Any]:
        """Return where the time of the last shard went, as shares, and what the GPU did."""
        return self._report

    def _has(self, shard: int) -> bool:
        return any(pack.shard == shard for pack in self._launched) or any(
            of == shard for of, _ in self._todo
        )

    def _take_up(self, shard: int) -> None:
        """Make a shard the next; forget packs of others, which were guessed wrongly."""
        self._todo = deque(pack for pack in self._todo if pack[0] == shard)
        self._launched = deque(pack for pack in self._launched if pack.shard == shard)
        if not self._has(shard):
            self._plan_shard(shard)

    def _plan_shard(self, shard: int) -> None:
        documents = self._plan.shard_documents(shard)
        packs = cut(documents, self._plan.lengths, self.token_budget)
        self._todo.extend((shard, pack) for pack in packs)

    def _launch_more(self) -> None:
        while len(self._launched) <= AHEAD:
            if not self._todo:
                guess = self._likely_next()
                if guess is None or self._has(guess):
                    return
                self._plan_shard(guess)
            shard, documents = self._todo.popleft()
            try:
                self._launched.append(self._launch(shard, documents))
            except torch.OutOfMemoryError as error:
                self._todo.appendleft((shard, documents))
                torch.cuda.empty_cache()
                if self._launched:  # their states lie in memory too
                    return
                self._halve(shard, documents, error)
            except RuntimeError as error:
                raise self._failed(shard, documents, error) from error

    def _halve(self, shard: int, documents: list[int], error: Exception) -> None:
        tokens = sum(int(self._plan.lengths[document]) for document in documents)
        if len(documents) == 1:
            raise HscacheError(
                f"document {documents[0]} of shard {shard}, {tokens:,} tokens, alone does not fit "
                f"the memory of {self._target.device}: {error}. Use a GPU with more memory, or a "
                "smaller data.max_tokens in a new cache; published shards are kept."
            ) from error
        self.token_budget = -(-tokens // 2)
        if not self._warned:
            log.warning(
                "a pack of %s tokens did not fit the memory of %s; packs are at most %s tokens "
                "from now on (token_budget)",
                f"{tokens:,}", self._target.device, f"{self.token_budget:,}",
            )  # fmt: skip
            self._warned = True
        todo = list(self._todo)
        self._todo.clear()
        for of, pack in todo:
            again = cut(pack, self._plan.lengths, self.token_budget)
            self._todo.extend((of, part) for part in again)

    def _failed(self, shard: int, documents: Sequence[int], error: Exception) -> HscacheError:
        return HscacheError(
            f"the forward of a pack failed on {self._target.device}: shard {shard}, documents "
            f"{documents[0]} to {documents[-1]}: {str(error).strip().splitlines()[0]}. Nothing of "
            "this shard was published. Run the same command again; it continues at this shard. If "
            "it fails at the same documents, look at them."
        )

    def _launch(self, shard: int, documents: list[int]) -> _Launched:
        plan = self._plan
        ids_T = torch.from_numpy(
            np.concatenate([plan.input_ids(document) for document in documents]).astype(np.int64)
        )
        lengths = [int(plan.lengths[document]) for document in documents]
        offsets = [0, *itertools.accumulate(lengths)]
        with self._on_device():
            begins = self._mark()
            states_TLH = self._target.capture(ids_T, offsets)
            return _Launched(shard, documents, offsets, states_TLH, begins, self._mark())

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._target.device) if self._cuda else contextlib.nullcontext()

    def _copying(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._copies) if self._copies else contextlib.nullcontext()

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        """Return the page-locked buffer; the pack before is written when it is asked for."""
        if self._page_locked is None or self._page_locked.numel() < size_bytes:
            token_bytes = 2 * len(self._target.captured_ids) * int(self._target.config.hidden_size)
            largest = min(self.token_budget, self._plan.num_tokens) * token_bytes
            self._page_locked = None
            self._page_locked = torch.empty(
                max(size_bytes, largest), dtype=torch.uint8, pin_memory=self._cuda
            )
        return self._page_locked

    def _warm_up(self) -> None:
        """Load every kernel of the second stream: a first use waits for all that the GPU has."""
        hidden = int(self._target.config.hidden_size)
        states_TLH = torch.ones(2, len(self._target.captured_ids), hidden, dtype=torch.bfloat16)
        with self._on_device(), self._copying():
            there_TLH = states_TLH.to(self._target.device)
            measure(there_TLH, (0, 1, 2), self._codec).to_host()
            split_into(there_TLH, self._codec, self._buffer(2 * states_TLH.numel()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait_for(self, pack: _Launched) -> None:
        """Wait until a pack's forward has ended; count its work."""
        if self._cuda:
            try:
                pack.ends.synchronize()
            except RuntimeError as error:
                raise self._failed(pack.shard, pack.documents, error) from error
        forward_s = self._seconds(pack.begins, pack.ends)
        self._work.add_pack(self._target.config, pack.offsets, forward_s)

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._cuda else end - begin

    def _documents(self) -> Iterator[tuple[int, Measured]]:
        pack = self._launched.popleft()
        self._wait_for(pack)
        documents, offsets = pack.documents, pack.offsets
        measures, arrays = self._brought(pack)
        del pack  # its states are on the host: the GPU has their memory back while they are written
        for index, document in enumerate(documents):
            begin, end = offsets[index], offsets[index + 1]
            yield (
                document,
                Measured(
                    facts=document_facts(measures, begin, end),
                    sums=document_sums(measures, index, begin, end),
                    arrays={name: values[begin:end] for name, values in arrays.items()},
                    encoded="bits" not in arrays,
                ),
            )

    def _brought(self, pack: _Launched) -> tuple[Measures, dict[str, Any]]:
        """Measure the states of a pack whose forward has ended; copy both to the host."""
        try:
            try:
                return self._copied(pack)
            except torch.OutOfMemoryError:
                # Forwards ahead take memory too; when they are done there is what this takes.
                if self._cuda:
                    torch.cuda.synchronize(self._target.device)
                    torch.cuda.empty_cache()
                return self._copied(pack)
        except RuntimeError as error:
            raise self._failed(pack.shard, pack.documents, error) from error

    def _copied(self, pack: _Launched) -> tuple[Measures, dict[str, Any]]:
        states_TLH = pack.states_TLH
        buffer = self._buffer(2 * states_TLH.numel())
        with self._on_device(), self._copying():
            begins = self._mark()
            measures = measure(states_TLH, pack.offsets, self._codec).to_host()
            arrays = split_into(states_TLH, self._codec, buffer)
            ends = self._mark()
            if self._cuda:
                ends.synchronize()
        self._work.copy_s += self._seconds(begins, ends)
        return measures, arrays
