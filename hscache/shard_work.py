"""Where the time of a shard went, for the log, its provenance and whoever asks what the limit is.

Takes times of packs as `hscache.stages` measures them, and what was seen of the GPU; hands on
shares and the limit in words.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hscache.forward_flops import forward_flops, mean_context_of

log = logging.getLogger(__name__)


@dataclass
class ShardWork:
    """Where the time between two shards' ends went, in seconds."""

    started_s: float = field(default_factory=time.perf_counter)
    forward_s: float = 0.0
    copy_s: float = 0.0
    write_s: float = 0.0
    publish_s: float = 0.0
    """of the shard before"""
    flop: float = 0.0
    tokens: int = 0
    documents_per_pack: list[int] = field(default_factory=list)

    def add_pack(self, config: Any, offsets: Sequence[int], forward_s: float) -> None:
        """Count a pack of documents between `offsets` whose forward took so long.

        `config` is the target's, cut to the blocks that run.
        """
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        flops = forward_flops(
            config,
            config.num_hidden_layers,
            num_tokens=offsets[-1],
            mean_context=mean_context_of(lengths),
        )
        self.forward_s += forward_s
        self.flop += flops.total
        self.tokens += offsets[-1]
        self.documents_per_pack.append(len(lengths))

    def report(self, gpu: dict[str, Any], token_budget: int) -> dict[str, Any]:
        """Log and return the shares of the time until now; `gpu` is of `clock.gpu_monitor`."""
        seconds = time.perf_counter() - self.started_s
        shares = {
            "forward": self.forward_s / seconds,
            "measure and copy": self.copy_s / seconds,
            "check and write": self.write_s / seconds,
            "publish": self.publish_s / seconds,
        }
        # A pack that ran before its turn counts in the shard that waited for it, so a share can be
        # above 100 %. The host writes and publishes one after the other, while the GPU goes on.
        host = self.write_s + self.publish_s > self.forward_s
        sides = ("forward", "measure and copy"), ("check and write", "publish")
        limit = max(sides[host], key=lambda name: shares[name])
        log.info(
            "%s tokens/s, %.0f TFLOP/s of useful work; busy: %s; the limit: %s%s",
            f"{self.tokens / seconds:,.0f}", self.flop / seconds / 1e12,
            ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), limit,
            _gpu_words(gpu),
        )  # fmt: skip
        return {
            "documents_per_pack": self.documents_per_pack,
            "token_budget": token_budget,
            "tokens_per_s": round(self.tokens / seconds, 1),
            "flop_per_s": self.flop / seconds,
            "busy": {name: round(share, 4) for name, share in shares.items()},
            "limit": limit,
            "gpu": gpu,
        }


def _gpu_words(gpu: dict[str, Any]) -> str:
    if gpu.get("power_w") is None:
        return ""
    return (
        f"; {gpu['power_w']:.0f} W, {gpu['clock_mhz']:.0f} MHz, GPU busy {gpu['utilisation']:.0%}, "
        f"power-capped {gpu['power_capped_share']:.0%}"
    )
