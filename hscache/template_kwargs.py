"""Variables of a chat template, such as `enable_thinking`, set once for all that is rendered.

Takes the setting's JSON, a tokenizer or input files; leaves the values in the tokenizer's template,
so that every later render and the template's hash hold them. Says where rows were answered under
other values than those they are about to be rendered with.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hscache.errors import ConfigError, DataError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_template_kwargs(text: str | None) -> dict[str, str | int | float | bool]:
    """Return the object in a setting; raise ConfigError for other JSON, or values that are not
    texts, numbers, true or false."""
    try:
        values = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"target.chat_template_kwargs is not JSON: {error}. Found {text!r}; expected an object "
            'such as {"enable_thinking": false}, on a command line within single quotes.'
        ) from error
    if not isinstance(values, dict) or not all(
        _NAME.fullmatch(name) and isinstance(value, str | int | float)
        for name, value in values.items()
    ):
        raise ConfigError(
            f"target.chat_template_kwargs is {text}; expected a JSON object of names and texts, "
            'numbers, true or false, such as {"enable_thinking": false}.'
        )
    return values


def set_template_kwargs(tokenizer: Any, values: dict[str, Any]) -> None:
    """Write the values into the tokenizer's chat template, as its first statements.

    Raises ConfigError for a variable that the template does not name: it would change nothing.
    """
    if not values:
        return
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {"default": template}
    for name in values:
        if not any(re.search(rf"\b{name}\b", text) for text in templates.values()):
            raise ConfigError(
                f"target.chat_template_kwargs sets {name}, which the target's chat template does "
                "not use. Correct the name, or leave it out."
            )
    # The empty print keeps a line break that the template begins with: one after a block is cut.
    head = "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in values.items())
    changed = {name: f"{head}{{{{ '' }}}}{text}" for name, text in templates.items()}
    tokenizer.chat_template = changed if isinstance(template, dict) else changed["default"]


def require_answered_so(paths: Sequence[Path], values: dict[str, Any]) -> None:
    """Raise DataError for a file whose rows a server answered under other template variables.

    `hscache regenerate` keeps those it asked for beside its output, in `NAME.settings.json`.
    """
    for path in paths:
        beside = path.with_name(f"{path.name}.settings.json")
        try:
            settings = json.loads(beside.read_bytes())
            seen = (settings.get("extra_body") or {}).get("chat_template_kwargs") or {}
        except (OSError, ValueError, AttributeError):
            continue  # not an output of ours: nothing is known
        if json.dumps(seen, sort_keys=True) != json.dumps(values, sort_keys=True):
            raise DataError(
                f"the rows of {path} were answered with chat_template_kwargs {json.dumps(seen)} "
                f"(says {beside.name}), and would be rendered here with {json.dumps(values)}: not "
                f"the prompts the target saw. Give --target.chat-template-kwargs "
                f"'{json.dumps(seen)}'; or move {beside.name} away if this is meant."
            )


def _literal(value: Any) -> str:
    """Return a value as Jinja reads it: texts as in Python, `true` as in JSON."""
    return json.dumps(value, ensure_ascii=False)
