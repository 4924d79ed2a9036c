"""Conversations as text, and which characters of it the assistant generated.

Takes a checked `Conversation` and a tokenizer with a chat template; hands on `Rendered`. The spans
come from the template's `{% generation %}` tags where it has them, else from the boundaries between
renders of growing prefixes; whatever would make them a guess is refused. Of a template that
rewrites earlier turns only the last answer can be had, which is rendered as a server would.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from hscache.config import Answers
from hscache.conversations import Conversation
from hscache.errors import DataError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINK, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text, and the character spans the assistant generated."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(row: Conversation, tokenizer: Any, answers: Answers = "all") -> Rendered:
    """Render a conversation and find what the assistant generated, end-of-turn marker included.

    With `answers` "last" the turns after the last answer are left out, and only this answer has a
    span: the text is what a server that was asked for it would have seen, and the answer.

    Without generation tags, an answer starts where the render of the turns before it, with a
    generation prompt, ends; it ends where the render of the turns up to it ends, trailing white
    space aside. A truncated last answer ends the document with what was said. Raises DataError
    naming row and turn if a render is not an append, or leaves out thinking or tool calls.
    """
    only_last = answers == "last"
    if only_last:
        row = _up_to_last_answer(row)
    full = render_turns(row, tokenizer, len(row.messages))
    if _GENERATION_TAG.search(tokenizer.get_chat_template(tools=row.tools)):
        spans = _tagged_spans(row, tokenizer, full)
        if only_last and row.messages[-1]["role"] == "assistant":
            start = len(_prompt_of(row, tokenizer, len(row.messages) - 1, full))
            spans = [(max(low, start), high) for low, high in spans if high > start]
    else:
        spans = _boundary_spans(row, tokenizer, full, only_last=only_last)
    last = len(row.messages) - 1
    if not row.truncated or row.messages[last]["role"] != "assistant":
        return Rendered(text=full, spans=tuple(spans))
    before = render_turns(row, tokenizer, last, prompt=True)
    full = _cut(row, full, before)
    spans = [(low, min(high, len(full))) for low, high in spans if low < len(full)]
    if full[len(before) :] and not any(high > len(before) for _, high in spans):
        spans.append((len(before), len(full)))
    return Rendered(text=full, spans=tuple(spans))


def render_turns(row: Conversation, tokenizer: Any, count: int, *, prompt: bool = False) -> str:
    """Return the first `count` turns as text, `prompt` with what opens the next answer."""
    try:
        return tokenizer.apply_chat_template(
            row.messages[:count], tools=row.tools, tokenize=False, add_generation_prompt=prompt
        )
    except (jinja2.TemplateError, TypeError, RecursionError) as error:
        raise DataError(
            f"{row.where}: the chat template refuses it: {error}. Mend or delete the row."
        ) from error


def _up_to_last_answer(row: Conversation) -> Conversation:
    """Return the conversation without what follows the last answer; without any, as it is."""
    turns = list(row.messages)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not turns or len(turns) == len(row.messages):
        return row
    # `finish_reason` spoke of a last turn that is now gone, and was not an answer.
    return dataclasses.replace(row, messages=turns, truncated=False)


def _prompt_of(row: Conversation, tokenizer: Any, index: int, full: str) -> str:
    """Return what the server sees before turn `index`, which must begin the whole."""
    before = render_turns(row, tokenizer, index, prompt=True)
    if not full.startswith(before):
        raise DataError(
            f"{row.where}: the chat template rewrites the prompt of turn {index + 1} once the "
            "answer is there, so a loss mask would be a guess. Use a template that marks answers "
            "with {% generation %} or only appends to the prompt, or delete the row."
        )
    return before


def _tagged_spans(row: Conversation, tokenizer: Any, full: str) -> list[tuple[int, int]]:
    tools: Any = row.tools
    rendered: Any = render_jinja_template(
        [row.messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(tools=row.tools),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    [text], [spans] = rendered
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    if text != full or (answers and not any(high > low for low, high in spans)):
        raise DataError(
            f"{row.where}: the chat template's generation tags mark nothing in {len(answers)} "
            "answers. Mend the tags, or take them out of the template."
        )
    if answers and answers[-1] == len(row.messages) - 1 and not row.truncated:
        # Of earlier turns a template may drop the thinking: so will the server.
        _require_kept(row, answers[-1], "".join(full[low:high] for low, high in spans))
    return [(low, high) for low, high in spans]


def _boundary_spans(
    row: Conversation, tokenizer: Any, full: str, *, only_last: bool
) -> list[tuple[int, int]]:
    spans = []
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    for index in answers[-1:] if only_last else answers:
        if index == 0:
            raise DataError(
                f"{row.where}: the conversation starts with an assistant turn, so it answers "
                "nothing. Put the question before it, or delete the row."
            )
        if only_last:
            before, upto = _prompt_of(row, tokenizer, index, full), full
        else:
            before = render_turns(row, tokenizer, index, prompt=True)
            upto = render_turns(row, tokenizer, index + 1)
        if not (full.startswith(before) and full.startswith(upto)):
            raise DataError(
                f"{row.where}: the chat template does not only append: rendering turns "
                f"1..{index + 1} is no prefix of the whole, so a loss mask would be a guess. "
                "Set data.answers to `last`, which supervises the last answer of each row alone; "
                "or use a template that keeps earlier turns unchanged, or that marks answers with "
                "{% generation %}; or end the row with this turn."
            )
        if not (row.truncated and index == len(row.messages) - 1):
            _require_kept(row, index, upto[len(before) :])
        spans.append((len(before), len(upto.rstrip())))
    return spans


def _require_kept(row: Conversation, index: int, said: str) -> None:
    """Refuse a template that drops thinking or tool calls, which would go unsupervised."""
    message = row.messages[index]
    parts = {"`reasoning_content`": message.get("reasoning_content", "").strip()}
    for call in message.get("tool_calls", ()):
        parts[f"call of the tool {call['function']['name']!r}"] = call["function"]["name"]
    for what, text in parts.items():
        if text not in said:
            raise DataError(
                f"{row.where}: the chat template leaves out the {what} of turn {index + 1}. Use "
                "the template of a target that has these, or write them into `content`."
            )


def _cut(row: Conversation, full: str, before: str) -> str:
    """Return the text up to where the truncated last answer stops."""
    message = row.messages[-1]
    content, thinking = message["content"], message.get("reasoning_content", "").strip()
    guess = DataError(
        f"{row.where}: the chat template changes the text of the truncated answer, so where it "
        "ends would be a guess. Delete the row."
    )
    if message.get("tool_calls") or not full.startswith(before):
        raise guess
    opened = before.rstrip().endswith(_THINK) or content.lstrip().startswith(_THINK)
    if opened and not thinking and _THINK_END not in content:
        # Cut while thinking: a template would close the thought, or put an empty one before it.
        return (before + content).rstrip()
    end = len(before)
    for part in (thinking, content.strip()):
        start = full.find(part, end)
        if start < 0:
            raise guess
        end = start + len(part)
    return full[:end]
