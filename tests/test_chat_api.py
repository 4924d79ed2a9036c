"""Addresses of servers, extra fields of requests, and answers: what is taken and what refused."""

import json

import pytest
from chat_server import completion

from hscache.chat_api import (
    UnusableAnswer,
    error_text,
    parse_completion,
    parse_extra_body,
    server_url,
)
from hscache.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://host/v1/chat/completions", "https://host/v1"),
        ("https://gateway/llama/v1", "https://gateway/llama/v1"),
        ("https://gateway/api/v3/", "https://gateway/api/v3"),
        ("http://[::1]:30000", "http://[::1]:30000/v1"),
    ],
)
def test_v1_is_added_to_an_address_without_a_path(endpoint, url):
    assert server_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    ["", "localhost:8000", "host", "ftp://host", "http://", "http://h:x", "http://h/?a=1"],
)
def test_what_is_no_address_is_refused(endpoint):
    with pytest.raises(ConfigError, match="expected the URL of a server"):
        server_url(endpoint)


def test_a_password_in_an_address_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="HSCACHE_API_KEY") as refused:
        server_url("http://me:secret@host")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"temperature": 1}', "`temperature`, which comes from temperature"),
        ('{"max_tokens": 1}', "`max_tokens`, which comes from max_new_tokens"),
        ('{"stream": true}', "`stream`"),
        ('{"stop": ["."]}', "`stop`: with it an answer is not"),
    ],
)
def test_extra_fields_that_would_be_overridden_or_change_the_answer_are_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_extra_body(text)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
        (b"<html>\n bad \xff</html>", "<html> bad \N{REPLACEMENT CHARACTER}</html>"),
        (b"", ""),
    ],
)
def test_the_servers_own_words_are_found(body, text):
    assert error_text(body) == text


def call(arguments: str, name: str = "f") -> dict:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("body", "complaint", "retry"),
    [
        (completion(None, "tool_calls"), "'tool_calls' and no call", True),
        (completion(None, tool_calls=[call("[" * 100_000)]), "no JSON, or no text", False),
        (completion(None, tool_calls=[call('{"a": "\\ud83d"}')]), "no JSON, or no text", False),
        (completion(None, tool_calls=[call("{}", "\ud83d")]), "no JSON, or no text", False),
        ({**completion(None), "usage": {"completion_tokens": 9}}, "9 tokens, .* none of", False),
        ({**completion("", "length"), "usage": {"completion_tokens": 9}}, "none of its", False),
    ],
)
def test_an_answer_that_could_not_be_read_back_is_refused(body, complaint, retry):
    with pytest.raises(UnusableAnswer, match=complaint) as refused:
        parse_completion(json.dumps(body).encode())
    assert refused.value.retry is retry


@pytest.mark.parametrize("count", [-1, True, 2.5, "7", None])
def test_what_is_no_count_of_tokens_is_none(count):
    body = {**completion("hi"), "usage": {"prompt_tokens": count, "completion_tokens": count}}
    found = parse_completion(json.dumps(body).encode())
    assert (found.prompt_tokens, found.completion_tokens) == (None, None)
