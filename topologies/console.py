"""What every command shares: errors to stderr with the right exit code, data to stdout, ``--json``, ``-o -``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from topologies.document import InputFile, to_json, write_atomically
from topologies.errors import HeadwayError, Infeasible

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class HeadwayCommand(click.Command):
    """A command that tells headway's own errors in one line (and as JSON where ``--json`` was asked for)."""

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help; docstrings are raw, so the mark of lines that are not to be wrapped is made here."""
        self.help = self.help and self.help.replace("\\b", "\b")
        super().format_help_text(context, formatter)

    def invoke(self, context: click.Context) -> Any:
        """Run the command; exit 1 where the answer is no, 2 on trouble, 130 on Ctrl-C."""
        try:
            return super().invoke(context)
        except HeadwayError as error:
            say(f"error: {error}")
            if context.params.get("as_json"):
                kind = "infeasible" if isinstance(error, Infeasible) else type(error).__name__
                click.echo(to_json({"error": {"kind": kind, "message": str(error)}}))
            context.exit(error.exit_code)
        except KeyboardInterrupt:
            say("interrupted")
            context.exit(130)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command; like ``click.command`` with headway's handling of errors."""
    return click.command(name, cls=HeadwayCommand, **attributes)


json_option: Callable[[Decorated], Decorated] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON with stable keys."
)


def say(text: str) -> None:
    """Talk to the person: stderr, so that stdout stays data."""
    click.echo(text, err=True)


def console() -> Console:
    """A rich console on stdout for tables; NO_COLOR and pipes are honoured by rich."""
    return Console(file=sys.stdout, soft_wrap=False, width=None if sys.stdout.isatty() else 140)


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Callable[[int, str], None] | None]:
    """A bar on stderr while something long goes on; None where stderr is no terminal.

    Yields:
        A function that takes how much is done, and words to stand beside the bar.
    """
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=screen) as progress:
        task = progress.add_task(what, total=total, words="")
        yield lambda done, words: progress.update(task, completed=done, words=words)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that work goes on, on stderr; what is yielded changes the text."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield lambda more: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda more: bar.update(task, description=more)


def print_json(content: Any) -> None:
    """Print plain data as JSON on stdout."""
    click.echo(to_json(content))


def write_output(path: str, content: str | bytes) -> None:
    """Write to a file, whole or not at all; ``-`` is stdout."""
    if path == "-":
        click.echo(content, nl=False)
    else:
        write_atomically(Path(path), content)
        say(f"wrote {path}")


def tell_inputs(inputs: Sequence[InputFile]) -> None:
    """Say on stderr which files were read."""
    for one in inputs:
        say(f"read {one.path} (sha256 {one.sha256[:12]})")


def inputs_json(inputs: Sequence[InputFile]) -> list[dict[str, str]]:
    """Return what ``--json`` tells of the files that were read."""
    return [{"path": one.path, "sha256": one.sha256} for one in inputs]
