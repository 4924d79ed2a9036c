"""Every file in configs/ parses, and holds what its name promises."""

from pathlib import Path

import pytest

from hscache.cli import COMMANDS
from hscache.config import ProduceConfig, spaced_layer_ids
from hscache.drafter_sizes import num_parameters
from hscache.settings import parse
from trainer.cli import COMMANDS as TRAINER_COMMANDS
from trainer.config import FitConfig
from trainer.drafter_config import DrafterConfig

CONFIGS = Path(__file__).parent.parent / "configs"
COMMAND = {command.name: command for command in [*COMMANDS, *TRAINER_COMMANDS]}
PLACE = {"produce": "--shard-dir", "fit": "--shards"}


def load(name: str) -> ProduceConfig | FitConfig:
    """Parse a file as its command would; the kind of command is a word of the name."""
    [kind] = PLACE.keys() & set(name.split("-"))
    place = [PLACE[kind], "/nvme/cache"]
    return parse(COMMAND[kind], ["--config", str(CONFIGS / f"{name}.yaml"), *place])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_parses_and_needs_only_a_place(path):
    config = load(path.stem)
    if isinstance(config, ProduceConfig):
        assert config.target.path
        assert config.target.target_layer_ids
        assert config.data.train
        assert config.data.held_out or config.data.held_out_fraction
    else:
        assert config.run_dir
        assert config.loss.gamma
        assert config.drafter.mask_token_id


def test_there_is_a_pair_for_each_use():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {
        "demo-produce", "demo-fit", "debug-produce", "debug-fit", "produce-qwen3-8b",
        "fit-qwen3-8b", "produce-qwen3.6-27b", "fit-qwen3.6-27b", "smollm2-produce", "smollm2-fit",
        "window-produce", "window-fit",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "num_target_layers", "vocab_size", "hidden_size", "parameters"),
    [("qwen3-8b", 36, 151_936, 4096, 1.049e9), ("qwen3.6-27b", 64, 248_320, 5120, 1.730e9)],
)
def test_the_pairs_of_real_targets_agree_and_have_the_published_size(
    model, num_target_layers, vocab_size, hidden_size, parameters
):
    produce, fit = load(f"produce-{model}"), load(f"fit-{model}")
    ids = spaced_layer_ids(num_target_layers, 5)
    assert produce.target.target_layer_ids == fit.drafter.target_layer_ids == ids
    assert fit.row_tokens >= produce.data.max_tokens
    assert fit.drafter.hidden_size == hidden_size
    shape = fit.drafter
    config = DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps or 1e-6,
        rope_theta=shape.rope_theta or 1e6,
        max_position_embeddings=40_960,
        vocab_size=vocab_size,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=ids,
        num_target_layers=num_target_layers,
    )
    assert num_parameters(config) == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("name", ["debug", "demo"])
def test_the_small_pairs_fit_together(name):
    produce, fit = load(f"{name}-produce"), load(f"{name}-fit")
    assert fit.row_tokens >= produce.data.max_tokens
    assert all((CONFIGS.parent / path).is_file() for path in produce.data.train)
