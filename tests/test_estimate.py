"""The estimate from shards equals real decoding of greedy text; an overfitted drafter gets far."""

from types import SimpleNamespace

import pytest
import torch
from greedy_run import BLOCK, LAYER_IDS, NUM_NEW, Greedy, train_on_greedy_text
from trainer_cache import documents, fit_config, make_cache

from hscache.reader import TorchDocument, open_cache
from trainer.acceptance import Acceptance
from trainer.anchors import valid_anchors
from trainer.decode import speculative_decode
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter
from trainer.estimate import estimate_acceptance
from trainer.frozen import load_frozen
from trainer.proposer import DrafterProposer
from trainer.run_plan import plan_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def greedy(tmp_path_factory) -> Greedy:
    return train_on_greedy_text(tmp_path_factory.mktemp("greedy"))


def drafter_of(greedy, kind) -> Drafter:
    if kind == "trained":
        return load_drafter(greedy.config.run_dir)
    return Drafter(plan_run(greedy.config).drafter, torch.Generator().manual_seed(1)).eval()


def fp32_documents(greedy):
    """The cache's documents with the states as decoding sees them."""
    for document in open_cache(greedy.folder).documents:
        data = document.torch()
        yield SimpleNamespace(
            input_ids=document.input_ids,
            loss_mask=document.loss_mask,
            torch=lambda data=data, row=document.row: TorchDocument(
                data.input_ids, data.loss_mask, greedy.states[row]
            ),
        )


def decoded(greedy, drafter, frozen) -> Acceptance:
    total = Acceptance()
    for row, prompt in greedy.prompts.items():
        result = speculative_decode(
            greedy.target, prompt, DrafterProposer(drafter, frozen), target_layer_ids=LAYER_IDS,
            block_size=BLOCK, max_new_tokens=NUM_NEW, stop_ids=(),
        )  # fmt: skip
        assert result.ids == greedy.answers[row]
        total += Acceptance(
            committed=result.committed,
            steps=result.steps,
            document_means=(result.committed / result.steps,),
        )
    return total


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_estimate_equals_real_decoding_of_greedy_text(greedy, kind):
    drafter = drafter_of(greedy, kind)
    frozen = load_frozen(open_cache(greedy.folder)).to(CPU, torch.float32)
    real = decoded(greedy, drafter, frozen)
    estimate = estimate_acceptance(
        drafter, frozen, fp32_documents(greedy), device=CPU, dtype=torch.float32
    )
    assert (estimate.committed, estimate.steps) == (real.committed, real.steps)
    assert sorted(estimate.document_means) == sorted(real.document_means)
    assert (estimate.sequential > 3) is (kind == "trained")


def test_overfitted_drafter_is_accepted(greedy):
    """Labels, offsets and masks end to end: off by one, acceptance would stay near 1."""
    drafter = drafter_of(greedy, "trained")
    frozen = load_frozen(open_cache(greedy.folder)).to(CPU, torch.float32)
    real = decoded(greedy, drafter, frozen)
    assert real.sequential > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate_equals_a_slow_loop_over_single_blocks(greedy, dtype, monkeypatch):
    """One anchor at a time with its context cut off, not masked; the cache's own bf16 states."""
    monkeypatch.setattr("trainer.estimate._BLOCKS", 5)
    drafter = drafter_of(greedy, "trained")
    cache = open_cache(greedy.folder)
    frozen = load_frozen(cache).to(CPU, dtype)
    committed = steps = dense_sum = dense_anchors = 0
    with torch.inference_mode():
        for document in cache.documents:
            ids, end = document.input_ids.tolist(), len(document)
            features = document.torch().hidden_states.flatten(1).to(dtype)
            matches = {}
            for anchor in valid_anchors(document.loss_mask).tolist():
                kv = drafter.context_kv(features[:anchor], torch.arange(anchor))
                hidden = drafter(
                    frozen.embedding_VH[[ids[anchor]]],
                    frozen.embedding_VH[drafter.config.mask_token_id],
                    kv, torch.tensor([0]), torch.tensor([anchor]),
                )  # fmt: skip
                drafts = (hidden[0] @ frozen.head_VH.T).argmax(-1).tolist()
                count = 0
                while anchor + 1 + count < end and count < BLOCK - 1 and (
                    drafts[count] == ids[anchor + 1 + count]
                ):  # fmt: skip
                    count += 1
                matches[anchor] = min(count + 1, end - 1 - anchor)
            dense_sum += sum(matches.values())
            dense_anchors += len(matches)
            anchor = min(matches)
            while anchor < end - 1:
                anchor += matches[anchor]
                steps += 1
            committed += end - 1 - min(matches)
    found = estimate_acceptance(drafter, frozen, cache.documents, device=CPU, dtype=dtype)
    assert (found.committed, found.steps) == (committed, steps)
    if dtype == torch.float32:  # batched products round differently in bf16
        assert (found.dense_sum, found.dense_anchors) == (dense_sum, dense_anchors)
    assert found.sequential > 2


def test_document_without_supervision_counts_for_nothing(tmp_path):
    folder = make_cache(tmp_path / "c", [*documents([20]), *documents([12], prompt=12, seed=1)])
    run = plan_run(fit_config(folder, tmp_path / "run"))
    drafter = Drafter(run.drafter).eval()
    frozen = load_frozen(run.cache).to(CPU, torch.float32)
    settings = {"device": CPU, "dtype": torch.float32}
    parts = [estimate_acceptance(drafter, frozen, [d], **settings) for d in run.cache.documents]
    assert sorted(part.dense_anchors for part in parts) == [0, 16]
    whole = estimate_acceptance(drafter, frozen, run.cache.documents, **settings)
    assert whole == sum(parts, Acceptance())
