"""The settings that a config dataclass declares: names, types in a user's words, defaults, help.

Takes a dataclass type, hands on flat `SettingField`s, nearest-name suggestions and the text of
`--help`. Field help is the docstring under the field, read from the source when help is printed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = object()
"""The default of a setting that has none."""

ON_COMMAND_LINE = "on the command line"
NULL_WORDS = {"null", "none", "~"}
BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SWITCHES = {
    "--dry-run": "print the resolved plan and start nothing",
    "--debug": "show the traceback of an error",
    "--version": "print the version",
    "--help": "print this help",
}


@dataclass(frozen=True, kw_only=True)
class SettingField:
    """A setting without settings below it."""

    name: str
    """Dotted, as in a YAML path: `optim.lr`."""
    type: Any
    default: Any
    owner: type

    @property
    def flag(self) -> str:
        """The spelling on the command line: `--optim.max-steps`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Whether the value may be several words on the command line."""
        return any(typing.get_origin(t) in (list, tuple) for t in alternatives(self.type))


def setting_fields(config: type, prefix: str = "", instance: Any = None) -> Iterator[SettingField]:
    """Yield the settings of a config class; `instance` supplies the defaults where it exists."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        default = _default(field, hint) if instance is None else getattr(instance, field.name)
        if dataclasses.is_dataclass(hint):
            section = None if default is REQUIRED else default
            yield from setting_fields(typing.cast(type, hint), f"{prefix}{field.name}.", section)
        else:
            yield SettingField(name=prefix + field.name, type=hint, default=default, owner=config)


def _default(field: dataclasses.Field[Any], hint: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is dataclasses.MISSING:
        return REQUIRED
    if field.default_factory is hint and dataclasses.is_dataclass(hint):
        return REQUIRED  # the section's own fields say what is required
    return field.default_factory()


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def holds_text(hint: Any) -> bool:
    """Say whether a value or an item of this type may be text, which must not become a number."""
    if typing.get_origin(hint) is typing.Literal:
        return any(isinstance(choice, str) for choice in typing.get_args(hint))
    return hint in (str, Path, Any) or any(holds_text(item) for item in typing.get_args(hint))


def explain_unknown(name: str, where: str, fields: Mapping[str, SettingField]) -> str:
    """Return the message for a name that is no setting, with the nearest one that is."""
    on_command_line = where == ON_COMMAND_LINE

    def show(known: str) -> str:
        return f"--{known.replace('_', '-')}" if on_command_line else known

    below = [f"`{show(known)}`" for known in fields if known.startswith(name + ".")]
    if below:
        return f"`{show(name)}` {where} is a section, not a setting; it holds {', '.join(below)}"
    switches = ["config", *(switch[2:] for switch in SWITCHES)] if on_command_line else []
    nearest = nearest_name(name, [*fields, *switches])
    hint = f"did you mean `{show(nearest)}`?" if nearest else "--help lists the valid ones"
    return f"unknown setting `{show(name)}` {where}; {hint}"


def nearest_name(name: str, known: list[str]) -> str | None:
    """Return the known name closest to `name`, by the whole path or by its last part."""

    def closeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        last = difflib.SequenceMatcher(None, name.split(".")[-1], other.split(".")[-1]).ratio()
        return max(whole, 0.95 * last)

    best = max(known, key=closeness, default=None)
    return best if best is not None and closeness(best) >= 0.6 else None


def explain_type(hint: Any) -> str:
    """Return a type in a user's words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names.update({Path: "a path", type(None): "none", Any: "anything"})
    if hint in names:
        return names[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(explain_type(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"{len(args)} values ({', '.join(explain_type(arg) for arg in args)})"
    if origin in (list, tuple):
        return f"a list, each item {explain_type(args[0])}"
    return str(hint)


def format_value(value: Any) -> str:
    """Return a value as it would be written in a config file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value)


def help_text(field: SettingField) -> str:
    """Return the docstring under the field, on one line."""
    return _docstrings(field.owner).get(field.name.split(".")[-1], "")


def format_help(label: str, summary: str, positional: str | None, config: type) -> str:
    """Return the text of `--help`: the settings by section, each with type, help and default."""
    sections: dict[str, list[tuple[str, str]]] = {
        "settings": [("--config FILE", "YAML file of settings; repeatable, later files win")]
    }
    for field in setting_fields(config):
        required = field.default is REQUIRED
        note = "(required)" if required else f"(default: {format_value(field.default)})"
        row = (f"{field.flag} {_metavar(field.type)}", f"{help_text(field)} {note}".strip())
        sections.setdefault(field.name.rpartition(".")[0] or "settings", []).append(row)
    sections["every command"] = list(SWITCHES.items())
    words = f" {positional.upper()}" if positional else ""
    lines = [
        f"usage: {label}{words} [--config FILE] [--setting VALUE ...]",
        "",
        *textwrap.wrap(summary, 96),
        "Settings come from defaults, then YAML files, then flags.",
    ]
    for section, rows in sections.items():
        lines += ["", f"{section}: {_section_help(config, section)}".rstrip(), *_format_rows(rows)]
    return "\n".join(lines)


def _section_help(config: type, section: str) -> str:
    text = ""
    for part in section.split("."):
        if part not in typing.get_type_hints(config):
            return ""  # one of the headings of `format_help`
        text, config = _docstrings(config).get(part, ""), typing.get_type_hints(config)[part]
    return text


def _format_rows(rows: list[tuple[str, str]]) -> Iterator[str]:
    indent = 30
    for left, right in rows:
        wrapped = textwrap.wrap(right, 98 - indent)
        if len(left) + 4 > indent:
            yield f"  {left}"
        else:
            yield f"  {left:<{indent - 2}}{wrapped.pop(0)}"
        yield from (" " * indent + text for text in wrapped)


def _metavar(hint: Any) -> str:
    names = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", Path: "PATH"}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "|".join(str(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return "|".join("none" if arg is type(None) else _metavar(arg) for arg in args)
    if origin in (list, tuple):
        return f"{_metavar(args[0])} ..."
    return names.get(hint, "VALUE")


@functools.cache
def _docstrings(config: type) -> dict[str, str]:
    """Return the docstrings under a class's fields, which Python itself throws away."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                value, target = text.value, field.target
                if isinstance(value, ast.Constant) and isinstance(target, ast.Name):
                    found[target.id] = " ".join(str(value.value).split())
    return found
