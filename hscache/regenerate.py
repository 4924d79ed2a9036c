"""`hscache regenerate`: let the target answer prompts itself, for DFlash is trained on the target's
own text.

Takes in prompts and a target; hands on a JSONL file of finished conversations, appended to
row by row in the order in which answers end. Killed at any time and started again, it continues
behind the rows already there.

    hscache regenerate --target DIR --prompts prompts.jsonl --output answers.jsonl
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hscache.answers import append_row, check_settings, open_output, rows_done
from hscache.config import Device, Dtype, RegenerateConfig, TargetConfig
from hscache.device import DTYPES, choose_device
from hscache.errors import ConfigError, StoppedBySignal
from hscache.fingerprint import weights_sha256
from hscache.pretrained import (
    find_stop_ids,
    load_config,
    load_model,
    load_tokenizer,
)
from hscache.progress import Progress, configure_logging
from hscache.prompts import Prompt, prompt_ids, read_prompts
from hscache.report import format_seconds, format_table
from hscache.signals import stop_requested
from hscache.slot_decode import Answer, Request, decode_slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RegenerateSummary:
    """What a run did; every row read is counted once in the first four fields together."""

    num_stopped: int
    """Answers that ended with a stop token."""
    num_cut: int
    """Answers cut at `max_new_tokens`."""
    num_already_done: int
    """Rows whose answer was in the output before."""
    num_too_long: int
    """Rows left out: prompt and answer would not fit into the target's context."""
    num_new_tokens: int
    """Generated tokens, stop tokens included."""
    wall_s: float
    """Seconds of decoding, without loading the model."""

    @property
    def num_rows(self) -> int:
        """Rows read."""
        return self.num_stopped + self.num_cut + self.num_already_done + self.num_too_long

    def table(self) -> str:
        """Return the end table."""
        rate = f"{self.num_new_tokens / max(self.wall_s, 1e-9):.0f} tokens/s"
        rows = [
            ("rows in", self.num_rows, ""),
            ("already answered", self.num_already_done, "skipped"),
            ("too long", self.num_too_long, "left out: prompt + max_new_tokens exceed the context"),
            ("answered", self.num_stopped + self.num_cut, f"in {format_seconds(self.wall_s)}"),
            ("  ended by a stop token", self.num_stopped, ""),
            ("  cut at max_new_tokens", self.num_cut, ""),
            ("new tokens", self.num_new_tokens, rate),
        ]
        return format_table(["regenerate", "count", ""], rows)


def run(config: RegenerateConfig, *, dry_run: bool) -> None:
    """Answer all prompts that the output does not hold yet and print the end table; see
    `regenerate`."""
    configure_logging()
    if not dry_run:
        print(regenerate(config).table())
        return
    prompts = read_prompts(config.prompts)
    load_config(TargetConfig(path=config.target))  # what is wrong with it, said early
    load_tokenizer(TargetConfig(path=config.target))
    settings = run_settings(config)
    check_settings(config.output, settings)
    done = rows_done(config.output, prompts)
    rows = [
        *((name, json.dumps(value)) for name, value in settings.items()),
        ("output", str(config.output)),
        ("rows in", len(prompts)),
        ("already answered", len(done)),
        ("to answer", len(prompts) - len(done)),
    ]
    print(format_table(["would regenerate", ""], rows))


def regenerate(config: RegenerateConfig) -> RegenerateSummary:
    """Answer all prompts that the output does not hold yet.

    Each output row is {"id", "messages" (the answer last), "finish_reason" ("stop" or "length"),
    "temperature", "completion_tokens" (stop token included)}, and "tools" if there were any. What
    fixes the answers is kept in `OUTPUT.settings.json`.
    Raises `DataError` for bad rows, `CacheMismatchError` if the output was made with other settings
    or other prompts, `UnsupportedTargetError` for targets that cannot decode here, and
    `StoppedBySignal` after SIGTERM or Ctrl-C; the rows written until then are whole and are kept.
    """
    prompts = read_prompts(config.prompts)
    settings = run_settings(config)
    with open_output(config.output, settings) as output, stop_requested() as stop:
        done = rows_done(config.output, prompts)
        todo = [prompt for prompt in prompts if prompt.key not in done]
        counts = dict.fromkeys(("stop", "length", "too long", "tokens"), 0)
        start_s = time.monotonic()
        if todo:
            model, tokenizer = load_generator(config.target, config.dtype, config.device)
            start_s = time.monotonic()
            progress = Progress(len(prompts), unit="rows", label="regenerate", initial=len(done))
            with progress:
                _answer_all(config, todo, model, tokenizer, output, progress, counts, stop)
        return RegenerateSummary(
            num_stopped=counts["stop"],
            num_cut=counts["length"],
            num_already_done=len(done),
            num_too_long=counts["too long"],
            num_new_tokens=counts["tokens"],
            wall_s=time.monotonic() - start_s,
        )


def _answer_all(
    config: RegenerateConfig,
    todo: Sequence[Prompt],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: BinaryIO,
    progress: Progress,
    counts: dict[str, int],
    stop: Callable[[], int | None],
) -> None:
    """Decode `todo`, append each answer to `output` when it ends, and keep `counts`."""
    prompts = {prompt.key: prompt for prompt in todo}
    stop_ids = find_stop_ids(model, tokenizer)
    context = getattr(model.config, "max_position_embeddings", 2**62)
    longest_prompt = context - config.max_new_tokens
    if longest_prompt < 1:
        raise ConfigError(
            f"max_new_tokens is {config.max_new_tokens}, and the target's context is {context} "
            "tokens, prompt included. Lower it."
        )
    start_s = time.monotonic()

    def requests() -> Iterator[Request]:
        for prompt in todo:
            ids = prompt_ids(prompt, tokenizer)
            if len(ids) <= longest_prompt:
                yield Request(key=prompt.key, prompt_ids=ids)
                continue
            counts["too long"] += 1
            progress.advance()
            logger.warning("row %r is left out: its prompt has %d tokens", prompt.id, len(ids))

    def on_step(num_tokens: int) -> None:
        counts["tokens"] += num_tokens
        rate = counts["tokens"] / max(time.monotonic() - start_s, 1e-9)
        progress.advance(0, **{"tokens/s": round(rate)})
        signum = stop()
        if signum is not None:
            num_answered = counts["stop"] + counts["length"]
            raise StoppedBySignal(
                f"stopped by signal {signum} after {num_answered} answers, all of them in "
                f"{config.output}; run the same command again to continue.",
                signum=signum,
            )

    for answer in decode_slots(
        model,
        requests(),
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        stop_ids=stop_ids,
        on_step=on_step,
    ):
        row = output_row(prompts[answer.key], answer, tokenizer, stop_ids, config.temperature)
        append_row(output, config.output, row)
        counts[answer.finish_reason] += 1
        progress.advance()


def output_row(
    prompt: Prompt,
    answer: Answer,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    temperature: float,
) -> dict[str, Any]:
    """Return the conversation with its answer, as it is written; special tokens are left out of the
    text."""
    text_ids = answer.ids[:-1] if answer.ids[-1] in stop_ids else answer.ids
    content = str(tokenizer.decode(text_ids, skip_special_tokens=True))
    if answer.finish_reason == "length":
        # A cut inside a character leaves half of its bytes, which the target never meant to say.
        content = content.rstrip("\N{REPLACEMENT CHARACTER}")
    return {
        "id": prompt.id,
        "messages": [*prompt.messages, {"role": "assistant", "content": content}],
        **({"tools": prompt.tools} if prompt.tools else {}),
        "finish_reason": answer.finish_reason,
        "temperature": temperature,
        "completion_tokens": len(answer.ids),
    }


def load_generator(
    path: str, dtype: Dtype, device: Device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target for generation; raise `ConfigError` for what is missing or broken in it."""
    config = TargetConfig(path=path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(config)
    model = load_model(path, dtype=DTYPES[dtype])
    return model.to(choose_device(device)).eval(), tokenizer


def run_settings(config: RegenerateConfig) -> dict[str, Any]:
    """Return what fixes the answers: the target's weights and the sampling."""
    folder = Path(config.target)
    return {
        "target": str(folder.resolve()) if folder.is_dir() else config.target,
        "weights_sha256": weights_sha256(config.target),
        "dtype": config.dtype,
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
