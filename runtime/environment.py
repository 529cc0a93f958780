"""What was true of the machine while something was measured: versions, cores, and how much of them others took."""

from __future__ import annotations

import os
import platform
import socket
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONTENDED_SHARE = 0.05
"""Above this share of the cores taken by others, wall times are not to be trusted."""


def node_name() -> str:
    """Name of this node: Slurm's, where Slurm started the process, else that of the host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def package_version(name: str) -> str:
    """Version of an installed package, or 'absent'."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def versions() -> dict[str, str]:
    """Versions that a measurement depends on."""
    return {
        "headway": package_version("headway-planner"),
        "torch": package_version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
    }


@dataclass(frozen=True, slots=True)
class CpuClock:
    """Seconds since some start: wall, CPU time that the whole machine was busy (nan where unknown), own CPU time."""

    wall_seconds: float
    busy_seconds: float
    own_seconds: float

    @classmethod
    def now(cls) -> CpuClock:
        """Read the clocks; time that a hypervisor gave to others (steal) counts as busy."""
        return cls(time.perf_counter(), _busy_seconds(), time.process_time())

    def foreign_share(self, before: CpuClock, own_seconds: float, cores: int) -> float | None:
        """Share of the cores that others took since ``before``, given the CPU time of all own ranks."""
        busy, wall = self.busy_seconds - before.busy_seconds, self.wall_seconds - before.wall_seconds
        if busy != busy or wall <= 0:
            return None
        return min(1.0, max(0.0, (busy - own_seconds) / (cores * wall)))


def _busy_seconds() -> float:
    try:
        line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return float("nan")
    ticks = [int(word) for word in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def resident_bytes(kind: str = "VmHWM") -> float:
    """Peak (VmHWM) or current (VmRSS) resident memory of this process in bytes; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0.0)


def reset_peak_memory() -> None:
    """Let the peak start again at what is resident now, where the kernel can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return
