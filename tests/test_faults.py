"""Real faults: rights, short reads, slow writers, forged frames, full disks, and random ones.

What one module alone meets is in its own test; here are those that go through the commands.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from trainer_cache import documents, make_cache, random_bits, small_disk

import hscache
from hscache import cli, layout, zarr_reader
from hscache.errors import CacheIncompleteError, ShardCorruptError
from hscache.verify import verify
from hscache.writer import ShardWriter
from trainer.frozen import head_is_tied, load_frozen, target_config

TOOLS = Path(__file__).parents[1] / "tools"
CORPUS = documents([30] * 20, held_out=(0, 1))
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("faults") / "cache", CORPUS)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "cache")


def everything(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# rights


def as_nobody(*lines):
    """Run `hscache` command lines in a process without root's rights; exit codes and output."""
    code = "import os, sys\nfrom hscache.cli import main\nimport hscache.verify, hscache.repair\n"
    code += f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    code += f"print([main(line.split()) for line in {list(lines)!r}])\n"
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    codes = done.stdout.splitlines()[-1]
    return [int(c) for c in codes.strip("[]").split(",")], done.stdout + done.stderr


@pytest.fixture
def shared(folder, tmp_path):
    """A folder in which somebody else may rename, but not read everything."""
    for place in [folder, *folder.rglob("*")]:
        place.chmod(0o777 if place.is_dir() else 0o666)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent == Path("/tmp"):
            break
        parent.chmod(0o755)
    return folder


@needs_root
@pytest.mark.parametrize(
    "name",
    ["shards/000002/zarr.json", "shards/000002/exponent/c.0.0.0", "shards/000002",
     "shards/000002/doc_rows", "shards"],
)  # fmt: skip
def test_what_may_not_be_read_is_no_damage_and_is_never_requeued(shared, name):
    path = shared / name
    path.chmod(0)
    before = everything(shared)
    codes, text = as_nobody(f"verify {shared} --deep", f"repair {shared} --deep")
    assert codes == [1, 1]
    assert "cannot be read here and now: Permission denied" in text
    assert "read it as a user who may" in text
    assert f"{path}" in text
    assert "Traceback" not in text
    assert everything(shared) == before


@needs_root
@pytest.mark.parametrize("name", ["zarr.json", "plan", "frozen/weights.safetensors"])
def test_unreadable_parts_of_the_whole_cache_are_named(shared, name):
    (shared / name).chmod(0)
    codes, text = as_nobody(f"verify {shared}", f"inspect {shared}")
    assert codes[0] == 1
    assert "cannot be read here and now: Permission denied" in text
    assert "Traceback" not in text


def test_too_many_open_files_is_no_damage(folder):
    """`repair` on a busy machine must not take sound shards for damaged ones."""
    code = f"""
import resource, sys
import hscache.repair, hscache.verify
from hscache.cli import main
held = [open("/dev/null") for _ in range(40)]
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
sys.exit(main(["repair", {str(folder)!r}, "--deep"]))
"""
    before = everything(folder)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot be read here and now: Too many open files" in done.stdout + done.stderr
    assert everything(folder) == before


# reads


def test_reads_that_return_less_than_asked_are_continued(folder, monkeypatch):
    expected = [d.hidden_states().view(np.uint16) for d in hscache.open(folder).documents]
    pread, preadv = os.pread, os.preadv

    def short_pread(descriptor, size, offset):
        return pread(descriptor, min(size, 7 + offset % 100), offset)

    def short_preadv(descriptor, buffers, offset, flags=0):
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[: 7 + offset % 100]], offset)

    monkeypatch.setattr(zarr_reader.os, "pread", short_pread)
    monkeypatch.setattr(zarr_reader.os, "preadv", short_preadv)
    for document, states in zip(hscache.open(folder).documents, expected, strict=True):
        np.testing.assert_array_equal(document.hidden_states().view(np.uint16), states)


def test_a_reader_that_races_a_slow_writer_sees_nothing_or_everything(folder):
    cache = hscache.open(folder)
    shard = 2
    rows = cache.plan.shard_documents(shard)
    shutil.rmtree(layout.shard_dir(folder, shard))
    done = threading.Event()

    def write():
        with ShardWriter(folder, shard, cache.identity) as writer:
            for row in rows:
                writer.add(row, random_bits(int(cache.plan.lengths[row]), row))
                time.sleep(0.02)
            writer.publish({})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = {"nothing": 0, "everything": 0}
    while not seen["everything"]:
        finished = done.is_set()
        reader = hscache.open(folder)
        try:
            for row in rows:
                states = reader.documents[row].hidden_states().view(np.uint16)
                np.testing.assert_array_equal(states, random_bits(len(states), row))
            seen["everything"] += 1
        except CacheIncompleteError:
            assert not finished
            seen["nothing"] += 1
    thread.join()
    assert seen["nothing"]
    assert verify(hscache.open(folder), deep=True) == []


@pytest.mark.parametrize("name", ["weights.safetensors", "target_config.json"])
@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_pipe_or_link_among_the_frozen_parts_is_damage_and_nobody_waits(
    folder, tmp_path, name, what
):
    path = layout.frozen_dir(folder) / name
    path.rename(tmp_path / "aside")
    os.mkfifo(path) if what == "pipe" else path.symlink_to(tmp_path / "aside")
    errors = []

    def look():
        cache = hscache.open(folder)
        errors.extend(damage.problem for damage in verify(cache, deep=False))
        for read in (load_frozen, target_config, head_is_tied):
            with contextlib.suppress(ShardCorruptError):
                read(cache)
                errors.append(read.__name__)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    problem, *read = errors
    assert str(path) in problem
    assert (
        set(read)
        == {
            "weights.safetensors": {"target_config"},
            "target_config.json": {"load_frozen", "head_is_tied"},
        }[name]
    )


# full disks


@pytest.mark.parametrize("full", ["bytes", "inodes"])
def test_looking_and_repairing_need_no_room(made, tmp_path, full, capsys):
    with small_disk(tmp_path / "disk", "8m"):
        folder = shutil.copytree(made, tmp_path / "disk" / "cache")
        (layout.shard_dir(folder, 3) / "zarr.json").write_bytes(b"x")
        if full == "bytes":
            with pytest.raises(OSError, match="No space"):
                (tmp_path / "disk" / "filler").write_bytes(bytes(9_000_000))
        else:
            options = f"remount,size=8m,nr_inodes={used_inodes(tmp_path / 'disk')}"
            subprocess.run(["mount", "-o", options, str(tmp_path / "disk")], check=True)
            with pytest.raises(OSError, match="No space"):
                (tmp_path / "disk" / "filler").touch()
        assert cli.main(["verify", str(folder), "--deep"]) == 1
        assert cli.main(["inspect", str(folder)]) == 1
        assert cli.main(["repair", str(folder), "--deep"]) == 0
        assert "requeued" in capsys.readouterr().out
        assert layout.list_shards(folder) == [0, 1, 2, 4, 5]


def used_inodes(place):
    status = os.statvfs(place)
    return status.f_files - status.f_ffree


# random ones


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import fault_campaign

    return fault_campaign


def test_a_small_campaign_of_random_faults_leaves_none_undetected(campaign, tmp_path):
    found = campaign.campaign(tmp_path, 80, seed=11)
    assert found["faults"] == 80
    assert found["detected"] > 60
    for name in ("undetected", "foreign_errors", "spikes", "slow"):
        assert found[name] == 0, found["stories"]


def test_the_campaign_notices_a_reader_that_does_not_check(campaign, tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "CODECS", ("none",))
    monkeypatch.setattr(zarr_reader.ZarrArrayReader, "_check", lambda *_: None)
    origin = tmp_path / "origin"
    campaign.make_cache(origin, "none")
    expected = campaign.read_all(origin)
    path = layout.shard_dir(origin, 1) / "bits" / "c.0.0.0"
    data = bytearray(path.read_bytes())
    data[1] ^= 1
    path.write_bytes(data)
    wrong = {name: [] for name in ("undetected", "foreign", "spikes", "slow")}
    assert campaign.judge(origin, expected, "a bit", wrong)[0] == "undetected"
