"""Conversations to tokens and loss masks, against masks written by hand."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import LLAMA3, tokenizer_with
from conftest import conversation, write_jsonl

from hscache.config import DataConfig
from hscache.conversations import Conversation, parse_row
from hscache.documents import load_corpus
from hscache.errors import DataError
from hscache.inputs import find_files
from hscache.render import render
from hscache.tokenize_rows import tokenize

START, END = "<|im_start|>", "<|im_end|>"


def read_rows(path):
    return [parse_row(row) for file in find_files([path]) for row in file.read_rows()]


def masked_text(row, tokenizer, tmp_path):
    """Return what is supervised and what is not, as (text, supervised) runs of the whole."""
    path = write_jsonl(tmp_path / "one.jsonl", [row])
    [parsed] = read_rows(str(path))
    [(ids_T, mask_T)] = tokenize([render(parsed, tokenizer)], tokenizer)
    assert (ids_T.dtype, mask_T.dtype) == (np.int32, np.uint8)
    runs, start = [], 0
    for end in range(1, len(ids_T) + 1):
        if end == len(ids_T) or mask_T[end] != mask_T[start]:
            runs.append((tokenizer.decode(ids_T[start:end]), bool(mask_T[start])))
            start = end
    return runs


def test_one_answer_is_supervised_with_its_end_marker(tokenizer, tmp_path):
    assert masked_text(conversation("Hi?", "Yo."), tokenizer, tmp_path) == [
        (f"{START}user\nHi?{END}\n{START}assistant\n", False),
        (f"Yo.{END}", True),
        ("\n", False),
    ]


def test_the_mask_is_right_token_by_token(tokenizer):
    row = Conversation(messages=conversation("é", "a b")["messages"], where="")
    [(ids_T, mask_T)] = tokenize([render(row, tokenizer)], tokenizer)
    expected = [
        *[(START, 0), *[(c, 0) for c in "user\n"], ("\xc3", 0), ("\xa9", 0), (END, 0), ("\n", 0)],
        *[(START, 0), *[(c, 0) for c in "assistant\n"]],
        *[("a", 1), (" ", 1), ("b", 1), (END, 1), ("\n", 0)],
    ]
    assert mask_T.tolist() == [supervised for _, supervised in expected]
    assert len(ids_T) == len(expected)


def test_every_answer_of_a_long_conversation_is_supervised(tokenizer, tmp_path):
    first, second = conversation("A?", "B."), conversation("C?", "D.")
    system = {"role": "system", "content": "Be brief."}
    row = {"messages": [system, *first["messages"], *second["messages"]]}
    assert masked_text(row, tokenizer, tmp_path) == [
        (f"{START}system\nBe brief.{END}\n{START}user\nA?{END}\n{START}assistant\n", False),
        (f"B.{END}", True),
        (f"\n{START}user\nC?{END}\n{START}assistant\n", False),
        (f"D.{END}", True),
        ("\n", False),
    ]


def test_runs_of_spaces_in_an_answer_are_supervised(tokenizer, tmp_path):
    # The tokenizer trims spaces off its offsets, so these tokens have none.
    runs = masked_text(conversation("  x  ", "  if a:\n        b  "), tokenizer, tmp_path)
    assert runs[1] == (f"  if a:\n        b  {END}", True)
    assert len(runs) == 3


def test_a_cut_answer_ends_the_document_without_an_end_marker(tokenizer, tmp_path):
    row = {**conversation("Hi?", "Once upon a"), "finish_reason": "length"}
    assert masked_text(row, tokenizer, tmp_path) == [
        (f"{START}user\nHi?{END}\n{START}assistant\n", False),
        ("Once upon a", True),
    ]


def test_only_the_last_answer_counts_as_cut(tokenizer, tmp_path):
    first, second = conversation("A?", "B"), conversation("C?", "B")
    row = {"messages": [*first["messages"], *second["messages"]], "finish_reason": "length"}
    runs = masked_text(row, tokenizer, tmp_path)
    assert [text for text, supervised in runs if supervised] == [f"B{END}", "B"]


def test_an_unanswered_turn_at_the_end_is_not_supervised(tokenizer, tmp_path):
    row = conversation("A?", "B.")
    row["messages"].append({"role": "user", "content": "C?"})
    runs = masked_text(row, tokenizer, tmp_path)
    assert [text for text, supervised in runs if supervised] == [f"B.{END}"]


def with_template(tokenizer, template):
    import copy

    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def parsed(row, tmp_path):
    [result] = read_rows(str(write_jsonl(tmp_path / "one.jsonl", [row])))
    return result


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path):
    forgetful = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}(cut){% else %}{{ m['content'] }}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    two_turns = {
        "messages": conversation("A?", "B.")["messages"] + conversation("C?", "D.")["messages"]
    }
    complaint = r"one.jsonl, line 1: the chat template does not only append"
    with pytest.raises(DataError, match=complaint):
        render(parsed(two_turns, tmp_path), with_template(tokenizer, forgetful))
    assert render(parsed(conversation("A?", "B."), tmp_path), with_template(tokenizer, forgetful))


def test_a_template_that_changes_a_cut_answer_is_refused(tokenizer, tmp_path):
    shouting = tokenizer.chat_template.replace("message['content']", "message['content'] | upper")
    row = {**conversation("A?", "once"), "finish_reason": "length"}
    with pytest.raises(DataError, match="changes the text of the truncated answer"):
        render(parsed(row, tmp_path), with_template(tokenizer, shouting))


def test_what_the_template_itself_refuses_names_the_line(tokenizer, tmp_path):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"one.jsonl, line 1: .*roles must alternate"):
        render(parsed(conversation("A?", "B."), tmp_path), with_template(tokenizer, strict))


def test_a_conversation_that_starts_with_an_answer_is_refused(tokenizer, tmp_path):
    row = {"messages": [{"role": "assistant", "content": "Hello"}]}
    with pytest.raises(DataError, match="line 1: the conversation starts with an assistant turn"):
        render(parsed(row, tmp_path), tokenizer)


GOOD = json.dumps(conversation("A?", "B."))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [', "line 3 is not JSON: .* at column"),
        ("[1, 2]", "line 3 has no messages: found list"),
        ('{"txt": "x"}', r"line 3 has no messages: found keys \['txt'\]"),
        ('{"messages": []}', "line 3 has no messages"),
        ('{"messages": [{"content": "x"}]}', "line 3: every message needs a `role`"),
        ('{"messages": ["x"]}', "line 3: every message needs a `role`"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 3: the content of a user"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(DataError, match=f"{path}, {complaint}"):
        list(read_rows(str(path)))


def test_gzipped_rows_are_the_same_rows(tmp_path):
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text(f"{GOOD}\n{GOOD}\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    messages = [row.messages for row in read_rows(str(packed))]
    assert messages == [row.messages for row in read_rows(str(plain))]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not gzip", "not utf-8"])
def test_an_unreadable_file_is_named(tmp_path, damage):
    path = tmp_path / "a.jsonl.gz"
    packed = bytearray(gzip.compress((GOOD + "\n").encode() * 50))
    if damage == "truncated":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        packed[12:30] = bytes(255 - byte for byte in packed[12:30])
    elif damage == "not gzip":
        packed = bytearray(GOOD.encode())
    else:
        packed = bytearray(gzip.compress(b"\xff\xfe\xfa\n"))
    path.write_bytes(packed)
    with pytest.raises(DataError, match=f"{path} cannot be read as UTF-8 JSONL"):
        list(read_rows(str(path)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl does not exist"):
        list(read_rows(str(tmp_path / "nowhere.jsonl")))


def corpus(tmp_path, tokenizer, rows, held_out=(), **data):
    train = (str(write_jsonl(tmp_path / "train.jsonl", rows)),)
    kept_out = (str(write_jsonl(tmp_path / "held.jsonl", held_out)),) if held_out else ()
    return load_corpus(DataConfig(train=train, held_out=kept_out, **data), tokenizer, seed=0)


def test_over_long_documents_are_dropped_or_truncated_and_counted(tmp_path, tokenizer):
    rows = [conversation("Q?", "x" * n) for n in (5, 30, 6, 40, 50, 60, 7, 8, 9, 10)]
    short = len("user\nQ?\nassistant\n") + 3  # and three special tokens
    dropped = corpus(tmp_path, tokenizer, rows, max_tokens=short + 13, over_long="drop")
    assert dropped.report == {
        "rows in": 10,
        "over max_tokens, drop": 4,
        "kept to train on": 6,
        "supervised tokens": 5 + 6 + 7 + 8 + 9 + 10 + 6,
        "supervised share": round(51 / (51 + 6 * 22), 4),
    }
    assert [d.source_row for d in dropped.documents] == [0, 2, 6, 7, 8, 9]
    cut = corpus(tmp_path, tokenizer, rows, max_tokens=short + 13, over_long="truncate")
    assert cut.report["over max_tokens, truncate"] == 4
    assert cut.report["kept to train on"] == 10
    for document in cut.documents:
        end_marker = 2
        assert len(document.ids_T) <= short + 13
        was_cut = len(document.ids_T) == short + 13
        supervised_end = end_marker in document.ids_T[document.loss_mask_T.astype(bool)]
        assert supervised_end != was_cut


def test_cut_answers_are_counted(tmp_path, tokenizer):
    rows = [conversation("Q?", "abc") for _ in range(5)]
    for row in rows[1:4]:
        row["finish_reason"] = "length"
    report = corpus(tmp_path, tokenizer, rows).report
    assert report["last answer cut by its token limit"] == 3


def test_documents_without_supervision_are_dropped_and_counted(tmp_path, tokenizer):
    only_question = {"messages": [{"role": "user", "content": "Q?"}]}
    report = corpus(tmp_path, tokenizer, [conversation("Q?", "abc"), only_question]).report
    assert report["dropped: no two supervised tokens in a row"] == 1
    with pytest.raises(DataError, match="no document is left to train on"):
        corpus(tmp_path, tokenizer, [only_question])


def test_a_held_out_share_is_chosen_by_content_so_copies_stay_together(tmp_path, tokenizer):
    rows = [conversation(f"{i % 40}?", f"answer {i % 40}") for i in range(120)]
    documents = corpus(tmp_path, tokenizer, rows, held_out_fraction=0.3).documents
    sides = {}
    for document in documents:
        sides.setdefault(document.ids_T.tobytes(), set()).add(document.held_out)
    assert len(sides) == 40
    assert all(len(side) == 1 for side in sides.values())
    assert 4 <= sum(side == {True} for side in sides.values()) <= 20
    # Other rows around it change nothing for a document.
    again = corpus(tmp_path, tokenizer, rows[60:100][::-1], held_out_fraction=0.3).documents
    assert all(sides[d.ids_T.tobytes()] == {d.held_out} for d in again)


def test_training_rows_that_are_also_held_out_are_dropped(tmp_path, tokenizer):
    rows = [conversation(f"{i}?", "abc") for i in range(6)]
    found = corpus(tmp_path, tokenizer, rows, held_out=rows[2:4])
    assert [(d.source_row, d.held_out) for d in found.documents] == [
        *[(i, False) for i in (0, 1, 4, 5)],
        *[(i, True) for i in (6, 7)],
    ]
    assert found.report["dropped: also held out"] == 2


def test_a_sample_of_the_rows_is_seeded_and_keeps_their_numbers(tmp_path, tokenizer):
    rows = [conversation(f"{i}?", f"answer {i}") for i in range(50)]
    found = corpus(tmp_path, tokenizer, rows, held_out=rows[:1], max_documents=10)
    numbers = [d.source_row for d in found.documents if not d.held_out]
    texts = [tokenizer.decode(d.ids_T) for d in found.documents if not d.held_out]
    assert len(numbers) == len(set(numbers)) == 10
    assert all(f"answer {n}<" in text for n, text in zip(numbers, texts, strict=True))
    assert [d.source_row for d in found.documents if d.held_out] == [50]
    assert found.report["not in the sample of max_documents"] == 40
    assert numbers == [
        d.source_row for d in corpus(tmp_path, tokenizer, rows, max_documents=10).documents
    ]


def test_a_sample_is_drawn_over_all_files_alike(tmp_path, tokenizer):
    files = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [conversation("Q?", f"{name}{i}")] * 100))
        for i, name in enumerate("ab")
    ]
    data = DataConfig(train=tuple(files), max_documents=60)
    rows = [document.source_row for document in load_corpus(data, tokenizer, seed=3).documents]
    assert len(rows) == 60
    assert rows == sorted(rows)
    assert 20 <= sum(row < 100 for row in rows) <= 40


def test_documents_are_the_same_from_every_kind_of_file(tmp_path, tokenizer):
    rows = [conversation(f"{i}?", f"answer {i}") for i in range(600)]  # several batches
    (tmp_path / "parts").mkdir()
    write_jsonl(tmp_path / "parts" / "0.jsonl", rows[:400])
    pq.write_table(pa.Table.from_pylist(rows[400:]), tmp_path / "parts" / "1.parquet")
    found = load_corpus(DataConfig(train=(str(tmp_path / "parts"),)), tokenizer, seed=0)
    expected = corpus(tmp_path, tokenizer, rows)
    assert [(d.source_row, d.key) for d in found.documents] == [
        (d.source_row, d.key) for d in expected.documents
    ]
    assert found.report == expected.report


def test_all_of_a_text_is_supervised_behind_one_bos(tmp_path):
    llama3 = tokenizer_with(LLAMA3)
    texts = ["a b", "<|begin_of_text|>a b"]
    documents = corpus(tmp_path, llama3, [{"text": text} for text in texts]).documents
    vocab = llama3.get_vocab()
    for document in documents:
        assert document.ids_T.tolist() == [vocab[t] for t in ("<|begin_of_text|>", "a", "Ġ", "b")]
        assert document.loss_mask_T.tolist() == [1, 1, 1, 1]
        assert (document.ids_T.dtype, document.loss_mask_T.dtype) == (np.int32, np.uint8)


def test_a_conversation_has_one_bos_too(tmp_path):
    [document] = corpus(tmp_path, tokenizer_with(LLAMA3), [conversation("A?", "B.")]).documents
    assert document.ids_T.tolist().count(1) == 1
    assert document.ids_T[0] == 1


def test_ids_are_stored_as_they_are_and_rows_of_all_forms_keep_their_order(tmp_path, tokenizer):
    ids = [7, 258, 0, 2, 2, 9]
    rows = [
        {"input_ids": ids, "loss_mask": [0, 0, 1, 1, 0, 1]},
        conversation("A?", "B."),
        {"text": "abc"},
        {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "C."}]},
    ]
    documents = corpus(tmp_path, tokenizer, rows).documents
    assert [document.source_row for document in documents] == [0, 1, 2, 3]
    assert documents[0].ids_T.tolist() == ids
    assert documents[0].loss_mask_T.tolist() == [0, 0, 1, 1, 0, 1]
    texts = [tokenizer.decode(document.ids_T) for document in documents[1:]]
    assert ["B." in texts[0], texts[1], "C." in texts[2]] == [True, "abc", True]


def test_ids_beyond_the_vocabulary_are_refused(tmp_path, tokenizer):
    rows = [{"input_ids": [1, 259], "loss_mask": [1, 1]}]
    with pytest.raises(DataError, match=r"line 1: `input_ids` holds 259, .* from 0 to 258"):
        corpus(tmp_path, tokenizer, rows)


def test_the_supervised_share_is_reported_and_has_a_floor(tmp_path, tokenizer):
    rows = [
        {"input_ids": [5] * 10, "loss_mask": [0] * 8 + [1] * 2},
        {"input_ids": [6] * 30, "loss_mask": [0] * 26 + [1] * 4},
    ]
    report = corpus(tmp_path, tokenizer, rows, min_supervised_share=0.15).report
    assert (report["supervised tokens"], report["supervised share"]) == (6, 0.15)
    with pytest.raises(DataError, match=r"only 15.00% of the tokens .*share is 16.00%"):
        corpus(tmp_path, tokenizer, rows, min_supervised_share=0.16)
