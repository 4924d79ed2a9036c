"""Time, memory and power of a device, for measurements.

Takes a device and the work to time; hands back seconds by CUDA events (a host clock on a CPU), the
memory peak, and what nvidia-smi says meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds on a device: CUDA events where there are any, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device

    def mark(self) -> Any:
        """Return a point in time of the device's stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Wait for `end` and return the seconds since `start`."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that some work takes."""
        start = self.mark()
        work()
        return self.between(start, self.mark())

    def finish(self) -> None:
        """Wait for everything that was asked for."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        """Forget the memory peak so far."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors have taken, None on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._cuda else None


@contextmanager
def gpu_monitor(device: torch.device) -> Iterator[dict[str, Any]]:
    """Sample power, clock, use and the reason for slowing down; fills the dict at the end."""
    found: dict[str, Any] = {
        "power_w": None,
        "clock_mhz": None,
        "utilisation": None,
        "power_capped_share": None,
        "heat_capped_share": None,
    }
    if device.type != "cuda":
        yield found
        return
    query = (
        "power.draw,clocks.sm,utilization.gpu,clocks_event_reasons.sw_power_cap,"
        "clocks_event_reasons.sw_thermal_slowdown"
    )
    with tempfile.TemporaryFile("w+") as samples:
        command = [
            "nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={query}",
            "--format=csv,noheader,nounits", "--loop-ms=200",
        ]  # fmt: skip
        try:
            process = subprocess.Popen(command, stdout=samples, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            yield found
            return
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            samples.seek(0)
            rows = [line.strip().split(", ") for line in samples if line.count(", ") == 4]
    if rows:
        found["power_w"] = statistics.median(float(row[0]) for row in rows)
        found["clock_mhz"] = statistics.median(float(row[1]) for row in rows)
        found["utilisation"] = statistics.mean(float(row[2]) for row in rows) / 100
        found["power_capped_share"] = statistics.mean(row[3] == "Active" for row in rows)
        found["heat_capped_share"] = statistics.mean(row[4] == "Active" for row in rows)
