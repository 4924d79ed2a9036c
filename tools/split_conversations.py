"""Hold out finished greedy answers of a JSONL file of conversations, chosen by a hash of their id.

    python tools/split_conversations.py conversations.jsonl.gz OUT --held-out 600

Leaves OUT/train.jsonl and OUT/held_out.jsonl. Only rows with `temperature` 0 and `finish_reason`
"stop" may be held out: on the target's own greedy text a drafter's acceptance length over recorded
tokens is that of real decoding.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def split(rows: list[dict[str, Any]], count: int) -> tuple[list[Any], list[Any]]:
    """Return (training rows, held-out rows), both in the order of the file."""

    def key(row: dict[str, Any]) -> str:
        return hashlib.sha256(str(row["id"]).encode()).hexdigest()

    able = [row for row in rows if row["temperature"] == 0 and row["finish_reason"] == "stop"]
    if len(able) < count:
        sys.exit(f"{len(able)} rows are greedy and finished, {count} were asked for")
    chosen = {row["id"] for row in sorted(able, key=key)[:count]}
    return (
        [row for row in rows if row["id"] not in chosen],
        [row for row in rows if row["id"] in chosen],
    )


def main() -> None:
    """Parse arguments, split, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--first", type=int, help="use this many rows of the file only")
    arguments = parser.parse_args()
    with gzip.open(arguments.source, "rt") as lines:
        rows = [json.loads(line) for line in lines][: arguments.first]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "held_out"), split(rows, arguments.held_out), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (arguments.folder / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(part):,} conversations")


if __name__ == "__main__":
    main()
