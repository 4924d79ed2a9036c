"""Answers of a target that is loaded here, many prompts at a time.

Takes in prompts and the target's folder; hands on answered rows to the output, in the order in
which answers end. Works on every target that `slot_decode` does.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hscache.answers import Tally, answered_row, append_row, stopped
from hscache.config import Device, Dtype, TargetConfig
from hscache.device import DTYPES, choose_device
from hscache.errors import ConfigError
from hscache.fingerprint import weights_sha256
from hscache.pretrained import (
    find_stop_ids,
    load_config,
    load_model,
    load_tokenizer,
)
from hscache.progress import Progress
from hscache.prompts import Prompt, prompt_ids
from hscache.regenerate_config import RegenerateConfig
from hscache.slot_decode import Answer, Request, decode_slots

logger = logging.getLogger(__name__)


def answer_all(
    config: RegenerateConfig,
    settings: dict[str, Any],
    todo: Sequence[Prompt],
    output: BinaryIO,
    tally: Tally,
    stop: Callable[[], int | None],
) -> None:
    """Decode `todo`, append each answer to `output` when it ends, and keep the tally.

    Raises `UnsupportedTargetError` for targets that cannot decode here, `ConfigError` when
    `max_new_tokens` leaves no room for a prompt, `StoppedBySignal` once `stop` returns a signal.
    """
    assert config.target is not None
    model, tokenizer = load_generator(config.target, config.dtype, config.device)
    prompts = {prompt.key: prompt for prompt in todo}
    stop_ids = find_stop_ids(model, tokenizer)
    context = getattr(model.config, "max_position_embeddings", 2**62)
    longest_prompt = context - config.max_new_tokens
    if longest_prompt < 1:
        raise ConfigError(
            f"max_new_tokens is {config.max_new_tokens}, and the target's context is {context} "
            "tokens, prompt included. Lower it."
        )
    num_before = tally.num_already_done
    progress = Progress(num_before + len(todo), unit="rows", label="regenerate", initial=num_before)

    def requests() -> Iterator[Request]:
        for prompt in todo:
            ids = prompt_ids(prompt, tokenizer)
            if len(ids) <= longest_prompt:
                yield Request(key=prompt.key, prompt_ids=ids)
                continue
            tally.num_too_long += 1
            progress.advance()
            logger.warning("row %r is left out: its prompt has %d tokens", prompt.id, len(ids))

    def on_step(num_tokens: int) -> None:
        tally.num_new_tokens += num_tokens
        tally.wall_s = progress.elapsed_s
        rate = tally.num_new_tokens / max(tally.wall_s, 1e-9)
        progress.advance(0, **{"tokens/s": round(rate)})
        signum = stop()
        if signum is not None:
            raise stopped(signum, tally, config.output)

    with progress:
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
            tally.count(answer.finish_reason)
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
    return answered_row(
        prompt,
        {"role": "assistant", "content": content},
        finish_reason=answer.finish_reason,
        temperature=temperature,
        completion_tokens=len(answer.ids),
    )


def load_generator(
    path: str, dtype: Dtype, device: Device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target for generation; raise `ConfigError` for what is missing or broken in it."""
    config = TargetConfig(path=path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(config)
    model = load_model(path, dtype=DTYPES[dtype])
    return model.to(choose_device(device)).eval(), tokenizer


def check_target(path: str) -> None:
    """Raise `ConfigError` or `UnsupportedTargetError` for a target that cannot answer; no weights
    are loaded."""
    load_config(TargetConfig(path=path))
    load_tokenizer(TargetConfig(path=path))


def run_settings(config: RegenerateConfig) -> dict[str, Any]:
    """Return what fixes the answers: the target's weights and the sampling."""
    assert config.target is not None
    folder = Path(config.target)
    return {
        "target": str(folder.resolve()) if folder.is_dir() else config.target,
        "weights_sha256": weights_sha256(config.target),
        "dtype": config.dtype,
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }
