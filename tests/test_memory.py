"""Predicted memory against the one run that was measured, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hscache.errors import ConfigError
from hscache.fit_memory import predict_memory
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.masters import Masters
from trainer.memory import require_memory

GIB = 2**30
RESULTS = Path(__file__).parents[1] / "tools" / "bench" / "results"
DRAFTER = DrafterConfig(
    hidden_size=5120, intermediate_size=17408, num_hidden_layers=5, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e7,
    max_position_embeddings=262144, vocab_size=248320, block_size=16, mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64,
)  # fmt: skip
SMALL = dataclasses.replace(
    DRAFTER, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, vocab_size=512, mask_token_id=5, target_layer_ids=(0, 2),
    num_target_layers=5, layer_types=("full_attention",) * 3,
)  # fmt: skip
ROW = {
    "row_tokens": 4096, "anchors_per_row": 512, "rows_per_step": 1, "chunk_size": 8192,
    "dtype_bytes": 2, "optimizer": "adamw", "tied_head": False, "backend": "flex",
}  # fmt: skip


def memory(**changes):
    return predict_memory(DRAFTER, **{**ROW, **changes})


def test_the_27b_drafter_is_within_a_few_percent_of_the_h200():
    """torch.cuda.max_memory_allocated on one H200, 2026-11-30, four rows of states on it.

    The activations were fitted to these figures, so this only holds the fit.
    """
    found = memory()
    assert found.before_first_step / GIB == pytest.approx(15.2, rel=0.02)
    assert found.masters / GIB == pytest.approx(6.45, rel=0.01)
    assert found.copy / GIB == pytest.approx(3.2, rel=0.02)
    assert found.frozen / GIB == pytest.approx(4.74, rel=0.01)
    assert found.features / GIB == pytest.approx(0.8, rel=0.05)
    assert (found.peak - found.moments) / GIB == pytest.approx(33.1, rel=0.05)
    assert found.peak / GIB == pytest.approx(46.0, rel=0.05)


def test_a_step_of_four_rows_is_within_2_percent_of_the_trainers_bench():
    """`trainer bench` on an H200, 2026-12-01; it keeps four rows of its own beside the loader's."""
    bench = json.loads((RESULTS / "trainer-27b-h200.json").read_text())
    own = memory().features  # as many as a fit of one row a step has
    assert memory(rows_per_step=4).peak + own == pytest.approx(bench["peak_bytes"], rel=0.02)


def test_each_setting_moves_the_part_that_it_should():
    base = dataclasses.asdict(memory())

    def changed(**changes):
        other = dataclasses.asdict(memory(**changes))
        return {name for name in base if other[name] != base[name]}

    assert changed(anchors_per_row=256) == {"activations", "scratch"}
    assert changed(chunk_size=1024) == {"scratch"}
    assert changed(rows_per_step=8) == {"features"}
    assert changed(soft_labels=True) == {"features", "activations", "scratch"}
    assert changed(optimizer="muon") == {"moments"}
    assert changed(outer_step=True) == {"moments"}
    assert changed(tied_head=True) == {"frozen"}
    assert memory(tied_head=True).frozen * 2 == memory().frozen
    assert memory(dtype_bytes=4).copy == 0
    assert memory(chunk_size=1).scratch > 0  # an MLP's gradients are always there


def test_gpu_that_lacks_the_memory_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError) as error:
        require_memory(memory(), free_bytes=30 * 10**9, total_bytes=32 * 10**9, device="RTX 5090")
    text = str(error.value)
    for word in (
        "RTX 5090 has 30.0 GB free of 32.0 GB (2.00 GB are taken)", "about 49.",
        "masters 6.92 GB", "moments 13.8 GB", "anchors_per_row", "loss.chunk_size", "muon",
    ):  # fmt: skip
        assert word in text
    assert len(text.splitlines()) < 12
    require_memory(memory(), free_bytes=80 * 10**9, total_bytes=80 * 10**9, device="H100")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["split", "sdpa"])
def test_activations_are_what_autograd_keeps(backend, dtype):
    """Without a compiler, so that a CPU can count: storages that the backward pass will read."""
    drafter = Drafter(SMALL)
    Masters(drafter, dtype)
    row_tokens, num_blocks, hidden = 256, 64, SMALL.hidden_size
    features_SF = torch.randn(row_tokens, 2 * hidden).to(dtype)
    outside = [*drafter.parameters(), features_SF]
    owned = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        context_kv = drafter.context_kv(features_SF, torch.arange(row_tokens), backend=backend)
        ends_N = torch.full((num_blocks,), row_tokens)
        embedding_NH = torch.randn(num_blocks + 1, hidden).to(dtype)
        drafter(
            embedding_NH[:-1], embedding_NH[-1], context_kv, torch.zeros_like(ends_N), ends_N,
            backend=backend,
        )  # fmt: skip
    predicted = predict_memory(
        SMALL,
        **{**ROW, "row_tokens": row_tokens, "anchors_per_row": num_blocks,
           "dtype_bytes": dtype.itemsize, "backend": backend},
    )  # fmt: skip
    counted = sum(storage.nbytes() for storage in kept.values())
    assert predicted.activations == pytest.approx(counted, rel=0.2)
