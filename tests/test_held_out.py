"""Figures on held-out documents equal a slow loop over single blocks, however rows are packed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from trainer_cache import documents, fit_config, make_cache

from hscache.reader import open_cache
from trainer.acceptance import Acceptance, document_acceptance
from trainer.anchors import valid_anchors
from trainer.drafter import Drafter
from trainer.frozen import load_frozen
from trainer.held_out import (
    HeldOutFigures,
    choose_documents,
    evaluate_held_out,
    held_out_documents,
)
from trainer.run_plan import plan_run

CPU = torch.device("cpu")
GAMMA, BLOCK = 2.0, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    corpus = documents([17, 30, 9, 26, 5, 30, 12], held_out=range(6))
    for document in corpus:
        document.ids_T[:] = document.ids_T % 3 + 8  # three tokens, so that guesses are right
    corpus[1].loss_mask_T[10:14] = 0  # two spans
    corpus[4].loss_mask_T[:] = 0
    folder = make_cache(tmp_path_factory.mktemp("held") / "cache", corpus)
    return plan_run(fit_config(folder, folder / "run"))


@pytest.fixture(scope="module")
def drafter(run):
    return Drafter(run.drafter, torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def frozen(run):
    found = load_frozen(run.cache).to(CPU, torch.float32)
    used_V1 = torch.zeros(len(found.head_VH), 1)
    used_V1[8:11] = 1.0  # no other token is ever drafted
    return dataclasses.replace(found, head_VH=found.head_VH * used_V1)


def figures_of(drafter, frozen, held_out, **changes):
    settings = {
        "gamma": GAMMA, "row_tokens": 64, "anchors_per_row": 12, "device": CPU,
        "dtype": torch.float32, "chunk_size": 10, **changes,
    }  # fmt: skip
    return evaluate_held_out(drafter, frozen, held_out, **settings)


def slow_figures(drafter, frozen, held_out) -> HeldOutFigures:
    """One anchor at a time, its context cut off rather than masked, every slot on its own."""
    total = HeldOutFigures()
    for document in held_out:
        ids, mask = document.input_ids.tolist(), document.loss_mask
        features = document.torch().hidden_states.flatten(1).float()
        matches = np.zeros(len(ids), np.int64)
        correct, scored = [0] * (BLOCK - 1), [0] * (BLOCK - 1)
        loss_sum = weight_sum = 0.0
        for anchor in valid_anchors(mask).tolist():
            kv = drafter.context_kv(features[:anchor], torch.arange(anchor))
            hidden = drafter(
                frozen.embedding_VH[[ids[anchor]]],
                frozen.embedding_VH[drafter.config.mask_token_id],
                kv, torch.tensor([0]), torch.tensor([anchor]),
            )  # fmt: skip
            logits = hidden[0] @ frozen.head_VH.T
            right = True
            for k in range(1, BLOCK):
                if anchor + k < len(ids) and mask[anchor + k]:
                    label = ids[anchor + k]
                    weight = math.exp(-(k - 1) / GAMMA)
                    loss_sum += weight * -logits[k - 1].log_softmax(-1)[label].item()
                    weight_sum += weight
                    hit = int(logits[k - 1].argmax()) == label
                    correct[k - 1] += hit
                    scored[k - 1] += 1
                right = right and anchor + k < len(ids) and bool(
                    logits[k - 1].argmax() == ids[anchor + k]
                )  # fmt: skip
                matches[anchor] += right
        total += HeldOutFigures(
            num_documents=1,
            num_anchors=len(valid_anchors(mask)),
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            correct_K=tuple(correct),
            scored_K=tuple(scored),
            acceptance=document_acceptance(matches, mask),
        )
    return total


@torch.no_grad()
def test_figures_equal_a_slow_loop_over_single_blocks(run, drafter, frozen):
    held_out = held_out_documents(run.cache)
    expected = slow_figures(drafter, frozen, held_out)
    found = figures_of(drafter, frozen, held_out)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.weight_sum == pytest.approx(expected.weight_sum)
    for name in ("num_documents", "num_anchors", "correct_K", "scored_K", "acceptance"):
        assert getattr(found, name) == getattr(expected, name), name
    assert min(found.correct_K) > 10
    assert found.acceptance.sequential > 1.2
    assert found.num_anchors == 13 + 6 + 15 + 5 + 22 + 26
    assert found.accuracy == sum(expected.correct_K) / sum(expected.scored_K)


def test_without_gamma_all_slots_weigh_the_same(run, drafter, frozen):
    figures = figures_of(drafter, frozen, held_out_documents(run.cache), gamma=None)
    assert figures.weight_sum == sum(figures.scored_K)


@pytest.mark.parametrize(
    "shape",
    [{"row_tokens": 30}, {"row_tokens": 999, "anchors_per_row": 999}, {"anchors_per_row": 1}],
)
def test_packing_changes_nothing(run, drafter, frozen, shape):
    held_out = held_out_documents(run.cache)
    base, other = (figures_of(drafter, frozen, held_out, **s) for s in ({}, shape))
    assert other.acceptance == base.acceptance
    assert (other.correct_K, other.scored_K) == (base.correct_K, base.scored_K)
    assert other.loss == pytest.approx(base.loss, rel=1e-5)


def test_figures_of_parts_add_up(run, drafter, frozen):
    held_out = held_out_documents(run.cache)
    parts = [figures_of(drafter, frozen, [document]) for document in held_out]
    total, whole = sum(parts, HeldOutFigures()), figures_of(drafter, frozen, held_out)
    assert (total.acceptance, total.correct_K) == (whole.acceptance, whole.correct_K)
    assert total.num_documents == len(held_out) == 6
    assert total.loss == pytest.approx(whole.loss, rel=1e-5)


def test_nothing_to_score_is_none_and_not_0(run, drafter, frozen):
    silent = [d for d in held_out_documents(run.cache) if not d.loss_mask.any()]
    for documents_ in ([], silent):
        figures = figures_of(drafter, frozen, documents_)
        assert figures.num_documents == len(documents_)
        assert figures.loss is figures.accuracy is None
        assert figures.acceptance == Acceptance()


def test_choice_is_the_first_of_the_plan_that_can_be_scored(run):
    held_out = held_out_documents(run.cache)
    usable = [d.row for d in held_out if d.loss_mask.any()]
    assert [d.row for d in choose_documents(run.cache, 99, 64)] == usable
    assert [d.row for d in choose_documents(run.cache, 3, 64)] == usable[:3]
    short = [d.row for d in held_out if d.row in usable and len(d) <= 17]
    assert [d.row for d in choose_documents(run.cache, 99, 17)] == short
    assert len(short) < len(usable)


def test_documents_that_are_not_there_are_not_chosen(tmp_path):
    corpus = documents([30] * 12, held_out=range(6))
    folder = make_cache(tmp_path / "c", corpus, shard_tokens=60, leave_out=(1,), quarantine=(0,))
    assert [d.row for d in choose_documents(open_cache(folder), 99, 64)] == [1, 4, 5]
