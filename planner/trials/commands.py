"""``headway plan --calibrate``: the fastest of a few real runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from topologies.console import console, print_json, say, write_output


def right_size_here(scenario: str, folder: Path, settings: list[str], output: str | None, as_json: bool) -> None:
    """Run headway's own commands on this machine, tell how the trials went, and write the plan of the fastest."""
    from planner.cli import headway
    from planner.rightsizing import right_size

    def run(words: list[str]) -> int:
        say(f"\n$ headway {' '.join(words)}")
        return int(headway.main(words, prog_name="headway", standalone_mode=False) or 0)

    with redirect_stdout(sys.stderr):  # what the commands say on the way is talk; the answer is data
        trials = right_size(run, scenario, folder, settings=settings)
    best = trials[0]
    if output is not None:
        write_output(output, best.plan.read_bytes())
    if as_json:
        print_json([{**asdict(one), "plan": str(one.plan), "error": one.error} for one in trials])
        return
    table = Table("layout", "predicted", "measured", "error", "plan", title="Run on this machine, the fastest first")
    for one in trials:
        measured = f"{one.measured_seconds:.3f} s" + (" (contended)" if one.contended else "")
        table.add_row(one.layout, f"{one.predicted_seconds:.3f} s", measured, f"{one.error:+.1%}", str(one.plan))
    console().print(table)
    say(f"the fastest is {best.plan}; what the runs taught is in {folder / 'machine.yaml'}")
