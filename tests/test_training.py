"""An optimizer step sums over its rows and divides once, however the rows are cut."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from trainer_cache import (
    HIDDEN,
    documents,
    fit_config,
    make_cache,
    random_bits,
)

from hscache.errors import CacheMismatchError
from trainer.batches import to_batch
from trainer.config import OptimConfig
from trainer.drafter_folder import load_drafter
from trainer.fit import fit
from trainer.row_loss import row_hidden, row_loss
from trainer.rows import RowDocument, build_row, decayed_weights
from trainer.run_plan import plan_run
from trainer.run_state import start_training, training_state
from trainer.schedule import Position
from trainer.training import Training

LENGTHS = (9, 30, 17, 24)  # unequal weights, so that a mean of means differs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_cache(tmp_path_factory.mktemp("training") / "cache", documents(LENGTHS))
    return plan_run(fit_config(folder, folder / "run", optim={"clip": 1e9}))


@pytest.fixture
def training(run) -> Training:
    return start_training(run, torch.device("cpu"))


def batch_of(run, rows, *, supervised=True, row_tokens=96, position=1):
    """One row with the given documents, every fourth position an anchor."""
    plan = run.cache.plan
    parts, anchors, states = [], [], []
    for row in rows:
        mask = plan.loss_mask(row).astype(bool)
        parts.append(
            RowDocument(
                document_id=row, input_ids_T=plan.input_ids(row), loss_mask_T=mask & supervised
            )
        )
        anchors.append(np.arange(3, len(mask) - 1, 4))
        states.append(random_bits(len(mask), row))
    built = build_row(
        parts, anchors, row_tokens=row_tokens, anchors_per_row=40, block_size=4,
        slot_weights=[decayed_weights(4, 4.0)] * len(parts),
    )  # fmt: skip
    bits = torch.from_numpy(np.concatenate(states).view(np.int16))
    features = bits.view(torch.bfloat16).flatten(1).float()
    return to_batch(built, features, Position(rows=position), torch.device("cpu"))


def gradients(training, group, monkeypatch):
    for optimizer in training.optimizers:
        monkeypatch.setattr(optimizer, "step", lambda: None)
        monkeypatch.setattr(optimizer, "zero_grad", lambda set_to_none: None)
    training.drafter.zero_grad()
    training.update(group)
    return {name: p.grad.clone() for name, p in training.drafter.named_parameters()}


def reference(training, batches):
    """All losses in one graph, one division, one backward."""
    training.drafter.zero_grad()
    total = sum(row_loss(training.drafter, training.frozen, b, chunk_size=512)[0] for b in batches)
    (total / sum(float(b.weights_M.double().sum()) for b in batches)).backward()
    return {name: p.grad.clone() for name, p in training.drafter.named_parameters()}


def assert_close(found, expected):
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * max(1.0, scale))
        assert scale > 0


def test_four_rows_give_the_gradient_of_one_loss_over_all(run, training, monkeypatch):
    group = [batch_of(run, [row]) for row in range(4)]
    expected = reference(training, group)
    assert_close(gradients(training, group, monkeypatch), expected)


def test_four_rows_equal_one_row_that_holds_the_same_documents(run, training, monkeypatch):
    expected = gradients(training, [batch_of(run, range(4))], monkeypatch)
    for cut in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0, 2], [1]]):
        found = gradients(training, [batch_of(run, rows) for rows in cut], monkeypatch)
        assert_close(found, expected)


def test_trailing_group_is_divided_by_its_own_weight(run, training, monkeypatch):
    group = [batch_of(run, [1])]
    assert_close(gradients(training, group, monkeypatch), reference(training, group))


def test_row_without_supervision_changes_nothing_but_the_counts(run, training, monkeypatch):
    one, empty = batch_of(run, [1]), batch_of(run, [2], supervised=False)
    assert empty.weight_sum == 0
    assert len(empty.labels_M) == 0
    expected = gradients(training, [one], monkeypatch)
    found = gradients(training, [empty, one], monkeypatch)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)
    assert training.empty_windows == 0
    assert training.tokens == 2 * one.num_tokens + empty.num_tokens


def test_step_without_supervision_is_counted_and_updates_nothing(run, training):
    before = {k: v.clone() for k, v in training.drafter.state_dict().items()}
    empty = batch_of(run, [2], supervised=False, position=7)
    training.update([empty, empty])
    assert training.empty_windows == 1
    assert (training.step, training.position.rows) == (1, 7)
    for name, value in training.drafter.state_dict().items():
        assert torch.equal(value, before[name])
    assert not training.optimizers[0].state
    values = training.window.values(wait_s=0.0)
    assert values["train/loss"] is None
    assert values["train/accuracy"] is None
    assert values["train/grad_norm_max"] is None


def test_padding_of_the_row_changes_neither_loss_nor_gradient(run, training, monkeypatch):
    expected = gradients(training, [batch_of(run, [1, 2])], monkeypatch)
    found = gradients(training, [batch_of(run, [1, 2], row_tokens=196)], monkeypatch)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)


def loss_by_block(training, batch):
    """Loss of every block on its own, exactly as the batch's labels and weights say."""
    losses = {}
    for block in sorted({slot // 3 for slot in batch.scored_M.tolist()}):
        keep = (batch.scored_M // 3) == block
        only = dict(vars(batch))
        only["labels_M"] = batch.labels_M[keep]
        only["weights_M"] = batch.weights_M[keep]
        only["scored_M"] = batch.scored_M[keep]
        with torch.no_grad():
            losses[block] = row_loss(
                training.drafter, training.frozen, type(batch)(**only), chunk_size=512
            )[0]
    return losses


def test_state_at_the_anchor_changes_nothing_and_the_one_before_does(run, training):
    """The whole path: row, masks, context, loss. Later blocks of the document do see the state."""
    batch = batch_of(run, [1, 3])
    expected = loss_by_block(training, batch)
    for block in expected:
        start, anchor = int(batch.context_start_N[block]), int(batch.context_end_N[block])
        for position, changes in ((anchor, False), (anchor - 1, True)):
            features = batch.features_SF.clone()
            features[position] += 1.0
            found = loss_by_block(training, type(batch)(**{**vars(batch), "features_SF": features}))
            assert torch.equal(found[block], expected[block]) is not changes
            for other in expected:
                other_start, other_end = batch.context_start_N[other], batch.context_end_N[other]
                if not other_start <= position < other_end:
                    assert torch.equal(found[other], expected[other])
        assert anchor - start >= 3


def test_masters_get_the_gradients_of_bf16_rows_in_fp32(run):
    """The whole drafter, over micro-batches, with its matrices in bf16."""
    sums = {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(run.config, dtype=dtype)
        training = start_training(dataclasses.replace(run, config=config), torch.device("cpu"))
        rows = [batch_of(run, [row]) for row in (1, 3, 1)]
        for batch in rows:
            wanted = batch.features_SF.to(getattr(torch, dtype))
            training._accumulate([type(batch)(**{**vars(batch), "features_SF": wanted})])
        assert all(p.grad is None for p in training.drafter.parameters() if p.ndim > 1) == (
            dtype == "bfloat16"
        )
        sums[dtype] = {name: master.grad for name, master in training.masters.by_name.items()}
    for name, expected in sums["float32"].items():
        found = sums["bfloat16"][name]
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.1 * expected.norm(), name


def test_rate_follows_the_tokens(run, training):
    training.optim = OptimConfig(lr=1.0, warmup_fraction=0.5)
    training.total_tokens = 1000
    rates = []
    for training.tokens in (250, 500, 750, 1000, 1200):
        rates.append(training.rate)
    assert rates == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0], abs=1e-12)
    training.optim = OptimConfig(
        lr=1.0, schedule="wsd", warmup_fraction=0.25, decay_fraction=0.5, final_fraction=0.5
    )
    rates = []
    for training.tokens in (250, 500, 750, 1000, 1200):
        rates.append(training.rate)
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5], abs=1e-12)


def test_state_holds_what_decides_the_result_and_nothing_else(run, training):
    state = training_state(run, training)
    assert set(state.settings) == {
        "optim", "row_tokens", "anchors_per_row", "global_batch_rows", "seed", "dtype", "gamma",
        "sample_slots", "drafter", "labels", "weighting", "sync",
    }  # fmt: skip
    assert state.schedule["shards"] == list(run.schedule.shards)
    assert state.cache["states"]["hidden_size"] == HIDDEN


def test_a_run_may_start_from_another_drafters_weights(run, tmp_path):
    folder = run.config.shards
    source = fit(fit_config(folder, tmp_path / "source", seed=5))
    config = fit_config(folder, tmp_path / "run", init_from=source)
    started = start_training(plan_run(config), torch.device("cpu"))
    for name, value in load_drafter(source).state_dict().items():
        assert torch.equal(started.drafter.state_dict()[name], value), name
    again = fit(dataclasses.replace(config, passes=1))
    shutil.rmtree(tmp_path / "source")  # needed once
    assert fit(dataclasses.replace(config, passes=1, resume=True)) == again


def test_weights_of_another_shape_are_refused_with_a_diff(run, tmp_path):
    folder = run.config.shards
    source = fit(fit_config(folder, tmp_path / "source", drafter={"mask_token_id": 6}))
    config = fit_config(
        folder, tmp_path / "run", init_from=source, drafter={"intermediate_size": 32}
    )
    with pytest.raises(CacheMismatchError) as error:
        start_training(plan_run(config), torch.device("cpu"))
    assert "drafter.mask_token_id" in str(error.value)
    assert "has 48, this run 32" in str(error.value)


def test_a_document_in_a_row_is_bit_equal_whatever_its_neighbours_are(run, training):
    """Logits, losses and gradients of the first two documents, beside others of the same length."""
    own, plan = (0, 2), run.cache.plan
    own_slots = sum(len(batch_of(run, [row]).labels_M) for row in own)

    def results(seed):
        batch = batch_of(run, [*own, 1, 3])
        num_tokens = sum(int(plan.lengths[row]) for row in own)
        generator = torch.Generator().manual_seed(seed)
        features_SF = batch.features_SF.clone()
        features_SF[num_tokens:] = torch.randn(features_SF[num_tokens:].shape, generator=generator)
        anchor_ids_N = batch.anchor_ids_N.clone()
        own_anchors = sum(batch_of(run, [row]).num_anchors for row in own)
        anchor_ids_N[own_anchors:] = anchor_ids_N[own_anchors:].roll(seed)
        weights_M = batch.weights_M.clone()
        weights_M[own_slots:] = 0  # what the neighbours teach is theirs
        batch = dataclasses.replace(
            batch, features_SF=features_SF, anchor_ids_N=anchor_ids_N, weights_M=weights_M
        )
        drafter = training.drafter
        drafter.zero_grad()
        context_kv = drafter.context_kv(batch.features_SF, batch.position_ids_S)
        hidden = row_hidden(drafter, training.frozen, batch, context_kv).flatten(0, 1)
        logits_MV = hidden[batch.scored_M[:own_slots]] @ training.frozen.head_VH.T
        loss_sum, _ = row_loss(drafter, training.frozen, batch, chunk_size=512)
        loss_sum.backward()
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
        return logits_MV.detach(), loss_sum.detach(), gradients

    first, second = results(1), results(2)
    assert first[0].shape[0] == own_slots > 20
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name
        assert gradient.count_nonzero() > 0
