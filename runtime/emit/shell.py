"""Words, comments and names in a shell script: nothing of a plan is ever read as code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from topologies.errors import InputError

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY", re.IGNORECASE)
"""Names of variables whose values do not belong into a file."""


def word(text: object) -> str:
    """Quote one word for bash.

    Raises:
        InputError: it holds a NUL or a line break, which no scheduler carries safely.

    >>> word("a $(b)")
    "'a $(b)'"
    """
    words = str(text)
    if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", words):
        raise InputError(f"{words!r} holds control characters", hint="use plain text")
    return shlex.quote(words)


def comment(text: str) -> str:
    """Put text on one line of plain characters, so that it cannot leave its comment."""
    return re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else " " for letter in text)).strip()


def job_name(name: str) -> str:
    """Reduce a scenario's name to letters, digits, dot, dash and underscore.

    >>> job_name("llama 3; rm -rf $HOME")
    'llama-3-rm-rf-HOME'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:60] or "headway"


def environment(pairs: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=VALUE`` texts.

    Raises:
        InputError: not of this form, or the name is one of a secret.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"{pair!r} is not NAME=VALUE", hint="for example --env NCCL_IB_HCA=mlx5", file="--env")
        if SECRET.search(name):
            raise InputError(
                f"{name} looks like a secret, and secrets are never written to a script",
                hint="export it where you submit: schedulers hand your environment on",
                file="--env",
            )
        found[name] = value
    return found


def exports(variables: Mapping[str, str]) -> list[str]:
    """Shell lines that set and export variables."""
    return [f"export {name}={word(value)}" for name, value in variables.items()]
