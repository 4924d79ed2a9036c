"""Settings of a command: frozen dataclasses filled from YAML files and command-line flags.

Takes the commands of a console script and its argv, hands a checked config to the command's
function, and turns every error into one message and an exit code. Files and flags meet in one list
of (setting, text) pairs, and jsonargparse converts and checks each against its field's type, so
both obey the same rules. Collecting and explaining is ours (`settings_input`, `settings_fields`):
jsonargparse 4.53 alone names neither the line nor the nearest setting, rejects `--list a b` and
`none`, and has `1e9` be no integer. Nothing heavy is imported before parsing has succeeded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import signal
import sys
import textwrap
import traceback
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse

from hscache import __version__
from hscache.errors import ConfigError, HscacheError
from hscache.files import replace_atomically
from hscache.settings_fields import (
    BOOL_WORDS,
    NULL_WORDS,
    REQUIRED,
    SWITCHES,
    SettingField,
    alternatives,
    explain_type,
    explain_unknown,
    format_help,
    format_value,
    help_text,
    holds_text,
    nearest_name,
    setting_fields,
)
from hscache.settings_input import Entry, read_file, read_flags, split_list

_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One word after the program's name.

    `config` is a frozen `kw_only` dataclass whose fields may be such dataclasses again; a docstring
    under a field is its help. `run` is "module:function", called as
    `function(config, *, dry_run: bool) -> int | None`. `positional` names the field that takes
    words without a flag, as in `hscache inspect DIR`. A name of two words, as `bench store`, is one
    of a group of commands that share the first.
    """

    name: str
    help: str
    config: type
    run: str
    positional: str | None = None


def main(
    prog: str, description: str, commands: Sequence[Command], argv: Sequence[str] | None = None
) -> int:
    """Parse `argv`, run the command it names and return the process's exit code.

    0 done, 1 failure, 2 wrong usage or config, 128 + signal number after a stop by signal.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    label = prog
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            overview = _format_overview(prog, description, commands)
            print(overview, file=sys.stdout if args else sys.stderr)
            return 0 if args else 2
        if args[0] == "--version":
            print(f"{prog} {__version__}")
            return 0
        if group := _group(commands, args[0]):
            return main(f"{prog} {args[0]}", f"Commands of {prog} {args[0]}.", group, args[1:])
        command = _find_command(commands, args[0])
        label = f"{prog} {command.name}"
        if "--help" in args or "-h" in args:
            print(format_help(label, command.help, command.positional, command.config))
            return 0
        if "--version" in args:
            print(f"{prog} {__version__}")
            return 0
        dry_run = "--dry-run" in args or "--dry_run" in args
        switches = {*SWITCHES, "--dry_run"}
        config = parse(command, [arg for arg in args[1:] if arg not in switches])
        module, function = command.run.split(":")
        run = getattr(importlib.import_module(module), function)
        exit_code = run(config, dry_run=dry_run) or 0
        sys.stdout.flush()  # so that a closed pipe is noticed here
        return exit_code
    except HscacheError as error:
        return _fail(label, str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _fail(label, "interrupted", 128 + signal.SIGINT, debug)
    except BrokenPipeError:  # `hscache inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return _fail(label, text if debug else f"{text}\nrun again with --debug", 1, debug)


def parse(command: Command, argv: Sequence[str]) -> Any:
    """Return the command's config from flags and the files they name.

    Defaults < files from left to right < flags, wherever they stand. Raises `ConfigError` that
    names the setting, where it was written, what was found and what is expected.
    """
    fields = {field.name: field for field in setting_fields(command.config)}
    files, flags = read_flags(argv, fields, command.positional)
    entries = [entry for file in files for entry in read_file(file)] + flags
    return _assemble(command.config, fields, entries, None)


def read_part(path: Path, config: type) -> Any:
    """Return those settings of a file that `config` has; the others are another command's.

    Raises `ConfigError` as `parse` does.
    """
    fields = {field.name: field for field in setting_fields(config)}
    sections = {name[: name.rindex(".")] for name in fields if "." in name}
    wanted = fields.keys() | sections  # a section that is text (`target: tiny`) is a mistake
    entries = [entry for entry in read_file(path) if entry.name in wanted]
    return _assemble(config, fields, entries, path)


def _assemble(
    config: type, fields: dict[str, SettingField], entries: Sequence[Entry], path: Path | None
) -> Any:
    """Make the config; `path` is the only place its settings come from, if there is just one."""
    values: dict[str, Any] = {}
    for entry in entries:
        if entry.name not in fields:
            empty_section = entry.value == "" and any(
                n.startswith(entry.name + ".") for n in fields
            )
            if empty_section:  # `optim:` with all its lines commented out
                continue
            raise ConfigError(explain_unknown(entry.name, entry.where, fields))
        values[entry.name] = _convert(entry, fields[entry.name])
    missing = [f for f in fields.values() if f.default is REQUIRED and f.name not in values]
    if missing:
        lines = [f"  {f.name}  ({explain_type(f.type)})  {help_text(f)}" for f in missing]
        noun = "setting" if len(missing) == 1 else "settings"
        names = ", ".join(f"`{f.name}`" for f in missing)
        advice = f"give it as {missing[0].flag} or in the file of --config"
        if path is not None:
            advice = f"write it into {path}"
        raise ConfigError(f"missing required {noun} {names}\n" + "\n".join(lines) + "\n" + advice)
    defaults = {f.name: f.default for f in fields.values()}
    return _build(config, "", {**defaults, **values}, {e.name: e.where for e in entries})


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as JSON-able nested dicts: paths become text, tuples become lists."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(config)


def save_config(config: Any, path: Path) -> None:
    """Write the resolved config as JSON; a crash leaves the old file or the new one.

    JSON is YAML too, so the file can be given to `--config` again.
    """
    text = json.dumps(to_dict(config), indent=2, ensure_ascii=False)
    replace_atomically(path, f"{text}\n".encode())


def _convert(entry: Entry, field: SettingField) -> Any:
    """Return an entry's value in the field's type, or raise `ConfigError`."""
    value = entry.value
    optional = type(None) in alternatives(field.type)
    if isinstance(value, str) and value.lower() in NULL_WORDS | {""} and optional:
        return None
    if isinstance(value, str) and field.is_list:
        value = split_list(value, field)
    value = _resolve(value, holds_text(field.type))
    if isinstance(value, str) and set(alternatives(field.type)) <= {str, type(None)}:
        return value  # jsonargparse would read YAML in it: "#" alone would be a comment, so None
    try:
        parsed = _checker(field.type).parse_object({"value": value})
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        found = f"nothing, expected {explain_type(field.type)}"
        if entry.value != "":
            found = f"`{format_value(entry.value)}`, expected {explain_type(field.type)}"
        raise ConfigError(f"setting `{field.name}` {entry.where}: found {found}") from error
    return _expand_home(parsed["value"])


def _expand_home(value: Any) -> Any:
    """Expand `~` as a shell does, also in a file, where no shell sees it."""
    if isinstance(value, list | tuple):
        return type(value)(_expand_home(item) for item in value)
    return value.expanduser() if isinstance(value, Path) else value


@functools.cache
def _checker(hint: Any) -> jsonargparse.ArgumentParser:
    """Return a parser of one value; fields are checked one by one to name the one at fault."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def _resolve(value: Any, keep_text: bool) -> Any:
    """Turn text into numbers, booleans and None. Unlike YAML 1.1, `6e-4` and `1e9` are numbers."""
    if isinstance(value, list):
        return [_resolve(item, keep_text) for item in value]
    if isinstance(value, dict):
        return {key: _resolve(item, keep_text) for key, item in value.items()}
    if keep_text:
        return value
    if value.lower() in BOOL_WORDS:
        return BOOL_WORDS[value.lower()]
    if value.lower() in NULL_WORDS:
        return None
    if _INT.fullmatch(value):
        return int(value)
    if _FLOAT.fullmatch(value):
        number = float(value.replace(".inf", "inf").replace(".nan", "nan"))
        return int(number) if number.is_integer() else number  # a float field makes it float again
    return value


def _build(config: type, prefix: str, values: dict[str, Any], where: dict[str, str]) -> Any:
    """Make the dataclass tree; what a `__post_init__` refuses becomes a `ConfigError`."""
    hints = typing.get_type_hints(config)
    arguments = {}
    for field in dataclasses.fields(config):
        name, hint = prefix + field.name, hints[field.name]
        nested = dataclasses.is_dataclass(hint)
        arguments[field.name] = _build(hint, name + ".", values, where) if nested else values[name]
    try:
        return config(**arguments)
    except ValueError as error:
        section = f"section `{prefix[:-1]}`: " if prefix and prefix not in str(error) else ""
        words = set(re.findall(r"\w+", str(error)))
        named = [n for n in where if n.startswith(prefix) and n.rpartition(".")[2] in words]
        origin = "".join(f"\n  `{name}` was set {where[name]}" for name in named)
        raise ConfigError(f"{section}{error}{origin}") from error


def _walk(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _group(commands: Sequence[Command], word: str) -> list[Command]:
    """Return the commands whose names are `word` and another one, under that other name."""
    return [
        dataclasses.replace(command, name=command.name.removeprefix(f"{word} "))
        for command in commands
        if command.name.startswith(f"{word} ")
    ]


def _find_command(commands: Sequence[Command], name: str) -> Command:
    by_name = {command.name: command for command in commands}
    if name not in by_name:
        nearest = nearest_name(name, list(by_name))
        hint = f"did you mean `{nearest}`?" if nearest else f"commands: {', '.join(by_name)}"
        what = (
            "a command comes before the flags; found" if name.startswith("-") else "unknown command"
        )
        raise ConfigError(f"{what} `{name}`; {hint}")
    return by_name[name]


def _format_overview(prog: str, description: str, commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in commands]
    return (
        f"usage: {prog} COMMAND [--config FILE] [--setting VALUE ...]\n\n"
        f"{textwrap.fill(description, 96)}\n\ncommands:\n" + "\n".join(lines) + "\n\n"
        f"`{prog} COMMAND --help` lists the settings of a command; "
        f"`{prog} --version` prints the version."
    )


def _fail(label: str, message: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"{label}: {message}", file=sys.stderr)
    return exit_code
