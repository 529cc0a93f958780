"""From a log of any trainer that headway knows to the runs in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simulator.logs import composer, deepspeed, internevo, logbook, megatron, nemo, primus, table, torchtitan
from simulator.logs.lines import log_lines, read_lines
from simulator.logs.steady import settle
from simulator.logs.trainer_log import TrainerLog
from topologies.errors import InputError


class Format(NamedTuple):
    """One family of logs."""

    name: str
    recognise: Callable[[Sequence[str]], bool]
    read: Callable[[Sequence[str]], list[TrainerLog]]


FORMATS = (
    Format("Primus", primus.recognise, primus.read),
    Format("Megatron-LM, -DeepSpeed and -Bridge", megatron.recognise, megatron.read),
    Format("torchtitan", torchtitan.recognise, torchtitan.read),
    Format("NeMo", nemo.recognise, nemo.read),
    Format("InternEvo", internevo.recognise, internevo.read),
    Format("Composer and llm-foundry", composer.recognise, composer.read),
    Format("benchmark tables", table.recognise, table.read),
    Format("DeepSpeed", deepspeed.recognise, deepspeed.read),
    Format("logbooks", logbook.recognise, logbook.read),
)
"""Those that say more come first: a Megatron-DeepSpeed log holds lines of DeepSpeed's timer, too."""


def read_logs(path: str | Path) -> list[TrainerLog]:
    """Read the runs of a log: one, or several where a table or a logbook holds one a line.

    Raises:
        InputError: not readable, empty, binary, of no known trainer, or without a timed step.
    """
    return _logs(read_lines(path), path)


def parse_logs(text: str, file: str | Path | None = None) -> list[TrainerLog]:
    """Read the runs of a log that is already in memory; see ``read_logs``."""
    return _logs(log_lines(text, file), file)


def _logs(lines: Sequence[str], file: str | Path | None) -> list[TrainerLog]:
    for family in FORMATS:
        if not family.recognise(lines):
            continue
        logs = [log for log in family.read(lines) if any(one.pace for one in log.steps)]
        if not logs:
            raise InputError(
                f"looks like a log of {family.name} and holds no timed step",
                hint="give a log with at least one whole line of a step",
                file=file,
            )
        return [settle(log) for log in logs]
    known = "; ".join(family.name for family in FORMATS)
    raise InputError(
        "holds no training step of a trainer that headway reads",
        hint=f"give the part of the log with the lines of the steps (read are: {known})",
        file=file,
    )


def is_measurement(path: str | Path) -> bool:
    """Tell whether a file is JSON, as measurements are and logs are not."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:
        return False
