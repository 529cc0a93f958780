"""Predicted against published bus bandwidths: large messages by system, then every log by size.

    python tests/benchmarks/bus_bandwidth.py

Rows of ``tests/reference``. Logs that a curve of the catalog is are marked (fit), logs on which the form of the model
was chosen (seen); all others are predictions.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from simulator.collectives import bus_factor, collective_seconds, without_logs
from topologies.cluster import Cluster
from topologies.console import say
from topologies.document import LoadContext, check, read_mapping
from topologies.units import parse_quantity

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
LARGE, SIZES = REFERENCE / "published_busbw.yaml", REFERENCE / "published_times.yaml"
GB = 1e9
ENOUGH = 0.15
"""Of the time of a size."""


def main() -> None:
    """Print both tables."""
    content = read_mapping(LARGE)
    systems = {
        name: check({**one, "name": name}, Cluster, LoadContext(LARGE)) for name, one in content["systems"].items()
    }
    large_table(systems, content["rows"])
    size_table(systems, read_mapping(SIZES)["logs"])


def large_table(systems: dict[str, Cluster], rows: list[dict[str, Any]]) -> None:
    """Bus bandwidth at the size where it was published."""
    say("| system | collective | ranks | size | published GB/s | predicted GB/s | error | |")
    say("|---|---|---|---|---|---|---|---|")
    errors = []
    for row in rows:
        size = parse_quantity(row["size"], "bytes")
        found = collective_seconds(
            row["kind"], systems[row["system"]], row["ranks"], size, algorithm=row.get("algorithm")
        )
        busbw = found.busbw_bytes_per_second / GB
        error = busbw / row["busbw"] - 1
        note = "(fit)" if row.get("calibrated") else row.get("explained", "")
        errors += [] if row.get("calibrated") else [abs(error)]
        say(
            f"| {row['system']} | {row['kind']} | {row['ranks']} | {row['size']} | {row['busbw']} | {busbw:.1f} "
            f"| {100 * error:+.1f} % | {note} |"
        )
    within = sum(error <= 0.05 for error in errors)
    say(f"\nnot fitted: median {100 * statistics.median(errors):.1f} %, {within} of {len(errors)} within 5 %\n")


def size_table(systems: dict[str, Cluster], logs: list[dict[str, Any]]) -> None:
    """Predicted over published bus bandwidth by size, GB/s."""
    sizes = [f"{2**power} MiB" for power in range(10)]
    say(f"| system | collective | ranks | {' | '.join(size.removesuffix(' MiB') for size in sizes)} MiB | |")
    say(f"|---|---|---|{'---|' * len(sizes)}---|")
    near = alone = total = 0
    for log in logs:
        cells = []
        for size in sizes:
            if size not in log["times"]:
                cells.append("")
                continue
            amount, time = parse_quantity(size, "bytes"), parse_quantity(log["times"][size], "seconds")
            found = collective_seconds(log["kind"], systems[log["system"]], log["ranks"], amount)
            bus = amount * bus_factor(log["kind"], log["ranks"]) / GB
            cells.append(f"{bus / found.seconds:.3g}/{bus / time:.3g}")
            if not (log.get("fitted") or log.get("seen")):
                bare = collective_seconds(log["kind"], without_logs(systems[log["system"]]), log["ranks"], amount)
                near, total = near + (abs(found.seconds / time - 1) <= ENOUGH), total + 1
                alone += abs(bare.seconds / time - 1) <= ENOUGH
        note = "(fit)" if log.get("fitted") else "(seen)" if log.get("seen") else log.get("explained", "")
        say(f"| {log['system']} | {log['kind']} | {log['ranks']} | {' | '.join(cells)} | {note} |")
    say(
        f"\nneither fitted nor seen: {near} of {total} sizes within {100 * ENOUGH:.0f} %; by NCCL's model alone {alone}"
    )


if __name__ == "__main__":
    main()
