"""Published runs played again: prints what was published, what is simulated, and the error, as a Markdown table.

python tests/benchmarks/reproductions.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from published_whole_runs import ROWS, verdict


def main() -> int:
    """Print the table; 1 where a row is not within its tolerance."""
    print("| published | source | published | simulated | error | not published |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    missed = 0
    for row in ROWS:
        found = row.simulate()
        missed += not verdict(row, found)
        unit = f" {row.unit}" if row.unit else ""
        more = "> " if row.least else ""
        note = row.chosen + ("" if math.isfinite(row.within) else " (shown, not judged)")
        error = f"{100 * (found / row.published - 1):+.1f} %"
        print(  # noqa: T201
            f"| {row.what} | {row.source} | {more}{row.published:g}{unit} | {found:.4g}{unit} | {error} | {note} |",
            flush=True,
        )
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
