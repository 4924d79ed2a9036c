"""Tokenise the rows of a corpus into one file per range of rows, in this process or in several.

Takes input files, settings and a tokenizer; leaves `<first row>.npz` in a folder for every 1,024
rows of a file, each whole or not at all, and hands on the ranges in order. What is there already is
not done again. Processes are spawned: a forked copy of a tokenizer with threads may never wake up.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache import files
from hscache.config import DataConfig
from hscache.errors import HscacheError
from hscache.inputs import InputFile, Packet
from hscache.progress import Progress
from hscache.tokenize_rows import RowTokenizer

_Job = tuple["Range", Packet]

RANGE_ROWS = 1024
"""Rows in a file of tokens: a few seconds of one core, which is what a kill loses."""
_TEXT_PER_WORKER = 16_000_000
"""Bytes of text that are worth a process: about 6 s of work (measured: 2.6 MB/s on a slow core with
SmolLM2's tokenizer), twice what it takes to start one."""
_PACKING = 4
"""Bytes of text in a byte of a compressed file, about."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Neighbouring rows of one input file that are tokenised together."""

    first_row: int
    """in the corpus"""
    positions: tuple[int, ...] | None
    """which of its rows are wanted, None for all"""
    num_rows: int
    """how many are wanted"""
    path: Path
    """file of their tokens"""


def cut_ranges(
    counts: Sequence[int], chosen: npt.NDArray[np.int64] | None, folder: Path
) -> list[list[Range]]:
    """Return the ranges of each input file of `counts` rows.

    `chosen` are the rows of the corpus that are wanted, ascending, None for all. A range may want
    none, and then has no file.
    """
    ranges: list[list[Range]] = []
    start = 0
    for count in counts:
        ranges.append([])
        for first in range(start, start + count, RANGE_ROWS):
            size = min(RANGE_ROWS, start + count - first)
            positions = None
            if chosen is not None:
                low, high = np.searchsorted(chosen, (first, first + size))
                positions = tuple((chosen[low:high] - first).tolist())
            ranges[-1].append(
                Range(
                    first_row=first,
                    positions=positions,
                    num_rows=size if positions is None else len(positions),
                    path=folder / f"{first:012d}.npz",
                )
            )
        start += count
    return ranges


def choose_workers(data: DataConfig, inputs: Sequence[InputFile], tokenizer: Any) -> int:
    """Return how many processes tokenise; 0 means this one, whose tokenizer has threads of its own.

    Starting one imports transformers, which costs seconds, so a small corpus is done here.
    """
    workers = data.workers
    if workers is None:
        text = sum(
            file.path.stat().st_size * (1 if file.path.suffix == ".jsonl" else _PACKING)
            for file in inputs
        )
        workers = min(len(os.sched_getaffinity(0)), text // _TEXT_PER_WORKER)
    # Code that came with a model is importable in this process alone.
    remote = type(tokenizer).__module__.startswith("transformers_modules")
    return 0 if workers <= 1 or remote else workers


def tokenize_files(
    inputs: Sequence[InputFile],
    ranges: Sequence[Sequence[Range]],
    data: DataConfig,
    tokenizer: Any,
) -> None:
    """Write the files of all ranges that are not there; `ranges` has a list for each input file.

    Raises the DataError of the first bad row, HscacheError when a process was killed. Files that
    were finished stay.
    """
    wanted = [part for parts in ranges for part in parts if part.num_rows]
    done = sum(part.num_rows for part in wanted if part.path.exists())
    total = sum(part.num_rows for part in wanted)
    if done == total:
        return
    workers = choose_workers(data, inputs, tokenizer)
    label = f"tokenize in {workers} processes" if workers else "tokenize"
    jobs = _read_jobs(inputs, ranges)
    with Progress(total, unit="rows", label=label, initial=done) as progress:
        for num_rows in (_in_processes if workers else _here)(jobs, workers, data, tokenizer):
            progress.advance(num_rows)


def _read_jobs(inputs: Sequence[InputFile], ranges: Sequence[Sequence[Range]]) -> Iterator[_Job]:
    """Yield the ranges without a file, and their rows."""
    for file, parts in zip(inputs, ranges, strict=True):
        if all(part.path.exists() or not part.num_rows for part in parts):
            continue
        packets = file.read_packets(RANGE_ROWS)
        for part, packet in zip(parts, packets, strict=False):
            if part.num_rows and not part.path.exists():
                yield part, replace(packet, chosen=part.positions)


def _here(jobs: Iterable[_Job], workers: int, data: DataConfig, tokenizer: Any) -> Iterator[int]:
    tokenize = RowTokenizer(data, tokenizer)
    for job in jobs:
        yield _do(job, tokenize)


def _in_processes(
    jobs: Iterable[_Job], workers: int, data: DataConfig, tokenizer: Any
) -> Iterator[int]:
    """Yield the number of rows of each range as it is finished."""
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(data, tokenizer),
    )
    pending: dict[Future[int], int] = {}
    try:
        for number, job in enumerate(jobs):
            with _signals_held_back():
                pending[executor.submit(_do_in_worker, job)] = number
            if len(pending) > 2 * workers:
                yield from _finished(pending)
        while pending:
            yield from _finished(pending)
    except BrokenProcessPool as error:
        raise HscacheError(
            f"one of {workers} processes that tokenise ended without an error, or could not start; "
            "most often the system killed it for memory. What was finished is kept: run the same "
            f"command again, with data.workers below {workers} if memory was short."
        ) from error
    finally:
        if pending:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        executor.shutdown(cancel_futures=True)


def _finished(pending: dict[Future[int], int]) -> Iterator[int]:
    """Wait for at least one range and take out all that are finished.

    Raises what the first bad range in the order of the corpus raised, as one process would: all
    that come before it have been given out, and `exception` waits for theirs.
    """
    done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
    if any(future.exception() for future in done):
        raise next(error for future in pending if (error := future.exception()))
    for future in done:
        del pending[future]
        yield future.result()


_tokenize_in_worker: RowTokenizer
"""Of a spawned process, set once when it starts."""


def _start_worker(data: DataConfig, tokenizer: Any) -> None:
    global _tokenize_in_worker
    # One core each: its threads would be as many as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenize_in_worker = RowTokenizer(data, tokenizer)


def _end_with_parent() -> None:
    """End this process when the one that started it was killed and could not do so."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do_in_worker(job: _Job) -> int:
    return _do(job, _tokenize_in_worker)


def _do(job: _Job, tokenize: RowTokenizer) -> int:
    """Write the file of a range; return the range's number of rows."""
    part, packet = job
    files.replace_atomically(part.path, tokenize(packet).to_bytes())
    return part.num_rows


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Start processes that never see Ctrl-C or SIGTERM: the main process ends them in order."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
