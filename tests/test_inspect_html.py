"""The page of `hscache inspect --html`: what it shows is there, and it needs nothing else."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from cache_maker import as_bf16, make_cache
from conftest import byte_tokenizer

from hscache import layout, svg
from hscache.cli import main
from hscache.inspect_document import token_kinds, token_texts
from hscache.page_parts import thinned
from hscache.reader import open_cache

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced; gathers texts, titles and tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        for name in found:
            assert name not in ("src", "href", "srcset", "onload", "onerror"), name
        if tag == "span" and found.get("class", "").startswith("token ") and "title" in found:
            self.tokens.append((found["class"][-1], ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data
        if self.open[-1:] == ["span"] and self.tokens and not self.tokens[-1][1]:
            self.tokens[-1] = (self.tokens[-1][0], data)


@pytest.fixture
def cache_dir(tmp_path):
    make_cache(tmp_path / "cache", num_documents=60, quarantine=(1, 20), only_shards=9)
    return tmp_path / "cache"


def write(cache_dir, *flags, code=0) -> tuple[str, Page]:
    file = cache_dir.parent / "pages" / "page.html"
    assert main(["inspect", str(cache_dir), "--html", str(file), *flags]) == code
    text = file.read_text()
    return text, Page(text)


def test_the_page_has_every_section_and_asks_for_nothing(cache_dir, capsys):
    text, page = write(cache_dir)
    for title in (
        "Shards", "Length of documents", "Supervised share", "Captured layers", "Rows of the input",
        "Quarantined documents", "All shards", "Identity", "a test said so", "/models/tiny",
    ):  # fmt: skip
        assert title in page.words
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert page.tags.count("svg") >= 8
    plan = open_cache(cache_dir).plan
    assert f"of {plan.num_shards:,} shards" in page.words
    assert f"missing ({plan.num_shards - 9:,})" in page.words
    assert str(cache_dir.parent / "pages") in capsys.readouterr().out


def test_tokens_are_coloured_by_mask_and_possible_anchors(cache_dir):
    _, page = write(cache_dir, "--doc", "5")
    document = open_cache(cache_dir).documents[5]
    mask = document.loss_mask
    anchors = mask & np.append(mask[1:], False)
    expected = ["a" if a else "s" if m else "x" for m, a in zip(mask, anchors, strict=True)]
    assert [kind for kind, _ in page.tokens] == expected
    assert [int(text) for _, text in page.tokens] == document.input_ids.tolist()
    assert expected.count("a") == open_cache(cache_dir).plan.valid_anchors[5]


def test_text_of_the_corpus_is_escaped(cache_dir, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(layout.frozen_dir(cache_dir) / "tokenizer")
    text = "<script>alert('Grüße')</script>"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    cache = open_cache(cache_dir)
    texts = token_texts(cache, ids)
    assert len(texts) == len(ids)
    assert "".join(texts).replace("�", "") == text
    monkeypatch.setattr("hscache.inspect_html_document.token_texts", lambda *_: ["<script>"] * 99)
    _, page = write(cache_dir)
    assert "script" not in page.tags
    assert "<script>" in page.words


def test_kinds_of_tokens_follow_the_mask():
    mask = np.array([False, True, True, False, True, False, True])
    assert token_kinds(mask).tolist() == [0, 2, 1, 0, 1, 0, 1]
    assert token_kinds(mask[:1]).tolist() == [0]


def test_the_norms_of_the_document_are_drawn(cache_dir):
    text, _ = write(cache_dir, "--doc", "5")
    chart = text[text.index("Norm of the states along the document") :]
    lines = re.findall(r'<polyline class="line l(\d)" points="([^"]+)">', chart)
    assert [number for number, _ in lines[:2]] == ["0", "1"]
    bits = open_cache(cache_dir).shard(int(open_cache(cache_dir).plan.shards[5])).bits(5)
    norms_T = np.linalg.norm(as_bf16(bits[:, 0]).astype(np.float32), axis=1)
    y = np.array([float(point.split(",")[1]) for point in lines[0][1].split()])
    assert len(y) == len(norms_T)
    # A log scale: heights differ as logarithms do, upwards.
    slope = np.polyfit(np.log(norms_T), y, 1)
    assert slope[0] < 0
    assert np.abs(np.polyval(slope, np.log(norms_T)) - y).max() < 0.2


def test_a_damaged_shard_is_on_the_page_and_in_the_exit_code(cache_dir):
    next((layout.shard_dir(cache_dir, 2) / "exponent").glob("c.*")).unlink()
    _, page = write(cache_dir, code=1)
    assert "Damaged shards" in page.words
    assert "is missing" in page.words


def test_a_document_without_states_is_shown_with_the_reason(cache_dir):
    _, page = write(cache_dir, "--doc", "20")
    assert "no states: document 20" in page.words
    assert len(page.tokens) == len(open_cache(cache_dir).documents[20])


def test_a_cache_without_any_shard_has_a_page(tmp_path):
    make_cache(tmp_path / "cache", only_shards=0)
    _, page = write(tmp_path / "cache")
    assert "0.0%" in page.words


def test_a_dry_run_writes_no_page(cache_dir):
    file = cache_dir.parent / "page.html"
    assert main(["inspect", str(cache_dir), "--html", str(file), "--dry-run"]) == 0
    assert not file.exists()


def test_many_values_are_thinned_to_means():
    means, size = thinned([float(i) for i in range(1000)])
    assert size == 3
    assert len(means) == 334
    assert means[0] == 1.0
    assert thinned([None, 2.0]) == ([None, 2.0], 1)


def test_bars_are_as_high_as_their_values():
    chart = svg.bars([1, 2, 4], ["a", "b", "c"], titles=["<a>", "b", "c"])
    heights = [float(h) for h in re.findall(r'class="c0".*? height="([\d.]+)"', chart)]
    assert (
        heights[2] == pytest.approx(2 * heights[1], abs=0.2) == pytest.approx(4 * heights[0], 0.1)
    )
    assert "&lt;a&gt;" in chart


def test_a_line_breaks_where_a_value_is_missing():
    chart = svg.lines([("x", [1.0, 2.0, None, 3.0])])
    assert chart.count("<polyline") == 1
    assert chart.count("<circle") == 1
    assert "nothing yet" in svg.lines([("x", [None])])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_chromium_opens_the_page_without_complaint(cache_dir, tmp_path):
    write(cache_dir)
    picture = tmp_path / "page.png"
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600",
        f"--screenshot={picture}", f"file://{cache_dir.parent / 'pages' / 'page.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr  # errors of the page, such as a refused request
