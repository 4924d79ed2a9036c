"""Batches carry the cache's states to the right places, in the same order from any position on."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_cache import LAYER_IDS, coded_bits, documents, fit_config, make_cache

from hscache import layout
from hscache.errors import ShardCorruptError
from hscache.reader import open_cache
from trainer.batches import Loader
from trainer.rows import decayed_weights
from trainer.run_plan import plan_run

CPU = torch.device("cpu")
LENGTHS = np.random.default_rng(2).integers(6, 30, 26).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    corpus = documents(LENGTHS, held_out=(0, 1))
    return make_cache(
        tmp_path_factory.mktemp("batches") / "cache", corpus, bits=coded_bits, quarantine=(9, 12)
    )


def run_of(folder, **changes):
    return plan_run(fit_config(folder, folder / "run", threads=2, **changes))


def loader_of(cache, task, separate=None):
    return Loader(cache, task, device=CPU, dtype=torch.bfloat16, separate=separate)


def loader(folder, start=None, stride=None, separate=None, **changes):
    run = run_of(folder, **changes)
    task = run.row_task(start)
    if stride is not None:
        task = replace(task, schedule=replace(task.schedule, stride=stride))
    return loader_of(run.cache, task, separate)


def read_all(loader):
    with loader:
        return list(loader)


def assert_same(a, b):
    assert a.document_ids == b.document_ids
    assert a.position == b.position
    for name in vars(a):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def test_features_are_the_states_of_the_documents_at_their_places(folder):
    plan = open_cache(folder).plan
    batches = read_all(loader(folder))
    assert len({d for b in batches for d in b.document_ids}) > 15
    for batch in batches:
        bits = batch.features_SF.view(torch.int16).numpy().view(np.uint16)
        lengths = [int(plan.lengths[d]) for d in batch.document_ids]
        expected = np.concatenate(
            [coded_bits(d, n) for d, n in zip(batch.document_ids, lengths, strict=True)]
        )
        np.testing.assert_array_equal(bits, expected.reshape(len(bits), -1))
        positions = np.concatenate([np.arange(n) for n in lengths])
        np.testing.assert_array_equal(batch.position_ids_S.numpy(), positions)
        assert bits.shape[1] == len(LAYER_IDS) * 32
        assert batch.num_tokens == len(bits)


def test_blocks_see_their_document_up_to_the_anchor_and_are_labelled_by_what_follows(folder):
    """The slow way: look every scored slot up in the plan."""
    plan = open_cache(folder).plan
    decay = decayed_weights(4, 4.0)
    for batch in read_all(loader(folder)):
        starts = np.cumsum([0] + [int(plan.lengths[d]) for d in batch.document_ids])
        weight_sum = 0.0
        for label, weight, slot in zip(
            batch.labels_M.tolist(), batch.weights_M.tolist(), batch.scored_M.tolist(),
            strict=True,
        ):  # fmt: skip
            block, k = slot // 3, slot % 3 + 1
            start, end = int(batch.context_start_N[block]), int(batch.context_end_N[block])
            document = batch.document_ids[starts.tolist().index(start)]
            ids, mask = plan.input_ids(document), plan.loss_mask(document)
            anchor = end - start
            assert batch.anchor_ids_N[block] == ids[anchor]
            assert label == ids[anchor + k]
            assert mask[anchor]
            assert mask[anchor + k]
            assert weight == decay[k - 1]
            weight_sum += weight
        assert batch.weight_sum == pytest.approx(weight_sum)


def test_held_out_and_quarantined_documents_are_never_read(folder):
    cache = open_cache(folder)
    held_out = {d.row for d in cache.held_out}
    seen = {d for b in read_all(loader(folder, passes=3)) for d in b.document_ids}
    assert held_out == {0, 1}
    assert not seen & (held_out | {9, 12})


@pytest.mark.parametrize("stride", [None, 1])
def test_resuming_from_any_position_gives_exactly_the_rest(folder, stride):
    options = {} if stride is None else {"stride": stride}
    whole = read_all(loader(folder, **options))
    assert len(whole) > 12
    assert [b.position.rows for b in whole] == list(range(1, len(whole) + 1))
    for done, batch in enumerate(whole, 1):
        rest = read_all(loader(folder, start=batch.position, **options))
        assert len(rest) == len(whole) - done
        for a, b in zip(rest, whole[done:], strict=True):
            assert_same(a, b)


def test_windowed_schedule_mixes_the_shards_of_a_tick(folder):
    plan = open_cache(folder).plan
    batches = read_all(loader(folder, stride=1))
    mixed = [b for b in batches if len({int(plan.shards[d]) for d in b.document_ids}) > 1]
    assert mixed
    once = [d for b in read_all(loader(folder)) for d in b.document_ids]
    assert sorted(d for b in batches for d in b.document_ids) == sorted(once)


def test_sampled_slots_keep_the_first_and_weigh_one(folder):
    whole = read_all(loader(folder))
    sampled = read_all(loader(folder, loss={"sample_slots": True}))
    for a, b in zip(whole, sampled, strict=True):
        assert a.document_ids == b.document_ids
        assert set(b.weights_M.tolist()) == {1.0}
        assert set(b.scored_M.tolist()) <= set(a.scored_M.tolist())
        firsts = {s for s in a.scored_M.tolist() if s % 3 == 0}
        assert firsts <= set(b.scored_M.tolist())
    assert sum(len(b.labels_M) for b in sampled) < sum(len(b.labels_M) for b in whole)


def test_damaged_shard_is_raised_where_rows_are_taken(tmp_path):
    folder = make_cache(tmp_path / "c", documents([40] * 12))
    loaded = loader(folder)
    largest = max(
        (p for p in layout.shard_dir(folder, 2).rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[100] ^= 1
    largest.write_bytes(data)
    seen = []
    with pytest.raises(ShardCorruptError), loaded:
        seen.extend(loaded)
    assert seen  # the shards before it were delivered
    assert not loader_threads()


def test_leaving_early_never_hangs_and_ends_the_thread(folder):
    for taken in (0, 1, 3, 7):
        source = loader(folder, passes=5)
        with source:
            rows = iter(source)
            for _ in range(taken):
                next(rows)
        assert not loader_threads()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_error_in_the_training_loop_ends_the_thread(folder):
    with pytest.raises(ZeroDivisionError), loader(folder, passes=5) as source:
        1 // len(next(iter(source)).document_ids[:0])
    assert not loader_threads()


def test_waiting_time_is_counted(folder):
    source = loader(folder)
    read_all(source)
    assert source.wait_s > 0
