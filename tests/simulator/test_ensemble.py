"""Ensembles: confidence, parts, and independence of how the work is divided."""

import json
import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from joblib import register_parallel_backend
from joblib.parallel import ThreadingBackend

from scenarios.faults import Failure, Faults
from simulator.ensemble import ensemble_json, quantile_interval, simulate_runs, spread
from simulator.parts import merge_parts, part_range, part_text
from simulator.run_setup import RunSetup
from simulator.tiers import SURVIVES, SaveTier
from topologies.errors import InputError, MissingExtra

KNOWN = {"analytic": {"goodput": 0.9}, "rate_spread": 0.3}


@pytest.fixture(scope="module")
def setup():
    faults = Faults(
        name="x", failures=(Failure(component="node", rate_per_second=1 / 6480, per="job"),), detection_seconds=60,
        restart_seconds=240,
    )  # fmt: skip
    store = SaveTier(
        name="store",
        every=1,
        stall_seconds=20.0,
        drain_seconds=0.0,
        load_seconds=0.0,
        survives=SURVIVES["object-store"],
    )
    return RunSetup(
        step_seconds=60.0, num_steps=7200, tokens_per_step=1000, interval_steps=8, tiers=(store,), faults=faults,
        num_gpus=64, num_nodes=8, checkpoint_bytes=1e9,
    )  # fmt: skip


def test_spread():
    values = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert values["mean"] == values["p50"] == 3.0
    assert (values["p10"], values["p90"]) == pytest.approx((1.4, 4.6))
    half = 2.776 * math.sqrt(2.5 / 5)  # Student's t, 4 degrees of freedom
    assert values["ci95"] == pytest.approx([3 - half, 3 + half], abs=1e-3)
    assert values["p90_ci95"] is None
    assert spread([1.0])["ci95"] is None


@pytest.mark.parametrize("count", [36, 50, 100, 1000])
def test_intervals_of_quantiles_cover_as_promised(count):
    """Order statistics, whatever the distribution: 95 % or a little more; below 36 values the p90 has none."""
    random = np.random.default_rng(count)
    true = -math.log(0.1)
    samples = random.exponential(size=(1500, count))
    inside = [low <= true <= high for low, high in (quantile_interval(list(row), 0.9) for row in samples)]
    assert 0.94 < np.mean(inside) < 0.985
    assert quantile_interval(list(samples[0][:35]), 0.9) is None


def test_the_answer_adds_up(setup):
    content = ensemble_json(simulate_runs(setup, 40, seed=1), 1, KNOWN)
    assert {"runs", "seed", "goodput", "wall_seconds", "lost_seconds", "failures", "analytic"} <= content.keys()
    assert {"mean", "p10", "p50", "p90", "ci95"} <= content["goodput"].keys()
    lost = sum(content["lost_seconds"].values())
    assert content["useful_seconds"] + lost == pytest.approx(content["wall_seconds"]["mean"])
    assert "30 %" in content["quantiles_include"]
    assert content["checkpoint_bytes"]["store"] == pytest.approx(content["checkpoints"] * 1e9)
    exact = replace(setup, faults=setup.faults.model_copy(update={"rate_spread": 0.0}))
    narrow = ensemble_json(simulate_runs(exact, 40, seed=1), 1, KNOWN | {"rate_spread": 0.0})
    assert "luck alone" in narrow["quantiles_include"]
    width = [one["goodput"]["p90"] - one["goodput"]["p10"] for one in (content, narrow)]
    assert width[0] > 1.5 * width[1]


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(setup):
    alone, shared = (simulate_runs(setup, 250, seed=3, jobs=jobs) for jobs in (1, 2))
    assert alone == shared


def test_progress_is_told(setup):
    told = []
    simulate_runs(setup, 20, seed=3, tell=told.append)
    assert sum(told) == 20
    assert len(told) > 3


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"jobs": 0}, {"seed": -1}, {"first_run": -1}])
def test_misuse(setup, wrong):
    with pytest.raises(ValueError, match="at least"):
        simulate_runs(setup, **({"runs": 1, "seed": 0, "jobs": 1} | wrong))


def test_ray_is_an_extra(setup, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'headway-planner\[ray\]'"):
        simulate_runs(setup, 2, 0, backend="ray")


def test_ray_is_a_back_end_of_joblib(setup, monkeypatch):
    """Ray's back end returns lists and no generators (Ray 2.60); the runs are the same."""

    class LikeRay(ThreadingBackend):
        supports_return_generator = False

    module = types.ModuleType("ray.util.joblib")
    module.register_ray = lambda: register_parallel_backend("ray", LikeRay)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert simulate_runs(setup, 6, 2, jobs=2, backend="ray") == simulate_runs(setup, 6, 2)


def test_parts_are_the_whole(setup, tmp_path):
    whole = simulate_runs(setup, 11, seed=4)
    paths = []
    for k in (3, 1, 2):
        first, count = part_range(f"{k}/3", 11)
        path = tmp_path / f"part-{k}.jsonl"
        path.write_text(part_text(simulate_runs(setup, count, seed=4, first_run=first), 4, first, KNOWN))
        paths.append(path)
    outcomes, seed, known = merge_parts(paths)
    assert (outcomes, seed, known) == (whole, 4, KNOWN)


def part(tmp_path, setup, name, *, seed=4, first=0, known=KNOWN):
    path = tmp_path / name
    path.write_text(part_text(simulate_runs(setup, 3, seed=seed, first_run=first), seed, first, known))
    return path


def test_parts_that_do_not_fit_are_refused(tmp_path, setup):
    one = part(tmp_path, setup, "a")
    for other, says in (
        (part(tmp_path, setup, "b", first=2), "holds runs that another part holds too"),
        (part(tmp_path, setup, "c", seed=5, first=3), "another seed"),
        (part(tmp_path, setup, "d", first=3, known=KNOWN | {"rate_spread": 0.1}), "another question"),
    ):
        with pytest.raises(InputError, match=says):
            merge_parts([one, other])
    text = one.read_text()
    for broken, says in (
        (text[:-40], "is not a whole part"),
        ("\n".join(text.splitlines()[:-1]), "holds 2 of 3 runs"),
        (json.dumps({"kind": "else"}) + "\n", "is not a part of an ensemble"),
        ("", "is not a whole part"),
    ):
        one.write_text(broken)
        with pytest.raises(InputError, match=says):
            merge_parts([one])
    with pytest.raises(InputError, match="cannot be read"):
        merge_parts([tmp_path / "nowhere"])


@pytest.mark.parametrize("text", ["0/4", "5/4", "a/b", "1", "3/4/5"])
def test_part_numbers(text):
    with pytest.raises(InputError, match="K/N"):
        part_range(text, 100)


def test_an_empty_part_is_refused():
    with pytest.raises(InputError, match="is empty"):
        part_range("1/9", 3)
