"""`trainer fit`: train a drafter from a cache, without the target.

Takes a `FitConfig`; reads rows in their fixed order, accumulates gradients over `global_batch_rows`
of them, steps, logs, and leaves checkpoints that serving engines load and a resume continues bit
for bit on a CPU.

    trainer fit --config configs/demo-fit.yaml --shards /nvme/cache
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from hscache import __version__, files
from hscache.device import DTYPES, choose_device
from hscache.errors import CacheMismatchError, ConfigError, HscacheError, StoppedBySignal
from hscache.progress import Progress, configure_logging
from hscache.report import format_table
from hscache.settings import save_config, to_dict
from hscache.signals import stop_requested
from trainer.batches import Batch, Loader
from trainer.checkpoint import list_checkpoints, read_state
from trainer.config import FitConfig
from trainer.metrics import MetricsLog, Window
from trainer.run_plan import RunPlan, describe, plan_run
from trainer.training import (
    Training,
    resume_training,
    save_training,
    start_training,
)

log = logging.getLogger(__name__)


def run(config: FitConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` print the batch arithmetic and touch nothing."""
    configure_logging()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: training on several ranks is not supported "
            "yet. Start one process without torchrun."
        )
    if dry_run:
        choose_device(config.device)
        checkpoint = _starting_point(config)
        if checkpoint is not None:
            print(f"would resume {checkpoint} at step {read_state(checkpoint).step:,}")
        print(describe(plan_run(config)))
        return 0
    fit(config)
    return 0


def fit(config: FitConfig) -> Path:
    """Train and return the folder of the last checkpoint.

    Raises StoppedBySignal after a checkpoint when SIGTERM or Ctrl-C came, HscacheError when the
    loss is no longer finite.
    """
    device = choose_device(config.device)
    checkpoint = _starting_point(config)
    if checkpoint is None:
        run = plan_run(config)
        training = start_training(run, device)
    else:
        found = read_state(checkpoint)
        run = plan_run(config, recorded_shards=found.schedule["shards"])
        training = resume_training(run, device, checkpoint, found)
        log.info("resuming %s at step %d", checkpoint, training.step)
    files.make_folder(config.run_dir)
    with files.only_writer(config.run_dir / "lock", str(config.run_dir)):
        if _starting_point(config) != checkpoint:
            raise CacheMismatchError(
                f"another process wrote a checkpoint to {config.run_dir} while this one started. "
                "Run the command again."
            )
        _remove_leftovers(config.run_dir)
        save_config(config, config.run_dir / "config.json")
        _save_environment(config.run_dir)
        print(describe(run))
        return _train(run, training, device, checkpoint)


def _train(run: RunPlan, training: Training, device: torch.device, saved: Path | None) -> Path:
    """Step through the rows that are left; `saved` is the checkpoint the run starts from."""
    config = run.config
    loader = Loader(
        run.cache,
        run.schedule,
        rule=run.rule,
        row=run.row,
        device=device,
        dtype=DTYPES[config.dtype],
        threads=config.threads,
        start=training.position,
    )
    metrics = MetricsLog(
        config.run_dir,
        after_step=training.step - training.window.num_steps,
        log_with=config.log_with,
        config=to_dict(config),
    )
    progress = Progress(run.total_tokens, unit="tokens", label="fit", initial=training.tokens)
    with stop_requested() as stop, metrics, loader, progress:
        shown: dict[str, float | str] = {}
        groups = _groups(loader, config.global_batch_rows)
        while group := _next_group(groups, run, training, saved):
            training.update(group)
            if training.step % config.log_every == 0:
                shown = _log(training, metrics, loader)
            progress.advance(sum(batch.num_tokens for batch in group), **shown)
            signum = stop()
            if training.step % config.checkpoint_every == 0 or signum is not None:
                saved = save_training(run, training)
            if signum is not None:
                raise StoppedBySignal(
                    f"stopped by {signal.Signals(signum).name} after step {training.step}; saved "
                    f"{saved}. Continue with --resume.",
                    signum=signum,
                )
        if training.window.num_steps:
            _log(training, metrics, loader)
        if saved is None or saved.name != f"checkpoint-{training.step}":
            saved = save_training(run, training)
    print(_summary(run, training, saved, progress.mean_rate))
    return saved


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield `size` rows at a time; the last group may have fewer."""
    rows = iter(batches)
    while group := list(itertools.islice(rows, size)):
        yield group


def _next_group(
    groups: Iterator[list[Batch]], run: RunPlan, training: Training, saved: Path | None
) -> list[Batch] | None:
    """Return the next rows, None at the end; if they cannot be read, save before giving up."""
    try:
        return next(groups, None)
    except (HscacheError, OSError):
        if training.step and (saved is None or saved.name != f"checkpoint-{training.step}"):
            log.error("the next rows cannot be read; saving step %d first", training.step)
            save_training(run, training)
        raise


def _log(training: Training, metrics: MetricsLog, loader: Loader) -> dict[str, float | str]:
    """Write a line of metrics, start a new window, and return what the progress line shows."""
    values = training.window.values(loader.wait_s)
    metrics.log(
        training.step,
        **values,
        **{
            "train/lr": training.rate,
            "train/tokens": training.tokens,
            "train/empty_windows": training.empty_windows,
        },
    )
    training.window = Window()
    loader.wait_s = 0.0
    loss = values["train/loss"]
    return {"loss": "-" if loss is None else f"{loss:.3f}", "lr": f"{training.rate:.1e}"}


def _starting_point(config: FitConfig) -> Path | None:
    checkpoints = list_checkpoints(config.run_dir)
    if config.resume and not checkpoints:
        raise ConfigError(f"--resume: {config.run_dir} has no checkpoint to continue from.")
    if checkpoints and not config.resume:
        raise CacheMismatchError(
            f"{config.run_dir} already holds {checkpoints[-1].name}. Continue it with --resume, or "
            "give another --run-dir."
        )
    return checkpoints[-1] if checkpoints else None


def _save_environment(run_dir: Path) -> None:
    """Record what a rerun would need to be the same; a CPU run also needs as many threads."""
    record = {
        "hscache": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.node()}",
        "command": sys.argv,
    }
    data = json.dumps(record, indent=2).encode() + b"\n"
    files.replace_atomically(run_dir / "env.json", data)


def _remove_leftovers(run_dir: Path) -> None:
    for path in run_dir.glob(f"{files.TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _summary(run: RunPlan, training: Training, saved: Path, rate: float) -> str:
    return format_table(
        ["trained", str(run.config.run_dir)],
        [
            ["steps", f"{training.step:,}"],
            ["tokens", f"{training.tokens:,} context tokens, {training.anchors:,} anchors"],
            ["tokens/s", f"{rate:,.0f}"],
            ["updates skipped", f"{training.empty_windows} (nothing supervised)"],
            ["checkpoint", str(saved)],
        ],
    )
