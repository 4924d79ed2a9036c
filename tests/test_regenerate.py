"""`hscache regenerate` on a tiny saved Llama with a word tokenizer, real files and real kills."""

import copy
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forked import Forked
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hscache.answers import rows_done
from hscache.config import TargetConfig
from hscache.errors import CacheMismatchError, ConfigError, DataError, StoppedBySignal
from hscache.local_answers import output_row
from hscache.pretrained import load_tokenizer
from hscache.prompts import Prompt, prompt_ids, read_prompts
from hscache.regenerate import regenerate, run
from hscache.regenerate_config import RegenerateConfig
from hscache.settings import to_dict

CHATML = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    vocab = ["<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", *WORDS]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.05, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def user(*words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(words)}]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def prompts(tmp_path) -> Path:
    rows = [{"id": f"r{i}", "messages": user(*WORDS[i : i + 1 + 3 * (i % 4)])} for i in range(12)]
    return write_rows(tmp_path / "prompts.jsonl", rows)


def config_for(target: str, prompts: Path, **kwargs) -> RegenerateConfig:
    settings = {
        "batch_size": 3,
        "max_new_tokens": 30,
        "temperature": 1.0,
        "dtype": "float32",
        "device": "cpu",
    }
    output = prompts.parent / "out" / "answers.jsonl"
    return RegenerateConfig(
        **{"target": target, "prompts": (str(prompts),), "output": output, **settings, **kwargs}
    )


def rows_of(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_prompt_is_answered_once_and_counted(target, prompts):
    config = config_for(target, prompts)
    summary = regenerate(config)
    rows = rows_of(config.output)
    assert set(rows) == {f"r{i}" for i in range(12)}
    for row, prompt in zip(
        (rows[f"r{i}"] for i in range(12)), read_prompts([prompts]), strict=True
    ):
        assert list(row) == ["id", "messages", "finish_reason", "temperature", "completion_tokens"]
        assert row["messages"][:-1] == prompt.messages
        assert row["messages"][-1]["role"] == "assistant"
        assert "<|im_end|>" not in row["messages"][-1]["content"]
        assert row["temperature"] == 1.0
        assert (row["finish_reason"] == "length") == (row["completion_tokens"] == 30)
    reasons = [row["finish_reason"] for row in rows.values()]
    assert reasons.count("stop") == summary.num_stopped > 0
    assert reasons.count("length") == summary.num_cut > 0
    assert summary.num_new_tokens == sum(row["completion_tokens"] for row in rows.values())
    assert (summary.num_rows, summary.num_already_done, summary.num_too_long) == (12, 0, 0)


def test_second_run_has_nothing_to_do(target, prompts):
    config = config_for(target, prompts)
    regenerate(config)
    before = config.output.read_bytes()
    summary = regenerate(config)
    assert (summary.num_already_done, summary.num_new_tokens) == (12, 0)
    assert config.output.read_bytes() == before


def test_interrupted_output_is_continued_to_the_same_rows(target, prompts, tmp_path):
    whole = config_for(target, prompts)
    regenerate(whole)
    lines = whole.output.read_bytes().splitlines(keepends=True)
    part = config_for(target, prompts, output=tmp_path / "part.jsonl", batch_size=4)
    regenerate(part)
    part.output.write_bytes(b"".join(lines[:5]) + lines[5][:-1])  # all of row 5 but its newline
    assert regenerate(part).num_already_done == 5
    assert rows_of(part.output) == rows_of(whole.output)
    part.output.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    run(part, dry_run=True)
    assert part.output.read_bytes().endswith(lines[5][:20])  # a dry run mends nothing
    assert regenerate(part).num_already_done == 5
    assert rows_of(part.output) == rows_of(whole.output)


def wait_for_lines(path: Path, num_lines: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        time.sleep(0.002)


def long_prompts(tmp_path: Path) -> Path:
    rows = [{"messages": user(WORDS[i % 40])} for i in range(60)]
    return write_rows(tmp_path / "long.jsonl", rows)


def test_rows_after_kill_9_and_rerun_equal_those_of_an_uninterrupted_run(target, tmp_path):
    prompts = long_prompts(tmp_path)
    killed = config_for(target, prompts, max_new_tokens=200, output=tmp_path / "killed.jsonl")
    file = tmp_path / "killed.json"
    file.write_text(json.dumps(to_dict(killed)))
    process = Forked("hscache", ["regenerate", "--config", str(file)])
    try:
        wait_for_lines(killed.output, 3)
    finally:
        process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    num_before = killed.output.read_bytes().count(b"\n")
    summary = regenerate(killed)
    assert 3 <= num_before == summary.num_already_done < 60
    whole = config_for(target, prompts, max_new_tokens=200, output=tmp_path / "whole.jsonl")
    regenerate(whole)
    assert rows_of(killed.output) == rows_of(whole.output)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_with_whole_rows_and_128_plus_signum(target, tmp_path, signum):
    config = config_for(target, long_prompts(tmp_path), max_new_tokens=200)

    def send() -> None:
        wait_for_lines(config.output, 2)
        os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(StoppedBySignal, match="same command again") as stopped:
        regenerate(config)
    sender.join()
    assert stopped.value.exit_code == 128 + signum
    assert config.output.read_bytes().endswith(b"\n")
    assert 2 <= len(rows_of(config.output)) < 60


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"temperature": 0.5}, r"temperature +1.0 +0.5"),
        ({"seed": 3}, r"seed +0 +3"),
        ({"max_new_tokens": 31}, r"max_new_tokens +30 +31"),
    ],
)
def test_changed_settings_are_refused_with_a_diff(target, prompts, change, shown):
    regenerate(config_for(target, prompts))
    for action in (regenerate, lambda config: run(config, dry_run=True)):
        with pytest.raises(CacheMismatchError, match=shown) as refused:
            action(config_for(target, prompts, **change))
        assert len(str(refused.value).splitlines()) == 5  # only the field that differs


def test_changed_weights_are_refused(target, prompts, tmp_path):
    config = config_for(target, prompts)
    regenerate(config)
    path = config.output.with_name("answers.jsonl.settings.json")
    settings = json.loads(path.read_text())
    settings["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(settings))
    with pytest.raises(CacheMismatchError, match="weights_sha256"):
        regenerate(config)
    path.unlink()
    with pytest.raises(CacheMismatchError, match="not known how its rows were made"):
        regenerate(config)


def test_prompt_changed_under_its_id_is_refused(target, prompts):
    config = config_for(target, prompts)
    regenerate(config)
    prompts.write_text(prompts.read_text().replace('"w3', '"w9'))
    with pytest.raises(CacheMismatchError, match="id 'r3' answers another prompt"):
        regenerate(config)


def test_output_being_written_by_another_process_is_refused(target, prompts):
    import fcntl

    config = config_for(target, prompts)
    config.output.parent.mkdir()
    with config.output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            regenerate(config)


def test_prompt_that_does_not_fit_is_left_out_and_counted(target, tmp_path):
    rows = [{"messages": user(*WORDS * 13)}, {"messages": user("w1")}]
    config = config_for(target, write_rows(tmp_path / "p.jsonl", rows))
    summary = regenerate(config)
    assert (summary.num_rows, summary.num_too_long) == (2, 1)
    assert set(rows_of(config.output)) == {2}


def test_messages_the_template_refuses_are_a_data_error(target, tmp_path):
    rows = [{"id": "x", "messages": [*user("w1"), {"role": "tool", "content": "w2"}]}]
    with pytest.raises(DataError, match=r"row 'x': .* refuses these messages: no tools"):
        regenerate(config_for(target, write_rows(tmp_path / "p.jsonl", rows)))


def test_dry_run_counts_and_writes_nothing(target, prompts, capsys):
    config = config_for(target, prompts)
    run(config, dry_run=True)
    assert not config.output.parent.exists()
    out = capsys.readouterr().out
    assert "to answer" in out
    assert "weights_sha256" in out


def test_target_without_chat_template_is_a_config_error(target, prompts, tmp_path):
    import shutil

    folder = Path(shutil.copytree(target, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        regenerate(config_for(str(folder), prompts))


def test_last_answers_are_dropped_and_earlier_ones_kept(tmp_path):
    turns = [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    answer = {"role": "assistant", "content": "d"}
    path = write_rows(
        tmp_path / "p.jsonl", [{"messages": [*turns, answer, answer]}, {"messages": turns}]
    )
    assert [(p.id, p.messages) for p in read_prompts([path])] == [(1, turns), (2, turns)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [', "line 3 is not JSON"),
        ("[1]", "line 3 has no messages: found list"),
        ('{"text": "x"}', r"line 3 has no messages: found keys \['text'\]"),
        ('{"messages": []}', "line 3 has no messages"),
        ('{"messages": [{"role": "user"}]}', "line 3: the content of a user message is not text"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 3: .*surrogate"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 3: no user turn"),
        ('{"id": "\\ud83d", "messages": [{"role": "user", "content": "x"}]}', "line 3: `id` hol"),
        (
            '{"tools": [{"d": "\\ud83d"}], "messages": [{"role": "user", "content": "x"}]}',
            "line 3: a tool, .* holds half a surrogate pair",
        ),
        ('{"id": 1.5, "messages": [{"role": "user", "content": "x"}]}', "line 3: `id` is 1.5"),
        (
            '{"id": "1", "messages": [{"role": "user", "content": "x"}]}',
            r"line 3: id '1' was already used by .*line 1",
        ),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps({'messages': user('a')})}\n\n{line}\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl, {complaint}"):
        read_prompts([path])


def test_rows_of_several_files_need_ids(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", [{"id": 1, "messages": user("a")}])
    b = write_rows(tmp_path / "b.jsonl", [{"messages": user("b")}])
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: no `id`"):
        read_prompts([a, b])


def test_missing_prompts_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        read_prompts([tmp_path / "nowhere.jsonl"])


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"prompts": ()}]
)
def test_impossible_settings_are_config_errors(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RegenerateConfig(**{"target": "t", "prompts": ("p",), "output": Path("o"), **bad})


def test_half_a_character_at_the_cut_is_left_out():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode(errors="replace")

    prompt = Prompt(id=1, messages=user("w1"))
    cut = list("so \N{PARTY POPPER}".encode())[:-1]
    for reason, expected in (("length", "so "), ("stop", "so \N{REPLACEMENT CHARACTER}")):
        answer = SimpleNamespace(ids=cut, finish_reason=reason)
        row = output_row(prompt, answer, Bytes(), {255}, 0.0)
        assert row["messages"][-1]["content"] == expected


def test_prompts_come_from_tables_and_sharegpt_too(tmp_path):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "old"}]
    rows = [{"conversations": turns, "tools": '[{"name": "f"}]'}, {"conversations": turns[:1]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert read_prompts([tmp_path / "*.parquet"]) == [
        Prompt(id=1, messages=user("a"), tools=[{"name": "f"}]),
        Prompt(id=2, messages=user("a")),
    ]


def test_offered_tools_are_seen_by_the_target_and_kept_with_the_answer(target):
    tokenizer = copy.deepcopy(load_tokenizer(TargetConfig(path=str(target))))
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}w1"
    prompt = Prompt(id=1, messages=user("w1"), tools=[{"name": "w2"}])
    without = prompt_ids(Prompt(id=1, messages=user("w1")), tokenizer)
    assert prompt_ids(prompt, tokenizer) != without
    answer = SimpleNamespace(ids=[5], finish_reason="stop")
    row = output_row(prompt, answer, tokenizer, {5}, 0.0)
    assert row["tools"] == prompt.tools


def test_an_answer_given_with_other_tools_is_refused(tmp_path):
    prompt = Prompt(id=1, messages=user("w1"), tools=[{"name": "f"}])
    answer = {"role": "assistant", "content": "x"}
    row = {"id": 1, "messages": [*prompt.messages, answer], "tools": prompt.tools}
    output = write_rows(tmp_path / "a.jsonl", [row])
    assert rows_done(output, [prompt]) == {"1"}
    with pytest.raises(CacheMismatchError, match="line 1: id 1 answers another prompt"):
        rows_done(output, [Prompt(id=1, messages=user("w1"))])
