"""How fast a planned run is, and what it pays beside its steps: measured, or a stated default.

Takes the settings of `hscache plan` and what was measured; hands on FLOP/s, bytes/s and seconds,
each with where it comes from.
"""

from __future__ import annotations

import math
from typing import Any

from hscache import cost
from hscache.cost_config import CostConfig, PlannedFit
from hscache.forward_flops import ForwardFlops
from hscache.gpus import GPUS, TERA, Gpu
from hscache.measured_rates import Measured
from hscache.sizes import parse_size

DEFAULT_SHARE = 0.75
"""Of the sustained products, where nothing was measured: both sides (design.md section 1)."""
DEFAULT_SUSTAINED = 0.7
"""Of the dense peak, where nobody measured the products of a GPU: an H200 sustains 67 %."""


def planned_gpu(config: CostConfig) -> Gpu:
    """Return the GPU of the table, or one that is only known by what was measured on it."""
    if config.gpu != "other":
        return GPUS[config.gpu]
    assert config.ceiling_tflops is not None
    assert config.gpu_memory is not None
    return Gpu(
        name="a GPU that is not in the table",
        bf16=config.ceiling_tflops * TERA,
        fp8=None,
        fp4=None,
        sparse_bf16=None,
        memory_bytes=parse_size(config.gpu_memory, "gpu_memory"),
        bandwidth=None,
        power_w=None,
        source="no dense peak is known: the measured ceiling stands in for it",
    )


def sustained_rate(config: CostConfig, gpu: Gpu, measured: Measured) -> dict[str, Any]:
    """Return the rate of sustained bf16 products, FLOP/s, and where it comes from."""
    if config.ceiling_tflops is not None:
        return {"flop_per_s": config.ceiling_tflops * TERA, "how": "given as ceiling_tflops"}
    if measured.sustained is not None:
        return {"flop_per_s": measured.sustained, "how": "measured by a bench"}
    if gpu.sustained is not None:
        return {"flop_per_s": gpu.sustained, "how": gpu.sustained_source}
    how = f"assumed: {DEFAULT_SUSTAINED:.0%} of the dense peak, for nobody measured it"
    return {"flop_per_s": DEFAULT_SUSTAINED * gpu.bf16, "how": how}


def speeds_of(
    measured: Measured, sustained: float, of_target: ForwardFlops
) -> tuple[cost.Speeds, dict[str, Any]]:
    """Return what one GPU reaches on each side; and the same in words, for the tables."""
    assumed = f"assumed: {DEFAULT_SHARE:.0%} of the sustained products"
    target, target_how = DEFAULT_SHARE * sustained, assumed
    writing: cost.Writing = "after" if measured.in_turns else "beside"
    if measured.target_tokens_per_s is not None:
        target = measured.target_tokens_per_s * of_target.total
        target_how = "measured, shards of a cache: writing included"
        writing = "included"
    elif measured.target_flop_per_s is not None:
        target, target_how = measured.target_flop_per_s, "measured"
    trainer, trainer_how = DEFAULT_SHARE * sustained, assumed
    if measured.trainer_flop_per_s is not None:
        trainer, trainer_how = measured.trainer_flop_per_s, "measured, steps from shards"
    speeds = cost.Speeds(
        target=target,
        trainer=trainer,
        write=measured.write,
        read=measured.read,
        writing=writing,
    )
    return speeds, {
        "target": {"flop_per_s": target, "share": target / sustained, "how": target_how},
        "trainer": {"flop_per_s": trainer, "share": trainer / sustained, "how": trainer_how},
        "disk_write": None if math.isinf(measured.write) else measured.write,
        "disk_read": None if math.isinf(measured.read) else measured.read,
    }


def pauses_of(
    measured: Measured, fit: PlannedFit, corpus: dict[str, Any]
) -> tuple[cost.Pauses, list[str]]:
    """Return what the run takes beside its steps, and names for what of it is not known."""
    unknown = []

    def known(value: float | None, name: str) -> float:
        if value is None:
            unknown.append(name)
        return value or 0.0

    target_start_s = known(measured.target_start_s, "the start of produce")
    target_start_s += known(corpus["tokenise_s"], "tokenising")
    trainer_start_s = known(measured.trainer_start_s, "the start of fit")
    look_s = 0.0
    if fit.eval_every_tokens:
        look_s = known(measured.look_s, "looks at held-out documents")
    looks_s, checkpoints_s = cost.fit_pauses(
        corpus["training_tokens"] * fit.passes,
        tokens_per_step=fit.row_tokens * measured.token_fill * fit.global_batch_rows,
        checkpoint_every=fit.checkpoint_every,
        eval_every_tokens=fit.eval_every_tokens,
        first_look_s=measured.first_look_s or 0.0,
        look_s=look_s,
        copy_s=measured.checkpoint_copy_s or 0.0,
        checkpoint_s=known(measured.checkpoint_s, "checkpoints"),
    )
    pauses = cost.Pauses(
        target_start_s=target_start_s,
        trainer_start_s=trainer_start_s,
        looks_s=looks_s,
        checkpoints_s=checkpoints_s,
    )
    return pauses, unknown
