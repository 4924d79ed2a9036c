"""Answers of a server, a bounded number of requests at a time.

Takes in prompts and an `Endpoint`; hands on answered rows to the output, in the order in which
answers end. A row that gets no answer is logged and listed, and the others go on; many such rows in
a row end the run.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from hscache.answers import Tally, answered_row, append_row, stopped
from hscache.chat_api import Completion, parse_extra_body, request_body, server_url
from hscache.endpoint import Backoff, Endpoint, Passing, Refused, TooLong, without_numbers
from hscache.errors import ConfigError, HscacheError
from hscache.progress import Progress
from hscache.prompts import Prompt
from hscache.regenerate_config import RegenerateConfig

logger = logging.getLogger(__name__)

MOST_FAILED_IN_A_ROW = 16
"""Rows without an answer between two that end the run: then it is not the rows."""

_POLL_S = 0.2


def run_settings(config: RegenerateConfig) -> dict[str, Any]:
    """Return what fixes the answers: the model's name at the server and the sampling.

    Not the address: a server may move between two runs. Asks the server for its models, so that a
    wrong address, a wrong key and a server that is not up are reported at once. Raises ConfigError
    when no model is named and the server has not exactly one.
    """
    names = asyncio.run(_served_models(config))
    model = config.model
    if model is None:
        if names is None or len(names) != 1:
            found = "lists no models" if not names else f"has {', '.join(names[:20])}"
            raise ConfigError(
                f"the server at {server_url(str(config.endpoint))} {found}. Give the name of the "
                "one to ask as --model."
            )
        model = names[0]
    return {
        "model": model,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "extra_body": parse_extra_body(config.extra_body),
    }


def answer_all(
    config: RegenerateConfig,
    settings: dict[str, Any],
    todo: Sequence[Prompt],
    output: BinaryIO,
    tally: Tally,
    stop: Callable[[], int | None],
) -> None:
    """Ask for all answers, append each to `output` when it ends, and keep the tally.

    Rows that cannot be answered are logged and listed in the tally. Raises ConfigError for what no
    request can mend, HscacheError when `MOST_FAILED_IN_A_ROW` rows failed with no answer between,
    and `StoppedBySignal` once `stop` returns a signal.
    """
    tally.num_prompt_tokens = 0
    run = _Run(config, settings["model"], output, tally, Backoff())
    asyncio.run(run.answer_all(todo, stop))
    if tally.num_too_long == tally.num_rows:
        raise ConfigError(
            f"no row fits into the model's context with max_new_tokens {config.max_new_tokens}: "
            "see the server's words above. Lower it."
        )


class _Run:
    """One run's requests: at most `concurrency` of them at a time."""

    def __init__(
        self,
        config: RegenerateConfig,
        model: str,
        output: BinaryIO,
        tally: Tally,
        backoff: Backoff,
    ) -> None:
        self.config = config
        self.model = model
        self.output = output
        self.tally = tally
        self.endpoint = Endpoint(config, backoff)
        self.num_failed_in_a_row = 0
        self.complaints: set[str] = set()

    async def answer_all(self, todo: Sequence[Prompt], stop: Callable[[], int | None]) -> None:
        """Start the workers and watch over them; when one raises, or at a signal, end them all."""
        num_before = self.tally.num_already_done
        total = num_before + len(todo)
        waiting = iter(todo)
        with Progress(total, unit="rows", label="regenerate", initial=num_before) as progress:
            async with self.endpoint:
                workers = {
                    asyncio.create_task(self._work(waiting, progress))
                    for _ in range(min(self.config.concurrency, len(todo)))
                }
                running = workers
                try:
                    while running:
                        ended, running = await asyncio.wait(
                            running, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
                        )
                        for worker in ended:
                            worker.result()
                        self._show(progress)
                        signum = stop()
                        if signum is not None:
                            raise stopped(signum, self.tally, self.config.output)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    def _show(self, progress: Progress) -> None:
        tally = self.tally
        tally.wall_s = progress.elapsed_s
        tally.num_retries = self.endpoint.num_retries
        rate = round(tally.num_new_tokens / max(tally.wall_s, 1e-9))
        figures = {
            "tokens/s": rate,
            "in flight": self.endpoint.num_asking,
            "retries": tally.num_retries,
        }
        progress.advance(0, **figures)

    async def _work(self, waiting: Iterator[Prompt], progress: Progress) -> None:
        """Answer one row after another until none waits."""
        tally = self.tally
        for prompt in waiting:
            # Escaped, for a description of a tool may hold half a surrogate pair.
            body = json.dumps(request_body(prompt, self.model, self.config)).encode()
            try:
                completion = await self.endpoint.answer(body)
            except TooLong as refusal:
                tally.num_too_long += 1
                self._complain(prompt, "left out", refusal)
            except Refused as refusal:
                tally.refused_ids.append(prompt.id)
                # Once there are answers, it is the rows that are wrong, and they may be neighbours.
                self.num_failed_in_a_row += not (tally.num_answered or tally.num_already_done)
                self._complain(prompt, "refused", refusal)
            except Passing as failure:
                tally.given_up_ids.append(prompt.id)
                self.num_failed_in_a_row += 1
                self._complain(prompt, f"given up after {self.config.attempts} attempts", failure)
            else:
                self._keep(prompt, completion)
                self.num_failed_in_a_row = 0
            progress.advance()
            if self.num_failed_in_a_row >= MOST_FAILED_IN_A_ROW:
                raise HscacheError(
                    f"{self.num_failed_in_a_row} rows in a row got no answer from "
                    f"{self.endpoint.url}; the reasons are in the log above. "
                    f"{tally.num_answered} answers of this run are in {self.config.output}; see to "
                    "the server or the settings, and run the same command again to continue."
                )

    def _keep(self, prompt: Prompt, completion: Completion) -> None:
        tally = self.tally
        row = answered_row(
            prompt,
            completion.message,
            finish_reason=completion.finish_reason,
            temperature=self.config.temperature,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
        )
        append_row(self.output, self.config.output, row)
        tally.count(completion.finish_reason)
        tally.num_new_tokens += completion.completion_tokens or 0
        tally.num_prompt_tokens = (tally.num_prompt_tokens or 0) + (completion.prompt_tokens or 0)
        tally.num_without_usage += completion.completion_tokens is None

    def _complain(self, prompt: Prompt, what: str, reason: Exception) -> None:
        """Log why a row has no answer; the same words, numbers aside, only once."""
        words = without_numbers(str(reason))
        seen = words in self.complaints
        self.complaints.add(words)
        logger.warning("row %r: %s: %s", prompt.id, what, "as before" if seen else reason)


async def _served_models(config: RegenerateConfig) -> list[str] | None:
    async with Endpoint(config, Backoff()) as endpoint:
        return await endpoint.models()
