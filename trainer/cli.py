"""The `trainer` console script."""

import sys

from hscache import settings
from hscache.settings import Command
from trainer.config import (
    BenchConfig,
    EvalConfig,
    ExportConfig,
    FitConfig,
    PlotConfig,
    StatusConfig,
)

COMMANDS = [
    Command(
        name="fit",
        help="train a drafter from a cache, without the target",
        config=FitConfig,
        run="trainer.fit:run",
    ),
    Command(
        name="eval",
        help="measure a drafter's acceptance length, from held-out shards and by real decoding",
        config=EvalConfig,
        run="trainer.evaluate:run",
    ),
    Command(
        name="status",
        help="show how far a run is right now",
        config=StatusConfig,
        positional="run",
        run="trainer.status:run",
    ),
    Command(
        name="plot",
        help="draw the curves of runs: loss, accuracy, acceptance, speed",
        config=PlotConfig,
        run="trainer.plot:run",
        positional="runs",
    ),
    Command(
        name="export",
        help="write a drafter for serving engines: z-lab's or speculators' format",
        config=ExportConfig,
        run="trainer.export:run",
    ),
    Command(
        name="bench",
        help="measure how fast a fit would run here, against the device's products alone",
        config=BenchConfig,
        run="trainer.bench:run",
    ),
]


def main(argv: list[str] | None = None) -> int:
    """Run `trainer`; return the exit code."""
    return settings.main(
        "trainer", "Train speculative-decoding drafters from hidden-state caches.", COMMANDS, argv
    )


if __name__ == "__main__":
    sys.exit(main())
