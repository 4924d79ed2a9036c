"""The fused forward on CUDA: what to run first on a new kind of GPU, by hand.

    python -m pytest -q tests/gpu/test_forward_gpu.py

A failure here says that states of this machine cannot be trusted: a leak between documents, NaN,
two runs that differ, or an error above that of transformers' own layers in the same dtype.
"""

import itertools

import pytest
import torch
import transformers
from conftest import byte_tokenizer, save_target
from hybrid_maker import TEXT, with_slow_decay

from hscache.config import TargetConfig
from hscache.packed_forward import MLP_ROWS, kernels
from hscache.target import Target

packed_kernels = kernels()  # None without a GPU
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 2, 3, 17, 64, 65, 200, 1, 130)
LAYERS = (0, 1, 3, 6)
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
HEADS = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [6, 5, 5]},
}
"""Heads of Qwen3.6-27B: kernels are compiled for their number."""


def save_hybrid(folder, change=lambda model: None):
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**{**TEXT, **WIDE, **HEADS})
    model = with_slow_decay(transformers.Qwen3_5ForCausalLM(config))
    change(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    small = {**WIDE, "initializer_range": 0.08}
    return {
        "hybrid": save_hybrid(tmp_path_factory.mktemp("hybrid")),
        "llama": save_target(tmp_path_factory.mktemp("llama"), "llama", **small),
        "qwen3": save_target(tmp_path_factory.mktemp("qwen3"), "qwen3", **small),
    }


def load(folder, device="cuda", dtype="bfloat16", layers=LAYERS):
    return Target(
        TargetConfig(path=str(folder), target_layer_ids=layers, device=device, dtype=dtype)
    )


@pytest.fixture(scope="module", params=["hybrid", "llama", "qwen3"])
def family(request, folders):
    """A target on the GPU, and states of one pack in fp32 on the CPU."""
    target = load(folders[request.param])
    assert target.forward_name == "fused"
    ids_T, offsets = make_pack(LENGTHS)
    return target, load(folders[request.param], "cpu", "float32").capture(ids_T, offsets)


def make_pack(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(3, 259, (sum(lengths),), generator=generator)
    return ids_T, [0, *torch.tensor(lengths).cumsum(0).tolist()]


def relative_L(found, exact):
    difference = (found.float().cpu() - exact.float().cpu()).norm(dim=(0, 2))
    return difference / exact.float().cpu().norm(dim=(0, 2))


def alone(target, ids_T, offsets):
    return torch.cat(
        [target.capture(ids_T[a:b], (0, b - a)) for a, b in itertools.pairwise(offsets)]
    )


def test_error_is_at_most_that_of_transformers_own_layers(family, capsys):
    target, exact = family
    ids_T, offsets = make_pack(LENGTHS)
    found = target.capture(ids_T, offsets)
    assert found.isfinite().all()
    error_L = relative_L(found, exact)
    with target.own_attention():
        theirs_L = relative_L(alone(target, ids_T, offsets), exact)
    with capsys.disabled():
        print(f"\nerror by layer {error_L.tolist()}\ntransformers   {theirs_L.tolist()}")
    assert (error_L <= 1.1 * theirs_L).all()
    assert (error_L < 0.1).all()


def test_a_document_in_a_pack_is_as_it_is_alone(family):
    target, exact = family
    ids_T, offsets = make_pack(LENGTHS)
    packed, single = target.capture(ids_T, offsets), alone(target, ids_T, offsets)
    for start, stop in itertools.pairwise(offsets):
        noise_L = relative_L(single[start:stop], exact[start:stop])
        assert (relative_L(packed[start:stop], single[start:stop]) < 2 * noise_L + 1e-3).all()


@pytest.mark.parametrize("scan", ["fla", "flash_qla"])
def test_a_pack_is_launched_without_waiting_for_the_gpu(family, scan, monkeypatch):
    target, _ = family
    if scan == "flash_qla":
        pytest.importorskip("flash_qla")
    else:
        monkeypatch.setattr(packed_kernels, "_flash_qla", lambda: None)
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
    for lengths in (LENGTHS, LENGTHS[::-1]):  # the first time compiles
        ids_T, offsets = make_pack(lengths)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # about two seconds of work before it
        before = torch.cuda.Event()
        before.record()
        target.capture(ids_T, offsets)
        waited = before.query()
    assert not waited


@pytest.mark.parametrize("documents", [1, 2, 3, 20])
def test_both_scans_agree(documents, folders, monkeypatch):
    pytest.importorskip("flash_qla")
    target = load(folders["hybrid"])
    exact = load(folders["hybrid"], "cpu", "float32")
    ids_T, offsets = make_pack([70] * documents)
    expected = exact.capture(ids_T, offsets)
    errors = [relative_L(target.capture(ids_T, offsets), expected)]
    monkeypatch.setattr(packed_kernels, "_flash_qla", lambda: None)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    errors.append(relative_L(target.capture(ids_T, offsets), expected))
    assert (errors[0] <= 1.1 * errors[1]).all()


def test_changing_one_document_changes_the_others_by_exactly_zero(family):
    target, _ = family
    ids_T, offsets = make_pack(LENGTHS)
    with target.without_decay():
        before = target.capture(ids_T, offsets)
        for start, stop in itertools.pairwise(offsets):
            other_T = ids_T.clone()
            other_T[start:stop] = (ids_T[start:stop] - 3 + 11) % 256 + 3
            after = target.capture(other_T, offsets)
            assert torch.equal(after[:start], before[:start])
            assert torch.equal(after[stop:], before[stop:])
            assert not torch.equal(after[start:stop], before[start:stop])


@pytest.mark.parametrize("num_tokens", [500, MLP_ROWS, MLP_ROWS + 1])
def test_two_runs_give_the_same_bits_at_any_size(family, num_tokens):
    target, _ = family
    lengths = [100] * (num_tokens // 100) + [num_tokens % 100]
    ids_T, offsets = make_pack([length for length in lengths if length])
    first = target.capture(ids_T, offsets)
    assert first.isfinite().all()
    assert torch.equal(target.capture(ids_T, offsets), first)


@pytest.mark.parametrize("num_documents", [1, 2, 1_400])
def test_any_number_of_documents_fits_a_pack(family, num_documents):
    target, _ = family
    lengths = [1 + (7 * i) % 23 for i in range(num_documents)]
    ids_T, offsets = make_pack(lengths)
    states = target.capture(ids_T, offsets)
    assert states.isfinite().all()
    for index in {0, num_documents // 2, num_documents - 1}:
        start, stop = offsets[index], offsets[index + 1]
        single = target.capture(ids_T[start:stop], (0, stop - start))
        assert (relative_L(states[start:stop], single) < 0.15).all()


def test_documents_of_one_token_depend_on_that_token_alone(family):
    target, _ = family
    ids_T = torch.tensor([5, 6, 5, 5, 6])
    states = target.capture(ids_T, range(6))
    assert torch.equal(states[0], states[2])
    assert torch.equal(states[1], states[4])
    assert not torch.equal(states[0], states[1])


def test_layers_are_the_blocks_of_their_numbers(tmp_path):
    def number_the_blocks(model):
        # block i writes into channel i of the residual stream, and nothing else does
        for index, block in enumerate(model.model.layers):
            mixer = block.linear_attn if hasattr(block, "linear_attn") else block.self_attn
            (mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj).weight.data.zero_()
            block.mlp.down_proj.weight.data.zero_()
            block.mlp.down_proj.weight.data[index, 0] = 1

    target = load(save_hybrid(tmp_path, number_the_blocks))
    ids_T, offsets = make_pack(LENGTHS)
    states = target.capture(ids_T, offsets).float()
    embedded = target.frozen.embedding_VH[ids_T].cuda().float()
    for index, layer in enumerate(LAYERS):
        changed = (states[:, index] != embedded).any(dim=0).nonzero().flatten().tolist()
        assert changed == list(range(layer + 1))
