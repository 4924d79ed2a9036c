"""What a disk budget would mean for a run, decided before anything is written: for a dry run.

Takes the settings, the target's config and tokenizer, and a folder with the plan in it; hands on
the window, or refuses as the run would. Only the size of the frozen parts is computed, not seen.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from hscache import budget, layout
from hscache.config import ProduceConfig
from hscache.manifest import ContentIdentity, Identity, StatesIdentity, WindowIdentity, read_group
from hscache.prepare import encoding_identity
from hscache.window_start import planned_needs, window_for
from hscache.zarr_array import canonical_json


def preview_window(
    config: ProduceConfig,
    model: Any,
    layer_ids: tuple[int, ...],
    tokenizer: Any,
    content: ContentIdentity,
    plan_folder: Path,
) -> WindowIdentity:
    """Return the window that a run would have; raises as `window_for` does.

    `model` is the target's text config, `plan_folder` holds the plan.
    """
    root = layout.root_file(config.shard_dir)
    if root.is_file():
        identity = read_group(root, Identity)
    else:
        identity = Identity(
            states=_states(config, model, layer_ids),
            content=content,
            encoding=encoding_identity(config.store),
        )
    frozen_bytes = budget.used_bytes(layout.frozen_dir(config.shard_dir))
    if not frozen_bytes:
        frozen_bytes = _frozen_bytes(config, model, tokenizer)
    return window_for(config, identity, planned_needs(plan_folder, identity, frozen_bytes))


def _states(config: ProduceConfig, model: Any, layer_ids: tuple[int, ...]) -> StatesIdentity:
    """Return what decides sizes; what only the loaded target tells stays empty."""
    return StatesIdentity(
        target=config.target.path,
        revision="",
        config_sha256="",
        weights_sha256="",
        tokenizer_sha256="",
        template_sha256="",
        frozen_sha256="",
        target_layer_ids=layer_ids,
        last_hidden=config.target.last_hidden,
        num_target_layers=int(model.num_hidden_layers),
        hidden_size=int(model.hidden_size),
        vocab_size=int(model.vocab_size),
        dtype=config.target.dtype,
        trust_remote_code=config.target.trust_remote_code,
    )


def _frozen_bytes(config: ProduceConfig, model: Any, tokenizer: Any) -> int:
    """Return what embedding, head (unless tied), norm, config and tokenizer take on disk."""
    matrices = 1 if model.tie_word_embeddings else 2
    numbers = (matrices * int(model.vocab_size) + 1) * int(model.hidden_size)
    weights = numbers * getattr(torch, config.target.dtype).itemsize
    header = 1024
    files = budget.in_blocks(weights + header) + budget.in_blocks(
        len(canonical_json(model.to_dict()))
    )
    with tempfile.TemporaryDirectory(prefix="hscache-") as folder:
        tokenizer.save_pretrained(folder)
        return budget.BLOCK_BYTES + files + budget.used_bytes(Path(folder))
