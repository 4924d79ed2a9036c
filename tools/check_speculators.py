"""Take drafters to the speculators library and back, and compare weights and logits.

Makes a tiny target, cache and run, exports the drafter, loads it with speculators' own class and
compares the logits of the same blocks; then reads drafters that speculators saved. It needs an
environment of its own, because speculators asks for transformers up to 5.19; torchaudio and
torchvision, which it also asks for, are not imported on this path:

    python -m venv /tmp/venvspec
    /tmp/venvspec/bin/pip install --no-deps speculators==0.9.0
    /tmp/venvspec/bin/pip install "torch==2.13.0" "transformers<=5.19.0" "datasets<=5.1.0" openai \
        "loguru<=0.7.3" pydantic-settings rich "tqdm<=4.70.1" hs-connectors==0.9.0 \
        accelerate crc32c jsonargparse ml_dtypes pytest zarr zstandard
    PYTHONPATH=. /tmp/venvspec/bin/python tools/check_speculators.py

Prints one line per fact and exits with 1 at the first that does not hold.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from conftest import conversation, save_target, write_jsonl
from safetensors import safe_open
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from hscache.cli import main as hscache
from hscache.errors import ConfigError
from trainer.cli import main as trainer
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter

LAYERS, BLOCK, MASK, NUM_BLOCKS_OF_TARGET = (0, 1, 3), 4, 1, 6
FIT = (
    "fit --shards cache --drafter.num-hidden-layers 2 --drafter.intermediate-size 96 "
    "--drafter.num-attention-heads 4 --drafter.num-key-value-heads 2 --drafter.head-dim 16 "
    f"--drafter.block-size {BLOCK} --drafter.mask-token-id {MASK} --loss.gamma 4 --passes 1 "
    "--row-tokens 128 --anchors-per-row 8 --device cpu --log-every 1000"
)


def prepare() -> None:
    """Make target, cache and a trained run in the current folder."""
    save_target(
        Path("target"), "qwen3", num_hidden_layers=NUM_BLOCKS_OF_TARGET, tie_word_embeddings=False
    )
    rows = [conversation(f"what is {i}?", f"it is the number {i}, I think.") for i in range(12)]
    write_jsonl(Path("train.jsonl"), rows)
    layers = ",".join(map(str, LAYERS))
    run(
        hscache,
        f"produce --shard-dir cache --target.path target --target.target-layer-ids {layers} "
        "--target.device cpu --data.train train.jsonl --data.max-tokens 128 --token-budget 256",
    )
    run(trainer, f"{FIT} --run-dir run")
    run(
        trainer,
        "export --checkpoint run --format speculators --shards cache --output exported",
    )


def run(main: Callable[[list[str]], int], line: str) -> None:
    """Run a command of ours in this process, its output to stderr; leave if it fails."""
    with contextlib.redirect_stdout(sys.stderr):
        if main(line.split()) != 0:
            sys.exit(f"failed: {line}")


def require(fact: str, holds: bool) -> None:
    """Print a fact that holds; leave at the first that does not."""
    if not holds:
        sys.exit(f"NOT TRUE: {fact}")
    print(f"ok: {fact}")


def theirs_from(folder: str) -> DFlashDraftModel:
    """Load with speculators' class, strictly, to compute in fp32 with a dense mask on the CPU."""
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model, info = SpeculatorModel.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    named = {name: sorted(info[name]) for name in ("unexpected_keys", "mismatched_keys")}
    # verifier_* are never in a file: speculators takes them from the target
    named["missing_keys"] = [k for k in info["missing_keys"] if not k.startswith("verifier_")]
    require(f"{folder}: {type(model).__name__} loads it strictly", not any(named.values()))
    return model.eval()


@torch.inference_mode()
def compare_logits(theirs: DFlashDraftModel, ours: Drafter, what: str) -> None:
    """Compare the logits of blocks of two packed documents, through their embedding and head."""
    config = ours.config
    embedding_VH, head_VH = theirs.embed_tokens.weight, theirs.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    lengths, anchors = (11, 14), torch.tensor([3, 6, 13, 20])  # rows; the first: document 0
    num_tokens = sum(lengths)
    ids_T = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)
    features_TF = torch.randn(
        num_tokens, config.num_features * config.hidden_size, generator=generator
    )
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    loss_mask_T = torch.zeros(num_tokens, dtype=torch.long)
    loss_mask_T[anchors] = 1  # exactly as many as it may draw, so it draws these
    _, logits, _, _, slots = theirs._backbone_forward(
        features_TF[None],
        ids_T[None],
        loss_mask_T[None],
        torch.zeros(1, num_tokens, config.hidden_size),
        torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None],
        positions_T[None],
        max_anchors=len(anchors),
    )
    assert slots[:: config.block_size].tolist() == anchors.tolist()
    starts_N = torch.where(anchors < lengths[0], 0, lengths[0])
    hidden_NKH = ours(
        embedding_VH[ids_T[anchors]],
        embedding_VH[config.mask_token_id],
        ours.context_kv(features_TF, positions_T),
        starts_N,
        anchors,
    )
    expected = (hidden_NKH @ head_VH.T).flatten(0, 1)[None]
    logits = logits.view(1, len(anchors), config.block_size, -1)[:, :, 1:].flatten(1, 2)
    apart = ((logits - expected).abs().max() / expected.abs().max()).item()
    require(
        f"{what}: logits of {len(anchors)} blocks in 2 packed documents agree, at most "
        f"{apart:.1e} of the largest apart (fp32)",
        apart < 1e-5,
    )


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Tell whether two sets of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def their_own(layer_types: list[str], vocab_size: int, folder: str) -> DFlashDraftModel:
    """Save a random drafter by speculators' own code, for our target."""
    layer = Qwen3Config(
        hidden_size=64, intermediate_size=80, num_hidden_layers=len(layer_types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=259,
        max_position_embeddings=512, layer_types=layer_types, use_sliding_window=True,
        sliding_window=64, rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    verifier = VerifierConfig.from_pretrained("target")
    verifier.name_or_path = str(Path("target").resolve())
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=vocab_size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[i + 1 for i in LAYERS],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    torch.manual_seed(1)
    model = DFlashDraftModel(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # not all ones
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
    if vocab_size == 259:
        model.load_verifier_weights()
    model.save_pretrained(folder)
    return model.eval()


def refusal(folder: str) -> str:
    """Return the message with which we refuse a folder."""
    try:
        load_drafter(Path(folder), num_target_layers=NUM_BLOCKS_OF_TARGET)
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    """Run every check."""
    prepare()
    print(f"speculators {version('speculators')}, transformers {version('transformers')}")
    exported = load_drafter(Path("exported"), num_target_layers=NUM_BLOCKS_OF_TARGET)
    rounded = {k: v.bfloat16().float() for k, v in load_drafter(Path("run")).state_dict().items()}
    require(
        "exported -> ours: weights are the run's in bf16", equal(exported.state_dict(), rounded)
    )

    theirs = theirs_from("exported")
    require("exported: speculators sees full layers only", not theirs.uses_sliding_window_attn)
    for name in ("embed_tokens", "lm_head"):
        weight = load_file("exported/model.safetensors")[f"{name}.weight"]
        require(f"exported: {name} is the target's", equal_to_target(name, weight))
    compare_logits(theirs, exported, "exported")

    theirs.save_pretrained("resaved")
    with safe_open("resaved/model.safetensors", framework="pt") as file:
        print(f"speculators saves {len(file.keys())} tensors of the {len(theirs.state_dict())}")
    resaved = load_drafter(Path("resaved"), num_target_layers=NUM_BLOCKS_OF_TARGET)
    require(
        "ours -> speculators -> saved by it -> ours: config and weights bit-equal",
        resaved.config == exported.config and equal(resaved.state_dict(), exported.state_dict()),
    )

    model = their_own(["full_attention"] * 3, 259, "theirs")
    ours = load_drafter(Path("theirs"), num_target_layers=NUM_BLOCKS_OF_TARGET)
    mine = {k: v for k, v in model.state_dict().items() if k in ours.state_dict()}
    require("made by speculators -> ours: weights bit-equal", equal(ours.state_dict(), mine))
    compare_logits(model, ours, "made by speculators")
    run(
        trainer,
        f"{FIT} --run-dir from-theirs --init-from theirs --drafter.num-hidden-layers 3 "
        "--drafter.intermediate-size 80 --drafter.rope-theta 50000",
    )
    require("trainer fit --init-from takes it", Path("from-theirs").is_dir())

    # Shorter than the window: where it cuts, speculators shows each slot more than engines do.
    model = their_own(["sliding_attention", "full_attention"], 259, "sliding")
    ours = load_drafter(Path("sliding"), num_target_layers=NUM_BLOCKS_OF_TARGET)
    require("made by speculators: sliding layers are seen by both", ours.config.slides)
    compare_logits(model, ours, "sliding and full layers, made by speculators")

    their_own(["full_attention"] * 2, 100, "pruned")
    require(f"pruned is refused: {refusal('pruned')}", "pruned vocabulary" in refusal("pruned"))


def equal_to_target(name: str, weight: torch.Tensor) -> bool:
    """Tell whether an exported tensor is the target's in bf16."""
    target = load_file("target/model.safetensors")
    key = f"model.{name}.weight" if name == "embed_tokens" else f"{name}.weight"
    return torch.equal(weight, target[key].bfloat16())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
        os.chdir("/")
