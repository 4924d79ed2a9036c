"""OpenAI's chat API as plain data: addresses, request bodies and what an answer means; no network.

Takes settings, prompts and the bytes of responses; hands on JSON objects to send and checked
`Completion`s. The API as vLLM, SGLang and OpenAI document it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hscache.errors import ConfigError
from hscache.jsonl import is_unicode

if TYPE_CHECKING:
    from hscache.prompts import Prompt
    from hscache.regenerate_config import RegenerateConfig

_SHOWN = 600
"""Characters of a response that a message shows."""

_OWN_FIELDS = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    **dict.fromkeys(("messages", "tools"), "prompts"),
    **{name: name for name in ("model", "temperature", "top_p", "seed")},
}
"""Fields of a request and the settings they are filled from."""
_MOST_UNSEEN = 8
"""Tokens of an empty answer: the stop token, and white space that a server may strip."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished answer of a server."""

    message: dict[str, Any]
    """The assistant's turn, as rows hold it: `content`, and `reasoning_content` and `tool_calls` if
    there were any."""
    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    prompt_tokens: int | None
    """As the server counted; None if it did not."""
    completion_tokens: int | None
    """Likewise; thinking included."""


class UnusableAnswer(Exception):
    """A response holds no whole answer; `retry` says whether asking again may help."""

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


def server_url(endpoint: str) -> str:
    """Return the URL that API paths are appended to, `/v1` added to one without a path.

    Raises ConfigError for what is no such URL, and for one that holds a password, which would be
    shown in messages.
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"endpoint is {endpoint!r}; expected the URL of a server, such as "
            "http://localhost:8000 or https://host/v1."
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"endpoint holds a user or password before {parts.hostname}; give a key in the "
            "environment variable HSCACHE_API_KEY, which is stored nowhere."
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Return the object in `extra_body`; raise ConfigError for other JSON and for fields that are
    filled from settings, or that change the form of the answer."""
    try:
        body = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"extra_body is not JSON: {error}. Found {text!r}; expected an object such as "
            '{"top_k": 20}, on a command line within single quotes.'
        ) from error
    if not isinstance(body, dict):
        raise ConfigError(f"extra_body is {text}; expected a JSON object.")
    for name in body:
        if name in _OWN_FIELDS:
            raise ConfigError(
                f"extra_body holds `{name}`, which comes from {_OWN_FIELDS[name]}. Use that."
            )
        if name in ("stream", "stream_options", "n"):
            raise ConfigError(
                f"extra_body holds `{name}`; each request is for one answer in one piece. "
                "Leave it out."
            )
        if name in ("stop", "echo", "continue_final_message", "add_generation_prompt"):
            raise ConfigError(
                f"extra_body holds `{name}`: with it an answer is not what the target says to the "
                "prompt, from the beginning to its own end, and is not to be learnt. Leave it out."
            )
    return body


def request_body(prompt: Prompt, model: str, config: RegenerateConfig) -> dict[str, Any]:
    """Return the JSON object that asks for the answer of a prompt.

    What is not set is left to the server. The seed is the row's own, as in a local run: made of the
    run's seed and the row's id, 31 bits.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": _to_openai(prompt.messages),
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
    }
    if prompt.tools:
        body["tools"] = prompt.tools
    if config.top_p is not None:
        body["top_p"] = config.top_p
    if config.temperature > 0:
        digest = hashlib.blake2b(f"{config.seed}:{prompt.key}".encode(), digest_size=8).digest()
        body["seed"] = int.from_bytes(digest) >> 33
    return {**body, **parse_extra_body(config.extra_body)}


def parse_completion(data: bytes) -> Completion:
    """Return the answer in a response.

    Thinking is taken from `reasoning_content` or `reasoning`, whichever the server uses. Of a cut
    answer, half a character at its end and half a tool call are left out. Raises `UnusableAnswer`
    if there is no whole answer, or none that ended by itself or by its limit.
    """
    body = _parse_json(data)
    try:
        choice = body["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        content, calls = message.get("content"), message.get("tool_calls")
        thinking = message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, TypeError, AttributeError) as error:
        raise UnusableAnswer(f"a response without an answer: {shorten(data)}") from error
    texts = [text for text in (thinking, content) if text is not None]
    if not all(isinstance(text, str) and is_unicode(text) for text in texts):
        raise UnusableAnswer(f"an answer that is no text: {shorten(data)}")
    if reason not in ("stop", "length", "tool_calls"):
        raise UnusableAnswer(f"finish_reason {reason!r}, so the answer may not be whole")
    if reason == "tool_calls" and not calls:
        raise UnusableAnswer(f"finish_reason 'tool_calls' and no call: {shorten(data)}")
    usage = body.get("usage") or {}
    num_tokens = _count(usage, "completion_tokens")
    if not (thinking or content or calls) and (num_tokens or 0) > _MOST_UNSEEN:
        raise UnusableAnswer(
            f"an answer of {num_tokens} tokens, by the server's count, and none of its text: is it "
            f"in a field that is not read, or lost by one of the server's parsers? {shorten(data)}",
            retry=False,
        )
    answer: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if thinking:
        answer["reasoning_content"] = thinking
    if reason == "length":
        # A cut inside a character leaves half of its bytes, which the target never meant to say.
        last = "content" if content or not thinking else "reasoning_content"
        answer[last] = answer[last].rstrip("\N{REPLACEMENT CHARACTER}")
    elif calls:
        answer["tool_calls"] = _check_calls(calls, data)
    return Completion(
        message=answer,
        finish_reason=reason,
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=num_tokens,
    )


def parse_models(data: bytes) -> list[str]:
    """Return the names in a response of `/models`; raise `UnusableAnswer` if it holds no list."""
    try:
        return [str(model["id"]) for model in _parse_json(data)["data"]]
    except (LookupError, TypeError) as error:
        raise UnusableAnswer(f"no list of models: {shorten(data)}") from error


def error_text(data: bytes) -> str:
    """Return what a server says about a refused request: the message in its JSON, or the body."""
    try:
        body = json.loads(data)
        nested = body["error"] if isinstance(body.get("error"), dict) else body
        text = nested.get("message") or nested.get("detail") or nested.get("error")
    except (ValueError, AttributeError, RecursionError):
        text = None
    return shorten(text.encode() if isinstance(text, str) else data)


def shorten(data: bytes) -> str:
    """Return bytes as text on one line, cut to a length that a message can hold."""
    text = " ".join(data[: 4 * _SHOWN].decode(errors="replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _to_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns as the API wants them: arguments of tool calls as JSON, every call with an id
    that its result names."""
    sent = []
    unanswered: list[str] = []
    for index, message in enumerate(messages):
        message = dict(message)
        if message.get("tool_calls"):
            calls = []
            for number, call in enumerate(message["tool_calls"]):
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call = {"id": f"call_{index}_{number}", "type": "function", **call}
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message["tool_calls"] = calls
            unanswered = [call["id"] for call in calls]
        elif message["role"] == "tool" and unanswered:
            message.setdefault("tool_call_id", unanswered.pop(0))
        sent.append(message)
    return sent


def _check_calls(calls: Any, data: bytes) -> list[dict[str, Any]]:
    """Return tool calls as received, if `produce` will be able to read them."""
    try:
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if not isinstance(arguments, dict) or not isinstance(call["function"]["name"], str):
                raise TypeError("arguments are no object")
            json.dumps([call, arguments], ensure_ascii=False).encode()  # no half surrogate pairs
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        # The target wrote it so, and with the row's seed would again.
        raise UnusableAnswer(
            f"a tool call that is no JSON, or no text: {shorten(data)}", retry=False
        ) from error
    return calls


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswer(f"a response that is not JSON: {shorten(data)}") from error
    if not isinstance(body, dict):
        raise UnusableAnswer(f"a response that is no JSON object: {shorten(data)}")
    return body


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None
