"""`hscache inspect` on small caches: what it says is what is there, damaged or not."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_maker import as_bf16, make_cache
from conftest import byte_tokenizer

from hscache import layout
from hscache.cli import main
from hscache.inspect_document import mask_runs, sparkline
from hscache.producers import Producer
from hscache.reader import open_cache


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "cache"
    documents, states = make_cache(folder, num_documents=60, quarantine=(1, 20))
    return folder, documents, states


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "cache")


def view(capsys, folder, *flags, code=0) -> str:
    assert main(["inspect", str(folder), *flags]) == code
    return capsys.readouterr().out


def section(text: str, header: str) -> str:
    """The one table whose first line starts so."""
    [found] = [part for part in text.split("\n\n") if re.match(rf"\s*{header}", part)]
    return found


def line_of(text: str, start: str) -> list[str]:
    """The cells of the one line that starts so."""
    [line] = [line for line in text.splitlines() if re.match(rf"\s*{start}\b", line)]
    return re.split(r"\s{2,}", line.strip())


def test_identity_is_shown_in_three_tiers(made, capsys):
    text = section(view(capsys, made[0]), "identity")
    assert line_of(text, "states") == ["states", "target", "/models/tiny"]
    assert line_of(text, "content")[:2] == ["content", "corpus sha256"]
    assert line_of(text, "encoding") == ["encoding", "schema version", "2"]
    assert line_of(text, "target layer ids")[1] == "1, 3"


def test_the_plan_counts_what_the_documents_hold(made, capsys):
    folder, documents, _ = made
    text = view(capsys, folder)
    for name, held_out in (("training", False), ("held out", True)):
        side = [d for d in documents if d.held_out == held_out]
        tokens = sum(len(d.ids_T) for d in side)
        share = sum(int(d.loss_mask_T.sum()) for d in side) / tokens
        anchors = sum(d.num_valid_anchors for d in side)
        assert line_of(text, name)[1:5] == [
            f"{len(side)}", f"{tokens:,}", f"{share:.1%}", f"{anchors:,}"
        ]  # fmt: skip
    lengths = [len(d.ids_T) for d in documents]
    assert f"min {min(lengths)}, median {np.median(lengths):.1f}" in text
    assert f"max {max(lengths)}" in text
    for power in range(6):
        counted = sum(1 << power <= n < 2 << power for n in lengths)
        assert line_of(text, f"{1 << power} to {(2 << power) - 1}")[1] == str(counted)
    assert line_of(text, "rows in")[1] == "60"


def test_shards_and_layers_are_those_of_the_manifests(made, capsys):
    folder, documents, states = made
    text = view(capsys, folder)
    cache = open_cache(folder)
    first = cache.shard_manifest(0)
    assert line_of(section(text, "shard  "), "0")[2:5] == [
        str(first.num_documents), str(first.num_tokens), f"{first.stored_bytes / 1e6:.2f}"
    ]  # fmt: skip
    kept = np.concatenate([s for row, s in enumerate(states) if row not in (1, 20)])
    norms_L = np.linalg.norm(as_bf16(kept).astype(np.float64), axis=2).mean(axis=0)
    table = section(text, "layer")
    for layer_id, norm in zip((1, 3), norms_L, strict=True):
        shown = line_of(table, str(layer_id))[1].replace(",", "")
        assert float(shown) == pytest.approx(norm, rel=0.01)
    assert f"58 of {len(documents)}" in text


def test_quarantined_documents_are_listed_with_their_reason(made, capsys):
    text = view(capsys, made[0])
    rows = [line.split() for line in text.splitlines() if line.endswith("a test said so")]
    assert [row[0] for row in rows] == ["1", "20"]
    source_rows = open_cache(made[0]).plan.source_rows
    assert [int(row[2]) for row in rows] == [source_rows[1], source_rows[20]]


def test_missing_shards_are_counted(tmp_path, capsys):
    make_cache(tmp_path / "cache", num_documents=60, only_shards=3)
    num_shards = open_cache(tmp_path / "cache").plan.num_shards
    text = view(capsys, tmp_path / "cache")
    assert line_of(text, "missing")[1] == f"{num_shards - 3}: 3-{num_shards - 1}"
    assert "when complete" in text


def test_a_cache_without_any_shard_yet_is_shown(tmp_path, capsys):
    make_cache(tmp_path / "cache", only_shards=0)
    assert "0 of" in view(capsys, tmp_path / "cache")


def test_of_many_shards_the_ends_are_shown(tmp_path, capsys):
    make_cache(tmp_path / "cache", num_documents=60, shard_tokens=20)
    num_shards = len(open_cache(tmp_path / "cache").published_shards())
    text = view(capsys, tmp_path / "cache")
    assert f"... {num_shards - 20} more" in text
    shards = [line.split()[0] for line in section(text, "shard  ").splitlines()[2:]]
    assert shards == [*map(str, range(10)), "...", *map(str, range(num_shards - 10, num_shards))]


def cut_the_payload(shard):
    file = next((shard / "exponent").glob("c.*"))
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit_of_the_metadata(shard):
    data = bytearray((shard / "zarr.json").read_bytes())
    data[100] ^= 1
    (shard / "zarr.json").write_bytes(data)


def lose_the_metadata(shard):
    (shard / "zarr.json").unlink()


@pytest.mark.parametrize("damage", [cut_the_payload, flip_a_bit_of_the_metadata, lose_the_metadata])
def test_a_damaged_shard_is_a_row_and_the_exit_code(copy, damage, capsys):
    damage(layout.shard_dir(copy, 2))
    text = view(capsys, copy, code=1)
    assert line_of(section(text, "shard  "), "2")[1] == "damaged"
    assert line_of(section(text, "shard  "), "1")[1] == "published"
    assert re.search(r"^shard 2: .*zarr.json|^shard 2: .*exponent", text, re.M)
    assert "1 damaged" in text


def test_a_producer_at_work_is_shown_and_a_dead_one_is_not(copy, capsys):
    with Producer(copy) as producer:
        producer.report(tokens=1234)
        alive = view(capsys, copy)
        [record] = layout.producers_dir(copy).glob("*.json")
        dead = json.loads(record.read_bytes())
        dead["owner"]["start_ticks"] = -1
        (record.parent / "dead-1-x.json").write_text(json.dumps(dead))
        assert view(capsys, copy).count("1,234") == alive.count("1,234") == 1
        assert record.stem in alive
    assert "producing now" not in view(capsys, copy)


def test_a_document_is_decoded_and_its_supervised_parts_are_marked(copy, capsys):
    cache = open_cache(copy)
    without = view(capsys, copy, "--doc", "5")
    ids, mask = cache.documents[5].input_ids, cache.documents[5].loss_mask
    marked = without.split("like this⟧:\n")[1].split("\n\n")[0]
    inside = re.findall(r"⟦(.*?)⟧", marked)
    assert [int(i) for part in inside for i in part.split()] == ids[mask].tolist()
    byte_tokenizer().save_pretrained(layout.frozen_dir(copy) / "tokenizer")
    assert "text, supervised parts" in view(capsys, copy, "--doc", "5")


def test_a_documents_text_is_its_bytes(tmp_path, capsys):
    from hscache.inspect_document import _decode

    tokenizer = byte_tokenizer()
    text = "<|im_start|>user\nGrüße, \x1b[31m world<|im_end|>"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    backend = tokenizer.backend_tokenizer.to_str().encode()
    pieces = _decode(backend, ids, [3, 12, len(ids)])
    assert "".join(pieces) == text.replace("\x1b", "␛")
    assert pieces[0] == tokenizer.decode(ids[:3])


def test_norms_along_a_document_are_those_of_its_states(made, capsys):
    folder, _, states = made
    text = view(capsys, folder, "--doc", "5")
    norms_TL = np.linalg.norm(as_bf16(states[5]).astype(np.float32), axis=2)
    for index, layer_id in enumerate((1, 3)):
        cells = line_of(text, str(layer_id))
        assert [float(c.replace(",", "")) for c in cells[1:4]] == pytest.approx(
            [norms_TL[:, index].min(), norms_TL[:, index].mean(), norms_TL[:, index].max()],
            rel=0.01,
        )
        assert len(cells[4]) == len(norms_TL)


def test_a_document_without_states_is_shown_with_the_reason(made, capsys):
    text = view(capsys, made[0], "--doc", "20")
    assert "a test said so" in text
    assert "min norm" not in text


@pytest.mark.parametrize("row", ["-1", "60"])
def test_a_document_that_is_not_there_is_refused_with_the_range(made, row, capsys):
    assert main(["inspect", str(made[0]), "--doc", row]) == 2
    assert "documents 0 to 59" in capsys.readouterr().err


def test_mask_runs_cover_the_mask():
    mask = np.array([False, False, True, True, False, True])
    assert mask_runs(mask) == [(2, False), (4, True), (5, False), (6, True)]
    assert mask_runs(mask[:1]) == [(1, False)]


def test_a_sparkline_rises_with_its_values_and_is_never_too_wide():
    assert sparkline(np.geomspace(1, 100, 8, dtype=np.float32)) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.full(5, 3.0, np.float32)) == "▁▁▁▁▁"
    assert len(sparkline(np.ones(1000, np.float32))) == 64


def test_inspect_needs_neither_torch_nor_transformers(made):
    code = (
        "import sys; from hscache.cli import main\n"
        f"assert main(['inspect', {str(made[0])!r}]) == 0\n"
        f"assert main(['inspect', {str(made[0])!r}, '--doc', '0']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=root)
