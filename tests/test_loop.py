"""Runs of several ranks read the rows of one rank, once each, whatever stops and resumes them."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import rank_checks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of

from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.drafter_folder import load_drafter
from trainer.fit import fit
from trainer.metrics import is_evaluation
from trainer.ranks import Ranks
from trainer.run_arithmetic import checkpoint_size
from trainer.run_folder import best_checkpoint, list_checkpoints
from trainer.run_plan import plan_run
from trainer.schedule import Position, Share, joint_position

LENGTHS = np.random.default_rng(4).integers(8, 40, 60).tolist()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("loop") / "cache", documents(LENGTHS, held_out=(1,)))


def config_of(cache, run_dir, mode="average", local_steps=3, outer=None, **changes):
    sync = SyncConfig(mode=mode, local_steps=local_steps, **(outer or {}))
    return fit_config(
        cache, run_dir,
        **{"sync": sync, "global_batch_rows": 4, "checkpoint_every": 5, "log_every": 4, **changes},
    )  # fmt: skip


def ledger(found):
    """How often each document was trained on, over all ranks."""
    return Counter(d for rank in found for step in rank["ledger"] for d in step)


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """One rank, without interruption: run folder and ledger."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    found = rank_checks.train(Ranks(), config=config_of(cache, run_dir, "ddp"))
    assert found["error"] is None
    return run_dir, ledger([found])


def weights(run_dir):
    return load_file(list_checkpoints(run_dir)[-1] / "model.safetensors")


def assert_equal_weights(a, b, tolerance=0.0):
    a, b = weights(a), weights(b)
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], rtol=0, atol=tolerance, err_msg=name)


def timeless(run_dir):
    return [
        {k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics_of(run_dir)
    ]


def test_ddp_on_several_ranks_is_the_run_of_one(pool, cache, alone, tmp_path):
    for num_ranks in (2, 3):
        run_dir = tmp_path / str(num_ranks)
        found = pool("train", num_ranks, config=config_of(cache, run_dir, "ddp"))
        assert [rank["error"] for rank in found] == [None] * num_ranks
        assert ledger(found) == alone[1]
        assert_equal_weights(run_dir, alone[0], tolerance=2e-5)
        for line, expected in zip(timeless(run_dir), timeless(alone[0]), strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
        assert metrics_of(run_dir)[-1]["perf/sync_s"] > 0


def test_one_rank_is_plain_training_in_every_mode(cache, alone, tmp_path):
    for mode in ("average", "broadcast", "diloco"):
        fit(config_of(cache, tmp_path / mode, mode, local_steps=2))
        assert_equal_weights(tmp_path / mode, alone[0])
        assert timeless(tmp_path / mode) == timeless(alone[0])


@pytest.mark.parametrize("mode", ["average", "broadcast", "diloco"])
def test_ranks_that_step_alone_read_every_row_once_and_end_together(
    pool, cache, alone, tmp_path, mode
):
    """The rows do not divide by ranks, steps or meetings."""
    found = pool("train", 3, config=config_of(cache, tmp_path / "run", mode))
    assert [rank["error"] for rank in found] == [None] * 3
    assert ledger(found) == alone[1]
    mine, theirs = (read_state(list_checkpoints(d)[-1]) for d in (tmp_path / "run", alone[0]))
    for name in ("step", "position", "tokens", "anchors"):
        assert getattr(mine, name) == getattr(theirs, name), name
    lines = metrics_of(tmp_path / "run")
    assert all(line["train/loss"] > 0 for line in lines)
    assert lines[-1]["train/tokens"] == mine.tokens
    assert lines[-1]["train/lr"] == metrics_of(alone[0])[-1]["train/lr"]
    assert [line["step"] for line in lines][:3] == [6, 9, 12]  # meetings after 4, 8, 12


@pytest.mark.parametrize("mode", ["ddp", "average"])
def test_looks_of_one_rank_change_nothing_for_any(pool, cache, tmp_path, mode):
    looks = {"eval_every_tokens": 300, "eval_documents": 1, "keep_checkpoints": 1}
    pool("train", 2, config=config_of(cache, tmp_path / "without", mode, passes=1))
    config = config_of(cache, tmp_path / "with", mode, passes=1, **looks)
    assert [rank["error"] for rank in pool("train", 2, config=config)] == [None] * 2
    assert_equal_weights(tmp_path / "without", tmp_path / "with")
    lines = timeless(tmp_path / "with")
    steps = [line for line in lines if not is_evaluation(line)]
    assert steps == timeless(tmp_path / "without")
    found = [line["step"] for line in lines if is_evaluation(line)]
    assert found == sorted(set(found))
    assert len(found) > 2
    assert found[-1] == steps[-1]["step"]
    assert 1 <= len(list_checkpoints(tmp_path / "with")) <= 2
    assert best_checkpoint(tmp_path / "with") in list_checkpoints(tmp_path / "with")


def test_diloco_without_momentum_at_rate_1_is_average(pool, cache, tmp_path):
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    pool("train", 2, config=config_of(cache, tmp_path / "a", "average"))
    pool("train", 2, config=config_of(cache, tmp_path / "d", "diloco", outer=outer))
    assert_equal_weights(tmp_path / "a", tmp_path / "d", tolerance=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "average", "diloco"])
def test_a_stop_on_one_rank_saves_all_and_others_in_any_number_do_the_rest(
    pool, cache, alone, tmp_path, mode
):
    """Rank 1 is told to stop in the middle of a stretch; 2, 3 and 1 ranks go on in turn."""
    config = config_of(cache, tmp_path / "run", mode)
    rest = config_of(cache, tmp_path / "run", mode, resume=True)
    total = Counter()
    for num_ranks, part, stop in ((2, config, (1, 4)), (3, rest, (2, 2)), (2, rest, (0, 3))):
        found = pool("train", num_ranks, config=part, stop=stop)
        for rank in found:
            assert "StoppedBySignal: stopped by SIGTERM" in rank["error"]
            assert list_checkpoints(config.run_dir)[-1].name in rank["error"]
        total += ledger(found)
        assert not list(config.run_dir.glob(".tmp-*"))
        load_drafter(config.run_dir)
    last = rank_checks.train(Ranks(), config=rest)
    assert last["error"] is None
    assert total + ledger([last]) == alone[1]
    mine, theirs = (read_state(list_checkpoints(d)[-1]) for d in (tmp_path / "run", alone[0]))
    for name in ("position", "tokens", "anchors"):
        assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("mode", ["ddp", "average", "diloco"])
def test_ranks_that_resume_at_a_meeting_end_bit_for_bit_alike(pool, cache, tmp_path, mode):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    pool("train", 2, config=config_of(cache, straight, mode, keep_checkpoints=99))
    names = [path.name for path in list_checkpoints(straight)]
    assert len(names) > 3
    shutil.copytree(straight, broken)
    for name in names[2:]:
        shutil.rmtree(broken / name)
    found = pool("train", 2, config=config_of(cache, broken, mode, resume=True))
    assert [rank["error"] for rank in found] == [None] * 2
    a, b = list_checkpoints(straight)[-1], list_checkpoints(broken)[-1]
    files = sorted(path.name for path in a.iterdir())
    assert ("moments-0001.safetensors" in files) == (mode != "ddp")
    assert files == sorted(path.name for path in b.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            left, right = load_file(a / name), load_file(b / name)
            assert left.keys() == right.keys()
            for key, value in left.items():
                np.testing.assert_array_equal(value, right[key], err_msg=key)
    assert read_state(a) == read_state(b)
    assert timeless(straight) == timeless(broken)
    if mode == "diloco":
        tensors = load_file(a / "training.safetensors")
        assert any(v.any() for k, v in tensors.items() if k.startswith("outer.momentum."))


def test_a_starved_rank_meets_early_and_everything_is_read_once(pool, cache, alone, tmp_path):
    config = config_of(cache, tmp_path / "run", local_steps=1000)
    found = pool("train", 2, config=config, late=1)
    assert [rank["error"] for rank in found] == [None] * 2
    assert ledger(found) == alone[1]
    state = read_state(list_checkpoints(config.run_dir)[-1])
    assert state.position.ahead == ()
    assert len(metrics_of(config.run_dir)) > 1  # more meetings than the one at the end
    assert "rank 1 has no rows after 0.3 s" in "".join(found[0]["warnings"])


def test_bf16_drafters_get_the_masters_of_the_meeting(pool, cache, tmp_path):
    config = config_of(cache, tmp_path / "run", passes=1, dtype="bfloat16")
    for error, equal in pool("compute_dtype_after_meetings", 2, config=config):
        assert error is None
        assert len(equal) > 2
        assert all(equal)


def test_a_checkpoint_is_as_large_as_predicted(pool, cache, tmp_path):
    for mode in ("ddp", "average", "diloco"):
        config = config_of(cache, tmp_path / mode, mode, passes=1)
        pool("train", 3, config=config)
        tensors = [
            tensor
            for path in list_checkpoints(config.run_dir)[-1].glob("*.safetensors")
            for name, tensor in load_file(path).items()
            if name != "rng" and not name.startswith("optimizer.step.")
        ]
        expected = checkpoint_size(plan_run(config), num_ranks=3)
        assert sum(tensor.nbytes for tensor in tensors) == expected


def test_same_number_of_ranks_gets_its_own_moments_and_another_their_mean(pool, cache, tmp_path):
    config = config_of(cache, tmp_path / "run", passes=1)
    pool("train", 2, config=config, stop=(0, 4))
    (checkpoint,) = list_checkpoints(config.run_dir)[-1:]
    state = read_state(checkpoint)
    assert state.moment_ranks == 2
    first, second = (load_file(checkpoint / f"moments-000{i}.safetensors") for i in range(2))
    key = "optimizer.exp_avg.fc.weight"
    assert not np.array_equal(first[key], second[key])
    for rank, found in enumerate(pool("moments", 2, checkpoint=checkpoint, config=config)):
        np.testing.assert_array_equal(found, (first, second)[rank][key])
    alone = rank_checks.moments(Ranks(), checkpoint, config)
    np.testing.assert_allclose(alone, (first[key] + second[key]) / 2, rtol=1e-6)
    for found in pool("moments", 3, checkpoint=checkpoint, config=config):
        np.testing.assert_array_equal(found, alone)


def test_ranks_with_other_settings_are_refused_everywhere(pool, cache, tmp_path):
    found = pool("train_with_own_seed", 2, config=config_of(cache, tmp_path / "run"))
    for rank in found:
        assert "CacheMismatchError" in rank["error"]
        assert "ranks [1] differ from rank 0" in rank["error"]
    assert not (tmp_path / "run").exists()


def test_rows_that_one_rank_cannot_read_stop_all_after_a_checkpoint(pool, cache, alone, tmp_path):
    for mode in ("ddp", "average"):
        config = config_of(cache, tmp_path / mode, mode, checkpoint_every=1000)
        found = pool("train_with_damage", 2, config=config)
        assert "ShardCorruptError: a test" in found[1]["error"]
        assert "ranks [1] could not read their rows" in found[0]["error"]
        rest = pool("train", 2, config=config_of(cache, tmp_path / mode, mode, resume=True))
        assert ledger(found) + ledger(rest) == alone[1]


# The arithmetic behind it, without a trainer


def consume(ticks, shares, start, steps):
    """Rows that each rank takes in its first `steps[rank]` steps, and where that leaves the run."""
    all_positions = [start]
    number = 0
    for tick, rows in enumerate(ticks):
        for row in range(rows):
            number += 1
            done = row + 1 == rows
            if number > start.rows:
                all_positions.append(
                    Position(rows=number, tick=tick + done, row_in_tick=0 if done else row + 1)
                )
    taken, reached = [], []
    for share, num_steps in zip(shares, steps, strict=True):
        mine, where, ended, pending = [], start, 0, False
        rows = []
        for position in all_positions[1:]:
            row = position.rows - 1
            if row not in start.ahead:
                pending = True
                if share.takes(row):
                    rows.append(row)
            last = position is all_positions[-1]
            if pending and (share.ends_step(row) or last) and ended < num_steps:
                mine += rows
                rows, pending, where, ended = [], False, position, ended + 1
        taken.append(mine)
        reached.append(where)
    return taken, joint_position(reached, start)


@settings(max_examples=150, deadline=None)
@given(
    ticks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    rows_per_step=st.integers(1, 7),
    stretches=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=5),
    last=st.integers(1, 5),
)
def test_every_row_is_taken_once_over_all_breaks_and_numbers_of_ranks(
    ticks, rows_per_step, stretches, last
):
    position, seen = Position(), []
    for steps in [*stretches, [10**6] * last]:
        shares = [
            Share(rank=rank, num_ranks=len(steps), rows_per_step=rows_per_step)
            for rank in range(len(steps))
        ]
        taken, position = consume(ticks, shares, position, steps)
        seen += [row for rows in taken for row in rows]
        assert position == Position(**json.loads(json.dumps(vars(position))))
        assert sorted(seen) == [*range(position.rows), *position.ahead]
    assert sorted(seen) == list(range(sum(ticks)))


def test_tokens_are_balanced_over_ranks_within_5_percent():
    """Log-normal lengths as of conversations, rows of 4,096, shards of 262,144 tokens."""
    from trainer.rows import pack_rows

    rng = np.random.default_rng(0)
    tokens = []
    for _ in range(16):
        lengths = np.clip(rng.lognormal(6.9, 0.8, 190), 20, 4096).astype(int)
        rows = pack_rows(lengths, [1] * 190, range(190), row_tokens=4096, anchors_per_row=512)
        tokens += [int(lengths[list(row)].sum()) for row in rows]
    for num_ranks in (2, 3, 4, 8):
        of_rank = np.zeros(num_ranks)
        for row, num_tokens in enumerate(tokens):
            rank = next(
                r for r in range(num_ranks) if Share(rank=r, num_ranks=num_ranks).takes(row)
            )
            of_rank[rank] += num_tokens
        assert of_rank.max() / of_rank.mean() < 1.05
        assert of_rank.min() / of_rank.mean() > 0.95
