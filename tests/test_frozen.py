"""The target's frozen parts come from the cache alone, whatever form the target stores them in."""

import dataclasses
import math

import pytest
import torch
from trainer_cache import HIDDEN, documents, make_cache, random_frozen

from hscache.reader import open_cache
from trainer.frozen import initial_norm, load_frozen


def frozen_of(tmp_path, frozen):
    return load_frozen(open_cache(make_cache(tmp_path / "c", documents([12]), frozen=frozen)))


def test_tensors_are_those_that_were_written(tmp_path):
    written = random_frozen(3)
    found = frozen_of(tmp_path, written)
    assert torch.equal(found.embedding_VH, written.embedding_VH)
    assert torch.equal(found.head_VH, written.head_VH)
    assert torch.equal(found.norm_H, written.norm_H)
    assert found.norm_eps == written.norm_eps


def test_tied_head_is_one_tensor_also_after_a_cast(tmp_path):
    found = frozen_of(tmp_path, random_frozen(tied=True))
    assert found.head_VH is found.embedding_VH
    moved = found.to(torch.device("cpu"), torch.bfloat16)
    assert moved.head_VH is moved.embedding_VH
    assert moved.embedding_VH.dtype == torch.bfloat16
    assert moved.norm_H.dtype == torch.float32


def test_norm_stored_as_one_plus_w_is_unfolded(tmp_path):
    written = random_frozen()
    shifted = dataclasses.replace(written, norm_H=written.norm_H - 1, norm_form="1+w")
    torch.testing.assert_close(frozen_of(tmp_path, shifted).norm_H, written.norm_H)


@pytest.mark.parametrize("scale", [1.0, 37.0])
def test_first_norm_gives_logits_of_unit_variance(tmp_path, scale):
    """A random direction through it and the head; the first loss is then near log V."""
    written = random_frozen()
    frozen = frozen_of(tmp_path, dataclasses.replace(written, norm_H=written.norm_H * scale))
    unit = torch.randn(2000, HIDDEN)
    unit = unit / unit.square().mean(1, keepdim=True).sqrt()
    logits = (unit * initial_norm(frozen)) @ frozen.head_VH.T
    assert logits.std().item() == pytest.approx(1.0, rel=0.1)
    labels = torch.randint(0, logits.shape[1], (2000,))
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss < math.log(logits.shape[1]) + 1
