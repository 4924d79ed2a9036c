"""`trainer eval`: how many tokens a drafter is worth, from held-out shards and by real decoding.

Takes a checkpoint and the cache it was trained on, and for real decoding prompts and the target;
prints one table of acceptance lengths (bonus token included), with table drafters counted on the
same training text beside the drafter.

    trainer eval --checkpoint runs/demo --shards /nvme/cache --prompts held_out.jsonl
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hscache.device import DTYPES, choose_device
from hscache.errors import CacheMismatchError, ConfigError
from hscache.progress import configure_logging
from hscache.prompts import read_prompts
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.result_file import require_writable, write_json
from hscache.settings import to_dict
from trainer.acceptance import Acceptance
from trainer.checkpoint import read_state
from trainer.config import EvalConfig
from trainer.decode_prompts import Decoded, decode_prompts
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter
from trainer.estimate import estimate_acceptance
from trainer.frozen import load_frozen
from trainer.held_out import held_out_documents
from trainer.run_folder import STATE, resolve_checkpoint
from trainer.tables import NGramTable, PromptLookup, TableDrafter, Text, evaluate_table

log = logging.getLogger(__name__)


def run(config: EvalConfig, *, dry_run: bool = False) -> int:
    """Run the command and print the table; with `dry_run` only check the inputs.

    Raises CacheMismatchError when the drafter was trained on other states, ConfigError when there
    is nothing to measure on.
    """
    configure_logging()
    device = choose_device(config.device)
    cache = open_cache(config.shards)
    checkpoint = resolve_checkpoint(config.checkpoint)
    num_target_layers = cache.identity.states.num_target_layers
    drafter = load_drafter(checkpoint, num_target_layers=num_target_layers)
    _require_same_target(drafter, cache, checkpoint)
    _compare_with_training(checkpoint, cache)
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
    require_writable(config.json)
    dtype = DTYPES[config.dtype]
    frozen = load_frozen(cache).to(device, dtype)
    drafter.to(device)
    estimate = estimate_acceptance(drafter, frozen, documents, device=device, dtype=dtype)
    decoded = decode_prompts(config, cache, drafter, frozen, device) if config.prompts else None
    tables = _count_tables(cache) if config.tables else {}
    held_out = [Text(d.input_ids, d.loss_mask) for d in documents]
    block_size = drafter.config.block_size
    results = {"drafter": _figures(estimate, decoded.acceptance if decoded else None)}
    for name, table in tables.items():
        on_shards = evaluate_table(table, held_out, block_size)
        on_text = evaluate_table(table, decoded.texts, block_size) if decoded else None
        results[name] = _figures(on_shards, on_text)
    counts = {"num_documents": len(documents), "num_missing": len(cache.held_out) - len(documents)}
    _report(config, checkpoint, results, counts, decoded)
    return 0


def _count_tables(cache: Cache) -> dict[str, TableDrafter]:
    plan = cache.plan
    training = [
        Text(plan.input_ids(d), plan.loss_mask(d))
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
    write_json(config.json, {"results": results, **facts, "config": to_dict(config)})
