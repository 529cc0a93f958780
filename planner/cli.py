"""The root of the command line: a group that imports a command only when it is used."""

from __future__ import annotations

import importlib
import sys
import traceback

import click

COMMANDS = {
    "calibrate": ("runtime.commands:calibrate", "Measure this machine (or read logs) into a cluster profile."),
    "collective": ("simulator.commands:collective", "Predict one collective on a cluster."),
    "compare": ("reports.commands:compare", "Compare a plan's promise with a measurement."),
    "demo": ("planner.demo:demo", "The whole story on this machine: calibrate, plan, simulate, run, compare, report."),
    "diff": ("planner.commands:diff", "Show where two plans differ (exit 1 if they do)."),
    "doctor": ("planner.doctor:doctor", "Check this installation."),
    "explain": ("planner.commands:explain", "Say why a plan is what it is."),
    "model": ("scenarios.commands:model", "List and show models; read a Hugging Face config.json."),
    "plan": ("planner.commands:plan", "Choose the layout for a scenario."),
    "report": ("reports.commands:report", "Write an HTML report of a plan and its measurements."),
    "run": ("runtime.commands:run", "Run a plan as a real torch.distributed job."),
    "scenario": ("scenarios.commands:scenario", "List, show and check scenarios."),
    "schema": ("scenarios.commands:schema", "Print the JSON Schema of a document."),
    "simulate": ("simulator.commands:simulate", "Predict a step or a whole run of a plan or scenario."),
    "topology": ("topologies.commands:topology", "List, show and check hardware and clusters."),
}
"""Where each command lives. A string, so that ``headway --help`` imports neither numpy nor torch."""


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
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in sorted(COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="headway-planner", prog_name="headway")
def headway() -> None:
    r"""Plan, simulate and run LLM training on clusters, and compare the promise with the measurement.

    \b
    headway demo                                            the whole story on this machine
    headway plan llama3-405b-16k-h100 -o plan.json          choose a layout
    headway explain plan.json                               why this one
    """


def main() -> None:
    """Entry point: an unexpected error is ours, says so, and exits 2."""
    try:
        headway()
    except Exception:  # the last line of defence: exit 1 would read as "the answer is no"
        traceback.print_exc()
        sys.stderr.write("error: this is a bug in headway; please report the lines above\n")
        sys.exit(2)
