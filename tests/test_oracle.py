"""Truth: a drafter that knows the labels has loss 0 and is accepted whole; one that is off by one
place knows nothing, and the best it can do is log V.

The stand-in drafter reads ids out of the hidden states, which hold them here, also those past its
anchor; everything else (cache, loader, rows, loss, estimate) is the real thing.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from trainer_cache import HIDDEN, LAYER_IDS, VOCAB, documents, fit_config, make_cache, to_bits

from hscache.plan import deal_into_shards
from trainer.acceptance import span_anchors
from trainer.batches import Loader
from trainer.estimate import estimate_acceptance
from trainer.frozen import load_frozen
from trainer.held_out import evaluate_held_out, held_out_documents
from trainer.row_loss import row_loss
from trainer.run_plan import plan_run

CPU = torch.device("cpu")
BLOCK, PROMPT = 4, 3
# after the prefill's token an answer is 4, 5, ... whole blocks long
LENGTHS = [PROMPT + 1 + BLOCK * n for n in (4, 5, 6, 7)] * 6
CORPUS = documents(LENGTHS, held_out=range(8), prompt=PROMPT)


@dataclasses.dataclass
class Oracle:
    """Puts its mass on the token `shift` places after the one that it is asked for."""

    config: object
    head_VH: torch.Tensor
    scale: torch.Tensor
    shift: int = 0

    def context_kv(self, features_SF, position_ids_S, *, backend=None):
        return features_SF

    def __call__(self, anchors_NH, mask_H, context, start_N, end_N, *, backend=None):
        ids_S = context[:, 0].long()
        places_NK = end_N[:, None] + torch.arange(1, BLOCK) + self.shift
        return self.head_VH[ids_S[places_NK.clamp(max=len(ids_S) - 1)]] * self.scale


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    order = [i for shard in deal_into_shards(CORPUS, 120, seed=0) for i in shard]

    def ids_as_states(row, num_tokens):
        ids_T = torch.from_numpy(CORPUS[order[row]].ids_T).float()  # below 256: exact in bf16
        return to_bits(ids_T[:, None, None].expand(num_tokens, len(LAYER_IDS), HIDDEN))

    folder = make_cache(tmp_path_factory.mktemp("oracle") / "cache", CORPUS, bits=ids_as_states)
    return plan_run(fit_config(folder, folder / "run", row_tokens=96))


@pytest.fixture(scope="module")
def frozen(run):
    found = load_frozen(run.cache).to(CPU, torch.float32)
    return dataclasses.replace(found, head_VH=torch.nn.functional.normalize(found.head_VH))


def oracle(run, frozen, scale, shift=0):
    scale = torch.tensor(float(scale), requires_grad=True)
    return Oracle(config=run.drafter, head_VH=frozen.head_VH, scale=scale, shift=shift)


def batches(run):
    loader = Loader(run.cache, run.row_task(), device=CPU, dtype=torch.float32)
    with loader:
        return list(loader)


def mean_loss(drafter, frozen, rows):
    parts = [row_loss(drafter, frozen, batch, chunk_size=64)[0] for batch in rows]
    return torch.stack(parts).sum() / sum(batch.weight_sum for batch in rows)


def test_oracle_has_loss_0_on_training_rows(run, frozen):
    rows = batches(run)
    assert mean_loss(oracle(run, frozen, 1e3), frozen, rows).item() == 0.0
    scored = sum(len(batch.labels_M) for batch in rows)
    right = sum(
        row_loss(oracle(run, frozen, 1e3), frozen, batch, chunk_size=64)[1] for batch in rows
    )
    assert right == scored > 300


def test_oracle_is_accepted_whole_on_held_out_documents(run, frozen):
    held_out = held_out_documents(run.cache)
    assert len(held_out) == 8
    figures = evaluate_held_out(
        oracle(run, frozen, 1e3), frozen, held_out, gamma=4.0, row_tokens=96, anchors_per_row=13,
        device=CPU, dtype=torch.float32, chunk_size=32,
    )  # fmt: skip
    assert figures.loss == 0.0
    assert figures.slot_accuracy_K == [1.0] * (BLOCK - 1)
    assert figures.acceptance.sequential == figures.acceptance.per_document_mean == BLOCK
    capped = [
        min(BLOCK, len(document) - 1 - anchor)
        for document in held_out
        for anchor in span_anchors(PROMPT, len(document))
    ]
    assert figures.acceptance.dense == np.mean(capped)
    estimate = estimate_acceptance(
        oracle(run, frozen, 1e3), frozen, held_out, device=CPU, dtype=torch.float32
    )
    assert estimate == figures.acceptance


def fitted_loss(run, frozen, shift):
    """The loss with the best confidence there is: one scale, learned through row_loss."""
    drafter, rows = oracle(run, frozen, 1, shift), batches(run)[:6]
    optimizer = torch.optim.Adam([drafter.scale], lr=2.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = mean_loss(drafter, frozen, rows)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_labels_off_by_one_land_near_log_v(run, frozen):
    assert fitted_loss(run, frozen, shift=0) < 1e-3
    assert fitted_loss(run, frozen, shift=1) == pytest.approx(math.log(VOCAB), rel=0.02)
    assert fitted_loss(run, frozen, shift=-1) == pytest.approx(math.log(VOCAB), rel=0.02)


def test_drafts_off_by_one_are_not_accepted(run, frozen):
    for shift in (-1, 1):
        found = estimate_acceptance(
            oracle(run, frozen, 1e3, shift), frozen, held_out_documents(run.cache), device=CPU,
            dtype=torch.float32,
        )  # fmt: skip
        assert 1 <= found.sequential < 1.1
