"""`hscache bench store`: what this disk and this codec give, and the tokens/s that each side gets.

Takes a folder on the disk; writes a shard of random or real states there as `produce` does, reads
it cold and warm as `trainer fit` does, and deletes it. GB are 10^9 bytes of decoded bf16 states.

    hscache bench store /nvme --codec lossless --threads 8
"""

import datetime
import logging
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hscache import __version__, files, layout
from hscache.bench_config import BenchStoreConfig
from hscache.bench_states import random_states, regrouped, store_identity
from hscache.errors import ConfigError
from hscache.manifest import Identity, encode_group
from hscache.plan import TokenizedDocument, write_plan
from hscache.planes import ARRAYS, Bits
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.result_file import require_writable, write_json
from hscache.settings import to_dict
from hscache.writer import ShardWriter

log = logging.getLogger(__name__)

DOCUMENT_TOKENS = 2048
_BLOCK_BYTES = 256e6
"""States that are made once and written again and again: no disk compresses across files."""
_READ_BYTES = 1 << 22

WRITE, COLD_FILES, COLD, WARM, MERGED = "write", "cold files", "cold read", "warm read", "merged"
_TITLES = {
    WRITE: "write: encode, write, fsync",
    COLD_FILES: "cold, the files' bytes alone",
    COLD: "cold read to planes",
    WARM: "warm read to planes (for a GPU)",
    MERGED: "warm read, merged to bf16",
}


def run(config: BenchStoreConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` say what would be written."""
    configure_logging()
    num_documents = _num_documents(config)
    _require_room(config)
    if dry_run:
        print(
            f"would write {config.size_gb:g} GB of states ({num_documents} documents of "
            f"{DOCUMENT_TOKENS} tokens) to {config.folder}, {config.rounds} times"
        )
        return 0
    require_writable(config.json)
    figures = measure(config)
    print(format_figures(figures))
    write_json(config.json, figures)
    return 0


def measure(config: BenchStoreConfig) -> dict[str, Any]:
    """Return all figures: GB/s and tokens/s of each part with median and range, sizes in bytes."""
    block_NLH = _block(config)
    rounds: dict[str, list[tuple[float, float]]] = {title: [] for title in _TITLES}
    stored_bytes = raw_bytes = num_files = 0
    cold, buffers = True, _buffers(config)
    for number in range(1, config.rounds + 1):
        log.info("round %d of %d", number, config.rounds)
        with files.temporary_folder(config.folder) as folder:
            identity = _prepare(folder, config)
            rounds[WRITE].append(_timed(lambda: _write(folder, identity, config, block_NLH)))  # noqa: B023
            cache = open_cache(folder)
            manifest = cache.shard_manifest(0)
            stored_bytes, raw_bytes = manifest.stored_bytes, manifest.raw_bytes
            states = _state_files(cache)
            num_files = sum(1 for _ in layout.shard_dir(folder, 0).rglob("*.*"))
            cold = drop_from_memory(states) and cold
            if cold:
                rounds[COLD_FILES].append(_timed(lambda: _read_files(states, config)))  # noqa: B023
                drop_from_memory(states)
                rounds[COLD].append(_timed(lambda: _read(cache, buffers)))  # noqa: B023
            _read(cache, buffers)
            rounds[WARM].append(_timed(lambda: _read(cache, buffers)))  # noqa: B023
            rounds[MERGED].append(_timed(lambda: _read_merged(cache, config.threads)))  # noqa: B023
    token_bytes = config.num_layers * config.hidden_size * 2
    return {
        "what": "hscache bench store",
        "date": datetime.date.today().isoformat(),
        "machine": {
            "host": platform.node(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "hscache": __version__,
        },
        "config": to_dict(config),
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": raw_bytes / stored_bytes,
        "files_per_shard": num_files,
        "cold_is_possible": cold,
        "token_bytes": token_bytes,
        "parts": {
            part: _figures(timings, raw_bytes, token_bytes)
            for part, timings in rounds.items()
            if timings
        },
    }


def format_figures(figures: dict[str, Any]) -> str:
    """Return the tables."""
    config = figures["config"]
    rows = []
    for part, found in figures["parts"].items():
        rate = found["gb_per_s"]
        rows.append(
            [
                _TITLES[part],
                f"{rate['median']:.2f}",
                f"{rate['min']:.2f} to {rate['max']:.2f}",
                f"{found['cpu_s_per_gb']['median']:.2f}",
                f"{found['tokens_per_s']:,.0f}",
            ]
        )
    head = (
        f"{config['folder']}: codec {config['codec']}, {config['threads']} threads, "
        f"{figures['raw_bytes'] / 1e9:.2f} GB of "
        f"{'random states' if config['cache'] is None else 'states of ' + config['cache']}, "
        f"{config['rounds']} rounds, ratio {figures['ratio']:.3f}, "
        f"{figures['files_per_shard']} files a shard"
    )
    lines = [head, format_table(["part", "GB/s", "range", "cpu-s/GB", "tokens/s"], rows)]
    shape = f"{config['num_layers']} layers x {config['hidden_size']}"
    parts = figures["parts"]
    reading = parts.get(COLD, parts[WARM])["tokens_per_s"]
    lines.append(
        f"GB of decoded bf16; tokens of {shape}, {figures['token_bytes']:,} bytes each. produce "
        f"can write {parts[WRITE]['tokens_per_s']:,.0f} tokens/s here, a GPU trainer can read "
        f"{reading:,.0f} ({'cold' if COLD in parts else 'from memory'})."
    )
    if not figures["cold_is_possible"]:
        lines.append("cold: not measured, this filesystem keeps its files in memory")
    return "\n".join(lines)


def _block(config: BenchStoreConfig) -> Bits:
    """Return the states that are written again and again, [N, L, H]."""
    token_bytes = config.num_layers * config.hidden_size * 2
    tokens = int(min(_BLOCK_BYTES, 1e9 * config.size_gb) // token_bytes)
    tokens = max(DOCUMENT_TOKENS, tokens // DOCUMENT_TOKENS * DOCUMENT_TOKENS)
    shape = (tokens, config.num_layers, config.hidden_size)
    if config.cache is None:
        return random_states(shape)
    return regrouped(open_cache(config.cache), shape)


def drop_from_memory(paths: list[Path]) -> bool:
    """Ask the kernel to forget the files; return whether it did (a tmpfs cannot)."""
    dropped = True
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped = dropped and not _in_memory(descriptor)
        finally:
            os.close(descriptor)
    return dropped


def _in_memory(descriptor: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # this filesystem cannot say
        return True
    return True


def _num_documents(config: BenchStoreConfig) -> int:
    token_bytes = config.num_layers * config.hidden_size * 2
    return max(1, round(1e9 * config.size_gb / (token_bytes * DOCUMENT_TOKENS)))


def _require_room(config: BenchStoreConfig) -> None:
    if not config.folder.is_dir():
        raise ConfigError(f"{config.folder} is no folder. Give one on the disk to measure.")
    needed = 1.05e9 * config.size_gb
    if shutil.disk_usage(config.folder).free < needed:
        raise ConfigError(
            f"size_gb {config.size_gb:g} needs {needed / 1e9:.1f} GB in {config.folder}: "
            f"{files.free_space(config.folder)}. Give a smaller --size-gb."
        )


def _prepare(folder: Path, config: BenchStoreConfig) -> Identity:
    corpus = [
        TokenizedDocument(
            ids_T=np.zeros(DOCUMENT_TOKENS, np.int32),
            loss_mask_T=np.ones(DOCUMENT_TOKENS, np.uint8),
            source_row=row,
            held_out=False,
        )
        for row in range(_num_documents(config))
    ]
    write_plan(folder, corpus, [list(range(len(corpus)))], {})
    identity = store_identity(corpus, config.codec, config.num_layers, config.hidden_size)
    files.create_once(layout.root_file(folder), encode_group(identity))
    return identity


def _write(folder: Path, identity: Identity, config: BenchStoreConfig, block_NLH: Bits) -> None:
    with (
        ThreadPoolExecutor(config.threads) as pool,
        ShardWriter(folder, 0, identity, pool) as writer,
    ):
        for row in range(_num_documents(config)):
            start = row * DOCUMENT_TOKENS % len(block_NLH)
            writer.add(row, block_NLH[start : start + DOCUMENT_TOKENS])
        writer.publish({"by": "hscache bench store"})


def _state_files(cache: Cache) -> list[Path]:
    shard = layout.shard_dir(cache.path, 0)
    return [next((shard / name).glob("c.*")) for name in ARRAYS[cache.identity.encoding.codec]]


def _read_files(paths: list[Path], config: BenchStoreConfig) -> None:
    pieces = [(p, start) for p in paths for start in range(0, p.stat().st_size, _READ_BYTES)]

    def read(piece: tuple[Path, int]) -> None:
        path, start = piece
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.pread(descriptor, _READ_BYTES, start)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(config.threads) as pool:
        list(pool.map(read, pieces))


def _buffers(config: BenchStoreConfig) -> list[dict[str, np.ndarray]]:
    """Return memory for a document of each thread, touched, as a loader has it."""
    layouts = layout.state_layouts(
        config.codec, config.num_layers, config.hidden_size, last_hidden=False
    )
    return [
        {
            name: np.ones((DOCUMENT_TOKENS, *array.row_shape), array.dtype)
            for name, array in layouts.items()
        }
        for _ in range(config.threads)
    ]


def _read(cache: Cache, buffers: list[dict[str, np.ndarray]]) -> None:
    """Read all documents into the threads' buffers, planes as they are stored."""
    shard = cache.shard(0)
    rows = shard.doc_rows.tolist()

    def read(number: int) -> None:
        for row in rows[number :: len(buffers)]:
            shard.read_arrays(row, buffers[number])

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(read, range(len(buffers))))


def _read_merged(cache: Cache, threads: int) -> None:
    shard = cache.shard(0)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda row: len(shard.bits(row)), shard.doc_rows.tolist()))


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu_started


def _figures(
    timings: list[tuple[float, float]], raw_bytes: int, token_bytes: int
) -> dict[str, Any]:
    rates = [raw_bytes / 1e9 / seconds for seconds, _ in timings]
    cpu = [seconds / (raw_bytes / 1e9) for _, seconds in timings]
    return {
        "gb_per_s": _spread(rates),
        "cpu_s_per_gb": _spread(cpu),
        "tokens_per_s": 1e9 * statistics.median(rates) / token_bytes,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
