"""The root of the command line: a group that imports a command only when it is used."""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import click

from topologies.console import command, console, json_option, print_json, say

SECTIONS = {
    "The main flow": {
        "plan": ("planner.commands:plan", "Choose the layout for a scenario."),
        "explain": ("planner.commands:explain", "Say why a plan is what it is."),
        "simulate": ("simulator.commands:simulate", "Predict a step or a whole run of a plan or scenario."),
        "run": ("runtime.commands:run", "Run a plan as a real torch.distributed job."),
        "compare": ("reports.commands:compare", "Compare a plan's promise with a measurement."),
        "report": ("reports.commands:report", "Write an HTML report of a plan and its measurements."),
        "demo": (
            "planner.cli:demo",
            "The whole story on this machine: calibrate, plan, simulate, run, compare, report.",
        ),
    },
    "What is asked and what is there": {
        "model": ("scenarios.commands:model", "List and show models; read a Hugging Face config.json."),
        "scenario": ("scenarios.commands:scenario", "List, show and check scenarios."),
        "topology": ("topologies.commands:topology", "List, show and check hardware and clusters."),
        "schema": ("scenarios.commands:schema", "Print the JSON Schema of a document."),
        "calibrate": ("runtime.calibration.commands:calibrate", "Measure this machine, or learn from logs."),
        "health": ("runtime.health.commands:health", "Examine this machine before a job."),
        "doctor": ("planner.cli:doctor", "Check this installation."),
        "data": ("runtime.commands:data", "Make token files for training from text."),
    },
    "More answers": {
        "diff": ("planner.commands:diff", "Show where two plans differ (exit 1 if they do)."),
        "sweep": ("planner.commands:sweep", "Answer every combination of some values of a scenario."),
        "rules": ("planner.commands:rules", "Try rules of thumb against headway's choice."),
        "collective": ("simulator.one_collective.commands:collective", "Predict one collective on a cluster."),
        "merge": ("simulator.commands:merge", "Put parts of an ensemble of runs together."),
        "picture": ("reports.commands:picture", "Draw whole runs, a sweep of intervals, or the links of a step."),
        "validate": ("reports.commands:validate", "Predict published, measured runs and say how far off that is."),
        "emit": ("runtime.emit.commands:emit", "Write a plan as a scheduler's job or a trainer's settings."),
    },
}
"""Where each command lives. A string, so that ``headway --help`` imports neither numpy nor torch."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return all command names."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import and return one command."""
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section without importing them."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, help_text) for name, (_, help_text) in commands.items()])


ABOUT = """Plan, simulate and run LLM training on clusters, and compare the promise with the measurement.

\b
headway demo                                     the whole story on this machine
headway plan llama3-405b-16k-h100 -o plan.json   choose a layout
headway explain plan.json                        why this one
"""


@click.group(cls=LazyGroup, help=ABOUT, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headway-planner", prog_name="headway")
def headway() -> None:
    """Root of the command line."""


@command()
@click.option("-o", "--output", "folder", default="out/demo", show_default=True, help="Folder of the results.")
@click.option("--scenario", default="laptop", show_default=True, help="Scenario to run on this machine.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(min=4), help="Optimizer steps of each job.")
@json_option
def demo(folder: str, scenario: str, steps: int, as_json: bool) -> None:
    """Calibrate this machine, plan, simulate, run the plan and one rival for real, compare, and report."""
    from rich.table import Table

    from planner.demo import tell_the_story

    def run(words: list[str]) -> int:
        say(f"\n$ headway {' '.join(words)}")
        return int(headway.main(words, prog_name="headway", standalone_mode=False) or 0)

    results = tell_the_story(run, Path(folder), scenario, steps)
    if as_json:
        print_json([{**asdict(result), "error": result.error} for result in results])
        return
    table = Table("layout", "predicted", "measured", "error", "MFU predicted", "MFU measured", title="headway demo")
    for result in results:
        mfus = ["-" if mfu is None else f"{mfu:.1%}" for mfu in (result.predicted_mfu, result.measured_mfu)]
        measured = f"{result.measured_seconds:.3f} s" + (" (contended)" if result.contended else "")
        table.add_row(result.layout, f"{result.predicted_seconds:.3f} s", measured, f"{result.error:+.1%}", *mfus)
    console().print(table)
    say(f"open {Path(folder) / 'report.html'}")


@command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check Python, packages, libraries, solver and machine; exit 1 where something is broken."""
    from planner.doctor import examine

    checks = examine()
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            click.echo(
                f"{check.state:9} {check.name:18} {check.found}" + (f"  ->  {check.remedy}" if check.remedy else "")
            )
    if any(check.state == "broken" for check in checks):
        context.exit(1)


def main() -> None:
    """Entry point: an unexpected error is ours, says so, and exits 2."""
    try:
        headway()
    except Exception:  # the last line of defence: exit 1 would read as "the answer is no"
        traceback.print_exc()
        sys.stderr.write("error: this is a bug in headway; please report the lines above\n")
        sys.exit(2)
