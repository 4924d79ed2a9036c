"""Several caches in one run: every document as often as its weight says, and its own states."""

import itertools
from collections import Counter

import numpy as np
import pytest
import rank_checks
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cache import (
    coded_bits,
    documents,
    fit_config,
    make_cache,
    metrics_of,
    random_bits,
)

from hscache import layout
from hscache.errors import CacheIncompleteError, CacheMismatchError, ConfigError
from hscache.reader import open_cache
from trainer.batches import Loader
from trainer.cache_set import open_caches
from trainer.checkpoint import read_state
from trainer.config import EvalConfig
from trainer.evaluate import run as evaluate
from trainer.fit import fit
from trainer.mixture import MixedSchedule
from trainer.ranks import Ranks
from trainer.run_folder import list_checkpoints
from trainer.run_plan import plan_run

CPU = torch.device("cpu")
A = documents(np.random.default_rng(1).integers(8, 30, 18).tolist(), seed=1, held_out=(0, 3))
B = documents(np.random.default_rng(2).integers(8, 30, 11).tolist(), seed=2, held_out=(1,))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp("set")
    make_cache(place / "a", A, quarantine=(6,))
    make_cache(place / "b", B, shard_tokens=60)
    return (place / "a", place / "b")


def read(paths, separate=False, **changes):
    """The rows of a run."""
    run = plan_run(fit_config(paths, paths[0] / "run", threads=2, **changes))
    task = run.row_task()
    loader = Loader(run.cache, task, device=CPU, dtype=torch.bfloat16, separate=separate)
    with loader:
        return run, list(loader)


def names(cache, document):
    one, row = cache.whose(document)
    return one.path.name, row


def test_documents_are_numbered_through_and_are_their_own(two):
    cache = open_caches(two)
    own = [open_cache(path) for path in two]
    assert len(cache.documents) == 29
    assert len(cache.held_out) == 3
    seen = set()
    for document in cache.documents:
        name, row = names(cache, document.row)
        source = own["ab".index(name)].documents[row]
        np.testing.assert_array_equal(document.input_ids, source.input_ids)
        np.testing.assert_array_equal(document.loss_mask, source.loss_mask)
        assert (document.key, document.source_row) == (source.key, source.source_row)
        assert (document.row in [d.row for d in cache.held_out]) == (
            row in [d.row for d in own["ab".index(name)].held_out]
        )
        if (name, row) != ("a", 6):
            np.testing.assert_array_equal(document.hidden_states(), source.hidden_states())
        seen.add((name, row))
    assert len(seen) == 29


@pytest.mark.parametrize(("weights", "often"), [((), (2, 2)), ((1.0, 2.0), (2, 4))])
def test_each_document_is_read_as_often_as_its_weight_says(two, weights, often):
    run, rows = read(two, passes=2, weights=weights, anchors_per_row=40)
    count = Counter(names(run.cache, d) for row in rows for d in row.document_ids)
    for name, times, corpus in (("a", often[0], A), ("b", often[1], B)):
        cache = open_cache(two["ab".index(name)])
        expected = {d.row: times for d in cache.training if (name, d.row) != ("a", 6)}
        assert {row: n for (c, row), n in count.items() if c == name} == expected
        assert len(expected) == sum(not d.held_out for d in corpus) - (name == "a")


def test_a_part_of_a_pass_is_its_first_shards(two):
    run, rows = read(two, passes=1, weights=(1.0, 0.5), anchors_per_row=40)
    shards = list(open_cache(two[1]).plan.training_shards)
    visited = {names(run.cache, d) for row in rows for d in row.document_ids}
    found = {open_cache(two[1]).plan.shards[row] for name, row in visited if name == "b"}
    assert found == set(shards[: round(len(shards) / 2)])


def test_features_are_those_of_the_documents_cache(tmp_path):
    corpora = [documents([9, 8, 7, 10], seed=s, held_out=(0,)) for s in (1, 2)]
    make_cache(tmp_path / "a", corpora[0], bits=coded_bits)
    make_cache(tmp_path / "b", corpora[1], bits=lambda row, n: coded_bits(row + 10, n))
    run, rows = read((tmp_path / "a", tmp_path / "b"), passes=1)
    checked = 0
    for row in rows:
        start = 0
        for document in row.document_ids:
            name, own = names(run.cache, document)
            length = int(run.cache.plan.lengths[document])
            bits = row.features_SF[start : start + length].view(torch.int16).numpy()
            expected = coded_bits(own + 10 * (name == "b"), length).reshape(length, -1)
            np.testing.assert_array_equal(bits.view(np.uint16), expected)
            start += length
            checked += 1
    assert checked == 6


@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    passes=st.integers(1, 5),
    data=st.data(),
)
def test_visits_are_spread_evenly(sizes, passes, data):
    weights = data.draw(st.tuples(*[st.floats(0.25, 4) for _ in sizes]))
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    parts = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges))
    schedule = MixedSchedule(
        shards=tuple(range(edges[-1])), passes=passes, stride=edges[-1], parts=parts,
        weights=weights,
    )  # fmt: skip
    counts = schedule.visits_of_parts()
    visits = [schedule.visits(tick)[0] for tick in range(schedule.num_ticks)]
    assert len(visits) == sum(counts)
    assert len(set(visits)) == len(visits)  # a shard once in each pass
    for part, count in zip(parts, counts, strict=True):
        own = [i for i, visit in enumerate(visits) if visit.shard in part]
        assert len(own) == count
        assert [v.pass_index for v in visits if v.shard in part] == [
            k // len(part) for k in range(count)
        ]
        for done, place in enumerate(own):  # never far from its share of what has been read
            assert abs(done - count * place / len(visits)) <= len(sizes)


def test_planned_tokens_are_those_consumed(two, tmp_path):
    saved = fit(fit_config(two, tmp_path / "run", weights=(1.0, 1.5), anchors_per_row=40))
    state = read_state(saved)
    assert state.tokens == state.total_tokens


def test_a_killed_run_resumes_with_the_same_samples_to_the_same_bits(two, tmp_path):
    settings = {"weights": (1.0, 2.0), "checkpoint_every": 4, "eval_every_tokens": 300}
    straight = rank_checks.train(Ranks(), config=fit_config(two, tmp_path / "s", **settings))
    first = rank_checks.train(
        Ranks(), stop=(0, 9), config=fit_config(two, tmp_path / "r", **settings)
    )
    assert "StoppedBySignal" in first["error"]
    rest = rank_checks.train(
        Ranks(), config=fit_config(two, tmp_path / "r", resume=True, **settings)
    )
    assert first["ledger"] + rest["ledger"] == straight["ledger"]
    a, b = (list_checkpoints(tmp_path / name)[-1] / "model.safetensors" for name in "sr")
    assert a.read_bytes() == b.read_bytes()
    held_out = [line for line in metrics_of(tmp_path / "s") if "eval/documents" in line]
    assert held_out[-1]["eval/documents"] == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": (1.0, 3.0)}, "schedule.weights.*\\[1.0, 2.0\\].*\\[1.0, 3.0\\]"),
        ({"order": "ba"}, "cache.content.corpus_sha256"),
        ({"order": "a", "weights": ()}, "cache.more: the checkpoint has 1 in it, this run none"),
    ],
)
def test_another_mixture_is_refused_with_a_diff(two, tmp_path, change, named):
    fit(fit_config(two, tmp_path / "run", weights=(1.0, 2.0), passes=1))
    paths = tuple(two["ab".index(name)] for name in change.get("order", "ab"))
    weights = change.get("weights", (1.0, 2.0))
    config = fit_config(paths, tmp_path / "run", weights=weights, passes=1, resume=True)
    with pytest.raises(CacheMismatchError, match=named):
        fit(config)


def test_a_checkpoint_of_several_caches_is_evaluated_on_each(two, tmp_path, caplog):
    fit(fit_config(two, tmp_path / "run", passes=1))
    for path in two:
        config = EvalConfig(checkpoint=tmp_path / "run", shards=path, device="cpu", tables=False)
        assert evaluate(config) == 0
    assert "another corpus" not in caplog.text


def test_what_one_cache_holds_out_no_other_trains_on(tmp_path, caplog):
    swapped = [documents([20] * 8, seed=1, held_out=held_out) for held_out in ((0, 1), (1, 2, 3))]
    make_cache(tmp_path / "a", swapped[0])
    make_cache(tmp_path / "b", swapped[1], bits=lambda row, n: random_bits(n, row + 50))
    run, rows = read((tmp_path / "a", tmp_path / "b"), passes=1, anchors_per_row=40)
    assert "3 training documents of one cache are held out in another" in caplog.text
    plan = run.cache.plan
    held_out = {plan.keys[d.row] for d in run.cache.held_out}
    trained = Counter(int(plan.keys[d]) for row in rows for d in row.document_ids)
    assert not held_out & set(trained)
    assert set(trained.values()) == {2}
    assert len(trained) == 4


def test_a_shard_of_a_set_is_there_if_its_own_cache_has_it(tmp_path):
    """By its number in the set, which may be another shard's number in the first cache."""
    for name, missing in (("a", (2,)), ("b", (1,))):
        corpus = documents([20] * 10, seed=ord(name), held_out=(0,))
        make_cache(tmp_path / name, corpus, shard_tokens=60, leave_out=missing)
    both = open_caches((tmp_path / "a", tmp_path / "b"))
    shards = range(both.plan.num_shards)
    assert [s for s in shards if both.is_published(s)] == both.published_shards()
    assert len(both.published_shards()) == len(shards) - 2
    opened = both.caches[1].shard(2)
    both.release_shards()  # or the disk would keep what is deleted
    assert both.caches[1].shard(2) is not opened


def test_one_cache_in_a_list_is_that_cache(two, tmp_path):
    saved = [fit(fit_config(s, tmp_path / n)) for s, n in ((two[0], "x"), (two[:1], "y"))]
    a, b = (path / "model.safetensors" for path in saved)
    assert a.read_bytes() == b.read_bytes()


def test_caches_that_do_not_fit_together_are_refused_with_the_diff(two, tmp_path):
    make_cache(tmp_path / "other", B, target_layer_ids=(0, 3), template_kwargs='{"x":1}')
    with pytest.raises(CacheMismatchError) as caught:
        open_caches([two[0], tmp_path / "other"])
    text = str(caught.value)
    assert f"states.target_layer_ids: {tmp_path / 'other'} has (0, 3), {two[0]} (0, 2)" in text
    assert "states.template_kwargs" in text
    assert "corpus_sha256" not in text
    with pytest.raises(ConfigError, match=r"are the same cache.*--weights"):
        open_caches([two[0], two[1], two[0]])


@pytest.mark.parametrize("last_hidden", [False, True])
def test_codecs_may_differ(tmp_path, last_hidden):
    states = {"last_hidden": last_hidden, "shard_tokens": 60}

    def bits(row, num_tokens):
        layers = random_bits(num_tokens, row)
        return np.concatenate([layers, layers[:, :1] ^ 1], axis=1) if last_hidden else layers

    loss = {"labels": "soft"} if last_hidden else None
    a = make_cache(tmp_path / "a", A, bits=bits, **states)
    b = make_cache(tmp_path / "b", B, bits=bits, **states)
    none = make_cache(tmp_path / "none", B, bits=bits, codec="none", **states)
    _, rows = read((a, none), passes=1, loss=loss)
    expected = read((a, b), passes=1, loss=loss)[1]
    assert len(rows) == len(expected) > 3
    for row, wanted in zip(rows, expected, strict=True):
        assert row.document_ids == wanted.document_ids
        assert torch.equal(row.features_SF, wanted.features_SF)
        if last_hidden:
            assert torch.equal(row.last_hidden_SH, wanted.last_hidden_SH)


def test_a_process_reads_the_same_rows(two):
    wanted = read(two, passes=1)[1]
    found = read(two, passes=1, separate=True)[1]
    assert [row.document_ids for row in found] == [row.document_ids for row in wanted]
    assert all(
        torch.equal(a.features_SF, b.features_SF) for a, b in zip(found, wanted, strict=True)
    )


def test_an_unfinished_cache_of_several_is_named(two, tmp_path):
    part = make_cache(tmp_path / "part", B, leave_out=(2,), shard_tokens=60)
    with pytest.raises(CacheIncompleteError, match=f"{part} is unfinished"):
        plan_run(fit_config((two[0], part), tmp_path / "run"))
    run, rows = read((two[0], part), allow_partial=True, passes=1)
    assert {names(run.cache, d)[0] for row in rows for d in row.document_ids} == {"a", "part"}


def test_skipped_documents_are_told_by_cache(two, tmp_path, capsys):
    corpus = documents([20] * 16, seed=9, held_out=(0,))
    bad = make_cache(tmp_path / "bad", corpus, shard_tokens=60)
    path = layout.shard_dir(bad, 3) / "exponent" / "c.0.0.0"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    fit(fit_config((two[0], bad), tmp_path / "run", on_bad_shard="skip", passes=1))
    assert f"of damaged shards {bad} 3: {bad} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": (1.0,)}, "found 1, expected one for each of the 2"),
        ({"weights": (1.0, 0.0)}, r"found \[1.0, 0.0\], expected numbers above 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused(two, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        fit_config(two, tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match="one cache needs none"):
        fit_config(two[0], tmp_path / "run", weights=(2.0,))
