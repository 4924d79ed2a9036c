"""The notebook runs, cell by cell, on a real small cache; and what it shows is true."""

import ast
import json
import re
import shutil
from pathlib import Path

import matplotlib
import pytest

from hscache import layout
from hscache.config import DataConfig, ProduceConfig, StoreConfig, TargetConfig
from hscache.produce import produce
from hscache.reader import open_cache

NOTEBOOK = Path(__file__).parents[1] / "tools" / "inspect_cache.ipynb"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory, llama_dir, corpus_file):
    folder = tmp_path_factory.mktemp("notebook") / "cache"
    produce(
        ProduceConfig(
            shard_dir=folder,
            target=TargetConfig(path=str(llama_dir), target_layer_ids=(0, 1, 3), device="cpu"),
            data=DataConfig(train=(str(corpus_file),), held_out_fraction=0.2, max_tokens=128),
            store=StoreConfig(shard_tokens=1500),
            token_budget=512,
        )
    )
    return folder


def run_cells(path: Path) -> tuple[dict, list[object]]:
    """Run a notebook's code in one namespace, as a kernel does; return it and what cells end with.

    A kernel of its own would take seconds, and thirty packages.
    """
    cells = json.loads(path.read_text())["cells"]
    namespace: dict = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = None
        if isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if last is not None:
            shown.append(eval(compile(last, f"cell {number}", "eval"), namespace))
    return namespace, shown


def test_the_notebook_runs_and_its_figures_hold(cache_dir, monkeypatch, capsys):
    matplotlib.use("agg")
    monkeypatch.setenv("HSCACHE_CACHE", str(cache_dir))
    namespace, shown = run_cells(NOTEBOOK)
    matplotlib.pyplot.close("all")
    cache, shard, document = (value for value in shown if hasattr(value, "_repr_html_"))
    assert str(cache_dir) in cache._repr_html_()
    assert f"Shard {shard.number}" in shard._repr_html_()
    assert document._repr_html_().count("<span") == len(document)
    for error, wrong in namespace["agreement"].values():
        assert error < 0.02
        assert wrong > 10 * error
    assert namespace["codecs"]["lossless"][1] == 0 == namespace["codecs"]["none"][1]
    assert 0 < namespace["codecs"]["bitround4"][1] < namespace["codecs"]["fp8"][1] < 0.05
    assert namespace["codecs"]["lossless"][0] > namespace["codecs"]["none"][0] == 1
    assert "documents to train on" in capsys.readouterr().out


def test_the_notebook_is_kept_without_output():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        assert cell["id"]
        assert not cell.get("outputs")


def test_a_document_is_shown_as_text_with_its_mask(cache_dir):
    document = open_cache(cache_dir).training[0]
    page = document._repr_html_()
    backgrounds = re.findall(r'background:([^"]+)"', page)
    mask = document.loss_mask
    assert [b != "transparent" for b in backgrounds] == mask.tolist()
    assert repr(document) == (
        f"Document({document.row}: {len(document)} tokens, {int(mask.sum())} supervised, shard "
        f"{document.shard_number})"
    )


def test_markup_in_a_document_is_escaped(cache_dir, monkeypatch):
    monkeypatch.setattr("hscache.notebook.token_texts", lambda *_: ["<b>&"] * 999)
    page = open_cache(cache_dir).training[0]._repr_html_()
    assert "<b>&amp;" not in page.replace("<b>Document", "")
    assert "&lt;b&gt;&amp;" in page


def test_a_damaged_tokenizer_does_not_keep_a_document_from_being_shown(cache_dir, tmp_path):
    copy = shutil.copytree(cache_dir, tmp_path / "cache")
    file = layout.frozen_dir(copy) / "tokenizer" / "tokenizer.json"
    file.write_text("{")
    document = open_cache(copy).training[0]
    assert str(int(document.input_ids[0])) in document._repr_html_()
