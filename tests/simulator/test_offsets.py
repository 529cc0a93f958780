from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.offsets import shrunk_offset

RUNS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "published-runs.json"
TIMES = st.floats(0.01, 1000.0)
DRAWS = 100


def test_n_runs_are_believed_by_n_over_n_plus_two() -> None:
    for runs in (1, 2, 3, 5, 20):
        found = shrunk_offset([1.0] * runs, [1.21] * runs)
        assert found.weight == pytest.approx(runs / (runs + 2))
        assert found.factor == pytest.approx(1.21 ** (runs / (runs + 2)))
        assert found.at_face_value == pytest.approx(1.21)


@given(pairs=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=9))
def test_an_offset_lies_between_none_and_face_value(pairs: list[tuple[float, float]]) -> None:
    found = shrunk_offset([told for told, _ in pairs], [seen for _, seen in pairs])
    low, high = sorted((1.0, found.at_face_value))
    assert low * (1 - 1e-12) <= found.factor <= high * (1 + 1e-12)
    scaled = shrunk_offset([3 * told for told, _ in pairs], [3 * seen for _, seen in pairs])
    assert scaled.factor == pytest.approx(found.factor)


def test_one_wrong_run_of_five_moves_little() -> None:
    assert shrunk_offset([1.0] * 5, [1.1, 1.1, 1.1, 1.1, 9.0]).factor == pytest.approx(1.1 ** (5 / 7))
    (told,) = shrunk_offset([1.0] * 5, [1.1, 1.1, 1.1, 1.1, 9.0]).warnings
    assert "9 times the predicted step" in told


@pytest.mark.parametrize(("predicted", "measured"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_misuse(predicted: list[float], measured: list[float]) -> None:
    with pytest.raises(ValueError, match=r"needed for each|must be positive"):
        shrunk_offset(predicted, measured)


def left_over(groups: list[np.ndarray], runs: int, *, face_value: bool = False) -> float:
    """Mean absolute error of the other runs of each group, once ``runs`` of them are known; averaged over draws.

    Groups hold log(measured / predicted).
    """
    generator = np.random.default_rng(7)
    errors = []
    for _ in range(DRAWS):
        for logs in groups:
            order = generator.permutation(len(logs))
            seen, rest = logs[order[:runs]], logs[order[runs:]]
            factor = 1.0
            if runs:
                found = shrunk_offset([1.0] * runs, list(np.exp(seen)))
                factor = found.at_face_value if face_value else found.factor
            errors += list(np.abs(factor / np.exp(rest) - 1))
    return float(np.mean(errors))


def test_on_stacks_with_offsets_and_runs_with_noise() -> None:
    """Between stacks 10 %, within 13 %, as published runs have it: one run helps a little, face value hurts."""
    generator = np.random.default_rng(1)
    groups = [generator.normal(0, 0.097) + generator.normal(0, 0.132, size=12) for _ in range(60)]
    none = left_over(groups, 0)
    assert left_over(groups, 1) < none
    assert left_over(groups, 1, face_value=True) > none * 1.1
    assert left_over(groups, 5) < left_over(groups, 3) < none - 0.005
    assert left_over(groups, 5) <= left_over(groups, 5, face_value=True)


@pytest.mark.skipif(not RUNS.is_file(), reason="the published runs are not beside this checkout")
def test_on_published_runs() -> None:
    """Groups of one source, GPU, precision and kind: 3 to 5 runs bring about a point, one does no harm."""
    from simulator.published import read_runs
    from simulator.validation import validate

    by_stack: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for one in validate(read_runs(RUNS)).counted:
        run = one.case.run
        key = (run.source_group, str(run.hardware.get("gpu")), str(run.precision.get("dtype")), run.kind)
        by_stack[key].append(math.log(one.case.measured_seconds / one.seconds))
    groups = [np.array(logs) for logs in by_stack.values() if len(logs) >= 6]
    assert len(groups) > 20
    none = left_over(groups, 0)
    assert left_over(groups, 1) <= none + 0.004
    assert left_over(groups, 1, face_value=True) > none + 0.01
    assert left_over(groups, 3) <= none - 0.002
    assert left_over(groups, 5) <= none - 0.004
