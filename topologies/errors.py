"""The errors that headway raises on purpose.

HeadwayError            anything that headway explains to its user; exit code 2
  InputError            a file, key or value that the user can correct
  Infeasible            a well-posed question whose answer is no; exit code 1
  SolverFailed          a solver ended without an answer
  RunFailed             a real job ended badly
  MissingExtra          an optional dependency is not installed

ValueError and TypeError are for misuse of the Python API, assert is for headway's own bugs.
"""

from __future__ import annotations

from pathlib import Path


class HeadwayError(Exception):
    """Base of all errors that headway explains in a sentence."""

    exit_code = 2


class InputError(HeadwayError):
    """Something that the user wrote cannot be used.

    Reads ``file:line:column: key: what is wrong; what to do``; parts that are unknown are left out.

    >>> print(InputError("80 has no unit", hint="write '80 GB'", file="gpu.yaml", line=3, key="memory"))
    gpu.yaml:3: memory: 80 has no unit; write '80 GB'
    """

    def __init__(
        self,
        what: str,
        *,
        hint: str | None = None,
        file: str | Path | None = None,
        line: int | None = None,
        column: int | None = None,
        key: str | None = None,
    ) -> None:
        self.what, self.hint = what, hint
        self.file = None if file is None else str(file)
        self.line, self.column, self.key = line, column, key
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        words = [part for part in (place, self.key) if part]
        words.append(self.what if self.hint is None else f"{self.what}; {self.hint}")
        return ": ".join(words)


class Infeasible(HeadwayError):
    """The question is well posed and the answer is no.

    ``constraint`` names the rule that no candidate satisfies, ``needed`` and ``available`` are in the unit of that
    rule, ``nearest`` describes the nearest miss and ``relax`` says what would have to change.
    """

    exit_code = 1

    def __init__(
        self,
        constraint: str,
        *,
        needed: str | None = None,
        available: str | None = None,
        nearest: str | None = None,
        relax: tuple[str, ...] = (),
    ) -> None:
        self.constraint, self.needed, self.available = constraint, needed, available
        self.nearest, self.relax = nearest, relax
        sentence = constraint
        if needed is not None and available is not None:
            sentence += f": needs {needed}, has {available}"
        if nearest is not None:
            sentence += f"; nearest miss: {nearest}"
        if relax:
            sentence += "; to relax: " + " or ".join(relax)
        super().__init__(sentence)


class SolverFailed(HeadwayError):
    """A solver ended without a usable answer."""


class RunFailed(HeadwayError):
    """A real job ended badly; the message carries the traceback of the first rank that failed."""


class MissingExtra(HeadwayError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the extra '{extra}', which is not installed; run: pip install 'headway-planner[{extra}]'"
        )
