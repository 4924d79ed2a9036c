"""`trainer fit`: train a drafter from a cache, without the target.

Takes a `FitConfig` and the launcher's environment; checks everything before the ranks meet, then
hands over to the loop. Leaves checkpoints that serving engines load and a resume continues bit for
bit on a CPU. Only rank 0 writes files, but for the moments of ranks that step alone.

    trainer fit --config configs/demo-fit.yaml --shards /nvme/cache
    torchrun --nproc-per-node 4 --no-python trainer fit --config configs/fit-qwen3-8b.yaml ...
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from hscache import __version__, files
from hscache.device import choose_device
from hscache.errors import CacheMismatchError, ConfigError, HscacheError
from hscache.progress import configure_logging
from hscache.settings import save_config
from hscache.zarr_array import canonical_json, checksum_hex
from trainer.checkpoint import read_state
from trainer.config import FitConfig
from trainer.follow import require_unseen_kept, require_window, wait_for_cache
from trainer.loop import train
from trainer.ranks import RankLostError, Ranks, connected, launch_of
from trainer.run_arithmetic import checkpoint_size, describe, require_room
from trainer.run_folder import list_checkpoints, require_space
from trainer.run_plan import RunPlan, plan_run
from trainer.run_state import resume_training, start_training, training_state
from trainer.training import Training

log = logging.getLogger(__name__)


def run(config: FitConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` print the batch arithmetic and touch nothing."""
    launch = launch_of(os.environ)
    configure_logging(launch.rank)
    try:
        if not dry_run:
            with connected(launch, config.sync.timeout_s) as ranks:
                fit(config, ranks)
            return 0
        device = choose_device(config.device)
        checkpoint = _starting_point(config)
        resumed = read_state(checkpoint) if checkpoint else None
        if launch.rank == 0:
            if resumed is not None:
                print(f"would resume {checkpoint} at step {resumed.step:,}")
            run = plan_run(config, recorded_shards=resumed.schedule["shards"] if resumed else None)
            print(describe(run, device, launch.num_ranks))
            require_room(run, device, launch.num_ranks)
    except HscacheError as error:
        if launch.num_ranks > 1:
            error.args = (f"rank {launch.rank} of {launch.num_ranks}: {error.args[0]}",)
        raise
    return 0


def fit(config: FitConfig, ranks: Ranks | None = None) -> Path:
    """Train and return the folder of the last checkpoint; every rank calls this.

    Raises StoppedBySignal after a checkpoint when SIGTERM or Ctrl-C came, HscacheError when the
    loss is no longer finite, RankLostError naming the checkpoint when another rank is gone.
    """
    ranks = ranks or Ranks()
    try:
        run, training, device, checkpoint = _prepare(config, ranks)
    except Exception as error:
        ranks.cannot_start(error)
        raise
    try:
        ranks.join(device)
        _require_same_start(run, training)
        if not ranks.is_first:
            return train(run, training, device, checkpoint)
        with _as_only_writer(run, device, checkpoint, ranks):
            return train(run, training, device, checkpoint)
    except RankLostError as error:
        saved = list_checkpoints(config.run_dir)
        advice = f"Continue from {saved[-1]} with --resume." if saved else "No checkpoint is there."
        raise RankLostError(f"{error} {advice}") from error


def _prepare(
    config: FitConfig, ranks: Ranks
) -> tuple[RunPlan, Training, torch.device, Path | None]:
    """Return what this rank would start with: the run, where it is, device and checkpoint."""
    device = choose_device(config.device)
    checkpoint = _starting_point(config)
    if config.follow:
        wait_for_cache(config)
    if checkpoint is None:
        run = _plan_alike(config, ranks)
        require_room(run, device, ranks.num_ranks)
        training = start_training(run, device, ranks)
    else:
        found = read_state(checkpoint, rank=ranks.rank, num_ranks=ranks.num_ranks)
        run = plan_run(config, recorded_shards=found.schedule["shards"])
        require_room(run, device, ranks.num_ranks)
        training = resume_training(run, device, checkpoint, found, ranks)
        log.info("resuming %s at step %d", checkpoint, training.step)
    if config.follow:
        require_window(run, ranks.num_ranks)
        require_unseen_kept(run, training.position)
    return run, training, device, checkpoint


def _plan_alike(config: FitConfig, ranks: Ranks) -> RunPlan:
    """Plan a new run; of a cache that is still growing all ranks take the shards rank 0 found."""
    if not config.allow_partial:
        return plan_run(config)
    if ranks.is_first:
        run = plan_run(config)
        ranks.leave_word("shards", json.dumps(run.schedule.shards))
        return run
    while not ranks.has_prepared("shards", 0):
        time.sleep(0.05)
    return plan_run(config, recorded_shards=json.loads(ranks.read_word("shards", 0)))


def _require_same_start(run: RunPlan, training: Training) -> None:
    """Raise CacheMismatchError unless all ranks read and compute the same from the same weights."""
    state = {**asdict(training_state(run, training)), "moment_ranks": 0}
    number = int(checksum_hex(canonical_json(state)), 16)
    training.ranks.require_equal(
        number, "the ranks were started with other settings, on another cache or another checkpoint"
    )
    training.require_equal_weights()


@contextlib.contextmanager
def _as_only_writer(
    run: RunPlan, device: torch.device, checkpoint: Path | None, ranks: Ranks
) -> Iterator[None]:
    """Open the run's folder for writing, and say what is about to be done."""
    config = run.config
    files.make_folder(config.run_dir)
    with files.only_writer(config.run_dir / "lock", str(config.run_dir)):
        if _starting_point(config) != checkpoint:
            raise CacheMismatchError(
                f"another process wrote a checkpoint to {config.run_dir} while this one started. "
                "Run the command again."
            )
        _remove_leftovers(config.run_dir)
        require_space(config.run_dir, checkpoint_size(run, ranks.num_ranks))
        save_config(config, config.run_dir / "config.json")
        _save_environment(config.run_dir, ranks.num_ranks)
        print(describe(run, device, ranks.num_ranks))
        _warn_of_waste(config, ranks.num_ranks)
        yield


def _warn_of_waste(config: FitConfig, num_ranks: int) -> None:
    if config.global_batch_rows % num_ranks:
        log.warning(
            "global_batch_rows %d is no multiple of %d ranks: some wait while others work",
            config.global_batch_rows, num_ranks,
        )  # fmt: skip
    if num_ranks > 1 and config.sync.mode == "broadcast":
        log.warning(
            "sync.mode broadcast keeps rank 0's weights: what the other %d ranks learn is thrown "
            "away at every meeting", num_ranks - 1,
        )  # fmt: skip


def _starting_point(config: FitConfig) -> Path | None:
    for shards in config.shards:
        if config.run_dir.resolve().is_relative_to(shards.resolve()):
            raise ConfigError(
                f"run_dir {config.run_dir} lies in the cache {shards}, where producers and "
                "readers expect their own files only. Give a folder outside of it."
            )
    checkpoints = list_checkpoints(config.run_dir)
    if config.resume and not checkpoints:
        raise ConfigError(f"--resume: {config.run_dir} has no checkpoint to continue from.")
    if checkpoints and not config.resume:
        raise CacheMismatchError(
            f"{config.run_dir} already holds {checkpoints[-1].name}. Continue it with --resume, or "
            "give another --run-dir."
        )
    return checkpoints[-1] if checkpoints else None


def _save_environment(run_dir: Path, num_ranks: int) -> None:
    """Record what a rerun would need to be the same; a CPU run also needs as many threads."""
    record = {
        "hscache": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "ranks": num_ranks,
        "machine": f"{platform.machine()} {platform.node()}",
        "command": sys.argv,
    }
    data = json.dumps(record, indent=2).encode() + b"\n"
    files.replace_atomically(run_dir / "env.json", data)


def _remove_leftovers(run_dir: Path) -> None:
    for path in run_dir.glob(f"{files.TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
