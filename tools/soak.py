"""Let producer and trainer dance on bounded caches for many seeds, killed at random.

    python tools/soak.py --seeds 24 --out tools/bench/results/soak.json

Each seed is a dance of `tests/dance.py`: windows of 6 shards and 6 passes, of 7 and 3, and plans of
fewer shards than the window; one or two producers, one or two ranks.
The folder of a dance that failed is left for a look.
"""

import argparse
import dataclasses
import json
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dance  # noqa: E402
import forked  # noqa: E402


def main() -> int:
    """Run the seeds; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="where caches and runs go; default: /tmp")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder))
    server = forked.context()
    large = dance.Dance(server, dance.make_world(base / "world", 110), base / "large")
    small = dance.Dance(server, dance.make_world(base / "few", 16), base / "small")
    reports, failed = [], []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        floor = small if seed % 4 == 3 else large
        window, passes = (7, 3) if seed % 4 == 1 else (6, 6)
        producers = 1 + (seed // 4) % 2
        try:
            report = floor.dance(
                seed,
                window,
                passes,
                producers=producers,
                ranks=1 + (seed % 8 == 4),
                kills=5,
                every=(1, 4, 9, 15)[seed // 2 % 4],
                lowest_dies=producers == 2 and floor is large,
            )
        except AssertionError:
            traceback.print_exc()
            failed.append(seed)
            print(f"seed {seed} failed; see {floor.folder}", file=sys.stderr)
            continue
        reports.append(dataclasses.asdict(report))
        print(json.dumps(reports[-1]), flush=True)
        for name in (f"window-{seed}", f"run-{seed}"):
            dance.remove(floor.folder / name)
    large.close()
    small.close()
    result = {
        "what": "tools/soak.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {platform.python_version()}",
        "seeds": arguments.seeds,
        "failed": failed,
        "kills": sum(sum(report["kills"].values()) for report in reports),
        "lowest_claim_killed_while_full": sum(r["lowest_dies"] for r in reports),
        "dances": reports,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if not failed:
        dance.remove(base)
    print(f"{arguments.seeds - len(failed)} of {arguments.seeds} seeds passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
