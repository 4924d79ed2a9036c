"""The `hscache` console script."""

import sys

from hscache.bench_config import BenchAllConfig, BenchStoreConfig
from hscache.bench_target_config import BenchForwardConfig, BenchGemmConfig
from hscache.config import (
    ConsumersConfig,
    InspectConfig,
    ProduceConfig,
    RepairConfig,
    RooflineConfig,
    StatusConfig,
    VerifyConfig,
)
from hscache.cost_config import CostConfig
from hscache.import_config import ImportConfig
from hscache.regenerate_config import RegenerateConfig
from hscache.settings import Command
from hscache.settings import main as run_command

COMMANDS = [
    Command(
        name="plan",
        help="say what a run costs before it is started, and what limits it",
        config=CostConfig,
        run="hscache.cost_command:run",
    ),
    Command(
        name="regenerate",
        help="let the target answer prompts itself: the text to train a drafter on",
        config=RegenerateConfig,
        run="hscache.regenerate:run",
    ),
    Command(
        name="produce",
        help="run the target once over a corpus and fill a cache with its hidden states",
        config=ProduceConfig,
        run="hscache.produce:run",
    ),
    Command(
        name="import",
        help="turn the hidden states that SpecForge, speculators or DeepSpec saved into a cache",
        config=ImportConfig,
        run="hscache.import_cache:run",
    ),
    Command(
        name="inspect",
        help="show what is in a cache",
        config=InspectConfig,
        positional="cache",
        run="hscache.inspect:run",
    ),
    Command(
        name="bench gemm",
        help="measure the matrix products of a target alone: what no forward can beat for long",
        config=BenchGemmConfig,
        run="hscache.bench_gemm:run",
    ),
    Command(
        name="bench forward",
        help="measure how fast this machine makes a target's states, and whether they are right",
        config=BenchForwardConfig,
        run="hscache.bench_forward:run",
    ),
    Command(
        name="consumers",
        help="show which trainers follow a cache, and drop those that will not come back",
        config=ConsumersConfig,
        positional="cache",
        run="hscache.consumers:run",
    ),
    Command(
        name="status",
        help="show how far producing and training are right now",
        config=StatusConfig,
        positional="cache",
        run="hscache.status:run",
    ),
    Command(
        name="roofline",
        help="draw results of benches under the roofs of their GPU, and where the time goes",
        config=RooflineConfig,
        positional="results",
        run="hscache.roofline:run",
    ),
    Command(
        name="verify",
        help="check that a cache still holds what was written",
        config=VerifyConfig,
        positional="cache",
        run="hscache.verify:run",
    ),
    Command(
        name="repair",
        help="take damaged shards out of a cache, for produce to make them again",
        config=RepairConfig,
        positional="cache",
        run="hscache.repair:run",
    ),
    Command(
        name="bench store",
        help="measure this disk with this codec: write, read, decode, and the tokens/s of each",
        config=BenchStoreConfig,
        positional="folder",
        run="hscache.bench_store:run",
    ),
    Command(
        name="bench all",
        help="run every bench, one after another: one JSON, one picture",
        config=BenchAllConfig,
        positional="folder",
        run="hscache.bench_all:run",
    ),
]


def main(argv: list[str] | None = None) -> int:
    """Run `hscache`; return the exit code."""
    return run_command(
        "hscache",
        "Run a target LLM once, keep its hidden states in a compressed cache.",
        COMMANDS,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
