"""`hscache import`: turn hidden states that another program saved into a cache of ours.

Takes an `ImportConfig`. A first pass over the source reads ids and masks and deals the documents
into shards, as produce does; a few documents are run through the target to prove that the layers
are what the user says; a second pass streams the states, one document in memory at a time, through
produce's checks and writer. Killed at any instant it continues where it was.

    hscache import --format speculators --source data/hidden_states --target MODEL \\
        --layer-convention hidden_states --layer-ids 2 18 33 --shard-dir /nvme/cache
"""

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hscache import producers
from hscache.admission import Admission
from hscache.config import TargetConfig
from hscache.content import count_seen
from hscache.corpus_plan import content_identity
from hscache.documents import Corpus
from hscache.errors import ConfigError, DataError, HscacheError
from hscache.import_check import Sample, check_layers
from hscache.import_config import ImportConfig
from hscache.manifest import Identity
from hscache.peer import (
    DamagedStates,
    PeerCache,
    find_problem,
    resolve_layers,
    to_bits,
)
from hscache.plan import TokenizedDocument, deal_into_shards
from hscache.planes import Bits
from hscache.prepare import (
    encoding_identity,
    make_cache_folder,
    start_cache,
    states_identity,
)
from hscache.pretrained import load_config, load_tokenizer
from hscache.produce import fill, software, summary
from hscache.progress import Progress, configure_logging
from hscache.reader import Cache
from hscache.report import format_table
from hscache.settings import to_dict
from hscache.signals import raise_on_stop
from hscache.target import Target

log = logging.getLogger(__name__)

_HASH_RANGE = 1 << 64
_EXPONENT = np.uint16(0x7F80)
"""All ones in a bf16 that is infinite or not a number."""
_TRIED_FOR_EACH = 8
"""Documents read at the most to find one that can be checked."""


def run(config: ImportConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` read ids and masks, print the plan and write nothing."""
    configure_logging()
    if dry_run:
        print(_describe(config, Import(config)))
        return 0
    with raise_on_stop() as raise_if_stopped:
        import_cache(config, raise_if_stopped)
    return 0


def import_cache(config: ImportConfig, poll: Callable[[], None] = lambda: None) -> Cache:
    """Fill the cache in `config.shard_dir` from the source and return it, complete.

    Raises ConfigError for ids that name no layer, CacheMismatchError when the target's states are
    others or the folder holds another cache, DataError or HscacheError when too many documents are
    unusable.
    """
    make_cache_folder(config.shard_dir)
    with producers.Producer(config.shard_dir) as producer:
        if removed := producers.clean_leftovers(config.shard_dir):
            log.info("removed %d leftovers of producers that died", len(removed))
        source = Import(config)
        source.read_corpus(poll)
        target = source.load_target()
        checked = source.check(target)
        cache = source.start(target)
        started = time.monotonic()
        made = fill(
            cache,
            Admission(cache, producer, poll),
            producer,
            config.store,
            functools.partial(source.states, cache, poll),
            lambda shard: {**software(), **checked, "settings": to_dict(config)},
            label="import",
        )
    print(summary(cache, made, time.monotonic() - started, "imported"))
    return cache


class Import:
    """A source, what the user says about it, and after `read_corpus` its documents."""

    corpus: Corpus
    dtype: str

    def __init__(self, config: ImportConfig) -> None:
        assert config.layer_convention is not None
        self._config = config
        self._convention = config.layer_convention
        self._target = TargetConfig(
            path=config.target,
            revision=config.revision,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
        model, revision = load_config(self._target)
        self._hidden_size = int(model.hidden_size)
        self._num_layers = int(model.num_hidden_layers)
        self.peer = _open_peer(config)
        self.layers = resolve_layers(
            _layer_ids(config, self.peer),
            self._convention,
            self._num_layers,
            may_append_final=self.peer.may_append_final,
        )
        vocab = load_tokenizer(self._target, revision).get_vocab()
        self._vocab_size = min(int(model.vocab_size), max(vocab.values()) + 1)

    def read_corpus(self, poll: Callable[[], None] = lambda: None) -> None:
        """Make the first pass: ids, masks and shapes of every document, no states.

        Raises HscacheError when too many are unusable, DataError when none is left to train on or
        their dtypes differ.
        """
        num_documents = self.peer.num_documents
        counts: collections.Counter[str] = collections.Counter({"rows in": num_documents})
        documents: list[TokenizedDocument] = []
        dtypes: collections.Counter[str] = collections.Counter()
        num_read = num_bad = 0
        with Progress(num_documents, unit="documents", label="read ids") as progress:
            for found in self.peer.read_documents():
                poll()
                num_read += 1
                progress.advance()
                if problem := found.problem or find_problem(
                    found, self.layers, self._hidden_size, self._vocab_size
                ):
                    num_bad += 1
                    log.warning("%s is left out: %s", found.where, problem)
                    self._require_few(num_bad, num_read, f"{found.where}: {problem}")
                    continue
                dtypes[found.dtype] += 1
                counts["padding tokens left out"] += found.num_padding
                document = TokenizedDocument(
                    ids_T=found.ids_T.astype(np.int32),
                    loss_mask_T=found.loss_mask_T.astype(np.uint8),
                    source_row=found.number,
                    held_out=False,
                )
                if document.num_valid_anchors == 0:
                    counts["dropped: no two supervised tokens in a row"] += 1
                    continue
                held_out = document.key < self._config.held_out_fraction * _HASH_RANGE
                documents.append(dataclasses.replace(document, held_out=held_out))
        if len(dtypes) > 1:
            raise DataError(
                f"{self._config.source} holds states of several dtypes: {dict(dtypes)}; expected "
                "one, of one run. Import them apart, or make them anew."
            )
        counts["dropped: unreadable or at odds with itself"] = num_bad
        counts["kept to train on"] = sum(not d.held_out for d in documents)
        counts["kept held out"] = sum(d.held_out for d in documents)
        counts["supervised tokens"] = sum(int(d.loss_mask_T.sum()) for d in documents)
        report = {key: n for key, n in counts.items() if n}
        if not counts["kept to train on"]:
            raise DataError(
                f"no document of {self._config.source} is left to train on: {report}. Documents "
                "need two supervised tokens in a row."
            )
        self.dtype = next(iter(dtypes))
        if self.dtype == "float16":
            log.warning(
                "the states are float16: they become bfloat16, which keeps 8 of their 11 "
                "significant bits; what overflowed when they were made is quarantined"
            )
        self.corpus = Corpus(documents=documents, report=dict(report))

    def _require_few(self, num_bad: int, num_read: int, latest: str) -> None:
        seen = count_seen(num_read, self.peer.num_documents)
        if num_bad > (share := self._config.store.max_quarantined_share) * seen:
            raise HscacheError(
                f"{num_bad} documents cannot be used, more than store.max_quarantined_share = "
                f"{share:.1%} of {seen:,}; the last is {latest}. Is it the right --format, target "
                "and list of layers? Otherwise mend the source, or allow a larger share."
            )

    def load_target(self) -> Target:
        """Load the target with every block to compare with, or with one if nothing is checked."""
        blocks = self._num_layers - 1 if self._config.check_documents else 1
        return Target(dataclasses.replace(self._target, target_layer_ids=tuple(range(blocks))))

    def check(self, target: Target) -> dict[str, Any]:
        """Run a few documents through the target; return what is recorded about it."""
        documents = self.corpus.documents
        number = min(self._config.check_documents, len(documents))
        if not number:
            log.warning(
                "no document is run through the target: that the layers are what you say, and "
                "that this is the model, is taken on trust"
            )
            return {"checked_documents": 0}
        samples = self._samples(number)
        worst = check_layers(target, samples, self.layers.block_ids, self._convention)
        log.info(
            "%d documents run through the target: blocks %s are what is stored, to within %.2g%%",
            *(len(samples), list(self.layers.block_ids), 100 * worst),
        )
        return {"checked_documents": len(samples), "largest_error": round(worst, 6)}

    def _samples(self, number: int) -> list[Sample]:
        """Choose documents to check, of which states that are not finite would say nothing."""
        documents, samples = self.corpus.documents, []
        order = np.random.default_rng(self._config.store.seed).permutation(len(documents))
        for i in order[: number * _TRIED_FOR_EACH]:
            document = documents[i]
            try:
                bits_TLH = self._bits(document.source_row, len(document.ids_T))
            except DamagedStates:  # the import will name it
                continue
            if (bits_TLH & _EXPONENT == _EXPONENT).any():
                continue
            where = f"document {document.source_row} of {self._config.source}"
            samples.append(Sample(where=where, ids_T=document.ids_T, bits_TLH=bits_TLH))
            if len(samples) == number:
                break
        if not samples:
            raise DataError(
                f"{self._config.source}: none of the documents that were to be checked has finite "
                "states, so nothing says whether the layers are right. Mend the source; something "
                "overflowed when it was made."
            )
        return samples

    def start(self, target: Target) -> Cache:
        """Begin or continue the cache."""
        config, documents = self._config, self.corpus.documents
        shards = deal_into_shards(documents, config.store.shard_tokens, config.store.seed)
        frozen = target.frozen.to_bytes()
        rounded = "" if self.dtype == "bfloat16" else f", {self.dtype} rounded to bfloat16"
        identity = Identity(
            states=dataclasses.replace(
                states_identity(self._target, target, frozen),
                target_layer_ids=self.layers.block_ids,
                dtype=self.dtype,
                origin=f"imported from {self.peer.title}{rounded}",
            ),
            content=content_identity(
                documents,
                shards,
                config.store,
                max_tokens=max(len(document.ids_T) for document in documents),
                over_long="drop",
            ),
            encoding=encoding_identity(config.store),
        )
        log.info("%s", self.peer.final_state)
        return start_cache(config.shard_dir, self.corpus, shards, target, frozen, identity)

    def states(
        self, cache: Cache, poll: Callable[[], None], shard: int
    ) -> Iterator[tuple[int, Bits | str]]:
        """Make the second pass for a shard: yield its documents with bf16 bits [T, L, H], or why
        there are none."""
        plan = cache.plan
        for document in plan.shard_documents(shard):
            poll()
            number = int(plan.source_rows[document])
            try:
                states: Bits | str = self._bits(number, int(plan.lengths[document]))
            except DamagedStates as damage:
                states = str(damage)
            yield document, states

    def _bits(self, number: int, num_tokens: int) -> Bits:
        found: object
        try:
            states = self.peer.read_states(number)
            bits_TLH = to_bits(states, num_tokens, self.layers, self._hidden_size)
        except (DamagedStates, HscacheError):
            raise
        except Exception as error:  # it was readable in the first pass, whatever reads it
            found = error
        else:
            if bits_TLH.shape == (num_tokens, len(self.layers.block_ids), self._hidden_size):
                return bits_TLH
            found = f"states of shape {list(states.shape)}"
        raise HscacheError(
            f"document {number} of {self._config.source} has changed since its ids were read: "
            f"found {str(found).splitlines()[0]}. Bring it back and run the same command again; "
            "or, without it, begin anew in another --shard-dir."
        )


def _open_peer(config: ImportConfig) -> PeerCache:
    if not config.source.is_dir():
        raise DataError(f"{config.source} is no folder; expected that of a {config.format} cache.")
    if config.format == "specforge":
        from hscache.peer_specforge import SpecForgeCache

        return SpecForgeCache(config.source)
    if config.format == "speculators":
        from hscache.peer_speculators import SpeculatorsCache

        return SpeculatorsCache(config.source, config.rows)
    from hscache.peer_deepspec import DeepSpecCache

    return DeepSpecCache(config.source)


def _layer_ids(config: ImportConfig, peer: PeerCache) -> tuple[int, ...]:
    """Return the ids of the stored layers: those recorded, which stated ones must equal."""
    if peer.layer_ids is None:
        assert config.layer_ids is not None
        return config.layer_ids
    if config.layer_ids not in (None, peer.layer_ids):
        raise ConfigError(
            f"layer_ids is {list(config.layer_ids or ())}, and {config.source} says it holds "
            f"{list(peer.layer_ids)}. Leave the setting out, or name the right folder."
        )
    return peer.layer_ids


def _describe(config: ImportConfig, source: Import) -> str:
    source.read_corpus()
    documents = source.corpus.documents
    shards = deal_into_shards(documents, config.store.shard_tokens, config.store.seed)
    rows = [[key, f"{value:,}"] for key, value in source.corpus.report.items()]
    rows += [
        ["tokens", f"{sum(len(d.ids_T) for d in documents):,}"],
        ["captured layers", f"{list(source.layers.block_ids)} (blocks, 0-based)"],
        ["stored as", source.dtype],
        ["shards", f"{len(shards):,} of at most {config.store.shard_tokens:,} tokens"],
    ]
    return format_table(["plan", str(config.shard_dir)], rows)
