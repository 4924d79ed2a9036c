"""`hscache verify`: does the cache on disk still hold what was written?

Takes a cache folder; checks root, plan, frozen parts and every published shard, and with `deep`
every byte of them: checksums, counts, ids against the plan, content of the states. Prints one line
per damaged part with the documents it costs, and exits with 1 if there is one. Changes nothing.

    hscache verify /nvme/cache --deep
    hscache verify /nvme/cache --replay 16 --target Qwen/Qwen3-8B
"""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenizers import Tokenizer

from hscache import layout
from hscache.config import VerifyConfig
from hscache.content import ContentCheck
from hscache.errors import (
    CacheIncompleteError,
    CacheUnreadableError,
    HscacheError,
    ShardCorruptError,
)
from hscache.fingerprint import config_sha256
from hscache.freeing import freed_shards, is_freed
from hscache.plan import corpus_sha256
from hscache.progress import Progress, configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.zarr_reader import is_there, read_small_file, refuse_link, regular_sha256


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A part of the cache that is not what was written."""

    part: str
    """plan, frozen, or a shard's number"""
    problem: str
    documents: tuple[int, ...] = ()
    """plan rows whose states cannot be used"""
    shard: int | None = None
    """the number of the shard, if it is one"""
    unreadable: bool = False
    """it cannot be read here and now, which does not say that it is damaged"""
    quarantine: bool = False
    """the shard is what was written, and these documents were refused then"""


def run(config: VerifyConfig, *, dry_run: bool = False) -> int:
    """Run the command; 1 if anything is damaged."""
    configure_logging()
    cache = open_cache(config.cache)
    shards = cache.published_shards()
    if dry_run:
        print(f"would check {len(shards) - _num_freed(cache)} shards of {config.cache}")
        return 0
    damaged = verify(cache, deep=config.deep, threads=config.threads)
    if config.replay:
        from hscache.replay import verify_replay  # torch, and the target

        text, found = verify_replay(cache, config, {damage.shard for damage in damaged})
        print(text)
        damaged += found
    print(_summary(cache, damaged, config.deep))
    return 1 if damaged else 0


def verify(cache: Cache, *, deep: bool, threads: int = 4) -> list[Damage]:
    """Return what is damaged: the plan, the frozen parts, then shards in order.

    Without `deep` only metadata, sizes, indices and ids are read; with it every chunk is, so all
    checksums are compared and every state is checked for content.
    """
    damaged = [
        *_attempt("plan", lambda: _check_plan(cache, deep)),
        *_attempt("frozen", lambda: _check_frozen(cache)),
        *_attempt("frozen", lambda: _check_target_config(cache)),
        *_attempt("frozen", lambda: _check_tokenizer(cache)),
    ]
    shards = cache.published_shards()
    tokens = {shard: cache.plan.shard_tokens(shard) for shard in shards}
    progress = Progress(sum(tokens.values()), unit="tokens", label="verify")
    with ThreadPoolExecutor(threads) as pool, progress:
        results = pool.map(lambda shard: check_shard(cache, shard, deep), shards)
        for shard, found in zip(shards, results, strict=True):
            damaged += found
            progress.advance(tokens[shard])
    return damaged


def _attempt(part: str, check: Callable[[], None]) -> Iterator[Damage]:
    try:
        check()
    except HscacheError as error:
        yield Damage(part=part, problem=str(error))


def _check_plan(cache: Cache, deep: bool) -> None:
    if not deep:
        return  # opening the cache has checked metadata, sizes and the per-document columns
    documents = map(cache.plan.document, range(cache.plan.num_documents))
    if corpus_sha256(documents) != cache.identity.content.corpus_sha256:
        raise ShardCorruptError(
            f"{layout.plan_dir(cache.path)} does not hold the corpus that the root names. Delete "
            "plan/ and run `hscache produce` again with the same settings."
        )


def _check_frozen(cache: Cache) -> None:
    path = layout.frozen_weights(cache.path)
    refuse_link(path.parent)
    if regular_sha256(path) != cache.identity.states.frozen_sha256:
        raise ShardCorruptError(
            f"{path} does not have the hash that the root names. Delete frozen/ and run "
            "`hscache produce` again with the same settings."
        )


def _check_target_config(cache: Cache) -> None:
    path = layout.target_config_file(cache.path)
    try:
        same = config_sha256(json.loads(read_small_file(path))) == (
            cache.identity.states.config_sha256
        )
    except (ShardCorruptError, ValueError, AttributeError):
        same = False
    if not same:
        raise ShardCorruptError(
            f"{path} is missing or does not have the hash that the root names. Delete frozen/ and "
            "run `hscache produce` again with the same settings."
        )


def _check_tokenizer(cache: Cache) -> None:
    """Check the tokenizer, which `inspect` shows texts with; nothing else reads it."""
    path = layout.frozen_dir(cache.path) / "tokenizer" / "tokenizer.json"
    if not is_there(path.parent):  # a cache that was made without one
        return
    try:
        text = Tokenizer.from_buffer(read_small_file(path)).to_str()
    except CacheUnreadableError:
        raise
    except Exception as error:  # the Rust library raises nothing narrower
        text = str(error)
    if hashlib.sha256(text.encode()).hexdigest() != cache.identity.states.tokenizer_sha256:
        raise ShardCorruptError(
            f"{path} is not the tokenizer that the root names. Delete frozen/ and run "
            "`hscache produce` again with the same settings."
        )


def check_shard(cache: Cache, shard: int, deep: bool) -> list[Damage]:
    """Check one shard; with `deep` each document by itself, to name those that are lost."""
    found = _check_shard(cache, shard, deep)
    return [] if found and _is_freed_by_now(cache, shard) else found


def _is_freed_by_now(cache: Cache, shard: int) -> bool:
    """A producer with a window may free a shard under our eyes: that is no damage."""
    try:
        return is_freed(cache, shard)
    except HscacheError:
        return False


def _check_shard(cache: Cache, shard: int, deep: bool) -> list[Damage]:
    everything = tuple(cache.plan.shard_documents(shard))
    part = f"shard {shard}"
    try:
        manifest = cache.shard_manifest(shard)
        if manifest.state == "freed":
            return []
        opened = cache.shard(shard)
        opened.check_files()
    except CacheIncompleteError:
        missing = f"{layout.shard_dir(cache.path, shard)} has no zarr.json"
        return [Damage(part=part, shard=shard, problem=missing, documents=everything)]
    except HscacheError as error:
        return [_damage(shard, error, everything)]
    known = set(opened.doc_rows.tolist()) | {q.document for q in manifest.quarantined}
    if known != set(everything) or manifest.num_documents != len(opened.doc_rows):
        problem = f"it holds {len(known)} documents, and the plan gives it {len(everything)}"
        return [Damage(part=part, shard=shard, problem=problem, documents=everything)]
    if not deep:
        return []
    content = ContentCheck()
    problems: dict[int, str] = {}
    for row in opened.doc_rows.tolist():
        try:
            if wrong := content.problem(opened.captured_bits(row)):
                problems[row] = wrong
        except CacheUnreadableError as error:
            return [_damage(shard, error, everything)]
        except HscacheError as error:
            problems[row] = str(error)
    if not problems:
        return []
    first = next(iter(problems.values()))
    return [Damage(part=part, shard=shard, problem=first, documents=tuple(problems))]


def _damage(shard: int, error: HscacheError, documents: tuple[int, ...]) -> Damage:
    unreadable = isinstance(error, CacheUnreadableError)
    return Damage(
        part=f"shard {shard}",
        shard=shard,
        problem=str(error),
        documents=documents,
        unreadable=unreadable,
    )


def _summary(cache: Cache, damaged: list[Damage], deep: bool) -> str:
    published = len(cache.published_shards())
    how = "every byte" if deep else "metadata, sizes and indices (--deep reads every byte)"
    how = f"checked {how}"
    if num_freed := _num_freed(cache):
        how = f"{num_freed} of them freed and no longer there to be checked; {how} of the others"
    lines = [f"{cache.path}: {published} of {cache.plan.num_shards} shards published, {how}"]
    if not damaged:
        return "\n".join([*lines, "no damage found"])
    rows = [[d.part, len(d.documents), _ranges(d.documents)] for d in damaged]
    lines.append(format_table(["damaged", "documents lost", "plan rows"], rows))
    lines += [f"{d.part}: {d.problem}" for d in damaged]
    if any(d.shard is not None and not d.unreadable for d in damaged):
        command = f"hscache repair {shlex.quote(str(cache.path))}" + deep * " --deep"
        lines.append(f"`{command}` requeues these shards")
    return "\n".join(lines)


def _num_freed(cache: Cache) -> int:
    with contextlib.suppress(CacheUnreadableError):  # it is among the damage
        return len(freed_shards(cache))
    return 0


def _ranges(rows: tuple[int, ...]) -> str:
    """Write increasing numbers as "0-3, 7"."""
    parts: list[list[int]] = []
    for row in sorted(rows):
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(text[:8]) + (", ..." if len(text) > 8 else "")
