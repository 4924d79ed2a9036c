"""Qwen3.5 hybrids: capture against transformers alone, leaks, and the published checkpoint layout.

Axes: T tokens of a pack, L captured layers, H hidden.
"""

import functools
import inspect
import itertools
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import VOCAB_SIZE, byte_tokenizer, save_target
from hybrid_maker import TEXT, VISION, with_slow_decay
from producer import command
from safetensors.torch import load_file, save_file
from test_target import CodedBlock, capture_fp32, load, make_pack
from transformers.models.qwen3_5 import modeling_qwen3_5

import hscache
from hscache import cli, delta_net
from hscache.errors import ConfigError, UnsupportedTargetError
from hscache.target import check_packing

LENGTHS = (1, 70, 2, 17, 40, 130, 1)
LAYER_IDS = (0, 2, 3, 6)
FAST = 4.0
"""A_log of a state that keeps nothing."""
OPERATIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


@pytest.fixture(scope="module")
def whole():
    """A multimodal model as published: text, vision tower, head."""
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION)
    torch.manual_seed(0)
    return with_slow_decay(transformers.Qwen3_5ForConditionalGeneration(config))


@pytest.fixture(scope="module")
def hybrid_dir(whole, tmp_path_factory):
    """Its checkpoint, with a tensor of the extra prediction block (mtp)."""
    folder = tmp_path_factory.mktemp("hybrid")
    whole.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    change_weights(folder, {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)})
    return folder


def change_weights(folder, changes):
    """Set tensors of a checkpoint, or remove those that are None."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def with_weights(folder, tmp_path, changes):
    copy = shutil.copytree(folder, tmp_path / "changed")
    change_weights(copy, changes)
    return copy


def load_hybrid(folder, **changes):
    return load(folder, **{"target_layer_ids": LAYER_IDS, **changes})


def alone(text_model, ids_T):
    """Captured states of one document by transformers' own forward of all blocks."""
    with torch.inference_mode():
        out = text_model(ids_T[None], output_hidden_states=True, use_cache=False)
    # hidden_states[0] is the embedding, so block i's output is hidden_states[i + 1]
    return torch.stack([out.hidden_states[i + 1][0] for i in LAYER_IDS], dim=1)


def test_a_pack_equals_transformers_alone(whole, hybrid_dir):
    target = load_hybrid(hybrid_dir)
    ids_T, offsets = make_pack(LENGTHS)
    states_TLH = capture_fp32(target, ids_T, offsets)
    for start, stop in itertools.pairwise(offsets):
        alone_TLH = alone(whole.model.language_model, ids_T[start:stop])
        for found_TH, alone_TH in zip(
            states_TLH[start:stop].unbind(1), alone_TLH.unbind(1), strict=True
        ):
            scale = alone_TH.abs().max()
            torch.testing.assert_close(found_TH / scale, alone_TH / scale, rtol=0, atol=1e-5)


def test_a_pack_in_bf16_equals_transformers_alone_up_to_rounding(hybrid_dir):
    target = load_hybrid(hybrid_dir, dtype="bfloat16")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(hybrid_dir, dtype=torch.bfloat16).eval()
    ids_T, offsets = make_pack(LENGTHS)
    states_TLH = target.capture(ids_T, offsets).float()
    for start, stop in itertools.pairwise(offsets):
        alone_TLH = alone(model.model, ids_T[start:stop]).float()
        difference_L = (states_TLH[start:stop] - alone_TLH).norm(dim=(0, 2))
        assert (difference_L / alone_TLH.norm(dim=(0, 2))).max() < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changing_one_document_changes_the_others_by_exactly_zero(hybrid_dir, dtype):
    target = load_hybrid(hybrid_dir, dtype=dtype)
    ids_T, offsets = make_pack(LENGTHS)
    before = target._capture(ids_T, offsets, target.dtype)
    for start, stop in itertools.pairwise(offsets):
        other_T = ids_T.clone()
        other_T[start:stop] = (ids_T[start:stop] - 3 + 11) % (VOCAB_SIZE - 3) + 3
        after = target._capture(other_T, offsets, target.dtype)
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[stop:], before[stop:])
        assert not torch.equal(after[start:stop], before[start:stop])


def leaks(monkeypatch, *names):
    """Leave operations of transformers as they are: they run over the whole pack."""
    packed_operations = delta_net.packed_operations

    def leaky(own, offsets):
        packed = packed_operations(own, offsets)
        return delta_net.Operations(
            *(getattr(own if name in names else packed, name) for name in ("conv", "scan"))
        )

    monkeypatch.setattr(delta_net, "packed_operations", leaky)


@pytest.mark.parametrize("names", [("conv",), ("scan",), ("conv", "scan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_leaks_is_refused_when_loading(hybrid_dir, monkeypatch, names, dtype):
    leaks(monkeypatch, *names)
    with pytest.raises(UnsupportedTargetError, match="changing one document of a pack changes"):
        load_hybrid(hybrid_dir, dtype=dtype)


def test_a_leaking_state_is_found_also_where_decay_would_hide_it(hybrid_dir, tmp_path, monkeypatch):
    fast = {}
    for i in (0, 1, 2, 4, 5, 6):
        layer = f"model.language_model.layers.{i}.linear_attn"
        fast[f"{layer}.A_log"] = torch.full((6,), FAST)
        fast[f"{layer}.in_proj_a.weight"] = torch.zeros(6, 64)
    target = load_hybrid(with_weights(hybrid_dir, tmp_path, fast), dtype="bfloat16")
    before = [layer.A_log.clone() for layer in delta_net.linear_layers(target._base)]
    leaks(monkeypatch, "scan")
    with pytest.raises(UnsupportedTargetError, match="changing one document of a pack changes"):
        check_packing(target)
    after = [layer.A_log for layer in delta_net.linear_layers(target._base)]
    assert all(map(torch.equal, before, after))
    monkeypatch.setattr(type(target), "without_decay", lambda self: torch.no_grad())
    check_packing(target)  # the states as they are hide the leak: the probe is needed


def test_the_operations_of_transformers_are_put_back(hybrid_dir):
    before = [getattr(modeling_qwen3_5, name) for name in OPERATIONS]
    target = load_hybrid(hybrid_dir)
    target.capture(torch.arange(9), (0, 4, 9))
    with pytest.raises(IndexError):
        target.capture(torch.tensor([VOCAB_SIZE + 5]), (0, 1))
    assert [getattr(modeling_qwen3_5, name) for name in OPERATIONS] == before


def test_kernels_of_an_installed_fla_are_not_called_on_a_cpu(hybrid_dir, monkeypatch):
    """transformers takes any importable `fla`, whose kernels die without a GPU."""
    for name in OPERATIONS:
        plain = inspect.unwrap(getattr(modeling_qwen3_5, name))

        @functools.wraps(plain)
        def kernel(*args, **kwargs):
            raise RuntimeError("0 active drivers")

        monkeypatch.setattr(modeling_qwen3_5, name, kernel)
    load_hybrid(hybrid_dir)


def test_a_transformers_with_other_names_is_refused(hybrid_dir, monkeypatch):
    monkeypatch.delattr(modeling_qwen3_5, OPERATIONS[0])
    with pytest.raises(UnsupportedTargetError, match=r"'qwen3_5_text'.*has no causal_conv1d_fn"):
        load_hybrid(hybrid_dir)


def test_layer_ids_are_zero_based_block_outputs_and_positions_restart(hybrid_dir):
    target = load_hybrid(hybrid_dir)
    for layer_id in range(7):
        target._layers[layer_id] = CodedBlock(layer_id)
    states_TLH = target.capture(torch.full((6,), 5), [0, 2, 6])
    assert states_TLH[:, :, 0].tolist() == [
        [layer_id + 8 * position for layer_id in LAYER_IDS] for position in (0, 1, 0, 1, 2, 3)
    ]


@pytest.mark.parametrize("ids", [(0,), (0, 2), (0, 3)])
def test_a_truncated_target_gives_what_the_whole_one_gives(hybrid_dir, ids):
    """Also below the first block with full attention, block 3."""
    ids_T, offsets = make_pack(LENGTHS)
    target = load_hybrid(hybrid_dir, target_layer_ids=ids)
    assert len(target._layers) == ids[-1] + 1
    assert target.num_target_layers == 8
    among = [LAYER_IDS.index(i) for i in ids]
    expected = load_hybrid(hybrid_dir).capture(ids_T, offsets)[:, among]
    assert torch.equal(target.capture(ids_T, offsets), expected)


def test_a_multimodal_checkpoint_gives_its_text_model(whole, hybrid_dir, tmp_path):
    assert any(name.startswith("model.visual.") for name in whole.state_dict())
    text = transformers.Qwen3_5ForCausalLM(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found, expected = load_hybrid(hybrid_dir), load_hybrid(tmp_path)
    ids_T, offsets = make_pack(LENGTHS)
    assert torch.equal(found.capture(ids_T, offsets), expected.capture(ids_T, offsets))
    assert found.frozen.norm_form == "1+w"
    assert found.frozen.to_bytes() == expected.frozen.to_bytes()
    assert torch.equal(found.frozen.norm_H, whole.model.language_model.norm.weight)


def test_rotary_frequencies_stay_fp32_and_nothing_is_cached(hybrid_dir):
    target = load_hybrid(hybrid_dir, dtype="bfloat16")
    assert target._base.rotary_emb.inv_freq.dtype == torch.float32
    assert target._base.embed_tokens.weight.dtype == torch.bfloat16
    assert target.config.use_cache is False


def test_missing_weights_are_refused_by_name(hybrid_dir, tmp_path):
    name = "layers.1.linear_attn.in_proj_b.weight"
    folder = with_weights(hybrid_dir, tmp_path, {f"model.language_model.{name}": None})
    with pytest.raises(ConfigError, match=f"lacks 1 weights .*{name}"):
        load_hybrid(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.1.mlp.up_proj.weight_scale_inv",  # a copy in FP8
        "model.language_model.layers.2.linear_attn.in_proj_qkvz.weight",
        "model.language_model.norm.bias",
        "model.audio_tower.layers.9.weight",
    ],
)
def test_weights_that_the_model_does_not_read_are_refused_by_name(hybrid_dir, tmp_path, name):
    folder = with_weights(hybrid_dir, tmp_path, {name: torch.ones(4)})
    tail = name.split("model.")[-1]
    with pytest.raises(ConfigError, match=f"has 1 weights .*does not read: .*{tail}"):
        load_hybrid(folder)


def test_other_hybrids_stay_refused_by_name(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    save_target(tmp_path, "qwen3_5_moe_text", **experts, shared_expert_intermediate_size=32)
    with pytest.raises(
        UnsupportedTargetError, match=r"'qwen3_5_moe_text'.*linear_attention layers"
    ):
        load(tmp_path)


def test_produce_makes_a_cache_of_a_hybrid(hybrid_dir, corpus_file, tmp_path):
    ids = ",".join(map(str, LAYER_IDS))
    args = command(tmp_path / "cache", hybrid_dir, corpus_file, target__target_layer_ids=ids)
    assert cli.main(args[3:]) == 0
    cache = hscache.open(tmp_path / "cache")
    target = load_hybrid(hybrid_dir, dtype="bfloat16")
    assert len(cache.documents) == 40
    for document in cache.documents[:8]:
        ids_T = torch.from_numpy(document.input_ids.astype(np.int64))
        alone_TLH = target.capture(ids_T, (0, len(ids_T))).float()
        found_TLH = document.torch().hidden_states.float()
        assert (found_TLH - alone_TLH).norm() / alone_TLH.norm() < 0.02
