"""Faults on purpose, for tests of what happens then: ``HEADWAY_FAULT=kind:rank=R,step=S[,seconds=T][,attempt=A]``.

kill        SIGKILL before a step             stop   SIGSTOP before a step
raise       an exception before a step        nan    weights become NaN before a step
slow        every step from this one on waits ``seconds``; with step=0 also every matrix product of a health check
hang        the step waits for ever, while the process lives
kill-save   SIGKILL when the shards of a save are written, before it is complete
fill-disk   from this save on, files above ``seconds`` kilobytes cannot be written

Steps count from 0; several faults are separated by ``;``. A fault strikes in the first attempt only, unless another is
given.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

VARIABLE = "HEADWAY_FAULT"
_struck: set[str] = set()


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of this rank and attempt."""

    kind: str
    step: int
    seconds: float
    words: str


def strike(place: str, step: int) -> str | None:
    """Do what the environment asks for at this place (``step`` or ``save``).

    Returns:
        'nan' where the caller must spoil its weights.

    Raises:
        RuntimeError: asked for.
    """
    told = None
    for fault in _faults():
        if fault.kind == "slow" and place in ("step", "health") and step >= fault.step:
            time.sleep(fault.seconds)
        if fault.step != step or fault.words in _struck or fault.kind.endswith("save") != (place == "save"):
            continue
        _struck.add(fault.words)
        if fault.kind in ("kill", "kill-save"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "raise":
            raise RuntimeError(f"a fault on purpose before step {step}")
        elif fault.kind == "hang":
            time.sleep(1e6)
        elif fault.kind == "fill-disk":
            size = int(fault.seconds * 1024)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif fault.kind == "nan":
            told = "nan"
    return told


def _faults() -> Iterator[Fault]:
    for words in filter(None, os.environ.get(VARIABLE, "").split(";")):
        kind, _, rest = words.partition(":")
        settings = dict(pair.split("=") for pair in rest.split(","))
        here = settings.get("rank", "0") == os.environ.get("RANK")
        now = settings.get("attempt", "0") == os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if here and now:
            yield Fault(kind, int(settings["step"]), float(settings.get("seconds", "0")), words)
