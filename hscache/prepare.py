"""Start a cache, or make sure that an existing one is the one these settings give.

Takes a `ProduceConfig` and the loaded target; leaves `plan/`, `frozen/` and, last of all, the root
with the identity, each written whole or not at all; hands on the open cache. Settings that would
make another cache are refused with a field-by-field diff.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from hscache import files, fingerprint, layout
from hscache.config import ProduceConfig, StoreConfig, TargetConfig
from hscache.corpus_plan import PlannedCorpus, make_plan, require_same_plan
from hscache.documents import Corpus
from hscache.errors import CacheMismatchError, ConfigError, HscacheError
from hscache.manifest import (
    EncodingIdentity,
    Identity,
    StatesIdentity,
    encode_group,
    read_group,
    require_same_identity,
)
from hscache.plan import write_plan
from hscache.reader import Cache, open_cache
from hscache.target import Target
from hscache.template_kwargs import parse_template_kwargs
from hscache.window_start import with_window
from hscache.zarr_array import canonical_json


def make_cache_folder(cache_dir: Path) -> None:
    """Make the cache folder; raise HscacheError, now rather than in an hour, if it is read-only."""
    try:
        with files.disk_full_named(cache_dir):
            layout.shards_dir(cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, HscacheError):
            raise
        raise HscacheError(
            f"cannot write to {cache_dir}: {error.strerror}. Give another --shard-dir."
        ) from error
    if not os.access(layout.shards_dir(cache_dir), os.W_OK):
        raise HscacheError(
            f"cannot write to {cache_dir}: it is read-only, or belongs to another. Run as a user "
            "who may write there, on a disk not mounted read-only, or give another --shard-dir."
        )


def prepare(config: ProduceConfig, target: Target) -> Cache:
    """Write plan, frozen weights and identity, or check them against an existing cache."""
    cache_dir = config.shard_dir
    frozen = target.frozen.to_bytes()
    states = states_identity(config.target, target, frozen)
    encoding = encoding_identity(config.store)
    root = layout.root_file(cache_dir)
    if root.exists():
        _refuse_early(config, states, encoding)
    _require_no_loose_shards(cache_dir)

    def check(corpus: PlannedCorpus) -> None:
        _require_context(corpus.longest, target)
        if root.exists():
            found = read_group(root, Identity)
            expected = dataclasses.replace(
                found, states=states, content=corpus.content, encoding=encoding
            )
            require_same_identity(found, expected, cache_dir)

    content = make_plan(config, target.tokenizer, check).content
    identity = Identity(states=states, content=content, encoding=encoding)
    return _write_root(cache_dir, target, frozen, identity, functools.partial(with_window, config))


def start_cache(
    cache_dir: Path,
    corpus: Corpus,
    shards: list[list[int]],
    target: Target,
    frozen: bytes,
    identity: Identity,
) -> Cache:
    """Write what a cache of a loaded corpus begins with, or check that it is there and the same."""
    root = layout.root_file(cache_dir)
    if root.exists():
        require_same_identity(read_group(root, Identity), identity, cache_dir)
    _require_no_loose_shards(cache_dir)
    if not layout.plan_dir(cache_dir).exists():
        write_plan(cache_dir, corpus.documents, shards, dict(corpus.report))
    require_same_plan(cache_dir, identity.content, shards)
    return _write_root(cache_dir, target, frozen, identity)


def _require_no_loose_shards(cache_dir: Path) -> None:
    if not layout.root_file(cache_dir).exists() and layout.list_shards(cache_dir):
        raise HscacheError(
            f"{cache_dir} has shards but no root zarr.json: it is no cache, or a damaged one. "
            "Give an empty --shard-dir."
        )


def _write_root(
    cache_dir: Path,
    target: Target,
    frozen: bytes,
    identity: Identity,
    complete: Callable[[Identity], Identity] = lambda identity: identity,
) -> Cache:
    """Write frozen/ and the root, or check those that are there; the plan is.

    `complete` adds to the identity what depends on the size of both.
    """
    if not layout.frozen_dir(cache_dir).exists():
        _write_frozen(cache_dir, frozen, target)
    _require_same_frozen(cache_dir, identity)
    identity = complete(identity)
    # Last, so that a root promises a plan and frozen weights.
    files.create_once(layout.root_file(cache_dir), encode_group(identity))
    cache = open_cache(cache_dir)
    require_same_identity(cache.identity, identity, cache_dir)
    return cache


def _refuse_early(
    config: ProduceConfig, states: StatesIdentity, encoding: EncodingIdentity
) -> None:
    """Refuse what is seen to be another cache before its corpus is tokenised."""
    found = read_group(layout.root_file(config.shard_dir), Identity)
    content = dataclasses.replace(
        found.content,
        seed=config.store.seed,
        max_tokens=config.data.max_tokens,
        over_long=config.data.over_long,
        shard_tokens=config.store.shard_tokens,
    )
    expected = dataclasses.replace(found, states=states, content=content, encoding=encoding)
    require_same_identity(found, expected, config.shard_dir)


def _require_context(longest: int, target: Target) -> None:
    context = target.full_config.get("max_position_embeddings")
    if context is not None and longest > int(context):
        raise ConfigError(
            f"the longest document has {longest} tokens, and the target was made for {context} "
            f"(max_position_embeddings): what it says beyond is noise. Set data.max_tokens to at "
            f"most {context}."
        )


def _write_frozen(cache_dir: Path, frozen: bytes, target: Target) -> None:
    with files.temporary_folder(cache_dir) as folder:
        files.write_durable(folder / layout.frozen_weights(cache_dir).name, frozen)
        config = canonical_json(target.full_config)
        files.write_durable(folder / layout.target_config_file(cache_dir).name, config)
        with files.disk_full_named(layout.frozen_dir(cache_dir)):
            target.tokenizer.save_pretrained(folder / "tokenizer")
            files.fsync_files(folder / "tokenizer")
        files.publish_folder(folder, layout.frozen_dir(cache_dir))


def _require_same_frozen(cache_dir: Path, identity: Identity) -> None:
    """Check frozen/, which may be left of a start with other settings, cut short."""
    weights = layout.frozen_weights(cache_dir).read_bytes()
    if hashlib.sha256(weights).hexdigest() != identity.states.frozen_sha256:
        folder = layout.frozen_dir(cache_dir)
        raise CacheMismatchError(
            f"{folder} is not what these settings give: it is left of a start with others, or "
            f"damaged. Delete {folder} and run the same command again."
        )


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _canonical(template_kwargs: str | None) -> str:
    values = parse_template_kwargs(template_kwargs)
    return canonical_json(values).decode() if values else ""


def states_identity(config: TargetConfig, target: Target, frozen: bytes) -> StatesIdentity:
    """Return what the states of a loaded target mean."""
    return StatesIdentity(
        # A folder by its whole path: the trainer may start elsewhere.
        target=_absolute(config.path),
        revision=target.revision,
        config_sha256=fingerprint.config_sha256(target.full_config),
        weights_sha256=fingerprint.weights_sha256(config.path),
        tokenizer_sha256=fingerprint.tokenizer_sha256(target.tokenizer),
        template_sha256=fingerprint.template_sha256(target.tokenizer),
        frozen_sha256=hashlib.sha256(frozen).hexdigest(),
        target_layer_ids=target.layer_ids,
        last_hidden=config.last_hidden,
        num_target_layers=target.num_target_layers,
        hidden_size=int(target.config.hidden_size),
        vocab_size=int(target.config.vocab_size),
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        template_kwargs=_canonical(config.chat_template_kwargs),
    )


def encoding_identity(store: StoreConfig) -> EncodingIdentity:
    """Return how the states are written."""
    return EncodingIdentity(codec=store.codec)
