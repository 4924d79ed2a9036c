"""`hscache produce`: run the target once over a corpus and publish its hidden states as shards.

Takes a `ProduceConfig`; tokenises into `plan/` and exports `frozen/` on the first start, then fills
the missing shards one by one: packs of documents -> forward -> checks -> codec -> rename. Killed at
any instant it continues where it was; several processes may work on one cache.

    hscache produce --config configs/demo-produce.yaml --shard-dir /nvme/cache
"""

import dataclasses
import itertools
import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hscache import __version__, files, layout, producers
from hscache.admission import Admission
from hscache.config import ProduceConfig, StoreConfig
from hscache.content import ContentCheck, count_seen
from hscache.corpus_plan import PlannedCorpus, preview
from hscache.device import choose_device
from hscache.errors import HscacheError, ShardCorruptError
from hscache.left_behind import find_left_behind
from hscache.manifest import ContentIdentity, WindowIdentity, require_same_identity
from hscache.packed_forward import kernel_versions
from hscache.plan import Plan
from hscache.planes import ARRAYS, Bits
from hscache.prepare import encoding_identity, make_cache_folder, prepare
from hscache.pretrained import check_layer_ids, library_versions, load_config, load_tokenizer
from hscache.progress import Progress, configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.settings import to_dict
from hscache.signals import raise_on_stop
from hscache.stages import Measured, Stages, cut
from hscache.target import Target
from hscache.window_preview import preview_window
from hscache.window_start import max_disk_bytes
from hscache.writer import ShardWriter

log = logging.getLogger(__name__)


def run(config: ProduceConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` print the sizes and touch nothing."""
    configure_logging()
    if dry_run:
        print(describe_plan(config))
        return 0
    with raise_on_stop() as raise_if_stopped:
        produce(config, raise_if_stopped)
    return 0


def produce(config: ProduceConfig, poll: Callable[[], None] = lambda: None) -> Cache:
    """Fill the cache in `config.shard_dir` and return it, complete; `poll` is called per pack.

    Raises CacheMismatchError with a diff when the folder holds another cache, DiskFullError,
    DataError on unusable input, HscacheError when too many documents gave unusable states.
    """
    make_cache_folder(config.shard_dir)
    for left in find_left_behind(config.shard_dir):
        log.warning("%s", left)
    with producers.Producer(config.shard_dir) as producer:
        removed = producers.clean_leftovers(config.shard_dir)
        if removed:
            log.info("removed %d leftovers of producers that died", len(removed))
        target = Target(config.target)
        cache = prepare(config, target)
        admission = Admission(cache, producer, poll, max_disk_bytes(config))
        stages = None
        if _runs_ahead(target):
            stages = Stages(
                cache.plan,
                target,
                cache.identity.encoding.codec,
                config.token_budget,
                poll=admission.poll,
                likely_next=lambda: producer.likely_next(cache.plan.num_shards),
            )

        def plainly(shard: int) -> Iterator[tuple[int, Bits]]:
            return _captured(cache, target, shard, config.token_budget, admission.poll)

        started = time.monotonic()
        made = fill(
            cache,
            admission,
            producer,
            config.store,
            stages.states if stages else plainly,
            lambda shard: _provenance(cache, target, shard, config, stages),
        )
        admission.free_what_is_done()
    print(summary(cache, made, time.monotonic() - started))
    return cache


def _runs_ahead(target: Target) -> bool:
    # On a CPU forward and checks share the cores: nothing is gained by keeping packs in memory.
    return target.device.type == "cuda"


def _require_whole_shards(cache_dir: Path) -> None:
    """Refuse debris under a shard's name: a name alone must never count as finished work."""
    for shard in layout.list_shards(cache_dir):
        folder = layout.shard_dir(cache_dir, shard)
        if not (folder / "zarr.json").is_file():
            raise ShardCorruptError(
                f"{folder} is no shard: it has no zarr.json, and a shard appears with all its "
                "files at once. Run `hscache repair` on the cache, then the same command again."
            )


@dataclass
class Made:
    """What this process did."""

    quarantined: list[int]
    """documents with unusable states, those of shards published before included"""
    num_documents: int = 0
    """documents seen, those of shards published before included"""
    shards: int = 0
    tokens: int = 0


def _quarantined(cache: Cache, shards: Iterable[int]) -> Iterator[int]:
    for shard in shards:
        yield from (q.document for q in cache.shard_manifest(shard).quarantined)


States = Callable[[int], Iterator[tuple[int, Bits | Measured | str]]]
"""Given a shard, yields (document, bf16 bits [T, L, H] or what was measured of them, or why it has
none) for its documents, in order."""


def fill(
    cache: Cache,
    admission: Admission,
    producer: producers.Producer,
    store: StoreConfig,
    states: States,
    provenance: Callable[[int], dict[str, Any]],
    *,
    label: str = "produce",
) -> Made:
    """Publish every missing shard with the documents that `states` gives and the check passes.

    Returns when all shards are published, by this process or by others.
    """
    plan = cache.plan
    _require_whole_shards(cache.path)
    published = cache.published_shards()
    done = sum(plan.shard_tokens(shard) for shard in published)
    made = Made(
        quarantined=list(_quarantined(cache, published)),
        num_documents=sum(len(plan.shard_documents(shard)) for shard in published),
    )
    with (
        ThreadPoolExecutor(store.threads) as pool,
        Progress(
            plan.num_tokens,
            unit="tokens",
            label=f"{label} {len(published)}/{plan.num_shards} shards",
            initial=done,
        ) as progress,
    ):
        while True:
            shard = admission.next_shard()
            if shard is None:
                if len(cache.published_shards()) == plan.num_shards:
                    return made
                admission.wait()
                continue
            started = time.monotonic()
            check = ContentCheck()
            with ShardWriter(cache.path, shard, cache.identity, pool) as writer:
                for document, found in states(shard):
                    made.num_documents += 1
                    if isinstance(found, str):
                        problem: str | None = found
                    elif isinstance(found, Measured):
                        problem = check.problem(found.facts)
                        if problem is None and found.encoded:
                            writer.add_encoded(document, found.arrays, found.sums)
                        elif problem is None:
                            writer.add(document, found.arrays["bits"])
                    else:
                        problem = check.problem(found)
                        if problem is None:
                            writer.add(document, found)
                    if problem is not None:
                        writer.quarantine(document, problem)
                        _count_quarantined(cache, made, document, problem, store)
                    num_tokens = int(plan.lengths[document])
                    made.tokens += num_tokens
                    progress.advance(num_tokens)
                seconds = round(time.monotonic() - started, 3)
                if writer.publish({**provenance(shard), **_when(seconds)}):
                    made.shards += 1
                else:
                    log.info("shard %d was published by another producer first", shard)
            producer.report(tokens=made.tokens, shards=made.shards)


def _captured(
    cache: Cache, target: Target, shard: int, token_budget: int, poll: Callable[[], None]
) -> Iterator[tuple[int, Bits]]:
    """Run a shard's packs through the target; yield its documents' states."""
    for pack in cut_packs(cache.plan, shard, token_budget):
        poll()
        yield from run_pack(cache.plan, target, pack)


def run_pack(plan: Plan, target: Target, pack: Sequence[int]) -> Iterator[tuple[int, Bits]]:
    """Run documents through the target in one pack; yield (document, bf16 bits [T, L, H])."""
    ids_T = np.concatenate([plan.input_ids(document) for document in pack])
    offsets = [0, *itertools.accumulate(int(plan.lengths[document]) for document in pack)]
    states_TLH = target.capture(torch.from_numpy(ids_T.astype(np.int64)), offsets)
    bits_TLH = states_TLH.view(torch.int16).cpu().numpy().view(np.uint16)
    for document, (begin, end) in zip(pack, itertools.pairwise(offsets), strict=True):
        yield document, bits_TLH[begin:end]


def cut_packs(plan: Plan, shard: int, token_budget: int) -> list[list[int]]:
    """Cut a shard's documents, in order, into packs of at most `token_budget` tokens."""
    return cut(plan.shard_documents(shard), plan.lengths, token_budget)


def _count_quarantined(
    cache: Cache, made: Made, document: int, problem: str, store: StoreConfig
) -> None:
    made.quarantined.append(document)
    row = int(cache.plan.source_rows[document])
    log.warning("document %d (input row %d) quarantined: %s", document, row, problem)
    seen = count_seen(made.num_documents, cache.plan.num_documents)
    if len(made.quarantined) > store.max_quarantined_share * seen:
        latest = ", ".join(map(str, made.quarantined[-10:]))
        raise HscacheError(
            f"{len(made.quarantined)} documents gave unusable states, more than "
            f"store.max_quarantined_share = {store.max_quarantined_share:.1%} of the "
            f"{seen:,} seen so far: documents {latest}; the last (input row {row}): "
            f"{problem}. Something is wrong with the target, its dtype or the input; published "
            "shards are kept."
        )


def _when(seconds: float) -> dict[str, Any]:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"seconds": seconds, "finished": finished}


def software() -> dict[str, Any]:
    """Return the machine and the versions a shard is made with."""
    return {"hscache": __version__, **library_versions(), "host": platform.node()}


def _provenance(
    cache: Cache, target: Target, shard: int, config: ProduceConfig, stages: Stages | None
) -> dict[str, Any]:
    device = str(target.device)
    name = torch.cuda.get_device_name(target.device) if device != "cpu" else platform.processor()
    packs = cut_packs(cache.plan, shard, config.token_budget)
    return {
        **software(),
        "device": device,
        "device_name": name or platform.machine(),
        "token_budget": config.token_budget,
        "settings": to_dict(config),
        "documents_per_pack": [len(pack) for pack in packs],
        "forward": target.forward_name,
        "kernels": kernel_versions() if target.forward_name == "fused" else {},
        **(stages.report() if stages else {}),
    }


def summary(cache: Cache, made: Made, seconds: float, title: str = "produced") -> str:
    """Return the table at the end of a run."""
    shards = [cache.shard_manifest(s) for s in cache.published_shards()]
    raw = sum(m.raw_bytes for m in shards)
    stored = sum(m.stored_bytes for m in shards)
    rate = made.tokens / seconds if seconds else 0.0
    freed = sum(m.state == "freed" for m in shards)
    and_freed = f"; {freed} freed since" if freed else ""
    report = cache.plan.manifest.report
    names = sorted(report, key=lambda name: (name != "rows in", name))
    rows = [[name, f"{report[name]:,}"] for name in names]
    rows += [
        ["shards", f"{len(shards)} ({made.shards} by this run{and_freed})"],
        ["documents", f"{sum(m.num_documents for m in shards):,}"],
        ["quarantined", f"{sum(len(m.quarantined) for m in shards):,}"],
        ["tokens", f"{sum(m.num_tokens for m in shards):,} ({made.tokens:,} by this run)"],
        ["tokens/s", f"{rate:,.0f}"],
        ["states", f"{raw / 1e6:,.1f} MB as bf16, {stored / 1e6:,.1f} MB stored"],
        ["ratio", f"{raw / max(1, stored):.3f} ({cache.identity.encoding.codec})"],
    ]
    return format_table([title, str(cache.path)], rows)


def _require_same_content(
    config: ProduceConfig, content: ContentIdentity, window: WindowIdentity
) -> None:
    """Refuse, as the run would, to continue a cache of other tokens, encoding or window."""
    found = open_cache(config.shard_dir).identity
    encoding = encoding_identity(config.store)
    expected = dataclasses.replace(found, content=content, encoding=encoding, window=window)
    require_same_identity(found, expected, config.shard_dir)


def describe_plan(config: ProduceConfig) -> str:
    """Return what a run would take and write, without loading the target's weights."""
    choose_device(config.target.device)
    model, _ = load_config(config.target)
    layer_ids = check_layer_ids(config.target, int(model.num_hidden_layers))
    tokenizer = load_tokenizer(config.target)
    window = WindowIdentity()

    def look(planned: PlannedCorpus, folder: Path) -> None:
        nonlocal window
        window = preview_window(config, model, layer_ids, tokenizer, planned.content, folder)

    corpus = preview(config, tokenizer, look if config.max_disk is not None else None)
    tokens, num_shards = corpus.content.num_tokens, corpus.content.num_shards
    if layout.root_file(config.shard_dir).is_file():
        _require_same_content(config, corpus.content, window)
    num_stored = len(layer_ids) + config.target.last_hidden
    token_bytes = num_stored * int(model.hidden_size) * 2
    folder = config.shard_dir
    and_last = ", and the last block's output" if config.target.last_hidden else ""
    arrays = len(ARRAYS[config.store.codec]) * (1 + config.target.last_hidden)
    rows = [[key, f"{value:,}"] for key, value in corpus.report.items()]
    rows += [
        ["tokens", f"{tokens:,}"],
        ["captured layers", f"{list(layer_ids)} of {model.num_hidden_layers}{and_last}"],
        ["shards", f"{num_shards:,} of at most {config.store.shard_tokens:,} tokens"],
        ["bytes a token", f"{token_bytes:,} as bf16"],
        ["states", f"{tokens * token_bytes / 1e6:,.1f} MB before the codec"],
        ["files", f"about {num_shards * (2 * arrays + 5):,} in shards/"],
        ["disk", files.free_space(folder)],
    ]
    if config.max_disk is not None:
        kept = f"{window.shards} shards at a time, {window.reserve} more in reserve"
        rows.append(["max_disk", f"{config.max_disk}: {kept if window.shards else 'all fit'}"])
    return format_table(["plan", str(folder)], rows)
