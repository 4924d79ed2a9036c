"""`hscache verify` names what is damaged and which documents it costs, and changes nothing."""

import shutil

import pytest
from trainer_cache import documents, make_cache, random_bits

import hscache
from hscache import cli, layout
from hscache.freeing import free_shard, is_freed
from hscache.shard import Shard
from hscache.verify import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    corpus = documents([30] * 20, held_out=(0, 1))
    return make_cache(tmp_path_factory.mktemp("verify") / "cache", corpus, quarantine=(4,))


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def snapshot(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_cache_has_no_damage_and_is_not_touched(folder, deep, capsys):
    before = snapshot(folder)
    assert verify(hscache.open(folder), deep=deep) == []
    assert cli.main(["verify", str(folder), *(["--deep"] if deep else [])]) == 0
    assert "no damage found" in capsys.readouterr().out
    assert snapshot(folder) == before


@pytest.mark.parametrize("deep", [False, True])
def test_a_shard_that_is_freed_while_it_is_checked_is_not_damaged(folder, deep, monkeypatch):
    cache, check_files = hscache.open(folder), Shard.check_files

    def free_first(shard):
        if shard.number == 2:
            free_shard(hscache.open(folder), 2, ["run"])
        check_files(shard)

    monkeypatch.setattr(Shard, "check_files", free_first)
    assert verify(cache, deep=deep) == []
    assert is_freed(cache, 2)


def test_a_flipped_bit_in_payload_is_found_deep_and_costs_the_documents_of_its_chunk(folder):
    cache = hscache.open(folder)
    flip(layout.shard_dir(folder, 1) / "significand" / "c.0.0.0", 5)
    assert verify(cache, deep=False) == []
    (damage,) = verify(hscache.open(folder), deep=True)
    assert damage.part == "shard 1"
    assert "significand" in damage.problem
    rows = set(damage.documents)
    assert rows
    for row in set(hscache.open(folder).plan.shard_documents(1)) - {4}:  # 4 has no states
        try:
            hscache.open(folder).documents[row].hidden_states()
        except hscache.errors.HscacheError:
            assert row in rows
        else:
            assert row not in rows


@pytest.mark.parametrize("cut", [1, 100_000])
def test_a_truncated_file_is_found_without_reading_payload(folder, cut, capsys):
    path = layout.shard_dir(folder, 0) / "exponent" / "c.0.0.0"
    path.write_bytes(path.read_bytes()[:-cut])  # by a byte, or to nothing
    rows = hscache.open(folder).plan.shard_documents(0)
    (damage,) = verify(hscache.open(folder), deep=False)
    assert damage.documents == tuple(rows)
    assert cli.main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "shard 0" in out
    assert "hscache repair" in out


def test_other_parts_are_checked_too(folder):
    flip(layout.frozen_weights(folder), -3)
    (damage,) = verify(hscache.open(folder), deep=False)
    assert damage.part == "frozen"


def test_unusable_states_behind_good_checksums_are_found_deep(tmp_path):
    """A producer without a content check would have published them."""

    def bits(row, num_tokens):
        states = random_bits(num_tokens, row)
        if row == 9:
            states[3, 1, 5] = 0x7F80
        return states

    folder = make_cache(tmp_path / "cache", documents([30] * 20, held_out=(0, 1)), bits=bits)
    assert verify(hscache.open(folder), deep=False) == []
    (damage,) = verify(hscache.open(folder), deep=True)
    assert damage.documents == (9,)
    assert "not finite" in damage.problem
