"""`trainer export`: write a drafter as a folder that serving engines and speculators load.

Takes a checkpoint (or a published drafter) and, to check it or to copy the target's embedding and
head, the cache; leaves `config.json` and `model.safetensors` in bfloat16, whole or not at all.

    trainer export --checkpoint runs/a --format zlab --output drafter
    trainer export --checkpoint runs/a --format speculators --shards /nvme/cache --output drafter
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hscache import files
from hscache.errors import CacheMismatchError, ConfigError
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.settings import to_dict
from trainer.checkpoint import recorded_states
from trainer.config import ExportConfig
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.drafter_folder import load_drafter, read_config
from trainer.drafter_json import drafter_json
from trainer.frozen import load_frozen, target_config
from trainer.run_folder import CONFIG, MODEL, resolve_checkpoint
from trainer.speculators_format import EMBEDDING, HEAD, speculators_json

log = logging.getLogger(__name__)

_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Export:
    """The two files of a folder, before they are written."""

    drafter: DrafterConfig
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def run(config: ExportConfig, *, dry_run: bool = False) -> int:
    """Run the command and print what was written; with `dry_run` only check and print."""
    configure_logging()
    require_free(config.output)
    checkpoint = resolve_checkpoint(config.checkpoint)
    export = make_export(config, checkpoint)
    if not dry_run:
        write_export(export, config.output)
    print(_describe(config, checkpoint, export))
    return 0


def make_export(config: ExportConfig, checkpoint: Path) -> Export:
    """Load a drafter, check it against the cache if one is given, and lay out its folder.

    Raises CacheMismatchError with a diff when the cache is not of the drafter's target.
    """
    cache = open_cache(config.shards) if config.shards else None
    num_target_layers = cache.identity.states.num_target_layers if cache else None
    drafter = load_drafter(checkpoint, num_target_layers=num_target_layers)
    if cache is None:
        # without a cache, its special tokens are known from the folder alone
        source = read_config(checkpoint)
        target = source.get("transformer_layer_config", source)
    else:
        require_same_states(drafter.config, checkpoint, cache)
        target = target_config(cache)
    tensors = _drafter_tensors(drafter)
    if config.format == "zlab":
        return Export(
            drafter=drafter.config,
            config=drafter_json(drafter.config, target, _DTYPE),
            tensors=tensors,
        )
    assert cache is not None  # ExportConfig asks for it
    frozen = load_frozen(cache)
    tensors[EMBEDDING] = frozen.embedding_VH.to(_DTYPE)
    tied = frozen.head_VH is frozen.embedding_VH  # a file holds no tensor twice
    tensors[HEAD] = tensors[EMBEDDING].clone() if tied else frozen.head_VH.to(_DTYPE)
    verifier = _verifier(config.target, cache)
    return Export(
        drafter=drafter.config,
        config=speculators_json(drafter.config, target, _DTYPE, verifier=verifier),
        tensors=tensors,
    )


def _drafter_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().to(_DTYPE).contiguous() for name, value in drafter.state_dict().items()
    }


def _verifier(asked: str | None, cache: Cache) -> str:
    # A hub id stays; a folder must be found from wherever the export is read.
    states = cache.identity.states
    name = asked or states.target
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if asked is None and not states.revision:
        raise ConfigError(
            f"{cache.path} was made from the target in the folder {name}, which is not here. Say "
            "where it is, or its hub id, with --target: readers of the export load it from there."
        )
    return name


def require_same_states(drafter: DrafterConfig, checkpoint: Path, cache: Cache) -> None:
    """Raise CacheMismatchError, listing each field, for a cache of another target or other layers.

    A published drafter has no record of its training: then only its config can be compared.
    """
    here = to_dict(cache.identity.states)
    config = to_dict(drafter)
    names = ("hidden_size", "vocab_size", "target_layer_ids", "num_target_layers")
    there = (recorded_states(checkpoint) or {}) | {name: config[name] for name in names}
    lines = [
        f"  {name}: the drafter has {value!r}, the cache {here.get(name)!r}"
        for name, value in there.items()
        # a moved folder is the same target; its last hidden states no drafter reads
        if here.get(name) != value and name not in ("target", "last_hidden")
    ]
    if lines:
        raise CacheMismatchError(
            f"{checkpoint} is not a drafter for the target of {cache.path}:\n"
            + "\n".join(lines)
            + "\nGive the cache it was trained on."
        )


def require_free(output: Path) -> None:
    """Raise ConfigError when something is in the way of the output folder."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output {output} exists already. Give a new folder, or delete it.")


def write_export(export: Export, output: Path) -> None:
    """Write the folder: whole or not at all; raise ConfigError rather than write over another."""
    files.make_folder(output.absolute().parent)
    with files.temporary_folder(output.absolute().parent) as folder:
        with files.disk_full_named(output):
            save_file(export.tensors, folder / MODEL, metadata={"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(export.config, indent=2) + "\n")
            # safetensors makes its file for the owner alone; a server may be another user
            (folder / MODEL).chmod((folder / CONFIG).stat().st_mode)
            files.fsync_files(folder)
        if not files.publish_folder(folder, output.absolute()):
            raise ConfigError(f"--output {output} appeared meanwhile. Give a new folder.")


def _describe(config: ExportConfig, checkpoint: Path, export: Export) -> str:
    drafter, output = export.drafter, shlex.quote(str(config.output))
    num_drafted = drafter.block_size - 1
    size_bytes = sum(t.numel() * t.element_size() for t in export.tensors.values())
    rows = [
        ["of", str(checkpoint)],
        ["tensors", f"{len(export.tensors)}, {size_bytes / 1e6:,.1f} MB in bfloat16"],
        ["target layers", f"{list(drafter.target_layer_ids)} of {drafter.num_target_layers}"],
        ["block", f"{drafter.block_size} slots, {num_drafted} drafted; {_causality(drafter)}"],
    ]
    if config.format == "speculators":
        verifier = export.config["speculators_config"]["verifier"]["name_or_path"]
        rows += [["target", verifier], ["vLLM", f"vllm serve {output}"]]
        if len(set(drafter.layer_types)) > 1:
            rows.append(
                ["warning", "vLLM takes full layers in this format for causal (vllm#56692): zlab"]
            )
    else:
        speculative = {
            "method": "dflash",
            "model": str(config.output),
            "num_speculative_tokens": num_drafted,
        }
        speculative_json = shlex.quote(json.dumps(speculative))
        rows += [
            ["vLLM", f"vllm serve TARGET --speculative-config {speculative_json}"],
            [
                "SGLang",
                f"--speculative-algorithm DFLASH --speculative-draft-model-path {output} "
                f"--speculative-num-draft-tokens {drafter.block_size}",
            ],
        ]
    return format_table([f"export {config.format}", str(config.output)], rows)


def _causality(drafter: DrafterConfig) -> str:
    sliding = drafter.layer_types.count("sliding_attention")
    full = len(drafter.layer_types) - sliding
    if not sliding:
        return "not causal"
    return f"causal in {sliding} layers of window {drafter.sliding_window}, not in {full} full ones"
