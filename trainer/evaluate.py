"""`trainer eval`: how many tokens a drafter is worth, from held-out shards and by real decoding.

Takes a checkpoint and the cache it was trained on, and for real decoding prompts and the target;
prints one table of acceptance lengths (bonus token included), with table drafters counted on the
same training text beside the drafter.

    trainer eval --checkpoint runs/demo --shards /nvme/cache --prompts held_out.jsonl
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from hscache import files
from hscache.device import DTYPES, choose_device
from hscache.errors import CacheMismatchError, ConfigError
from hscache.fingerprint import (
    config_sha256,
    template_sha256,
    tokenizer_sha256,
    weights_sha256,
)
from hscache.pretrained import find_stop_ids, load_model, load_pretrained
from hscache.progress import Progress, configure_logging
from hscache.prompts import prompt_ids, read_prompts
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.settings import to_dict
from hscache.template_kwargs import parse_template_kwargs, set_template_kwargs
from trainer.acceptance import Acceptance
from trainer.checkpoint import read_state
from trainer.config import EvalConfig
from trainer.decode import compare_with_greedy, plain_greedy, speculative_decode
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter
from trainer.estimate import estimate_acceptance
from trainer.frozen import FrozenTarget, load_frozen
from trainer.held_out import held_out_documents
from trainer.proposer import DrafterProposer
from trainer.run_folder import STATE, resolve_checkpoint
from trainer.tables import NGramTable, PromptLookup, TableDrafter, evaluate_table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Text:
    """A document for the table drafters, from the plan alone."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Real decoding of all prompts."""

    acceptance: Acceptance
    """dense figures are empty: decoding visits one chain of anchors"""
    num_prompts: int
    num_tokens: int
    """new tokens, the prefills' included"""
    num_ties: int
    seconds_speculative: float
    seconds_greedy: float
    texts: list[_Text]
    """the greedy texts, for the table drafters"""

    @property
    def tokens_per_target_step(self) -> float:
        """New tokens over target passes, prefills included."""
        return self.num_tokens / (self.acceptance.steps + self.num_prompts)


def run(config: EvalConfig, *, dry_run: bool = False) -> int:
    """Run the command and print the table; with `dry_run` only check the inputs."""
    configure_logging()
    device = choose_device(config.device)
    cache = open_cache(config.shards)
    checkpoint = resolve_checkpoint(config.checkpoint)
    num_target_layers = cache.identity.states.num_target_layers
    drafter = load_drafter(checkpoint, num_target_layers=num_target_layers)
    _require_same_target(drafter, cache, checkpoint)
    _compare_with_training(checkpoint, cache)
    if config.json is not None and config.json.is_dir():
        raise ConfigError(f"--json {config.json} is a folder; give a file to write.")
    documents = held_out_documents(cache)
    if not documents and not config.prompts:
        raise ConfigError(
            f"{config.shards} has no held-out documents with states and no --prompts were given: "
            "there is nothing to measure on."
        )
    if config.prompts:
        read_prompts(config.prompts)  # only to complain now, not in an hour
    if dry_run:
        print(f"{checkpoint} fits {config.shards}: {len(documents)} held-out documents")
        return 0
    if config.json is not None:
        files.make_folder(config.json.parent)
    dtype = DTYPES[config.dtype]
    frozen = load_frozen(cache).to(device, dtype)
    drafter.to(device)
    estimate = estimate_acceptance(drafter, frozen, documents, device=device, dtype=dtype)
    decoded = decode_prompts(config, cache, drafter, frozen, device) if config.prompts else None
    tables = _count_tables(cache) if config.tables else {}
    held_out = [_Text(d.input_ids, d.loss_mask) for d in documents]
    block_size = drafter.config.block_size
    results = {"drafter": _figures(estimate, decoded.acceptance if decoded else None)}
    for name, table in tables.items():
        on_shards = evaluate_table(table, held_out, block_size)
        on_text = evaluate_table(table, decoded.texts, block_size) if decoded else None
        results[name] = _figures(on_shards, on_text)
    counts = {"num_documents": len(documents), "num_missing": len(cache.held_out) - len(documents)}
    _report(config, checkpoint, results, counts, decoded)
    return 0


def decode_prompts(
    config: EvalConfig,
    cache: Cache,
    drafter: Drafter,
    frozen: FrozenTarget,
    device: torch.device,
) -> Decoded:
    """Answer prompts by speculative decoding, check each text against plain greedy decoding.

    Raises DecodeMismatchError when a text differs (in float32), or by more than a tie (bfloat16).
    """
    path = config.target or cache.identity.states.target
    if Path(path).is_dir() and weights_sha256(path) != cache.identity.states.weights_sha256:
        raise CacheMismatchError(
            f"the weights in {path} are not those the cache {cache.path} was made with. Give the "
            "target's folder with --target."
        )
    dtype = DTYPES[config.dtype]
    # A cache never switches on trust_remote_code; hub models are pinned to the cache's revision.
    revision = cache.identity.states.revision or None
    _require_config(path, revision, cache)
    tokenizer = load_pretrained(AutoTokenizer, path, revision=revision)
    values = parse_template_kwargs(cache.identity.states.template_kwargs)
    set_template_kwargs(tokenizer, values)  # prompts as those the drafter has learned from
    _require_tokenizer(tokenizer, path, cache)
    target = load_model(path, dtype=dtype, revision=revision).to(device).eval()
    _require_frozen(target, frozen, path, cache)
    stop_ids = find_stop_ids(target, tokenizer)
    prompts = read_prompts(config.prompts)[: config.max_prompts]
    parts, texts, ties, new_tokens = [], [], 0, 0
    spent = {"speculative": 0.0, "greedy": 0.0}
    with Progress(len(prompts), unit="prompts", label="decode") as progress:
        for prompt in prompts:
            ids = prompt_ids(prompt, tokenizer)
            started = time.perf_counter()
            result = speculative_decode(
                target,
                ids,
                DrafterProposer(drafter, frozen),
                target_layer_ids=drafter.config.target_layer_ids,
                block_size=drafter.config.block_size,
                max_new_tokens=config.max_new_tokens,
                stop_ids=stop_ids,
            )
            spent["speculative"] += time.perf_counter() - started
            started = time.perf_counter()
            greedy = plain_greedy(target, ids, config.max_new_tokens, stop_ids)
            spent["greedy"] += time.perf_counter() - started
            ties += compare_with_greedy(target, ids, result.ids, greedy, dtype).kind == "tie"
            mask = np.array([0] * len(ids) + [1] * len(greedy), bool)
            texts.append(_Text(np.array(ids + greedy), mask))
            new_tokens += len(result.ids)
            if result.steps:
                mean = result.committed / result.steps
                parts.append(
                    Acceptance(
                        committed=result.committed, steps=result.steps, document_means=(mean,)
                    )
                )
            progress.advance(1)
    return Decoded(
        acceptance=sum(parts, Acceptance()),
        num_prompts=len(prompts),
        num_tokens=new_tokens,
        num_ties=ties,
        seconds_speculative=spent["speculative"],
        seconds_greedy=spent["greedy"],
        texts=texts,
    )


def _count_tables(cache: Cache) -> dict[str, TableDrafter]:
    plan = cache.plan
    training = [
        _Text(plan.input_ids(d), plan.loss_mask(d))
        for shard in plan.training_shards
        for d in plan.shard_documents(shard)
    ]
    names = {2: "bigram table", 3: "trigram table", 4: "4-gram table"}
    tables: dict[str, TableDrafter] = {
        name: NGramTable.count(training, order) for order, name in names.items()
    }
    return tables | {"prompt look-up": PromptLookup()}


def _require_same_target(drafter: Drafter, cache: Cache, checkpoint: Path) -> None:
    states, config = cache.identity.states, drafter.config
    for name in ("hidden_size", "vocab_size", "target_layer_ids", "num_target_layers"):
        if getattr(states, name) != getattr(config, name):
            raise CacheMismatchError(
                f"{checkpoint} was trained for {name} {getattr(config, name)}, and the cache "
                f"{cache.path} has {getattr(states, name)}."
            )


def _compare_with_training(checkpoint: Path, cache: Cache) -> None:
    """Refuse states the drafter was not trained on; say so if the documents are others.

    A published drafter has no trainer state: then only its config can be checked.
    """
    if not (checkpoint / STATE).is_file():
        log.warning("%s does not say which cache it was trained on; not checked", checkpoint)
        return
    trained, here = read_state(checkpoint).cache, to_dict(cache.identity)
    lines = [
        f"  {name}: trained on {trained['states'].get(name)!r}, this cache has {value!r}"
        for name, value in here["states"].items()
        # neither the target's folder nor its last hidden states are what a drafter reads
        if trained["states"].get(name) != value and name not in ("target", "last_hidden")
    ]
    if lines:
        raise CacheMismatchError(
            f"{checkpoint} was trained on other hidden states than {cache.path} holds:\n"
            + "\n".join(lines)
            + "\nEvaluate it on the cache it was trained on, or on one of the same states."
        )
    corpora = [one["content"] for one in (trained, *trained.get("more", {}).values())]
    if here["content"] not in corpora:
        log.warning(
            "%s was trained on another corpus than %s: what is held out here may have been "
            "trained on",
            checkpoint,
            cache.path,
        )


def _require_config(path: str, revision: str | None, cache: Cache) -> None:
    config = load_pretrained(AutoConfig, path, revision=revision).get_text_config()
    found = config_sha256(json.loads(config.to_json_string(use_diff=False)))
    if found != cache.identity.states.config_sha256:
        raise CacheMismatchError(
            f"the config of {path} is not that of the target of {cache.path}; the same weights "
            "under another config are another model. Give the target's folder with --target."
        )


def _require_tokenizer(tokenizer: Any, path: str, cache: Cache) -> None:
    states = cache.identity.states
    for what, found, expected in (
        ("tokenizer", tokenizer_sha256(tokenizer), states.tokenizer_sha256),
        ("chat template", template_sha256(tokenizer), states.template_sha256),
    ):
        if found != expected:
            raise CacheMismatchError(
                f"the {what} of {path} is not the one the cache {cache.path} was made with: the "
                "drafter has never seen such prompts. Give the target's folder with --target."
            )


def _require_frozen(target: Any, frozen: FrozenTarget, path: str, cache: Cache) -> None:
    # A hub model has no folder to hash; its embedding tells it from another one. In bfloat16,
    # because the producer may have run in another dtype.
    theirs, ours = target.get_input_embeddings().weight, frozen.embedding_VH
    if theirs.shape != ours.shape or not torch.equal(theirs.bfloat16(), ours.bfloat16()):
        raise CacheMismatchError(
            f"{path} has another embedding than the target of the cache {cache.path} "
            f"({cache.identity.states.target}). Give that target with --target."
        )


def _figures(held_out: Acceptance, decoded: Acceptance | None) -> dict[str, float | None]:
    def number(value: float) -> float | None:
        return value if value == value else None

    return {
        "sequential": number(held_out.sequential),
        "dense": number(held_out.dense),
        "per_document_mean": number(held_out.per_document_mean),
        "decoded": number(decoded.sequential) if decoded else None,
    }


def _report(
    config: EvalConfig,
    checkpoint: Path,
    results: dict[str, dict[str, float | None]],
    counts: dict[str, int],
    decoded: Decoded | None,
) -> None:
    columns = ("sequential", "dense", "per_document_mean", "decoded")

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    print(
        format_table(
            ["acceptance length", *columns],
            [[name, *(cell(r[column]) for column in columns)] for name, r in results.items()],
        )
    )
    without = f" ({counts['num_missing']} more have no states)" if counts["num_missing"] else ""
    print(
        f"sequential, dense, per document: {counts['num_documents']} held-out documents of "
        f"{config.shards}{without}\n"
        "all counts include the bonus token and stop at the end of the answer"
    )
    facts: dict[str, Any] = {**counts, "checkpoint": str(checkpoint)}
    trained = [r["sequential"] for n, r in results.items() if n.endswith("table")]
    best = max((value for value in trained if value is not None), default=None)
    ours = results["drafter"]["sequential"]
    if best is not None and ours is not None:
        facts["ratio_to_best_table"] = ours / best
        print(f"drafter / best trained table: {ours / best:.3f}")
    if decoded is not None:
        identical = decoded.num_prompts - decoded.num_ties
        facts |= {
            "num_prompts": decoded.num_prompts,
            "tokens_per_target_step": decoded.tokens_per_target_step,
            "identical_to_greedy": identical,
            "ties": decoded.num_ties,
        }
        print(
            f"decoded: {decoded.num_prompts} prompts, {decoded.num_tokens} tokens, "
            f"{decoded.tokens_per_target_step:.3f} tokens per target step (prefill included), "
            f"{decoded.seconds_speculative:.1f} s against {decoded.seconds_greedy:.1f} s one by one"
            f"\ntext equals plain greedy decoding in {config.dtype}: {identical} of "
            f"{decoded.num_prompts}" + (f", {decoded.num_ties} ties" if decoded.num_ties else "")
        )
    if config.json is not None:
        record = {"results": results, **facts, "config": to_dict(config)}
        files.replace_atomically(config.json, json.dumps(record, indent=2).encode())
