"""Producer and trainer in processes of their own on one bounded cache, killed at random instants.

Imported by test_dance.py and tools/soak.py. Processes are forked (`forked`), so that a death costs
a tenth of a second; each runs the command line.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from conftest import conversation, save_target, write_jsonl
from forked import end_with, print_to

from hscache import budget, layout
from hscache.producers import read_record
from hscache.reader import open_cache
from hscache.window_start import needs_of

MASK = 1
STUCK_S = 120.0
"""Without a new shard, checkpoint or freed shard for so long, the dance is deadlocked."""


def make_world(folder: Path, num_rows: int) -> Path:
    """Save a tiny target and a corpus of short conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    save_target(folder / "target", "llama", num_hidden_layers=4, hidden_size=32, head_dim=8)
    rng = np.random.default_rng(3)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    rows = [
        conversation(f"{i}?", " ".join(rng.choice(words, int(rng.integers(3, 9)))) + f" {i}.")
        for i in range(num_rows)
    ]
    write_jsonl(folder / "train.jsonl", rows)
    return folder


def produce_flags(world: Path, shard_dir: Path, *flags: str) -> list[str]:
    """The command line of a producer."""
    return [
        "produce", f"--shard-dir={shard_dir}", f"--target.path={world / 'target'}",
        "--target.target-layer-ids=0,1", "--target.device=cpu", "--target.dtype=float32",
        f"--data.train={world / 'train.jsonl'}", "--data.max-tokens=120", "--data.workers=0",
        "--data.held-out-fraction=0.04", "--store.shard-tokens=260", "--store.threads=1",
        "--store.codec=none",  # so that a shard takes nearly all that it is given
        "--token-budget=128", *flags,
    ]  # fmt: skip


def fit_flags(shards: Path, run_dir: Path, *flags: str) -> list[str]:
    """The command line of a trainer; so many anchors that every document gets one in each pass."""
    return [
        "fit", f"--shards={shards}", f"--run-dir={run_dir}", "--drafter.num-hidden-layers=1",
        "--drafter.intermediate-size=32", "--drafter.num-attention-heads=2",
        "--drafter.num-key-value-heads=1", "--drafter.head-dim=8", "--drafter.block-size=4",
        f"--drafter.mask-token-id={MASK}", "--loss.gamma=4", "--row-tokens=128",
        "--anchors-per-row=128", "--global-batch-rows=2", "--dtype=float32", "--device=cpu",
        "--threads=1", "--log-every=1", "--sync.mode=ddp", *flags,
    ]  # fmt: skip


def child(
    owner: int,
    program: str,
    argv: list[str],
    log: Path,
    ledger: Path | None = None,
    pause_s: float = 0.0,
    seed: float = 0,
    stall_after: int | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a command line in this forked process.

    Pauses of up to `pause_s` slow it down; a producer stops dead in the pack after `stall_after`.
    """
    os.environ.update(environment or {})
    end_with(owner)
    print_to(log)
    import torch

    import hscache.admission
    import hscache.cli
    import hscache.produce
    import hscache.target
    import trainer.batches
    import trainer.cli
    import trainer.loop
    import trainer.row_process
    import trainer.training

    torch.set_num_threads(1)
    hscache.admission._WAIT_S = 0.02
    hscache.admission._SAY_AGAIN_S = 0.0
    trainer.batches.LOOK_S = trainer.row_process.LOOK_S = 0.02
    trainer.loop.PATIENCE_S = 0.1
    chance = random.Random(seed)
    if program == "hscache":
        capture = hscache.target.Target.capture

        num_captures = 0

        def slow_capture(self, *args):
            nonlocal num_captures
            num_captures += 1
            stalls = stall_after is not None and num_captures > stall_after
            time.sleep(3600 if stalls else chance.uniform(0, pause_s))
            return capture(self, *args)

        hscache.target.Target.capture = slow_capture
        code = hscache.cli.main(argv)
    else:
        update = trainer.training.Training.update

        def noted_update(self, rows, end=None):
            time.sleep(chance.uniform(0, pause_s))
            update(self, rows, end)
            if ledger is not None:
                ids = [row.document_ids for row in rows]
                with ledger.open("a") as file:
                    line = {"pid": os.getpid(), "rank": self.ranks.rank, "step": self.step}
                    file.write(json.dumps({**line, "rows": ids}) + "\n")

        trainer.training.Training.update = noted_update
        code = trainer.cli.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def lineage(ledger: Path, num_ranks: int = 1, *, together: bool = True) -> dict[int, list]:
    """Rows of every step that the last checkpoint descends from: a resumed process overwrites.

    In local modes the ranks count their steps alone, so a step need not have all of them.
    """
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    steps: dict[int, list] = {}
    last: dict[int, int] = {}
    for line in lines:
        rank, step = line["rank"], line["step"]
        if step <= last.get(rank, 0):  # resumed from a checkpoint before
            for old in [s for s in steps if s >= step]:
                steps[old] = [entry for entry in steps[old] if entry[0] != rank]
        last[rank] = step
        steps.setdefault(step, []).append((rank, line["rows"]))
    for step, entries in steps.items() if together else ():
        assert sorted(rank for rank, _ in entries) == list(range(num_ranks)), step
    # Row n goes to rank n mod R: deal them back into one order, free of ranks.
    return {
        step: sorted(tuple(ids) for _, rows in entries for ids in rows)
        for step, entries in sorted(steps.items())
    }


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step."""
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def weights_hash(run_dir: Path) -> str:
    """Hash of the last checkpoint's fp32 weights and moments."""
    from trainer.run_folder import list_checkpoints

    data = (list_checkpoints(run_dir)[-1] / "training.safetensors").read_bytes()
    return hashlib.sha256(data).hexdigest()


@dataclass
class Report:
    """What a dance showed."""

    seed: int
    window: int
    passes: int
    shards: int
    producers: int
    ranks: int
    checkpoint_every: int
    kills: dict[str, int]
    seconds: float
    max_disk: int
    most_used: int
    freed: int
    steps: int
    lowest_dies: bool
    """the holder of the lowest missing shard was killed while the window was full but for it"""
    early_saves: int
    full: int
    """times a producer said that it waits for room"""


class Dance:
    """One cache, one plan, and the offline run that it must equal."""

    def __init__(self, server, world: Path, folder: Path) -> None:
        self.server, self.world, self.folder = server, world, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._children: list = []

    def start(self, *arguments):
        """Start a process that runs `child`."""
        process = self.server.Process(target=child, args=(os.getpid(), *arguments), daemon=True)
        process.start()
        self._children.append(process)
        return process

    def finish(self, process, log) -> None:
        """Wait for a process that must succeed."""
        process.join()
        assert process.exitcode == 0, log.read_text()[-3000:]

    def offline(self, window: int, passes: int) -> tuple[Path, Path, Path]:
        """Make the whole cache and train on it in the order of the window; done once each."""
        cache = self.folder / "whole"
        log = self.folder / "offline.log"
        if not cache.exists():
            self.finish(self.start("hscache", produce_flags(self.world, cache), log), log)
        run_dir = self.folder / f"offline-{window}-{passes}"
        ledger = run_dir.with_suffix(".ledger")
        if not run_dir.exists():
            flags = fit_flags(cache, run_dir, f"--passes={passes}", f"--window={window}")
            self.finish(self.start("trainer", flags, log, ledger), log)
        return cache, run_dir, ledger

    def dance(
        self,
        seed: int,
        window: int,
        passes: int,
        *,
        reserve: int = 3,
        producers: int = 1,
        ranks: int = 1,
        mode: str = "ddp",
        kills: int = 3,
        every: int = 2,
        lowest_dies: bool = False,
    ) -> Report:
        """Produce and follow with deaths at random; check everything; return what happened.

        With `lowest_dies` the first producer stops in the middle of a shard and is killed when the
        others wait, as a rule because the window is full but for that one.
        """
        whole, offline_dir, offline_ledger = self.offline(window, passes)
        plain = open_cache(whole)
        num_shards = len(plain.plan.training_shards)
        needs = needs_of(whole, plain.identity)
        max_disk = needs.with_shards(min(window, num_shards) + reserve)
        cache = self.folder / f"window-{seed}"
        run_dir = self.folder / f"run-{seed}"
        ledger, log = self.folder / f"ledger-{seed}", self.folder / f"log-{seed}"
        log.touch()
        chance = random.Random(seed)
        slow = chance.choice([(0.0, 0.05), (0.1, 0.0), (0.03, 0.01)])  # who is the limit
        produce = produce_flags(
            self.world, cache, "--retain=window", f"--max-disk={max_disk}", f"--passes={passes}",
            f"--reserve={reserve}",
        )  # fmt: skip
        follow = [
            "--follow", f"--passes={passes}", f"--checkpoint-every={every}", f"--sync.mode={mode}",
            f"--sync.local-steps={every}",
        ]  # fmt: skip

        def start_producer(stall_after=None):
            return self.start("hscache", produce, log, None, slow[0], chance.random(), stall_after)

        def start_trainer():
            resume = ["--resume"] if list(run_dir.glob("checkpoint-*")) else []
            flags = fit_flags(cache, run_dir, *follow, *resume)
            port = str(chance.randrange(20000, 60000))
            launch = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            return [
                self.start(
                    "trainer", flags, log, ledger, slow[1], chance.random(), None,
                    {**launch, "RANK": str(rank)},
                )
                for rank in range(ranks)
            ]  # fmt: skip

        started_s, lowest_died = time.monotonic(), False
        counts = dict.fromkeys(("producer", "trainer", "lowest claim", "terminated"), 0)
        with Watch(cache) as watch:
            running = {
                f"producer{n}": [start_producer(9 if lowest_dies and n == 0 else None)]
                for n in range(producers)
            }
            running["trainer"] = start_trainer()
            next_kill_s = started_s + chance.uniform(0.2, 1.5)
            while running:
                for name, processes in list(running.items()):
                    codes = [process.exitcode for process in processes]
                    if codes == [0] * len(codes):
                        del running[name]
                    elif any(codes):
                        self._clear(processes, log)
                        again = start_trainer if name == "trainer" else lambda: [start_producer()]
                        running[name] = again()
                time.sleep(0.01)
                watch.require_progress(run_dir, log)
                if lowest_dies:
                    stalled = running["producer0"][0]
                    waiting = _others_wait_for(cache, stalled.pid)
                    if _holds_lowest(cache, stalled.pid) and waiting:
                        counts["lowest claim"] += 1
                        stalled.kill()
                        stalled.join()
                        lowest_dies, lowest_died = False, "window is full" in waiting
                elif kills and running and time.monotonic() > next_kill_s:
                    if what := self._kill(chance, cache, running):
                        counts[what] += 1
                        kills -= 1
                    next_kill_s = time.monotonic() + chance.uniform(0.2, 1.5)
        text = log.read_text()
        assert "Traceback" not in text, text[-3000:]
        assert watch.most_used <= max_disk
        together = mode == "ddp"
        found, expected = lineage(ledger, ranks, together=together), lineage(offline_ledger)
        documents = [d for rows in found.values() for ids in rows for d in ids]
        training = plain.plan.training_shards
        wanted = [d for shard in training for d in plain.plan.shard_documents(shard)] * passes
        assert sorted(documents) == sorted(wanted)
        assert sorted(chain(*found.values())) == sorted(chain(*expected.values()))
        if together:
            assert found == expected
        if ranks == 1:  # another number of ranks adds in another order
            assert losses(run_dir) == losses(offline_dir)
            assert weights_hash(run_dir) == weights_hash(offline_dir)
        opened = open_cache(cache)
        assert opened.published_shards() == list(range(opened.plan.num_shards))
        states = [opened.shard_manifest(s).state for s in opened.plan.training_shards]
        held_out = [opened.shard_manifest(s).state for s in opened.plan.held_out_shards]
        assert "freed" not in held_out
        assert states.count("freed") >= num_shards - min(window, num_shards) - reserve
        return Report(
            seed=seed, window=window, passes=passes, shards=num_shards, producers=producers,
            ranks=ranks, checkpoint_every=every, kills=counts,
            seconds=round(time.monotonic() - started_s, 2), max_disk=max_disk,
            most_used=watch.most_used, freed=states.count("freed"), steps=len(found),
            lowest_dies=lowest_died,
            early_saves=text.count("early:"), full=text.count("the window is full"),
        )  # fmt: skip

    def _clear(self, processes, log: Path) -> None:
        """Let the other ranks of a run end too, which one of them was killed in."""
        deadline_s = time.monotonic() + 20
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        codes = {process.exitcode for process in processes}
        killed = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
        assert codes & killed, log.read_text()[-3000:]
        if len(processes) == 1:
            assert codes <= killed

    def _kill(self, chance, cache: Path, running) -> str:
        """Kill one process at this instant; return which kind, "" if it had ended before."""
        name = chance.choice(sorted(running))
        process = chance.choice(running[name])
        what = name.rstrip("0123456789")
        if what == "producer" and _holds_lowest(cache, process.pid):
            what = "lowest claim"
        if what == "trainer" and chance.random() < 0.25:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                return "terminated"
        process.kill()
        process.join()
        return what if process.exitcode == -signal.SIGKILL else ""

    def close(self) -> None:
        """End whatever still runs."""
        for process in self._children:
            if process.is_alive():
                process.kill()
                process.join()


def _records(cache: Path) -> list[dict]:
    paths = layout.producers_dir(cache).glob("*.json")
    return [record for path in paths if (record := read_record(path)) is not None]


def _holds_lowest(cache: Path, pid: int) -> bool:
    """Whether that process is writing the lowest shard that is missing."""
    there = set(layout.list_shards(cache))
    lowest = next(n for n in range(10**6) if n not in there)
    return any(r["owner"]["pid"] == pid and r["claim"] == lowest for r in _records(cache))


def _others_wait_for(cache: Path, pid: int) -> str:
    """What all other producers wait for, "" if one works; a held-out shard holds no window up."""
    others = [r for r in _records(cache) if r["owner"]["pid"] != pid]
    reasons = [r.get("waiting") or "" for r in others]
    return " ".join(reasons) if all(reasons) else ""


class Watch:
    """Looks at the disk all the time; knows when nothing has happened for too long."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self.most_used = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._last, self._last_s = (), time.monotonic()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()

    def _look(self):
        while not self._stopped.wait(0.005):
            self.most_used = max(self.most_used, budget.used_bytes(self._cache))

    def require_progress(self, run_dir: Path, log: Path) -> None:
        now = (len(layout.list_shards(self._cache)), sorted(p.name for p in run_dir.glob("ch*")))
        if now != self._last:
            self._last, self._last_s = now, time.monotonic()
        assert time.monotonic() - self._last_s < STUCK_S, log.read_text()[-3000:]


def remove(folder: Path) -> None:
    """Delete what a dance left."""
    shutil.rmtree(folder, ignore_errors=True)
