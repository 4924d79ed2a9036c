"""`hscache regenerate`: let the target answer prompts itself, for DFlash is trained on the target's
own text.

Takes in prompts and a target, loaded here (`local_answers`) or served elsewhere
(`endpoint_answers`); hands on a JSONL file of finished conversations, appended to row by row in the
order in which answers end. Killed at any time and started again, it continues behind the rows
already there.

    hscache regenerate --target DIR --prompts prompts.jsonl --output answers.jsonl
    hscache regenerate --endpoint http://localhost:8000 --prompts ... --output ...
"""

import json
from collections.abc import Callable
from typing import Any

from hscache.answers import Tally, check_settings, open_output, rows_done
from hscache.errors import HscacheError
from hscache.progress import configure_logging
from hscache.prompts import read_prompts
from hscache.regenerate_config import RegenerateConfig
from hscache.report import format_table
from hscache.signals import stop_requested

_IDS_SHOWN = 20


def run(config: RegenerateConfig, *, dry_run: bool) -> None:
    """Answer all prompts that the output does not hold yet and print the end table; see
    `regenerate`. Raises HscacheError at the end if rows have failed."""
    configure_logging()
    if dry_run:
        _print_plan(config)
        return
    tally = regenerate(config)
    print(tally.table(), flush=True)
    if tally.num_failed:
        raise HscacheError(_explain_failed(config, tally))


def regenerate(config: RegenerateConfig) -> Tally:
    """Answer all prompts that the output does not hold yet.

    Each output row is {"id", "messages" (the answer last), "finish_reason" ("stop" or "length"; of
    a server also "tool_calls"), "temperature", "completion_tokens" (stop token included)}, and
    "tools" if there were any; of a server also "prompt_tokens", and both counts are its own, null
    where it gave none. What fixes the answers is kept in `OUTPUT.settings.json`.
    Raises `DataError` for bad rows, `CacheMismatchError` if the output was made with other settings
    or other prompts, `UnsupportedTargetError` for targets without full attention, and
    `StoppedBySignal` after SIGTERM or Ctrl-C; the rows written until then are whole and are kept.
    """
    prompts = read_prompts(config.prompts)
    run_settings, answer_all = _answerer(config)
    settings = run_settings(config)
    with open_output(config.output, settings) as output, stop_requested() as stop:
        done = rows_done(config.output, prompts)
        tally = Tally(num_already_done=len(done))
        todo = [prompt for prompt in prompts if prompt.key not in done]
        if todo:
            answer_all(config, settings, todo, output, tally, stop)
        return tally


def _answerer(
    config: RegenerateConfig,
) -> tuple[Callable[[RegenerateConfig], dict[str, Any]], Callable[..., None]]:
    """Return `run_settings` and `answer_all` of the module that this run needs, and import no
    other: a run with a server does without torch."""
    if config.endpoint is not None:
        from hscache import endpoint_answers

        return endpoint_answers.run_settings, endpoint_answers.answer_all
    from hscache import local_answers

    return local_answers.run_settings, local_answers.answer_all


def _print_plan(config: RegenerateConfig) -> None:
    prompts = read_prompts(config.prompts)
    if config.target is not None:
        from hscache.local_answers import check_target

        check_target(config.target)
    settings = _answerer(config)[0](config)
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


def _explain_failed(config: RegenerateConfig, tally: Tally) -> str:
    lines = [f"{tally.num_failed:,} of {tally.num_rows:,} rows have no answer."]
    for ids, what in (
        (tally.refused_ids, "refused by the server"),
        (tally.given_up_ids, f"given up after {config.attempts} attempts"),
    ):
        if ids:
            more = f" and {len(ids) - _IDS_SHOWN:,} more" if len(ids) > _IDS_SHOWN else ""
            names = ", ".join(repr(row_id) for row_id in ids[:_IDS_SHOWN])
            lines.append(f"  {what}: {names}{more}")
    lines.append(
        f"The reasons are in the log above. All other answers are in {config.output}; run the same "
        "command again to retry these."
    )
    return "\n".join(lines)
