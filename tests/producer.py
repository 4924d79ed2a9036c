"""Run `hscache produce` as users do, in a process of its own, and look at what it leaves.

Imported by test_produce.py; kept apart from the tests for length.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from forked import Forked

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "target.target_layer_ids": "0,1,3",
    "target.device": "cpu",
    "data.max_tokens": "256",
    "store.shard_tokens": "200",
    "store.threads": "1",
    "token_budget": "256",
}


def command(shard_dir, target_dir, corpus_file, **settings) -> list[str]:
    """The command line; a setting's dot is written as two underscores."""
    values = {
        "shard_dir": shard_dir,
        "target.path": target_dir,
        "data.train": corpus_file,
        **SETTINGS,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return [sys.executable, "-m", "hscache.cli", "produce", *flags]


def fork(*args, **settings) -> Forked:
    """Start a producer that need not import anything."""
    return Forked("hscache", command(*args, **settings)[3:])


def start(*args, **settings) -> subprocess.Popen:
    """Start a producer as a user does; its output is kept."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "default",
    }
    return subprocess.Popen(
        command(*args, **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen | Forked) -> tuple[int, str]:
    """Wait for a producer; return its exit code and output."""
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_until(condition, process: subprocess.Popen | Forked) -> bool:
    """Poll until the condition holds (True) or the process has ended (False)."""
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # a folder was renamed under our eyes
            if condition():
                return True
        time.sleep(0.002)
    return condition()


def published(shard_dir: Path) -> list[str]:
    """Names of the published shards."""
    return sorted(p.name for p in (shard_dir / "shards").glob("[0-9]*"))


def temporaries(shard_dir: Path) -> list[Path]:
    """All temporary files and folders of the cache."""
    return sorted(shard_dir.rglob(".tmp-*"))


def array_hashes(shard_dir: Path) -> dict[str, str]:
    """Hash of every file of the cache but shards' attributes, which carry times, and heartbeats."""
    skipped = {"producers"}
    hashes = {}
    for path in sorted(shard_dir.rglob("*")):
        relative = path.relative_to(shard_dir)
        attributes = len(relative.parts) == 3 and relative.parts[0] == "shards"
        if path.is_file() and relative.parts[0] not in skipped and not attributes:
            hashes[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def mtimes(shard_dir: Path, shards: list[str]) -> dict[str, int]:
    """Modification time of every file of some shards."""
    return {
        str(path): path.stat().st_mtime_ns
        for shard in shards
        for path in sorted((shard_dir / "shards" / shard).rglob("*"))
    }
