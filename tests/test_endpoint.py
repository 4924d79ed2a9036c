"""`hscache regenerate --endpoint` against a server that misbehaves, over real HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from chat_server import CUT, HANG, ChatServer, Fault, chat_server, completion
from conftest import write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from hscache import endpoint, endpoint_answers
from hscache.answers import Tally
from hscache.config import DataConfig
from hscache.documents import load_corpus
from hscache.endpoint import Backoff, asked_wait_s
from hscache.errors import CacheMismatchError, ConfigError, HscacheError, StoppedBySignal
from hscache.regenerate import regenerate, run
from hscache.regenerate_config import RegenerateConfig

ROOT = Path(__file__).parents[1]
KEY = "sk-very-secret-0123456789"
NUM_ROWS = 12


@pytest.fixture
def server():
    with chat_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick_and_without_a_key(monkeypatch):
    monkeypatch.delenv("HSCACHE_API_KEY", raising=False)
    quick = {"first_s": 0.01, "longest_s": 0.05}
    monkeypatch.setattr(endpoint_answers, "Backoff", lambda: Backoff(**quick))


def write_prompts(folder: Path, num_rows: int = NUM_ROWS) -> Path:
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"q{i}"}]} for i in range(num_rows)
    ]
    return write_jsonl(folder / "prompts.jsonl", rows)


def config_for(server: ChatServer, folder: Path, **changes) -> RegenerateConfig:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(folder)
    settings = {"endpoint": server.url, "concurrency": 4, "attempts": 4, **changes}
    return RegenerateConfig(
        **{"prompts": (str(prompts),), "output": folder / "out" / "answers.jsonl", **settings}
    )


def rows_of(path: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_prompt_is_answered_once_and_usage_is_counted(server, tmp_path):
    config = config_for(server, tmp_path)
    tally = regenerate(config)
    rows = rows_of(config.output)
    assert set(rows) == {f"r{i}" for i in range(NUM_ROWS)}
    assert rows["r3"] == {
        "id": "r3",
        "messages": [
            {"role": "user", "content": "q3"},
            {"role": "assistant", "content": "answer to q3"},
        ],
        "finish_reason": "stop",
        "temperature": 0.7,
        "prompt_tokens": 7,
        "completion_tokens": 3,
    }
    assert (tally.num_rows, tally.num_stopped, tally.num_retries) == (NUM_ROWS, NUM_ROWS, 0)
    assert (tally.num_prompt_tokens, tally.num_new_tokens) == (7 * NUM_ROWS, 3 * NUM_ROWS)
    assert sorted(server.questions()) == sorted(f"q{i}" for i in range(NUM_ROWS))
    before = config.output.read_bytes()
    again = regenerate(config)
    assert (again.num_already_done, again.num_new_tokens) == (NUM_ROWS, 0)
    assert config.output.read_bytes() == before
    assert len(server.bodies) == NUM_ROWS


def test_sampling_options_and_tools_are_sent(server, tmp_path):
    server.models = ["big", "small"]
    call = {"function": {"name": "f", "arguments": {"x": "\u00e4"}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    rows = [{"id": 1, "messages": turns, "tools": tools}, {"id": 2, "messages": turns}]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    config = config_for(
        server, tmp_path, model="small", temperature=0.5, top_p=0.9, max_new_tokens=99,
        extra_body='{"chat_template_kwargs": {"enable_thinking": false}}', concurrency=1,
    )  # fmt: skip
    regenerate(config)
    first, second = server.bodies
    sent_call = first["messages"][1]["tool_calls"][0]
    assert json.loads(sent_call["function"]["arguments"]) == {"x": "\u00e4"}
    assert (sent_call["type"], sent_call["id"]) == (
        "function",
        first["messages"][2]["tool_call_id"],
    )
    assert first.pop("tools") == tools
    assert first.pop("seed") != second.pop("seed")  # each row has random numbers of its own
    del first["messages"]
    assert first == {
        "model": "small",
        "max_tokens": 99,
        "temperature": 0.5,
        "top_p": 0.9,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    row = rows_of(config.output)[1]
    assert row["messages"][1]["tool_calls"] == [call]
    assert row["tools"] == tools


PASSING = {
    "500": Fault(status=500, body={"error": {"message": "boom"}}),
    "503": Fault(status=503, body=b"<html>"),
    "429": Fault(status=429, body={}),
    "hang": HANG,
    "cut connection": CUT,
    "half a JSON": Fault(body=b'{"choices": [{"mess'),
    "no object": Fault(body=b"[1]"),
    "an error of status 200": Fault(body={"error": {"message": "overloaded"}}),
    "no message": Fault(body={"choices": [{"message": None, "finish_reason": "stop"}]}),
    "aborted": Fault(body=completion("half an ans", "abort")),
    "not said how it ended": Fault(body=completion("half an ans", None)),
    "half a surrogate pair": Fault(body=completion("half a pair \ud83d")),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_what_may_pass_is_asked_again(server, tmp_path, caplog, fault):
    server.faults = {"q2": [fault], "q5": [fault, fault]}
    config = config_for(server, tmp_path, timeout_s=1.5 if fault == HANG else 30)
    tally = regenerate(config)
    assert tally.num_retries == 3
    assert caplog.text.count("asking again (said once): ") == 1
    rows = rows_of(config.output)
    assert {row["messages"][-1]["content"] for row in rows.values()} == {
        f"answer to q{i}" for i in range(NUM_ROWS)
    }


def test_a_response_without_an_end_is_not_kept_in_memory(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "_LARGEST_ANSWER", 10_000)
    packed = zlib.compress(b" " * 1_000_000)
    long = Fault(body=packed, headers={"Content-Encoding": "deflate"})
    server.faults = {"q1": [Fault(body=b" " * 1_000_000), long]}
    assert regenerate(config_for(server, tmp_path)).num_retries == 2
    assert "a response of more than 0 MB" in caplog.text


def test_a_proxy_that_cannot_be_used_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "::::bad")
    with pytest.raises(ConfigError, match=r"ALL_PROXY.*cannot be used: Invalid port"):
        regenerate(config_for(server, tmp_path))


def test_a_server_that_asks_for_a_wait_gets_it(server, tmp_path):
    write_prompts(tmp_path, 1)
    server.faults = {"q0": [Fault(status=429, body={}, headers={"Retry-After": "1"})]}
    regenerate(config_for(server, tmp_path))
    first, second = server.times_s
    assert second - first >= 1


def test_a_wait_may_be_asked_for_in_seconds_or_by_a_date():
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    for value, low, high in (
        ("7", 7, 7), ("1.5", 1.5, 1.5), (in_a_minute, 1, 60), ("soon", 0, 0), ("-1", 0, 0),
        (formatdate(0, usegmt=True), 0, 0),
    ):  # fmt: skip
        response = httpx.Response(429, headers={"Retry-After": value})
        assert low <= asked_wait_s(response) <= high
    assert asked_wait_s(httpx.Response(429)) == 0


@given(
    attempt=st.integers(1, 1000),
    asked_s=st.floats(0, 1e6),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_waits_double_up_to_a_limit_and_obey_the_server(attempt, asked_s, uniform):
    backoff = Backoff()
    wait_s = backoff.wait_s(attempt, 0.0, uniform)
    doubled_s = min(30.0, 2.0 ** (attempt - 1))
    assert doubled_s / 2 <= wait_s <= doubled_s
    assert backoff.wait_s(attempt, asked_s, uniform) >= min(asked_s, 300.0)
    assert backoff.wait_s(attempt, asked_s, uniform) <= 330.0


def test_no_more_requests_are_in_flight_than_allowed(server, tmp_path):
    write_prompts(tmp_path, 40)
    server.hold_until = 5  # so the bound is also reached
    server.wait_s = 0.005
    server.faults = {f"q{i}": [Fault(status=500, body={})] for i in range(0, 40, 3)}
    regenerate(config_for(server, tmp_path, concurrency=5))
    assert server.most_in_flight == 5


def test_a_row_the_server_refuses_is_not_asked_again_and_its_words_are_shown_once(
    server, tmp_path, caplog, capsys
):
    body = {"error": {"message": "tool turns are not supported (row 17)"}}
    server.faults = {f"q{i}": [Fault(status=400, body=body)] for i in (3, 7)}
    config = config_for(server, tmp_path)
    with pytest.raises(HscacheError) as failed:
        run(config, dry_run=False)
    assert failed.value.exit_code == 1
    assert "2 of 12 rows have no answer" in str(failed.value)
    assert re.search("refused by the server: ('r3', 'r7'|'r7', 'r3')\n", str(failed.value))
    assert "run the same command again" in " ".join(str(failed.value).split())
    assert len(server.bodies) == NUM_ROWS
    assert caplog.text.count("tool turns are not supported") == 1
    assert "refused by the server" in capsys.readouterr().out
    assert set(rows_of(config.output)) == {f"r{i}" for i in range(NUM_ROWS) if i not in (3, 7)}
    assert regenerate(config).num_failed == 0
    assert len(rows_of(config.output)) == NUM_ROWS


def test_a_row_given_up_is_named_and_a_second_run_answers_it_alone(server, tmp_path):
    server.faults = {"q4": [Fault(status=500, body={})] * 4}
    config = config_for(server, tmp_path)
    with pytest.raises(HscacheError, match="given up after 4 attempts: 'r4'"):
        run(config, dry_run=False)
    assert server.questions().count("q4") == 4
    assert set(rows_of(config.output)) == {f"r{i}" for i in range(NUM_ROWS) if i != 4}
    num_before = len(server.bodies)
    assert regenerate(config).num_stopped == 1
    assert server.questions()[num_before:] == ["q4"]


def test_a_row_beyond_the_context_is_left_out_as_in_a_local_run(server, tmp_path):
    body = {"error": {"message": "This model's maximum context length is 512 tokens."}}
    server.faults = {"q1": [Fault(status=400, body=body)]}
    config = config_for(server, tmp_path)
    tally = regenerate(config)
    assert (tally.num_too_long, tally.num_failed, tally.num_rows) == (1, 0, NUM_ROWS)
    assert "r1" not in rows_of(config.output)
    server.always = Fault(status=400, body=body)
    with pytest.raises(ConfigError, match="no row fits"):
        regenerate(config_for(server, tmp_path, output=tmp_path / "other.jsonl"))


@pytest.mark.parametrize(
    ("status", "word"), [(401, "HSCACHE_API_KEY"), (404, "--model"), (307, "elsewhere")]
)
def test_what_no_request_can_pass_ends_the_run_at_once(server, tmp_path, monkeypatch, status, word):
    monkeypatch.setenv("HSCACHE_API_KEY", KEY)
    write_prompts(tmp_path, 100)
    server.always = Fault(
        status=status, body={"message": f"no, {KEY}"}, headers={"Location": "elsewhere"}
    )
    with pytest.raises(ConfigError, match=word) as refused:
        regenerate(config_for(server, tmp_path))
    assert "no, ***" in str(refused.value)
    assert KEY not in str(refused.value)
    assert len(server.bodies) <= 4


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_answers_nothing_is_not_asked_for_every_row(server, tmp_path, status):
    write_prompts(tmp_path, 100)
    server.always = Fault(status=status, body={"message": "no"})
    with pytest.raises(HscacheError, match=r"(1[6-9]|20) rows in a row"):
        regenerate(config_for(server, tmp_path, attempts=1))
    assert 16 <= len(server.bodies) <= 20


def test_neighbouring_rows_that_are_refused_do_not_end_a_run_with_answers(server, tmp_path):
    write_prompts(tmp_path, 40)
    server.faults = {f"q{i}": [Fault(status=400, body={})] for i in range(10, 35)}
    tally = regenerate(config_for(server, tmp_path, concurrency=1))
    assert (tally.num_stopped, len(tally.refused_ids)) == (15, 25)


def test_an_answer_cut_at_the_limit_is_marked_and_not_supervised_past_the_cut(
    server, tmp_path, tokenizer
):
    write_prompts(tmp_path, 2)
    server.faults = {"q1": [Fault(body=completion("once upon \ufffd", "length"))]}
    config = config_for(server, tmp_path)
    tally = regenerate(config)
    assert (tally.num_stopped, tally.num_cut) == (1, 1)
    row = rows_of(config.output)["r1"]
    assert (row["finish_reason"], row["messages"][-1]["content"]) == ("length", "once upon ")
    corpus = load_corpus(DataConfig(train=(str(config.output),)), tokenizer, seed=0)
    whole, cut = sorted(
        (tokenizer.decode(d.ids_T[d.loss_mask_T == 1]) for d in corpus.documents), reverse=True
    )
    assert (whole, cut) == ("once upon", "answer to q0<|im_end|>")
    assert corpus.report["last answer cut by its token limit"] == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_under_one_name(server, tmp_path, name):
    write_prompts(tmp_path, 2)
    server.faults = {
        "q0": [Fault(body=completion("so", **{name: "hm"}))],
        "q1": [Fault(body=completion(None, "length", **{name: "hm, \ufffd"}))],
    }
    config = config_for(server, tmp_path)
    regenerate(config)
    rows = rows_of(config.output)
    whole = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    cut = {"role": "assistant", "content": "", "reasoning_content": "hm, "}
    assert [rows[f"r{i}"]["messages"][-1] for i in (0, 1)] == [whole, cut]


def test_calls_of_tools_are_kept_unless_cut_or_no_json(server, tmp_path):
    write_prompts(tmp_path, 3)

    def calls(arguments: str) -> list[dict]:
        function = {"name": "f", "arguments": arguments}
        return [{"id": "c1", "type": "function", "function": function}]

    server.faults = {
        "q0": [Fault(body=completion(None, "tool_calls", tool_calls=calls('{"x": 1}')))],
        "q1": [Fault(body=completion("I call", "length", tool_calls=calls('{"x":')))],
        "q2": [Fault(body=completion(None, "tool_calls", tool_calls=calls("{x}")))],
    }
    config = config_for(server, tmp_path)
    tally = regenerate(config)
    rows = rows_of(config.output)
    assert rows["r0"]["messages"][-1]["tool_calls"] == calls('{"x": 1}')
    assert "tool_calls" not in rows["r1"]["messages"][-1]
    assert (tally.refused_ids, tally.num_retries) == (["r2"], 0)


def test_empty_answers_and_missing_usage_are_kept_and_counted(server, tmp_path):
    write_prompts(tmp_path, 2)
    without = completion("an answer")
    del without["usage"]
    server.faults = {"q0": [Fault(body=completion(""))], "q1": [Fault(body=without)]}
    config = config_for(server, tmp_path)
    tally = regenerate(config)
    rows = rows_of(config.output)
    assert (rows["r0"]["messages"][-1]["content"], rows["r0"]["completion_tokens"]) == ("", 0)
    assert rows["r1"]["completion_tokens"] is None
    assert (tally.num_without_usage, tally.num_stopped) == (1, 2)
    assert "1 answers were not counted" in tally.table()


def command(config: RegenerateConfig) -> list[str]:
    code = (
        "import sys; from hscache.cli import main; code = main(); "
        "heavy = {'torch', 'transformers'} & sys.modules.keys(); "
        "print('imported', heavy) if heavy else None; sys.exit(code)"
    )
    flags = {
        "prompts": config.prompts[0],
        "output": config.output,
        "endpoint": config.endpoint,
        "concurrency": config.concurrency,
    }
    return [sys.executable, "-c", code, "regenerate", *(f"--{n}={v}" for n, v in flags.items())]


def start(config: RegenerateConfig) -> subprocess.Popen:
    return subprocess.Popen(
        command(config),
        cwd=config.output.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HSCACHE_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(path: Path, process: subprocess.Popen, num_rows: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < num_rows:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)


def test_kill_9_and_sigterm_and_a_third_run_give_every_row_once(server, tmp_path):
    write_prompts(tmp_path, 60)
    server.wait_s = 0.05
    config = config_for(server, tmp_path, output=tmp_path / "killed.jsonl")

    killed = start(config)
    wait_for_rows(config.output, killed, 8)
    killed.kill()
    killed.communicate()
    num_kept = config.output.read_bytes().count(b"\n")
    assert 8 <= num_kept < 50
    with config.output.open("ab") as output:
        output.write(b'{"id": "r59", "mess')  # as a kill in the middle of a write would leave it

    stopped = start(config)
    wait_for_rows(config.output, stopped, num_kept + 4)
    stopped.send_signal(signal.SIGTERM)
    shown = stopped.communicate()[0]
    assert stopped.returncode == 128 + signal.SIGTERM, shown
    assert "run the same command again to continue" in shown
    assert "Traceback" not in shown
    num_stopped = config.output.read_bytes().count(b"\n")
    assert num_kept + 4 <= num_stopped < 60

    ended = start(config)
    shown += ended.communicate()[0]
    assert ended.returncode == 0, shown
    assert "imported" not in shown  # neither torch nor transformers
    rows = rows_of(config.output)
    assert set(rows) == {f"r{i}" for i in range(60)}
    # Asked twice is only what was in flight at one of the two stops.
    assert sum(server.answered.values()) <= 60 + 2 * config.concurrency
    whole = config_for(server, tmp_path, output=tmp_path / "whole.jsonl")
    regenerate(whole)
    assert rows == rows_of(whole.output)

    assert server.keys == {f"Bearer {KEY}", None}  # sent, if there is one, and found nowhere
    assert KEY not in shown
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or KEY not in path.read_text()


def test_a_signal_does_not_wait_for_a_server_that_hangs(server, tmp_path):
    server.faults = {"q5": [HANG]}
    config = config_for(server, tmp_path)

    def send() -> None:
        while not (config.output.exists() and config.output.read_bytes().count(b"\n") == 11):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(StoppedBySignal, match="after 11 answers"):
        regenerate(config)
    sender.join()


def test_a_server_that_is_not_there_is_said_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refused, and no one else's
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        write_prompts(tmp_path)
        config = RegenerateConfig(
            endpoint=url, prompts=(str(tmp_path / "prompts.jsonl"),), output=tmp_path / "a.jsonl"
        )
        with pytest.raises(HscacheError, match=f"cannot reach .*{url}/v1: .*Connection refused"):
            regenerate(config)
    assert not config.output.exists()


def test_the_model_is_found_or_asked_for(server, tmp_path, capsys):
    config = config_for(server, tmp_path)
    run(config, dry_run=True)
    shown = capsys.readouterr().out
    assert '"tiny"' in shown
    assert "to answer" in shown
    assert not config.output.parent.exists()
    assert server.bodies == []
    for names, found in ((["a", "b"], "has a, b"), ([], "lists no models")):
        server.models = names
        with pytest.raises(ConfigError, match=f"{found}.*--model"):
            regenerate(config)


def test_other_sampling_is_refused_and_another_address_is_not(server, tmp_path):
    regenerate(config_for(server, tmp_path))
    with chat_server() as moved:
        assert regenerate(config_for(moved, tmp_path)).num_already_done == NUM_ROWS
        for changes, shown in (
            ({"top_p": 0.5}, r"top_p +null +0.5"),
            ({"extra_body": '{"top_k": 5}'}, r'extra_body +{} +{"top_k": 5}'),
            ({"model": "other"}, r'model +"tiny" +"other"'),
        ):
            with pytest.raises(CacheMismatchError, match=shown):
                regenerate(config_for(moved, tmp_path, **changes))


def test_rates_are_of_this_run_only():
    tally = Tally(num_already_done=1000, num_stopped=2, num_new_tokens=30, wall_s=3.0)
    assert "10 tokens/s" in tally.table()
