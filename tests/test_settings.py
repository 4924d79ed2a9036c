"""Files and flags become one checked config; every mistake is named and has its exit code."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hscache.settings
from hscache.errors import CacheMismatchError, ConfigError, StoppedBySignal
from hscache.settings import Command, main, parse, save_config, to_dict

PROJECT = Path(hscache.settings.__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    max_steps: int | None = None
    """Steps to take; none means all."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, found {self.lr}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...] = ()
    """Files to read."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What happens to an over-long conversation."""
    holdout: list[Path] = field(default_factory=list)
    """Files never trained on."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    shard_dir: Path
    """Folder of the cache,
    on a fast disk."""
    note: str | None = None
    """Free text."""
    verbose: bool = False
    """Say more."""
    target_layer_ids: tuple[int, ...] = (1, 8)
    """Blocks to capture."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How to step."""
    data: DataConfig = field(default_factory=lambda: DataConfig(train=("default.jsonl",)))


COMMAND = Command(name="go", help="Run.", config=RunConfig, run=f"{__name__}:run")
RAN: list[tuple[RunConfig, bool]] = []


def run(config: RunConfig, *, dry_run: bool) -> int | None:
    RAN.append((config, dry_run))
    match config.note:
        case "mismatch":
            raise CacheMismatchError("block_size: cache has 8, config has 16")
        case "bug":
            raise RuntimeError("surprise")
        case "sigterm":
            raise StoppedBySignal("saved checkpoint-10", signum=signal.SIGTERM)
        case "ctrl-c":
            raise KeyboardInterrupt
        case "three":
            return 3
    return None


def call(*argv: str) -> int:
    RAN.clear()
    return main("tool", "A tool.", [COMMAND, replace(COMMAND, name="stay")], argv)


def read(*argv: str, positional: str | None = None) -> RunConfig:
    return parse(replace(COMMAND, positional=positional), argv)


def write(folder: Path, text: str, name: str = "c.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    return str(caught.value)


def test_commands_of_two_words_form_a_group(capsys):
    commands = [replace(COMMAND, name="bench a"), replace(COMMAND, name="bench b"), COMMAND]
    RAN.clear()
    assert main("tool", "A tool.", commands, ["bench", "b", "--shard-dir", "d"]) == 0
    assert [config.shard_dir for config, _ in RAN] == [Path("d")]
    assert main("tool", "A tool.", commands, ["bench", "--help"]) == 0
    assert "usage: tool bench COMMAND" in capsys.readouterr().out
    assert main("tool", "A tool.", commands, ["bench", "c"]) == 2
    assert "tool bench: unknown command `c`" in capsys.readouterr().err


# --- values --------------------------------------------------------------------------------------


def test_defaults_hold_where_nothing_is_given():
    assert read("--shard-dir", "d") == RunConfig(shard_dir=Path("d"))


@pytest.mark.parametrize("flag", ["--shard-dir", "--shard_dir"])
def test_a_flag_may_be_spelled_with_hyphen_or_underscore(flag):
    assert read(flag, "d").shard_dir == read(f"{flag}=d").shard_dir == Path("d")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("optim.lr", "6e-4", 6e-4),
        ("optim.lr", "1e9", 1e9),
        ("optim.lr", "1", 1.0),
        ("optim.lr", ".5", 0.5),
        ("optim.max_steps", "1e9", 10**9),
        ("optim.max_steps", "1_000", 1000),
        ("optim.max_steps", "null", None),
        ("optim.max_steps", "none", None),
        ("optim.betas", "[0, 1e-3]", (0.0, 1e-3)),
        ("target_layer_ids", "[1, 8, 14]", (1, 8, 14)),
        ("target_layer_ids", "[]", ()),
        ("data.train", "[a.jsonl, b.jsonl]", ("a.jsonl", "b.jsonl")),
        ("data.train", "[1, true, null]", ("1", "true", "null")),
        ("data.train", "a,b.jsonl", ("a,b.jsonl",)),
        ("data.too_long", "truncate", "truncate"),
        ("data.holdout", "[~/h, x]", [Path.home() / "h", Path("x")]),
        ("verbose", "true", True),
        ("verbose", "false", False),
        ("note", "123", "123"),
        ("note", "1e9", "1e9"),
        ("note", "None", None),
        ("shard_dir", "~/cache", Path.home() / "cache"),
        ("shard_dir", "2026", Path("2026")),
    ],
)
def test_a_value_means_the_same_in_file_and_flag(tmp_path, name, text, expected):
    base = ["--shard-dir", "d"] if name != "shard_dir" else []
    nested = name.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(nested)]
    file = write(tmp_path, "\n".join(lines) + f" {text}\n")
    for config in (read(*base, f"--{name}", text), read(*base, "--config", file)):
        value: Any = config
        for part in nested:
            value = getattr(value, part)
        assert value == expected
        assert type(value) is type(expected)


def test_a_list_takes_several_words_up_to_the_next_flag():
    config = read("--data.train", "a", "b", "--target-layer-ids", "1", "-2", "--shard-dir", "d")
    assert config.data.train == ("a", "b")
    assert config.target_layer_ids == (1, -2)
    assert read("--shard-dir", "d", "--target-layer-ids", "3,4").target_layer_ids == (3, 4)


def test_a_bare_boolean_flag_is_true_and_takes_no_other_word():
    assert read("--verbose", "--shard-dir", "d").verbose is True
    assert read("--verbose", "d", positional="shard_dir") == read(
        "d", "--verbose", positional="shard_dir"
    )


def test_a_default_section_keeps_its_other_values():
    config = read("--shard-dir", "d", "--data.too-long", "truncate")
    assert config.data == DataConfig(train=("default.jsonl",), too_long="truncate")


def test_later_files_win_over_earlier_and_flags_over_files(tmp_path):
    first = write(tmp_path, "shard_dir: a\nnote: a\nverbose: true\n", "a.yaml")
    second = write(tmp_path, "shard_dir: b\nnote: b\n", "b.yaml")
    config = read("--note", "flag", "--config", first, "--config", second)
    assert (config.note, config.shard_dir, config.verbose) == ("flag", Path("b"), True)
    assert read("--config", first, "--note", "x", "--note", "y").note == "y"


def test_comments_and_empty_sections_are_allowed(tmp_path):
    file = write(tmp_path, "# all defaults\nshard_dir: d\noptim:\n  # lr: 1\ndata:\n")
    assert read("--config", file) == RunConfig(shard_dir=Path("d"))
    assert read("--config", write(tmp_path, "# nothing\n"), "--shard-dir", "d").note is None


# --- refusals ------------------------------------------------------------------------------------


def test_an_unknown_key_names_the_nearest_with_file_and_line(tmp_path):
    file = write(tmp_path, "shard_dir: d\noptim:\n  lrr: 1\n")
    text = refusal("--config", file)
    assert text == f"unknown setting `optim.lrr` in {file}, line 3; did you mean `optim.lr`?"


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--optim.lrr", "--optim.lr"),
        ("--shard-dri", "--shard-dir"),
        ("--max-steps", "--optim.max-steps"),
        ("--confg", "--config"),
        ("--dry-rnu", "--dry-run"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag, nearest):
    assert f"unknown setting `{flag}`" in refusal(flag, "1")
    assert f"did you mean `{nearest}`?" in refusal(flag, "1")


def test_a_section_given_a_value_lists_its_settings(tmp_path):
    text = refusal("--config", write(tmp_path, "shard_dir: d\noptim: 3\n"))
    assert "`optim`" in text
    assert "is a section" in text
    assert "`optim.lr`" in text


def test_a_nested_value_under_a_plain_setting_is_unknown(tmp_path):
    assert "did you mean `note`?" in refusal("--config", write(tmp_path, "note:\n  s: 1\n"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("optim.lr", "fast", "a number"),
        ("optim.lr", "true", "a number"),
        ("optim.max_steps", "1.5", "a whole number or none"),
        ("optim.betas", "[1, 2, 3]", "2 values (a number, a number)"),
        ("target_layer_ids", "[1, x]", "a list, each item a whole number"),
        ("data.too_long", "keep", "one of drop, truncate"),
        ("verbose", "2", "true or false"),
    ],
)
def test_a_wrong_type_names_setting_value_place_and_expectation(tmp_path, name, text, expected):
    value = text if name != "optim.betas" else "[1, 2, 3]"
    flat = f"{name}: {text}\n"
    for argv, place in (
        ((f"--{name}={text}",), "on the command line"),
        (("--config", write(tmp_path, flat)), f"in {tmp_path}/c.yaml, line 1"),
    ):
        assert refusal(*argv) == f"setting `{name}` {place}: found `{value}`, expected {expected}"


def test_missing_required_settings_are_named_with_their_help():
    text = refusal("--note", "x")
    assert "missing required setting `shard_dir`" in text
    assert "Folder of the cache, on a fast disk." in text
    assert "--shard-dir" in text


def test_a_refusing_post_init_says_where_the_setting_was_made(tmp_path):
    file = write(tmp_path, "shard_dir: d\noptim: {lr: -1}\n")
    text = refusal("--config", file)
    assert "section `optim`: lr must be above 0, found -1.0" in text
    assert f"`optim.lr` was set in {file}, line 2" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shard_dir: d\noptim: [\n  lr: 1\n", "line 4 is not valid YAML"),
        ("- a\n- b\n", "must hold `setting: value` lines, found sequence"),
        ("note: a\nverbose: true\nnote: b\n", "`note` is set twice"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, said):
    assert said in refusal("--config", write(tmp_path, text))


def test_missing_files_and_values_are_refused(tmp_path):
    assert "No such file" in refusal("--config", str(tmp_path / "none.yaml"))
    assert "not UTF-8" in refusal("--config", write_bytes(tmp_path, b"note: \xff\n"))
    assert "--config needs" in refusal("--config")
    assert refusal("--note", "--verbose") == "--note needs a value: text or none"
    assert "unexpected word `stray`" in refusal("stray")


def test_a_positional_setting_is_given_once_and_is_no_flag():
    for argv, word in ((("d", "e"), "e"), (("-v",), "-v"), (("--shard-dir", "d", "e"), "e")):
        with pytest.raises(ConfigError, match=f"unexpected word `{word}`"):
            read(*argv, positional="shard_dir")


def write_bytes(folder: Path, data: bytes) -> str:
    (folder / "bytes.yaml").write_bytes(data)
    return str(folder / "bytes.yaml")


# --- config out ----------------------------------------------------------------------------------


plain_text = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1
).filter(lambda text: text.lower() not in {"null", "none", "~"})
configs = st.builds(
    RunConfig,
    shard_dir=st.builds(
        lambda name: Path("/caches") / name, st.from_regex(r"[a-z0-9. ]+", fullmatch=True)
    ),
    note=st.none() | plain_text,
    verbose=st.booleans(),
    target_layer_ids=st.lists(st.integers()).map(tuple),
    optim=st.builds(
        OptimConfig,
        lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        betas=st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2),
        max_steps=st.none() | st.integers(),
    ),
    data=st.builds(
        DataConfig,
        train=st.lists(plain_text).map(tuple),
        too_long=st.sampled_from(["drop", "truncate"]),
        holdout=st.just([Path("/h/1"), Path("2")]),
    ),
)


@given(config=configs)
def test_a_saved_config_reads_back_as_itself(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.json"
    save_config(config, path)
    assert json.loads(path.read_text()) == to_dict(config)
    assert read("--config", str(path)) == config


def test_save_config_leaves_the_old_file_when_it_cannot_write(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    save_config(RunConfig(shard_dir=Path("old")), path)

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_config(RunConfig(shard_dir=Path("new")), path)
    assert json.loads(path.read_text())["shard_dir"] == "old"


def test_to_dict_holds_only_json_types():
    values = to_dict(RunConfig(shard_dir=Path("d")))
    assert values["shard_dir"] == "d"
    assert values["target_layer_ids"] == [1, 8]
    assert values["optim"] == {"lr": 6e-4, "betas": [0.9, 0.95], "max_steps": None}


# --- commands ------------------------------------------------------------------------------------


def test_the_command_gets_config_and_dry_run():
    assert call("go", "--shard-dir", "d") == 0
    assert [(RunConfig(shard_dir=Path("d")), False)] == RAN
    assert call("go", "--dry-run", "--shard-dir", "d") == 0
    assert RAN[0][1] is True


@pytest.mark.parametrize(
    ("note", "exit_code", "said"),
    [
        ("mismatch", 1, "tool go: block_size: cache has 8, config has 16\n"),
        ("sigterm", 143, "tool go: saved checkpoint-10\n"),
        ("ctrl-c", 130, "tool go: interrupted\n"),
        ("bug", 1, "tool go: RuntimeError: surprise\nrun again with --debug\n"),
        ("three", 3, ""),
    ],
)
def test_an_ending_has_its_exit_code_and_no_traceback(capsys, note, exit_code, said):
    assert call("go", "--shard-dir", "d", "--note", note) == exit_code
    assert capsys.readouterr().err == said


def test_debug_shows_the_traceback(capsys):
    assert call("go", "--shard-dir", "d", "--note", "bug", "--debug") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_wrong_config_starts_nothing_and_exits_2(capsys):
    assert call("go", "--shard-dir", "d", "--optim.lr", "fast") == 2
    assert RAN == []
    assert "optim.lr" in capsys.readouterr().err


def test_command_names_are_checked_and_listed(capsys):
    assert call("sta") == 2
    assert "did you mean `stay`?" in capsys.readouterr().err
    assert call("--shard-dir", "d") == 2
    assert "a command comes before the flags" in capsys.readouterr().err
    assert call() == 2
    assert "commands:\n  go    Run.\n  stay  Run." in capsys.readouterr().err
    assert call("--help") == 0
    assert "usage: tool COMMAND" in capsys.readouterr().out
    assert call("--version") == call("go", "--version") == 0
    assert capsys.readouterr().out.startswith("tool ")


def test_help_shows_every_setting_with_docstring_type_and_default(capsys):
    assert call("go", "--help") == 0
    text = capsys.readouterr().out
    assert "--shard-dir PATH            Folder of the cache, on a fast disk. (required)" in text
    assert "--optim.lr NUMBER           Peak learning rate. (default: 0.0006)" in text
    assert "--data.too-long drop|truncate\n" in text
    assert "\noptim: How to step.\n" in text
    assert "\ndata:\n" in text
    assert "(default: [default.jsonl])" in text
    for switch in ("--config", "--dry-run", "--debug", "--version"):
        assert switch in text
    assert max(len(line) for line in text.splitlines()) <= 100


SCRIPT = """
import sys
from dataclasses import dataclass
from hscache.settings import Command, main

@dataclass(frozen=True, kw_only=True)
class Config:
    lines: int = 1
    \"\"\"Lines to print.\"\"\"

def run(config, *, dry_run):
    for line in range(config.lines):
        print(line)

if __name__ == "__main__":
    code = main("tool", "A tool.", [Command(name="go", help="", config=Config, run="script:run")])
    assert not {"torch", "transformers"} & set(sys.modules)
    sys.exit(code)
"""


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, script, *argv],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("argv", "exit_code", "said"),
    [(["go", "--help"], 0, "Lines to print."), (["go", "--lnes=2"], 2, "did you mean `--lines`?")],
)
def test_a_process_answers_without_torch_and_exits_as_promised(tmp_path, argv, exit_code, said):
    with start(tmp_path, *argv) as process:
        out, err = process.communicate()
    assert said in (err if exit_code else out)
    assert process.returncode == exit_code


def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    with start(tmp_path, "go", "--lines=1e6") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE


def test_nan_and_infinity_are_numbers():
    assert math.isnan(read("--shard-dir", "d", "--optim.lr", ".nan").optim.lr)
    assert read("--shard-dir", "d", "--optim.lr", "inf").optim.lr == math.inf


@pytest.mark.parametrize("text", ["#", "# x", "- a", "{a: b}", "1e3", "~/x", "'", '"', "@", "%"])
def test_text_is_taken_as_it_is_written(text, tmp_path):
    # YAML means something by each of these.
    path = tmp_path / "config.json"
    config = replace(read("--shard-dir", "d"), note=text)
    save_config(config, path)
    assert read("--config", str(path)).note == text
