"""Capture on CUDA in bf16 against the CPU in fp32; run by hand on a machine with a GPU."""

import itertools

import pytest
import torch

from hscache.config import TargetConfig
from hscache.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 2, 3, 17, 64, 65, 200, 1)


def load(folder, device, dtype):
    return Target(
        TargetConfig(path=str(folder), target_layer_ids=(0, 1, 3), device=device, dtype=dtype)
    )


@pytest.fixture(params=["llama_dir", "qwen3_dir"])
def folder(request):
    return request.getfixturevalue(request.param)


def make_pack(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(3, 259, (sum(LENGTHS),), generator=generator)
    return ids_T, [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]


def relative_L(found, exact):
    difference = (found.float().cpu() - exact.float().cpu()).norm(dim=(0, 2))
    return difference / exact.float().cpu().norm(dim=(0, 2))


def test_bf16_on_cuda_is_as_close_to_fp32_as_bf16_on_the_cpu(folder):
    ids_T, offsets = make_pack()
    exact = load(folder, "cpu", "float32").capture(ids_T, offsets)
    noise_L = relative_L(load(folder, "cpu", "bfloat16").capture(ids_T, offsets), exact)
    found = load(folder, "cuda", "bfloat16").capture(ids_T, offsets)
    assert (found.device.type, found.dtype) == ("cuda", torch.bfloat16)
    assert (relative_L(found, exact) < 1.5 * noise_L).all()
    for start, stop in itertools.pairwise(offsets):  # a single document has less to average over
        assert (relative_L(found[start:stop], exact[start:stop]) < 4 * noise_L).all()


def test_fp32_on_cuda_agrees_to_the_bf16_it_is_stored_in(folder):
    ids_T, offsets = make_pack()
    exact = load(folder, "cpu", "float32").capture(ids_T, offsets)
    found = load(folder, "cuda", "float32").capture(ids_T, offsets)
    assert (relative_L(found, exact) < 2**-8).all()


def test_a_document_in_a_pack_is_close_to_the_same_alone(folder):
    target = load(folder, "cuda", "bfloat16")
    ids_T, offsets = make_pack()
    packed = target.capture(ids_T, offsets)
    for start, stop in itertools.pairwise(offsets):
        alone = target.capture(ids_T[start:stop], (0, stop - start))
        assert (relative_L(packed[start:stop], alone) < 0.02).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_changing_one_document_changes_the_others_by_exactly_zero(folder, dtype):
    target = load(folder, "cuda", dtype)
    ids_T, offsets = make_pack()
    before = target.capture(ids_T, offsets)
    for changed in range(len(LENGTHS)):
        start, stop = offsets[changed], offsets[changed + 1]
        other_T = ids_T.clone()
        other_T[start:stop] = (ids_T[start:stop] - 3 + 11) % 256 + 3
        after = target.capture(other_T, offsets)
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[stop:], before[stop:])
        assert not torch.equal(after[start:stop], before[start:stop])


def test_two_runs_give_the_same_bits(folder):
    target = load(folder, "cuda", "bfloat16")
    ids_T, offsets = make_pack()
    assert torch.equal(target.capture(ids_T, offsets), target.capture(ids_T, offsets))


def test_documents_of_one_token_are_packed(folder):
    target = load(folder, "cuda", "bfloat16")
    ids_T = torch.arange(3, 40)
    states = target.capture(ids_T, range(len(ids_T) + 1))
    again = target.capture(ids_T[:1], (0, 1))
    assert states.isfinite().all()
    assert (relative_L(states[:1], again) < 0.02).all()
