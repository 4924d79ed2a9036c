"""The fused forward, in plain PyTorch, against transformers' own layers on packs."""

import itertools
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import byte_tokenizer, save_target
from hybrid_maker import tiny_hybrid

from hscache.config import TargetConfig
from hscache.forward_flops import (
    block_types,
    document_lengths,
    forward_flops,
    mean_context_of,
    products,
)
from hscache.pack import make_pack
from hscache.packed_forward import PackedForward, place, why_not
from hscache.random_target import random_base
from hscache.target import Target

OFFSETS = (0, 1, 38, 40, 43, 107, 177)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, llama_dir, qwen3_dir):
    biased = save_target(tmp_path_factory.mktemp("qwen2"), "qwen2")
    hybrid = tmp_path_factory.mktemp("hybrid")
    tiny_hybrid().save_pretrained(hybrid)
    byte_tokenizer().save_pretrained(hybrid)
    return {"llama": llama_dir, "qwen3": qwen3_dir, "qwen2": biased, "qwen3_5": hybrid}


def make_ids():
    return torch.randint(3, 259, (OFFSETS[-1],), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "qwen3_5"])
def test_states_equal_those_of_transformers_layers(folders, family, monkeypatch):
    config = TargetConfig(
        path=str(folders[family]), target_layer_ids=(0, 1, 3), device="cpu", dtype="float32"
    )
    target = Target(config)
    with torch.no_grad():
        for name, weight in target._base.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) / 4)
    expected = target._capture(make_ids(), OFFSETS, torch.float32)
    assert target.forward_name == "transformers"
    assert why_not(target._base) is None
    place(target._base, CPU)
    monkeypatch.setattr("hscache.packed_forward.MLP_ROWS", 50)
    found = PackedForward(target._base, target.captured_ids)(make_ids(), OFFSETS, torch.float32)
    error_L = (found - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    assert (error_L < 1e-5).all()
    # the modules kept their weights, as views of the merged ones
    assert torch.equal(target._capture(make_ids(), OFFSETS, torch.float32), expected)


def test_changing_a_document_leaves_the_others_as_they_were(folders):
    target = Target(
        TargetConfig(path=str(folders["qwen3_5"]), target_layer_ids=(0, 3), device="cpu")
    )
    place(target._base, CPU)
    forward = PackedForward(target._base, target.captured_ids)
    ids_T = make_ids()
    with target.without_decay():
        before = forward(ids_T, OFFSETS)
        ids_T[1:38] = (ids_T[1:38] + 1) % 259
        after = forward(ids_T, OFFSETS)
    assert torch.equal(after[:1], before[:1])
    assert torch.equal(after[38:], before[38:])
    assert not torch.equal(after[1:38], before[1:38])


def test_a_random_target_has_merged_weights_and_exact_angles():
    config = tiny_hybrid().config
    base = random_base(config, 5, 0, CPU, torch.bfloat16)
    assert base.rotary_emb.inv_freq.dtype == torch.float32
    assert len(base.layers) == 5
    states_TLH = PackedForward(base, (0, 4))(make_ids(), OFFSETS)
    assert states_TLH.shape == (OFFSETS[-1], 2, config.hidden_size)
    assert states_TLH.isfinite().all()
    again = PackedForward(random_base(config, 5, 0, CPU, torch.bfloat16), (0, 4))
    assert torch.equal(again(make_ids(), OFFSETS), states_TLH)


def test_other_families_run_as_transformers_wrote_them(folders):
    config = transformers.AutoConfig.for_model(
        "phi3", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    assert "phi3" in why_not(transformers.AutoModel.from_config(config))
    llama = transformers.AutoConfig.from_pretrained(folders["llama"])
    llama.mlp_bias = True
    assert "bias" in why_not(transformers.AutoModel.from_config(llama))


def test_a_pack_knows_every_tokens_place_and_every_chunk():
    pack = make_pack(OFFSETS, CPU)
    expected = [i for a, b in itertools.pairwise(OFFSETS) for i in range(b - a)]
    assert pack.positions_T.tolist() == expected
    assert pack.longest == 70
    assert pack.chunks.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [5, 1]]
    assert pack.cumulative.tolist() == list(OFFSETS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_products_are_the_weights_of_the_blocks(folders, family):
    config = transformers.AutoConfig.from_pretrained(folders[family]).get_text_config()
    base = transformers.AutoModel.from_config(config)
    blocks = base.layers[:4]
    weights = sum(
        p.numel() for b in blocks for n, p in b.named_parameters() if "proj" in n and p.ndim == 2
    )
    assert sum(p.outputs * p.inputs * p.count for p in products(config, 4)) == weights


def test_flops_of_a_pack_add_up(folders):
    config = transformers.AutoConfig.from_pretrained(folders["qwen3_5"]).get_text_config()
    one, two = (
        forward_flops(config, 4, num_tokens=sum(lengths), mean_context=mean_context_of(lengths))
        for lengths in ([64], [64, 64])
    )
    assert block_types(config, 4) == ["linear_attention"] * 3 + ["full_attention"]
    assert (two.products, two.scan, two.attention) == (
        2 * one.products,
        2 * one.scan,
        2 * one.attention,
    )
    assert one.attention == 4 * (64 * 65 / 2) * 4 * 32
    assert one.total == one.products + one.scan + one.attention


def test_document_lengths_fill_the_budget():
    for budget in (4_096, 65_536):
        lengths = document_lengths(budget, 0)
        assert sum(lengths) == budget
        assert min(lengths) >= 64
        assert max(lengths[:-1]) <= 8_191
    assert 1_300 < 65_536 / len(lengths) < 2_100


def test_all_but_the_kernels_imports_without_triton_and_fla():
    code = """
import importlib, pkgutil, sys
sys.modules.update(triton=None, fla=None, flash_qla=None)
import hscache, trainer
names = [m.name for package in (hscache, trainer)
         for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
for name in names:
    if name != "hscache.packed_kernels":
        importlib.import_module(name)
from hscache import packed_forward
assert packed_forward.kernels() is None
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
