"""What a user wrote, as a flat list of (setting, text, place), before any value is interpreted.

Takes the words of a command line and the YAML files it names; hands on entries to `settings.py`.
All scalars stay text, so that a value means the same in a file and in a flag; files are composed to
nodes rather than loaded, because nodes know their lines and repeated keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hscache.errors import ConfigError
from hscache.settings_fields import (
    BOOL_WORDS,
    NULL_WORDS,
    ON_COMMAND_LINE,
    SettingField,
    alternatives,
    explain_type,
    explain_unknown,
    holds_text,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One value a user wrote: text, or a list (of lists) of text."""

    name: str
    value: Any
    where: str
    """"in configs/x.yaml, line 3" or "on the command line"."""


def read_flags(
    argv: Sequence[str], fields: Mapping[str, SettingField], positional: str | None
) -> tuple[list[Path], list[Entry]]:
    """Split argv into config files and settings; the value of a list may be several words.

    Raises ConfigError for a word or a flag that nothing takes.
    """
    files: list[Path] = []
    entries: list[Entry] = []
    words = list(argv)
    where = ON_COMMAND_LINE
    while words:
        word = words.pop(0)
        if not word.startswith("--"):  # the positional setting
            taken = any(entry.name == positional for entry in entries)
            if positional is None or taken or word.startswith("-"):
                raise ConfigError(
                    f"unexpected word `{word}` on the command line; flags begin with `--`"
                )
            more = _take(words) if fields[positional].is_list else []
            entries.append(Entry(name=positional, value=_words([word, *more]), where=where))
            continue
        flag, equals, inline = word.partition("=")
        name = flag[2:].replace("-", "_")
        if name == "config":
            following = [inline] if equals else _take(words, 1)
            if not following:
                raise ConfigError("--config needs the path of a YAML file")
            files.append(Path(following[0]))
            continue
        field = fields.get(name)
        if field is None:
            raise ConfigError(explain_unknown(name, where, fields))
        if equals:
            value: Any = inline
        elif bool in alternatives(field.type) and not (words and _is_bool_word(words[0])):
            value = "true"  # a bare `--flag`
        else:
            following = _take(words) if field.is_list else _take(words, 1)
            if not following:
                raise ConfigError(f"{field.flag} needs a value: {explain_type(field.type)}")
            value = _words(following)
        entries.append(Entry(name=name, value=value, where=where))
    return files, entries


def read_file(path: Path) -> list[Entry]:
    """Return the settings of a YAML file with their lines; all scalars stay text here.

    Raises ConfigError where it cannot be read or is no mapping.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line} is not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must hold `setting: value` lines, found {root.id}")
    entries = list(_flatten(root, "", path))
    lines: dict[str, str] = {}
    for entry in entries:
        if entry.name in lines:
            raise ConfigError(f"`{entry.name}` is set twice: {lines[entry.name]} and {entry.where}")
        lines[entry.name] = entry.where
    return entries


def split_list(text: str, field: SettingField) -> Any:
    """Return the items of `[a, b]`, of `1,2` where items are numbers, or of a lone word."""
    if text.lstrip().startswith("["):
        try:
            return _node_text(yaml.compose(text, Loader=yaml.BaseLoader))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"setting `{field.name}`: `{text}` is not a list such as [a, b]"
            ) from error
    if not holds_text(field.type):
        return [item.strip() for item in text.split(",") if item.strip()]
    return [text] if text else []


def _take(words: list[str], limit: int | None = None) -> list[str]:
    """Remove and return the words up to the next flag; negative numbers are words."""
    taken: list[str] = []
    while words and not words[0].startswith("--") and (limit is None or len(taken) < limit):
        taken.append(words.pop(0))
    return taken


def _words(words: list[str]) -> Any:
    return words[0] if len(words) == 1 else words


def _is_bool_word(word: str) -> bool:
    return word.lower() in BOOL_WORDS or word.lower() in NULL_WORDS


def _flatten(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[Entry]:
    for key, value in node.value:
        name = prefix + str(key.value)
        if isinstance(value, yaml.MappingNode):
            yield from _flatten(value, name + ".", path)
        else:
            where = f"in {path}, line {key.start_mark.line + 1}"
            yield Entry(name=name, value=_node_text(value), where=where)


def _node_text(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_node_text(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _node_text(value) for key, value in node.value}
    return node.value
