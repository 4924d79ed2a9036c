"""Make the plan of a corpus once, however many producers start, or know it for made already.

Takes settings and a tokenizer; leaves `plan/` and hands on what the cache's identity says of it.
One producer tokenises and the others wait, saying so; what was tokenised lies in `tokenizing/`
until the plan is there, so a run that was killed goes on. A plan remembers a hash of the files and
settings it was made of: where it is the same, nothing is tokenised again.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tokenizers
import transformers

from hscache import files, layout
from hscache.config import ProduceConfig, StoreConfig
from hscache.documents import Corpus, load_corpus, require_share, tokens_key
from hscache.errors import CacheMismatchError
from hscache.inputs import find_files
from hscache.manifest import ContentIdentity, read_group
from hscache.plan import (
    Plan,
    PlanManifest,
    TokenizedDocument,
    corpus_sha256,
    deal_into_shards,
    write_plan,
)
from hscache.template_kwargs import parse_template_kwargs, require_answered_so
from hscache.zarr_array import canonical_json

log = logging.getLogger(__name__)

_WAIT_S = 1.0
_SAY_EVERY_S = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class PlannedCorpus:
    """What is known of a corpus that was tokenised and dealt into shards."""

    content: ContentIdentity
    longest: int
    """tokens of the longest document"""
    report: dict[str, Any]
    """rows in, kept, dropped by reason"""


def content_identity(
    documents: Sequence[TokenizedDocument],
    shards: list[list[int]],
    store: StoreConfig,
    *,
    max_tokens: int,
    over_long: str,
) -> ContentIdentity:
    """Return which tokens a cache of these documents holds, and how they are dealt."""
    return ContentIdentity(
        corpus_sha256=corpus_sha256(documents[i] for shard in shards for i in shard),
        seed=store.seed,
        max_tokens=max_tokens,
        over_long=over_long,
        shard_tokens=store.shard_tokens,
        num_documents=sum(map(len, shards)),
        num_tokens=sum(len(document.ids_T) for document in documents),
        num_held_out_shards=sum(documents[shard[0]].held_out for shard in shards),
        num_shards=len(shards),
    )


def preview(
    config: ProduceConfig,
    tokenizer: Any,
    look: Callable[[PlannedCorpus, Path], None] | None = None,
) -> PlannedCorpus:
    """Return what the plan would be, or is; leave nothing in the cache folder.

    `look` is given a folder with the plan itself in it, a temporary one if it is not made yet.
    """
    _require_answered_so(config)
    key = tokens_key(config.data, tokenizer, config.store.seed)
    made = _made_before(config, _source_sha256(config, key))
    if made is not None:
        if look:
            look(made, config.shard_dir)
        return made
    with tempfile.TemporaryDirectory(prefix="hscache-") as temporary:
        corpus = load_corpus(config.data, tokenizer, config.store.seed)
        planned, shards = _deal(config, corpus)
        if look:
            write_plan(Path(temporary), corpus.documents, shards, corpus.report)
            look(planned, Path(temporary))
    return planned


def make_plan(
    config: ProduceConfig, tokenizer: Any, check: Callable[[PlannedCorpus], None]
) -> PlannedCorpus:
    """Make `plan/` unless it is there; `check` is called before and may refuse by raising.

    Raises DataError as `load_corpus` does, CacheMismatchError when `plan/` holds another plan.
    """
    _require_answered_so(config)
    cache_dir, seed = config.shard_dir, config.store.seed
    key = tokens_key(config.data, tokenizer, seed)
    source = _source_sha256(config, key)
    folder = layout.tokens_dir(cache_dir)
    made = _made_before(config, source)
    if made is None or folder.exists():
        with _alone(folder, until=lambda: _made_before(config, source) is not None):
            made = _made_before(config, source) or _make(config, tokenizer, key, source, check)
            files.discard_folder(folder)
    check(made)
    return made


def _require_answered_so(config: ProduceConfig) -> None:
    """Refuse rows that a server answered to other prompts than they would be rendered with."""
    rows = find_files([*config.data.train, *config.data.held_out])
    values = parse_template_kwargs(config.target.chat_template_kwargs)
    require_answered_so([file.path for file in rows], values)


def _make(
    config: ProduceConfig,
    tokenizer: Any,
    key: str,
    source: str,
    check: Callable[[PlannedCorpus], None],
) -> PlannedCorpus:
    cache_dir = config.shard_dir
    folder = layout.tokens_dir(cache_dir) / _versioned(key)
    for other in layout.tokens_dir(cache_dir).iterdir():
        if other.is_dir() and other != folder:
            log.info("deleting %s: tokens of a start with other files or settings", other)
            shutil.rmtree(other)
    files.make_folder(folder)
    corpus = load_corpus(config.data, tokenizer, config.store.seed, folder)
    planned, shards = _deal(config, corpus)
    try:
        check(planned)
        if layout.plan_dir(cache_dir).exists():
            require_same_plan(cache_dir, planned.content, shards)
    except CacheMismatchError:
        # It would never be asked for.
        files.discard_folder(layout.tokens_dir(cache_dir))
        raise
    write_plan(cache_dir, corpus.documents, shards, corpus.report, source)
    return planned


def _deal(config: ProduceConfig, corpus: Corpus) -> tuple[PlannedCorpus, list[list[int]]]:
    shards = deal_into_shards(corpus.documents, config.store.shard_tokens, config.store.seed)
    planned = PlannedCorpus(
        content=content_identity(
            corpus.documents,
            shards,
            config.store,
            max_tokens=config.data.max_tokens,
            over_long=config.data.over_long,
        ),
        longest=max(len(document.ids_T) for document in corpus.documents),
        report=corpus.report,
    )
    return planned, shards


def _made_before(config: ProduceConfig, source: str) -> PlannedCorpus | None:
    """Return what `plan/` holds if it was made of the same files and settings."""
    file = layout.plan_dir(config.shard_dir) / "zarr.json"
    if not file.exists() or read_group(file, PlanManifest).source_sha256 != source:
        return None
    plan = Plan(config.shard_dir)
    supervised = plan.manifest.report["supervised tokens"]
    require_share(supervised / plan.num_tokens, config.data.min_supervised_share)
    return PlannedCorpus(
        content=ContentIdentity(
            corpus_sha256=plan.manifest.corpus_sha256,
            seed=config.store.seed,
            max_tokens=config.data.max_tokens,
            over_long=config.data.over_long,
            shard_tokens=config.store.shard_tokens,
            num_documents=plan.num_documents,
            num_tokens=plan.num_tokens,
            num_held_out_shards=len(plan.held_out_shards),
            num_shards=plan.num_shards,
        ),
        longest=int(plan.lengths.max()),
        report=plan.manifest.report,
    )


def _source_sha256(config: ProduceConfig, key: str) -> str:
    """Hash all that decides a plan; `key` stands for the tokens."""
    decisive = [key, config.data.held_out_fraction, config.store.shard_tokens, config.store.seed]
    return hashlib.sha256(canonical_json(decisive)).hexdigest()


def _versioned(key: str) -> str:
    """Return the name of the folder for unfinished tokens: two versions must not mix there."""
    versions = [key, transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(canonical_json(versions)).hexdigest()[:16]


def require_same_plan(cache_dir: Path, content: ContentIdentity, shards: list[list[int]]) -> None:
    """Raise CacheMismatchError unless `plan/`, made of whatever it was, is the one expected."""
    plan = Plan(cache_dir)
    sizes = np.bincount(plan.shards, minlength=plan.num_shards).tolist()
    if plan.manifest.corpus_sha256 != content.corpus_sha256 or sizes != list(map(len, shards)):
        folder = layout.plan_dir(cache_dir)
        raise CacheMismatchError(
            f"{folder} is not what these settings give: it is left of a start with others, or "
            f"damaged. Delete {folder} and run the same command again."
        )


@contextlib.contextmanager
def _alone(folder: Path, until: Callable[[], bool]) -> Iterator[None]:
    """Wait, saying so, for the lock in `folder` or until there is nothing left to wait for."""
    said_s = -_SAY_EVERY_S
    while True:
        with _open_lock(folder) as file:
            taken = _take(file)
            # Who held it may have deleted the folder, and a new one has another lock.
            if (taken and _is_still_there(file)) or until():
                yield
                return
            if time.monotonic() - said_s >= _SAY_EVERY_S and not taken:
                said_s = time.monotonic()
                done = sum(1 for _ in folder.glob("*/*.npz"))
                file.seek(0)
                log.info(
                    "waiting for %s to tokenize the corpus: %d ranges of rows are done",
                    file.read() or "another producer",
                    done,
                )
        if not taken:
            time.sleep(_WAIT_S)


def _open_lock(folder: Path) -> IO[str]:
    while True:
        files.make_folder(folder)
        # Whoever made the plan deletes the folder, perhaps right now.
        with contextlib.suppress(FileNotFoundError), files.disk_full_named(folder):
            return (folder / "lock").open("a+")


def _is_still_there(file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _take(file: IO[str]) -> bool:
    """Try to lock a file, for as long as it is open; write who holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s cannot be locked on this filesystem: start one producer first", file.name)
    with files.disk_full_named(Path(file.name)):
        file.truncate(0)
        # Past the buffer, which closing would flush again, and fail again on a full disk.
        os.write(file.fileno(), files.process_name().encode())
    return True
