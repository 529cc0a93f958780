"""Is this installation whole? Each check says what it found, and what to do where something is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PACKAGES = ("topologies", "scenarios", "simulator", "planner", "runtime", "reports")
DISTRIBUTION = "headway-planner"
EXTRAS = {"torch": "runtime", "prometheus_client": "runtime", "matplotlib": "reports"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding: ``ok``, ``optional`` (something may be added) or ``broken``."""

    name: str
    state: Literal["ok", "optional", "broken"]
    found: str
    remedy: str | None = None


def examine() -> list[Check]:
    """Check Python, the packages (no stranger may own their names), the libraries, the solver and this machine."""
    return [_python(), *(_package(name) for name in PACKAGES), *_libraries(), _solver(), _torchrun(), _machine()]


def _python() -> Check:
    return Check(name="python", state="ok", found=".".join(map(str, sys.version_info[:3])))


def _package(name: str) -> Check:
    module = importlib.import_module(name)
    place = str(Path(module.__file__ or "?").parent)
    if getattr(module, "PRODUCT", None) != "headway":
        remedy = f"another distribution owns the import name {name!r}; use an environment of headway's own"
        return Check(name=name, state="broken", found=place, remedy=remedy)
    return Check(name=name, state="ok", found=place)


def _libraries() -> list[Check]:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    checks = []
    for text in (one for one in required if "extra ==" not in one):
        name = re.split(r"[^A-Za-z0-9._-]", text)[0]
        checks.append(_library(name, "broken", f"pip install '{text}'"))
    extras = [_library(name, "optional", f"pip install '{DISTRIBUTION}[{extra}]'") for name, extra in EXTRAS.items()]
    return checks + extras


def _library(name: str, missing: Literal["optional", "broken"], remedy: str) -> Check:
    try:
        return Check(name=name, state="ok", found=importlib.metadata.version(name.replace("_", "-")))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, state=missing, found="not installed", remedy=remedy)


def _solver() -> Check:
    pulp = importlib.import_module("pulp")
    available = pulp.listSolvers(onlyAvailable=True)
    if "HiGHS" not in available:
        found = ", ".join(available) or "none"
        return Check(name="solver", state="broken", found=found, remedy="pip install 'highspy!=1.16.0'")
    fallback = " (CBC as fallback)" if "PULP_CBC_CMD" in available else ""
    return Check(name="solver", state="ok", found=f"HiGHS{fallback}")


def _torchrun() -> Check:
    beside = Path(sys.executable).with_name("torchrun")
    found = str(beside) if beside.exists() else shutil.which("torchrun")
    if found is None:
        return Check(
            name="torchrun", state="optional", found="not found", remedy=f"pip install '{DISTRIBUTION}[runtime]'"
        )
    return Check(name="torchrun", state="ok", found=found)


def _machine() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check(name="machine", state="ok", found=f"{cores} CPU cores")
