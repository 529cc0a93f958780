"""What makes a step or a collective slower, as the command line says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from simulator.disturbances import OtherJob
from topologies.cluster import CollectiveKind
from topologies.errors import InputError
from topologies.units import parse_quantity

DEAD_HELP = "A link or switch that is dead: node3.nic2, leaf0.1.2, leaf0.1.2-spine0.0.3."
SLOW_LINK_HELP = "A link that keeps a share of its rate: node3.nic2='50 %'."
BESIDE_HELP = "Another job that repeats a collective: 'all_reduce:512-1023:8 GiB'."

Faults = tuple[tuple[str, float], ...]


def read_faults(dead: Sequence[str], slow: Sequence[str]) -> Faults:
    """Read ``--dead LINK`` and ``--slow-link LINK=SHARE``.

    >>> read_faults(["leaf0.1.2"], ["node3.nic2=50 %"])
    (('leaf0.1.2', 0.0), ('node3.nic2', 0.5))

    Raises:
        InputError: not of that form.
    """
    parts = [_assigned(text, "--slow-link", "node3.nic2=50 %") for text in slow]
    return (*((name, 0.0) for name in dead), *((name, _share(share, "--slow-link")) for name, share in parts))


def read_slow_gpus(texts: Sequence[str]) -> dict[int, float]:
    """Read ``--slow-gpu GPU=SPEED``.

    Raises:
        InputError: not of that form.
    """
    found = {}
    for text in texts:
        gpu, speed = _assigned(text, "--slow-gpu", "17=80 %")
        if not re.fullmatch(r"\d{1,9}", gpu):
            raise InputError(f"{gpu!r} is no number of a GPU", hint="for example 17=80 %", key="--slow-gpu")
        found[int(gpu)] = _share(speed, "--slow-gpu")
    return found


def read_share(text: str, key: str) -> float:
    """Read a share such as ``2 %`` or 0.02.

    Raises:
        InputError: not a share.
    """
    return _share(text, key)


def read_others(texts: Sequence[str]) -> tuple[OtherJob, ...]:
    """Read ``--beside KIND:FIRST-LAST:SIZE``: a collective that another job repeats on some GPUs.

    >>> read_others(["all_reduce:8-15:1 GiB"])[0].gpus[-1]
    15

    Raises:
        InputError: not of that form.
    """
    found = []
    for text in texts:
        kind, _, rest = text.partition(":")
        span, _, size = rest.partition(":")
        gpus = re.fullmatch(r"(\d{1,9})-(\d{1,9})", span)
        if gpus is None or not size or int(gpus[1]) >= int(gpus[2]):
            raise InputError(
                f"{text!r} is not of the form KIND:FIRST-LAST:SIZE",
                hint="for example 'all_reduce:512-1023:8 GiB'",
                key="--beside",
            )
        if kind not in get_args(CollectiveKind):
            raise InputError(f"no collective {kind!r}", hint=", ".join(get_args(CollectiveKind)), key="--beside")
        try:
            size_bytes = parse_quantity(size, "bytes")
        except ValueError as error:
            what, _, hint = str(error).partition("; ")
            raise InputError(what, hint=hint or None, key="--beside") from None
        if size_bytes <= 0:
            raise InputError(f"{text!r} moves no bytes", key="--beside")
        members = range(int(gpus[1]), int(gpus[2]) + 1)
        found.append(OtherJob(kind=kind, gpus=tuple(members), size_bytes=size_bytes))  # type: ignore[arg-type]
    return tuple(found)


def _assigned(text: str, key: str, example: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise InputError(
            f"{text!r} is not of the form {example.split('=')[0]}=SHARE", hint=f"for example {example}", key=key
        )
    return name.strip(), value.strip()


def _share(text: str, key: str) -> float:
    try:
        share = float(text) if "%" not in text else float(text.replace("%", "")) / 100
    except ValueError:
        raise InputError(f"{text!r} is no share", hint="write 0.5 or '50 %'", key=key) from None
    if not 0 <= share <= 1:
        raise InputError(f"{text!r} is no share from 0 to 1", key=key)
    return share
