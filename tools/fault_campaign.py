"""Put thousands of random faults into a small cache and count those that nobody notices.

    python tools/fault_campaign.py --faults 12000 --json tools/bench/results/fault-campaign.json

Each fault is drawn from (seed, number) and put into a copy of a cache on /dev/shm. Then everything
is read as a notebook and the trainer read it, and `verify --deep` runs. A fault is

- detected, if a read raised one of our errors or `verify` named damage;
- unchanged, if it left the bytes as they were (zeros over padding, a value forged to itself);
- harmless, if every read gave the bytes that were written and `verify` found nothing: the file is
  not read, or its bytes mean the same. The files are listed;
- undetected, if a read returned other bytes without an error, or a read failed where `verify` found
  nothing. The bar is 0.

Errors that are not ours, growth of memory and slow reads are counted apart; the bar is 0 too. A
payload with a forged checksum is no fault that a checksum can find, and is not drawn.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faults
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import hscache
from hscache import files, layout
from hscache.errors import HscacheError
from hscache.fingerprint import config_sha256
from hscache.frozen import Frozen
from hscache.manifest import (
    ContentIdentity,
    EncodingIdentity,
    Identity,
    StatesIdentity,
    encode_group,
)
from hscache.plan import TokenizedDocument, corpus_sha256, deal_into_shards, write_plan
from hscache.verify import verify
from hscache.writer import ShardWriter
from trainer.frozen import load_frozen, target_config

HIDDEN, VOCAB, LAYER_IDS = 16, 64, (1, 3)
SPIKE_BYTES = 64 << 20
SLOW_S, STUCK_S = 30.0, 60.0
CODECS = ("lossless", "none", "bitround4", "fp8", "last_hidden")


def main() -> int:
    """Parse arguments, run the campaign, print and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.place, prefix="hscache-faults-") as place:
        result = campaign(Path(place), arguments.faults, arguments.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return int(any(result[name] for name in ("undetected", "foreign_errors", "spikes", "slow")))


def campaign(place: Path, num_faults: int, seed: int) -> dict[str, Any]:
    """Inject that many faults, the codecs taking turns; return counts and what went wrong."""
    started = time.perf_counter()
    outcomes: collections.Counter[str] = collections.Counter()
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    harmless: collections.Counter[str] = collections.Counter()
    wrong: dict[str, list[str]] = {n: [] for n in ("undetected", "foreign", "spikes", "slow")}
    share = -(-num_faults // len(CODECS))
    number = 0
    for codec in CODECS:
        origin = place / f"{codec}-origin"
        make_cache(origin, codec)
        expected = read_all(origin)
        assert all(isinstance(value, bytes) for value in expected.values())
        assert not find_damage(origin)
        for _ in range(min(share, num_faults - number)):
            rng = np.random.default_rng([seed, number])
            number += 1
            folder = place / "copy" / "cache"
            shutil.copytree(origin, folder)
            pool = faults.ACCIDENTS if rng.random() < 0.8 else faults.FORGERIES
            fault = pool[int(rng.integers(len(pool)))]
            what = fault(folder, rng)
            outcome, story = judge(folder, expected, what, wrong)
            if outcome == "harmless" and is_same(folder, origin):
                outcome = "unchanged"
            outcomes[outcome] += 1
            kinds[fault.__name__][outcome] += 1
            if outcome == "harmless":
                harmless[_file_of(what)] += 1
            elif outcome == "undetected":
                wrong["undetected"].append(f"fault {number - 1}, {codec}: {what}: {story}")
            shutil.rmtree(place / "copy")
    return {
        "faults": number,
        "seed": seed,
        **{name: outcomes[name] for name in ("detected", "unchanged", "harmless", "undetected")},
        "foreign_errors": len(wrong["foreign"]),
        "spikes": len(wrong["spikes"]),
        "slow": len(wrong["slow"]),
        "by_fault": {name: dict(sorted(counts.items())) for name, counts in sorted(kinds.items())},
        "harmless_files": dict(harmless.most_common()),
        "stories": {name: stories[:20] for name, stories in wrong.items()},
        "machine": f"{platform.machine()}, python {platform.python_version()}",
        "seconds": round(time.perf_counter() - started),
    }


def judge(
    folder: Path, expected: dict[str, bytes], what: str, wrong: dict[str, list[str]]
) -> tuple[str, str]:
    """Read and verify a cache with a fault; note foreign errors, memory and time in `wrong`."""
    started, before = time.perf_counter(), reset_peak()
    signal.signal(signal.SIGALRM, _stuck)
    signal.setitimer(signal.ITIMER_REAL, STUCK_S, 1.0)  # a read that hangs is a foreign error
    found = read_all(folder)
    damage = find_damage(folder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if (grown := peak_bytes() - before) > SPIKE_BYTES:
        wrong["spikes"].append(f"{what}: {grown / 1e6:.0f} MB")
    if (took := time.perf_counter() - started) > SLOW_S:
        wrong["slow"].append(f"{what}: {took:.1f} s")
    foreign = [v for v in [*found.values(), damage] if isinstance(v, Exception)]
    foreign = [error for error in foreign if not isinstance(error, HscacheError)]
    if foreign:
        wrong["foreign"].append(f"{what}: {foreign[0]!r}")
    changed = [k for k, v in found.items() if isinstance(v, bytes) and v != expected.get(k)]
    failed = [k for k, v in found.items() if isinstance(v, Exception)]
    failed += [name for name in expected if name not in found]
    if changed:
        return "undetected", f"{changed[0]} and {len(changed) - 1} others differ"
    if failed and not damage:
        return "undetected", f"{failed[0]} cannot be read, and verify finds nothing"
    return ("detected", "") if failed or damage else ("harmless", "")


def _stuck(signum: int, frame: Any) -> None:
    raise TimeoutError(f"nothing came in {STUCK_S:g} s")


def read_all(folder: Path) -> dict[str, bytes | Exception]:
    """Return all that readers get of a cache, as bytes or as the error that came instead."""
    found: dict[str, bytes | Exception] = {}

    def read(name: str, function: Any) -> Any:
        try:
            value = function()
        except Exception as error:
            found[name] = error
            return None
        found[name] = value if isinstance(value, bytes) else repr(value).encode()
        return value

    def document(row: int) -> bytes:
        one = cache.documents[row]
        about = repr((one.key, one.source_row, len(one), one.shard_number)).encode()
        states = cache.shard(one.shard_number).captured_bits(row)
        return b"".join([about, one.input_ids.tobytes(), one.loss_mask.tobytes(), states.tobytes()])

    try:
        cache = hscache.open(folder)
    except Exception as error:
        return {"open": error}
    read("sizes", lambda: (len(cache.documents), len(cache.held_out), len(cache.training)))
    for row in range(len(cache.documents)):
        read(f"document {row}", lambda row=row: document(row))
    read("embedding", lambda: load_frozen(cache).embedding_VH.view(torch.int32).numpy().tobytes())
    read("norm", lambda: load_frozen(cache).norm_H.numpy().tobytes())
    read("config", lambda: sorted(target_config(cache).items()))
    return found


def find_damage(folder: Path) -> Any:
    """Return what `verify --deep` finds: a list of damage, or the error that ended it."""
    try:
        cache = hscache.open(folder)
        missing = cache.plan.num_shards - len(cache.published_shards())
        return verify(cache, deep=True, threads=1) or ["unfinished"] * missing
    except Exception as error:
        return error


def reset_peak() -> int:
    """Start anew to count the largest resident size; return the present one (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the largest resident size since the last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def is_same(folder: Path, origin: Path) -> bool:
    """Say whether two folders hold the same files with the same bytes, and no links."""

    def bytes_of(place: Path) -> dict[Path, bytes]:
        paths = [path for path in place.rglob("*") if not path.is_dir() or path.is_symlink()]
        return {
            p.relative_to(place): b"a link" if p.is_symlink() else p.read_bytes() for p in paths
        }

    return bytes_of(folder) == bytes_of(origin)


def _file_of(what: str) -> str:
    """Return the file of a fault's story, shards' numbers and arrays' names aside."""
    path = what.split(":")[0].split(" and ")[0]
    parts = path.split("/")
    return "/".join("*" if part.isdigit() else part for part in parts)


def make_cache(folder: Path, codec: str) -> None:
    """Write a cache of about 24 documents in six shards, with everything that a real one has."""
    rng = np.random.default_rng(1)
    last_hidden = codec == "last_hidden"
    codec = "lossless" if last_hidden else codec
    corpus = [
        TokenizedDocument(
            ids_T=rng.integers(2, VOCAB, length).astype(np.int32),
            loss_mask_T=(rng.random(length) < 0.7).astype(np.uint8),
            source_row=i,
            held_out=i < 3,
        )
        for i, length in enumerate(rng.integers(1, 300, 24).tolist())
    ]
    shards = deal_into_shards(corpus, 900, seed=0)
    ordered = [corpus[i] for shard in shards for i in shard]
    folder.mkdir(parents=True)
    weights = Frozen(
        embedding_VH=torch.from_numpy(rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)),
        head_VH=None,
        norm_H=torch.ones(HIDDEN),
        norm_eps=1e-6,
        norm_form="w",
    ).to_bytes()
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "rope_theta": 1e4, "_name_or_path": "x"}
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (layout.frozen_dir(folder) / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(layout.frozen_dir(folder) / "tokenizer" / "tokenizer.json"))
    layout.frozen_weights(folder).write_bytes(weights)
    layout.target_config_file(folder).write_text(json.dumps(config))
    identity = Identity(
        states=StatesIdentity(
            target="random states",
            revision="",
            config_sha256=config_sha256(config),
            weights_sha256="none",
            tokenizer_sha256=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
            template_sha256="none",
            frozen_sha256=hashlib.sha256(weights).hexdigest(),
            target_layer_ids=LAYER_IDS,
            num_target_layers=5,
            last_hidden=last_hidden,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            dtype="bfloat16",
            trust_remote_code=False,
        ),
        content=ContentIdentity(
            corpus_sha256=corpus_sha256(ordered),
            seed=0,
            max_tokens=300,
            over_long="drop",
            shard_tokens=900,
            num_documents=len(ordered),
            num_tokens=sum(len(document.ids_T) for document in ordered),
            num_held_out_shards=sum(corpus[shard[0]].held_out for shard in shards),
            num_shards=len(shards),
        ),
        encoding=EncodingIdentity(codec=codec),  # type: ignore[arg-type]
    )
    write_plan(folder, corpus, shards, {"rows in": len(corpus)})
    row = 0
    for shard_number, shard in enumerate(shards):
        with ShardWriter(folder, shard_number, identity) as writer:
            for index in shard:
                shape = (len(corpus[index].ids_T), len(LAYER_IDS) + last_hidden, HIDDEN)
                values = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
                writer.add(row, values.bfloat16().view(torch.int16).numpy().view(np.uint16))
                row += 1
            writer.publish({"by": "fault_campaign", "host": os.uname().nodename[:0]})
    files.create_once(layout.root_file(folder), encode_group(identity))


if __name__ == "__main__":
    sys.exit(main())
