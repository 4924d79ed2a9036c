"""Capture against transformers alone; targets that cannot be packed are refused by name.

Axes: T tokens of a pack, L captured layers, H hidden.
"""

import itertools
import json
import shutil

import pytest
import torch
import transformers
from conftest import VOCAB_SIZE, save_target
from torch import nn

from hscache import fingerprint
from hscache import target as target_module
from hscache.config import TargetConfig
from hscache.errors import ConfigError, UnsupportedTargetError
from hscache.frozen import frozen_tensors
from hscache.target import Target, packed_attention

LENGTHS = (1, 2, 3, 17, 40, 16, 5)
LAYER_IDS = (0, 1, 3)


def load(folder, **changes):
    settings = {"target_layer_ids": LAYER_IDS, "dtype": "float32", "device": "cpu", **changes}
    return Target(TargetConfig(path=str(folder), **settings))


def make_pack(lengths=LENGTHS, seed=0):
    """Random documents, the later ones with a common prefix; ids and boundaries."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in lengths]
    for document in documents[4:6]:
        document[:4] = documents[3][:4]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return torch.cat(documents), offsets


def capture_fp32(target, ids_T, offsets):
    """What capture keeps, before it is rounded to bf16."""
    kept = {}

    def keep(layer_id):
        def hook(module, inputs, output):
            kept[layer_id] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    handles = [target._layers[i].register_forward_hook(keep(i)) for i in target.layer_ids]
    rounded = target.capture(ids_T, offsets)
    for handle in handles:
        handle.remove()
    states_TLH = torch.stack([kept[i] for i in target.layer_ids], dim=1)
    assert torch.equal(states_TLH.to(torch.bfloat16), rounded)
    return states_TLH


@pytest.mark.parametrize("family", ["llama_dir", "qwen3_dir"])
def test_a_pack_equals_transformers_alone(family, request):
    folder = request.getfixturevalue(family)
    target = load(folder)
    ids_T, offsets = make_pack()
    states_TLH = capture_fp32(target, ids_T, offsets)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_hidden_layers == 5  # the whole model, not the truncated one
    for start, stop in itertools.pairwise(offsets):
        with torch.inference_mode():
            out = model(ids_T[None, start:stop], output_hidden_states=True)
        for index, layer_id in enumerate(LAYER_IDS):
            # hidden_states[0] is the embedding, so block i's output is hidden_states[i + 1]
            alone_TH = out.hidden_states[layer_id + 1][0]
            scale = alone_TH.abs().max()
            torch.testing.assert_close(
                states_TLH[start:stop, index] / scale, alone_TH / scale, rtol=0, atol=1e-5
            )


def test_the_final_norm_is_never_applied(llama_dir, tmp_path):
    folder = shutil.copytree(llama_dir, tmp_path / "target")
    weights = folder / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1000
    save_file(tensors, weights, metadata={"format": "pt"})
    ids_T, offsets = make_pack()
    plain, changed = load(llama_dir), load(folder)
    assert torch.equal(plain.capture(ids_T, offsets), changed.capture(ids_T, offsets))
    assert torch.equal(changed.frozen.norm_H, 1000 * plain.frozen.norm_H)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changing_one_document_changes_the_others_by_exactly_zero(qwen3_dir, dtype):
    target = load(qwen3_dir, dtype=dtype)
    ids_T, offsets = make_pack()
    before = target.capture(ids_T, offsets)
    assert before.dtype == torch.bfloat16
    for changed in (0, 3, len(LENGTHS) - 1):
        start, stop = offsets[changed], offsets[changed + 1]
        other_T = ids_T.clone()
        other_T[start:stop] = (ids_T[start:stop] - 3 + 11) % (VOCAB_SIZE - 3) + 3
        after = target.capture(other_T, offsets)
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[stop:], before[stop:])
        assert not torch.equal(after[start:stop], before[start:stop])


def test_the_place_in_a_pack_and_earlier_calls_do_not_matter(llama_dir):
    target = load(llama_dir)
    ids_T, offsets = make_pack()
    spans = list(itertools.pairwise(offsets))
    packed = target.capture(ids_T, offsets).float()
    for order in ([2], [4, 3], [6, 5, 4, 3, 2, 1, 0]):
        parts = [ids_T[slice(*spans[i])] for i in order]
        bounds = [0, *torch.tensor([len(p) for p in parts]).cumsum(0).tolist()]
        found = target.capture(torch.cat(parts), bounds).float()
        for place, i in enumerate(order):
            mine = found[bounds[place] : bounds[place + 1]]
            torch.testing.assert_close(mine, packed[slice(*spans[i])], rtol=2**-7, atol=1e-4)


class CodedBlock(nn.Module):
    """A decoder block that adds its number and position, in place of a real one."""

    def __init__(self, layer_id):
        super().__init__()
        self.layer_id = layer_id

    def forward(self, hidden, position_ids=None, **_):
        return torch.ones_like(hidden) * (self.layer_id + 8 * position_ids[..., None])


def test_layer_ids_are_zero_based_block_outputs_and_positions_restart(llama_dir):
    target = load(llama_dir, target_layer_ids=(0, 2, 3))
    for layer_id in range(4):
        target._layers[layer_id] = CodedBlock(layer_id)
    states_TLH = target.capture(torch.full((6,), 5), [0, 2, 6])
    assert states_TLH[:, :, 0].tolist() == [
        [layer_id + 8 * position for layer_id in (0, 2, 3)] for position in (0, 1, 0, 1, 2, 3)
    ]


def test_blocks_after_the_last_captured_one_are_not_loaded(llama_dir):
    assert len(load(llama_dir, target_layer_ids=(0, 1))._layers) == 2
    assert load(llama_dir, target_layer_ids=(0, 1)).num_target_layers == 5


@pytest.mark.parametrize("ids", [(0, 4), (0, 5), (-1, 2), (2, 1), (1, 1)])
def test_bad_layer_ids_are_refused_with_the_range(llama_dir, ids):
    with pytest.raises(ConfigError, match=r"expected increasing block numbers from 0 to 3"):
        load(llama_dir, target_layer_ids=ids)


LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "sliding_attention layers",
        ),
        ("mistral", {"sliding_window": 8}, "sliding window of 8"),
        ("qwen3_next", LINEAR, "linear_attention layers"),
        ("mamba", {"state_size": 8}, "targets of type 'mamba'"),
        ("rwkv", {"attention_hidden_size": 64}, "targets of type 'rwkv'"),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4}, "targets of type 'gpt2'"),
        ("gpt_neox", {}, "targets of type 'gpt_neox'"),
        ("starcoder2", {"sliding_window": None}, "final norm LayerNorm is no RMSNorm"),
    ],
)
def test_targets_that_cannot_be_packed_are_refused_by_name(tmp_path, model_type, changes, reason):
    save_target(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedTargetError, match=reason) as caught:
        load(tmp_path, target_layer_ids=(0, 1, 2))
    assert f"targets of type '{model_type}' are not supported yet" in str(caught.value)


def test_sliding_window_models_with_the_window_off_are_welcome(tmp_path):
    save_target(tmp_path, "qwen2", use_sliding_window=False, num_hidden_layers=2)
    load(tmp_path, target_layer_ids=(0,))


def leaky(module, query, key, value, mask, *, pack=None, **options):
    """Attention over the whole pack, as if it were one document."""
    whole = target_module.make_pack((0, query.shape[2]), query.device)
    return packed_attention(module, query, key, value, mask, pack=whole, **options)


def not_causal(module, query, key, value, mask, *, scaling=None, pack=None, **options):
    """Packs are kept apart, but every token sees its whole document."""
    parts = [
        nn.functional.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale=scaling, enable_gqa=True
        )
        for a, b in itertools.pairwise(pack.offsets)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def does_not_hand_on_packs(module, query, key, value, mask, *, pack=None, **options):
    return packed_attention(module, query, key, value, mask, **options)


def with_sinks(module, query, key, value, mask, **options):
    return packed_attention(module, query, key, value, mask, s_aux=torch.zeros(4), **options)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (leaky, "changing one document of a pack changes another"),
        (not_causal, "differs from the same one alone"),
        (does_not_hand_on_packs, "does not hand the packs on"),
        (with_sinks, "its attention uses s_aux"),
    ],
)
def test_attention_that_is_not_ours_is_caught_when_loading(
    llama_dir, monkeypatch, attention, reason
):
    functions = target_module.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions, target_module.ATTENTION, attention)
    with pytest.raises(UnsupportedTargetError, match=reason):
        load(llama_dir)


def test_missing_weights_are_refused_not_made_up(llama_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(llama_dir, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights .*layers.1.mlp.up_proj"):
        load(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"target '{tmp_path}/none' cannot be loaded"):
        load(tmp_path / "none")


def test_a_tokenizer_without_chat_template_is_refused(llama_dir, tmp_path):
    folder = shutil.copytree(llama_dir, tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        load(folder)


@pytest.mark.parametrize(("family", "tied"), [("llama_dir", True), ("qwen3_dir", False)])
def test_frozen_parts_give_the_logits_of_the_whole_model(family, tied, request):
    from safetensors.torch import load as load_bytes

    folder = request.getfixturevalue(family)
    frozen = load(folder).frozen
    assert (frozen.head_VH is None) == tied
    tensors = load_bytes(frozen.to_bytes())
    assert ("lm_head.weight" in tensors) != tied
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids_T = torch.arange(3, 20)
    last = {}
    model.model.layers[-1].register_forward_hook(lambda m, i, o: last.update(states=o))
    with torch.inference_mode():
        logits = model(ids_T[None]).logits[0]
    states_TH = last["states"][0] if isinstance(last["states"], tuple) else last["states"]
    states_TH = states_TH.reshape(len(ids_T), -1)
    unit_TH = states_TH * torch.rsqrt(states_TH.square().mean(-1, keepdim=True) + frozen.norm_eps)
    head_VH = tensors["embed_tokens.weight" if tied else "lm_head.weight"]
    assert frozen.norm_form == "w"
    torch.testing.assert_close(unit_TH * tensors["norm.weight"] @ head_VH.T, logits)
    assert frozen.to_bytes() == load(folder).frozen.to_bytes()


def test_a_norm_that_multiplies_by_one_plus_w_is_recognised(tmp_path):
    save_target(tmp_path, "gemma", num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert frozen_tensors(model).norm_form == "1+w"


def test_targets_that_scale_embeddings_or_logits_are_refused_by_name(tmp_path):
    # A drafter reads embedding[ids] and multiplies by the head, and nothing else.
    save_target(tmp_path / "gemma", "gemma", num_hidden_layers=2)
    with pytest.raises(UnsupportedTargetError, match=r"'gemma'.*changes its embeddings"):
        load(tmp_path / "gemma", target_layer_ids=(0,))
    scaled = {"embedding_multiplier": 1.0, "logits_scaling": 3.0}
    save_target(tmp_path / "granite", "granite", num_hidden_layers=2, **scaled)
    with pytest.raises(UnsupportedTargetError, match=r"'granite'.*not the product of final norm"):
        load(tmp_path / "granite", target_layer_ids=(0,))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_angles_of_the_whole_pack_are_refused(llama_dir, tmp_path, kind):
    folder = shutil.copytree(llama_dir, tmp_path / kind)
    config = json.loads((folder / "config.json").read_text())
    half = [1.0] * (config["head_dim"] // 2)
    factors = {"factor": 2.0, "short_factor": half, "long_factor": half}
    config["rope_parameters"] = {
        "rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedTargetError, match=f"{kind} rotary angles depend"):
        load(folder)


def test_hashes_see_what_matters_and_nothing_else(llama_dir, tmp_path):
    folder = shutil.copytree(llama_dir, tmp_path / "elsewhere")

    def hashes():
        target = load(folder)
        return (
            fingerprint.config_sha256(target.full_config),
            fingerprint.weights_sha256(str(folder)),
            fingerprint.tokenizer_sha256(target.tokenizer),
            fingerprint.template_sha256(target.tokenizer),
        )

    def change_json(name, **values):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    original = load(llama_dir)
    start = hashes()
    assert start[0] == fingerprint.config_sha256(original.full_config)
    assert start[1] == fingerprint.weights_sha256(str(llama_dir))
    change_json("config.json", transformers_version="4.0.0")
    assert hashes() == start
    change_json("config.json", rms_norm_eps=1e-5)
    assert [a == b for a, b in zip(hashes(), start, strict=True)] == [False, True, True, True]
    start = hashes()
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("\n", "\n\n"))
    assert [a == b for a, b in zip(hashes(), start, strict=True)] == [True, True, True, False]
    start = hashes()
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert [a == b for a, b in zip(hashes(), start, strict=True)] == [True, False, True, True]
    start = hashes()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["trim_offsets"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert [a == b for a, b in zip(hashes(), start, strict=True)] == [True, True, False, True]
