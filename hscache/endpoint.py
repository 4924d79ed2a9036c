"""Requests to a server with OpenAI's chat API (vLLM, SGLang and others), tried again when that may
help.

Takes in the server's address and request bodies; hands on answers. What may pass (a busy or
restarting server, a cut connection) is tried again after growing waits; what the user has to mend
ends the row, or the run, with the server's own words.
"""

import asyncio
import logging
import os
import random
import re
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import httpx

from hscache.chat_api import (
    Completion,
    UnusableAnswer,
    error_text,
    parse_completion,
    parse_models,
    server_url,
)
from hscache.errors import ConfigError, HscacheError
from hscache.regenerate_config import RegenerateConfig

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HSCACHE_API_KEY"
"""Environment variable of the key; it goes into a request header and nowhere else."""

_CONNECT_S = 10.0
_LARGEST_ANSWER = 64_000_000
"""Bytes of a response; a whole context of tokens, each in escapes, is a tenth of it."""
_PASSING = {408, 425, 429}
_ABOUT_A_ROW = {400, 413, 422}
_CONTEXT = re.compile(r"context.?length|context.?window|max_model_len|maximum context", re.I)


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Waits between attempts: doubled each time, and random, so that requests do not return at
    once."""

    first_s: float = 1.0
    longest_s: float = 30.0
    longest_asked_s: float = 300.0
    """Most that a server's Retry-After is obeyed."""

    def wait_s(self, attempt: int, asked_s: float, uniform: float) -> float:
        """Return the wait after a failed attempt (1, 2, ...); `uniform` is in [0, 1).

        Between half of the doubled wait and all of it, and not less than what the server asked for.
        """
        doubled_s = min(self.longest_s, self.first_s * 2 ** min(attempt - 1, 60))
        asked_s = min(self.longest_asked_s, asked_s)
        return max(doubled_s * (1 + uniform) / 2, asked_s * (1 + uniform / 10))


class Passing(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, message: str, asked_s: float = 0.0) -> None:
        super().__init__(message)
        self.asked_s = asked_s


class Refused(Exception):
    """The server refuses one row."""


class TooLong(Refused):
    """One row does not fit into the model's context."""


class Endpoint:
    """A server and the connections to it; use it with `async with`."""

    def __init__(self, config: RegenerateConfig, backoff: Backoff) -> None:
        """Raises ConfigError if the key in the environment cannot be one, or the address or a
        proxy in the environment is none."""
        key = _key()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"the environment variable {KEY_VARIABLE} holds characters that no key has (line "
                "breaks, or letters beyond ASCII). Set it again."
            )
        self.url = server_url(str(config.endpoint))
        self.num_asking = 0
        """Requests in flight."""
        self.num_retries = 0
        self._attempts = config.attempts
        self._timeout_s = config.timeout_s
        self._backoff = backoff
        self._told: set[str] = set()
        try:
            _ = httpx.URL(self.url).host
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"endpoint is {self.url!r}, which is no address: {error}. Expected the URL of a "
                "server, such as http://localhost:8000."
            ) from error
        try:
            self._client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=config.concurrency),
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            raise ConfigError(
                "a proxy named in the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY) cannot be "
                f"used: {error} Unset it, or add the server to NO_PROXY."
            ) from error

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(error_type, error, trace)

    async def answer(self, body: bytes) -> Completion:
        """Return the answer to a request, after as many attempts as it takes and settings allow.

        Raises `Refused` or `TooLong` (never tried again), `Passing` after the last attempt, and
        ConfigError for what no row's request can pass.
        """
        for attempt in range(1, self._attempts + 1):
            self.num_asking += 1
            try:
                return await self._ask(body)
            except Passing as failure:
                if attempt == self._attempts:
                    raise
                wait_s = self._backoff.wait_s(attempt, failure.asked_s, random.random())
                self._tell(failure)
            finally:
                self.num_asking -= 1
            await asyncio.sleep(wait_s)
            self.num_retries += 1
        raise AssertionError("attempts is at least 1")

    async def models(self) -> list[str] | None:
        """Return the names of the models the server lists; None if it lists none, or not now.

        Raises HscacheError at once if there is no server, and ConfigError for a wrong key.
        """
        try:
            async with asyncio.timeout(3 * _CONNECT_S):
                response, data = await self._read("GET", "models", timeout=_CONNECT_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise HscacheError(
                f"cannot reach the server at {self.url}: {_reason(error)}. Is it up, and is this "
                "its address? (vLLM says `Application startup complete` when it is.)"
            ) from error
        except (httpx.RequestError, Passing, TimeoutError) as error:
            logger.warning("%s does not list its models: %s", self.url, _reason(error))
            return None
        if response.status_code in (401, 403):
            raise _settings_error(response, data)
        if response.status_code != 200:
            return None
        try:
            return parse_models(data)
        except UnusableAnswer:
            return None

    def _tell(self, failure: Passing) -> None:
        """Log why requests are made again; the same words, numbers aside, only once."""
        words = without_numbers(str(failure))
        if words not in self._told:
            self._told.add(words)
            logger.warning("asking again (said once): %s", failure)

    async def _ask(self, body: bytes) -> Completion:
        """Make one request; raise `Passing`, `Refused`, or ConfigError for what will not pass."""
        try:
            async with asyncio.timeout(self._timeout_s):
                response, data = await self._read(
                    "POST",
                    "chat/completions",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
        except TimeoutError as error:
            raise Passing(f"no answer within {self._timeout_s:g} s (timeout_s)") from error
        except httpx.RequestError as error:
            raise Passing(_reason(error)) from error
        status = response.status_code
        if status == 200:
            try:
                return parse_completion(data)
            except UnusableAnswer as error:
                raise (Passing if error.retry else Refused)(_hide_key(str(error))) from error
        text = _words(response, data)
        if status in _PASSING or status >= 500:
            raise Passing(f"status {status}: {text}", asked_wait_s(response))
        if status in _ABOUT_A_ROW:
            raise (TooLong if _CONTEXT.search(text) else Refused)(f"status {status}: {text}")
        raise _settings_error(response, data)

    async def _read(self, method: str, path: str, **options: Any) -> tuple[httpx.Response, bytes]:
        """Make a request; return the response and its body, `Passing` if that has no end."""
        data = bytearray()
        async with self._client.stream(method, f"{self.url}/{path}", **options) as response:
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _LARGEST_ANSWER:
                    raise Passing(f"a response of more than {_LARGEST_ANSWER / 1e6:.0f} MB")
        return response, bytes(data)


def without_numbers(text: str) -> str:
    """Return what two messages have in common that differ in counts, ids or times."""
    return re.sub(r"[0-9]+", "#", text)


def _settings_error(response: httpx.Response, data: bytes) -> ConfigError:
    status, url = response.status_code, response.request.url
    hints = {
        401: f"Set the key in the environment variable {KEY_VARIABLE}.",
        403: f"Set the key in the environment variable {KEY_VARIABLE}.",
        404: "Check --model, and the path of --endpoint (`/v1` is added only if it has none).",
    }
    to = f" to {response.headers['location']}" if "location" in response.headers else ""
    return ConfigError(
        f"the server answers status {status}{to} at {url}: {_words(response, data)}\n"
        f"{hints.get(status, 'Check --endpoint.')} What was answered so far is kept."
    )


def _words(response: httpx.Response, data: bytes) -> str:
    return _hide_key(error_text(data) or response.reason_phrase)


def _key() -> str:
    return os.environ.get(KEY_VARIABLE, "").strip()


def _hide_key(text: str) -> str:
    """Take the key out of what a server says, should it repeat it."""
    key = _key()
    return text.replace(key, "***") if key else text


def asked_wait_s(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header, which may also hold a date; 0 without one."""
    value = response.headers.get("retry-after", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip()):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _reason(error: Exception) -> str:
    """Return the words of the operating system below httpx's, if there are any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one error for each address of the host
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.errno:
            named = isinstance(cause, socket.gaierror | ssl.SSLError)
            return str(cause.strerror) if named else os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
