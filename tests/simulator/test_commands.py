"""``headway simulate`` and ``headway collective``: the JSON contract, exit codes, bad input."""

import gzip
import json

import pytest
from click.testing import CliRunner

from planner.cli import headway
from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from topologies.document import to_json

LLAMA = ["llama3-405b-16k-h100", "--pin", "tp=8", "--pin", "pp=16", "--pin", "dp=128"]


def run(*words, code=0):
    result = CliRunner().invoke(headway, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def answer(*words):
    return json.loads(run(*words, "--json").stdout)


@pytest.fixture
def plan(tmp_path):
    """The stable keys of a plan, as the contract has them."""
    scenario = load_scenario("laptop")
    layout = Layout(pp=2)
    content = {
        "format_version": 1,
        "scenario": scenario.model_dump(mode="json"),
        "layout": layout.model_dump(mode="json") | {"num_microbatches": layout.num_microbatches(scenario.job)},
        "checkpoint": {"interval_steps": 7, "interval_seconds": 30.0, "mode": "sync", "tiers": [], "bytes": 1.0},
        "predicted": {"step_seconds": 4.0},
    }
    path = tmp_path / "plan.json"
    path.write_text(to_json(content))
    return path, content


def test_a_step_of_a_pinned_scenario():
    content = answer("simulate", *LLAMA)
    assert {"step_seconds", "mfu", "breakdown_seconds", "memory_bytes"} <= content.keys()
    assert sum(content["breakdown_seconds"].values()) == pytest.approx(content["step_seconds"])
    assert content["memory_bytes"]["peak"] > 0
    assert content["layout"]["num_microbatches"] == 16
    assert 0.2 < content["mfu"] < 0.6
    # the closed form charges the 1:7 between pods to every NIC; on the links it is there for who crosses it
    reasons = content["difference_seconds"]
    assert reasons["oversubscription"] < 0
    untapered = content["closed_form"]["step_seconds"] + reasons["oversubscription"]
    assert content["step_seconds"] - reasons["paths"] == pytest.approx(untapered, rel=0.02)
    assert all(len(one["sha256"]) == 64 for one in content["inputs"])


def test_a_step_for_people():
    result = run("simulate", *LLAMA, "--step")
    assert "TP8 PP16 DP128" in result.stdout
    assert "pp bubble" in result.stdout
    assert "\nread " in f"\n{result.stderr}"
    assert "\nread " not in f"\n{result.stdout}"


def test_overrides_change_the_scenario():
    short, long = (
        answer("simulate", *LLAMA, "--set", f"job.seq_length={length}")["step_seconds"] for length in (4096, 8192)
    )
    assert 0.3 * long < short < 0.6 * long


def test_runs_have_the_keys_of_the_contract():
    content = answer("simulate", *LLAMA, "--runs", 6, "--seed", 3, "--jobs", 1)
    assert {"runs", "seed", "goodput", "wall_seconds", "lost_seconds", "failures", "analytic"} <= content.keys()
    assert content["runs"] == content["completed_runs"] == 6
    assert content["seed"] == 3
    assert {"mean", "p10", "p50", "p90", "ci95"} <= content["goodput"].keys()
    assert {"goodput", "optimum_interval_seconds", "difference_points", "agrees"} <= content["analytic"].keys()
    assert content["goodput"]["mean"] == pytest.approx(content["analytic"]["goodput"], abs=0.03)
    assert "30 %" in content["quantiles_include"]
    assert content["energy_kwh"]["mean"] > 0
    assert content["cost_usd"]["mean"] > 1e7
    assert content["failures"]["faulty GPU"] > content["failures"]["NIC"] > 0
    assert content["useful_seconds"] + sum(content["lost_seconds"].values()) == pytest.approx(
        content["wall_seconds"]["mean"]
    )
    assert content == answer("simulate", *LLAMA, "--runs", 6, "--seed", 3, "--jobs", 1)
    assert content["goodput"] != answer("simulate", *LLAMA, "--runs", 6, "--seed", 4, "--jobs", 1)["goodput"]


def test_runs_for_people_say_the_seed_and_what_is_left_out():
    result = run("simulate", *LLAMA, "--runs", 2)
    assert "seed: 0" in result.stderr
    assert "goodput" in result.stdout
    assert "not modelled" in result.stdout


def test_search_and_simulation_agree_on_a_plan_of_four_months():
    content = answer("simulate", *LLAMA, "--runs", 60, "--jobs", 1, "--set", "faults.rate_spread=0")
    assert abs(content["analytic"]["difference_points"]) < 0.3
    assert content["analytic"]["agrees"]
    assert "luck alone" in content["quantiles_include"]


def test_the_scenario_fixes_checkpoints_faults_and_power():
    changes = [
        "checkpoint.interval=10 min", "checkpoint.peer_memory=false", "faults.spares=5", "faults.standbys=2",
        "faults.elastic={reconfigure: 3 min}", "cluster.power.node_cap=7 kW", "faults.restart=2 min",
    ]  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    content = answer("simulate", *LLAMA, "--runs", 2, *words)
    assert content["checkpoint"]["interval_seconds"] == pytest.approx(600, abs=10)
    assert content["checkpoint"]["tiers"] == ["Tectonic", "Tectonic (archive)"]
    assert content["power"]["speed"] < 1
    assert content["lost_seconds"]["power cap"] > 0
    assert content["lost_seconds"]["degraded"] > 0
    assert content["spares_used"]["mean"] <= 7
    assert content["analytic"]["leaves_out"]


def test_parts_and_their_merge(tmp_path):
    whole = answer("simulate", *LLAMA, "--runs", 5, "--seed", 2, "--jobs", 1)
    paths = [tmp_path / f"part-{k}.jsonl" for k in (1, 2)]
    for k, path in enumerate(paths, start=1):
        run("simulate", *LLAMA, "--runs", 5, "--seed", 2, "--jobs", 1, "--part", f"{k}/2", "-o", path)
    assert answer("merge", *paths) == whole
    assert "goodput" in run("merge", *paths).stdout


def test_an_answer_in_a_file_has_a_timeline(tmp_path):
    path = tmp_path / "runs.json"
    run("simulate", *LLAMA, "--runs", 2, "-o", path)
    timeline = json.loads(path.read_text())["timeline"]
    assert timeline["spans"][0][2] == "training"
    assert timeline["spans"][-1][1] == pytest.approx(timeline["wall_seconds"])


def test_without_failure_rates_it_says_so():
    result = run("simulate", "laptop", "--pin", "dp=2", "--runs", 2)
    assert "names no failure rates" in result.stderr


def test_a_job_that_cannot_progress_ends_and_says_so():
    bad = ["--set", "faults.restart=2 h", "--set", "faults.detection=1 h", "--set", "cluster.num_nodes=2048"]
    failures = "faults.failures=[{component: x, rate: '100 /d', per: gpu}]"
    result = run("simulate", *LLAMA, *bad, "--set", failures, "--set", "faults.maintenance=null", "--runs", 3)
    assert "3 of 3 runs were given up" in result.stderr


def test_a_plan_file(plan):
    path, _ = plan
    content = answer("simulate", path)
    assert content["layout"]["pp"] == 2
    assert content["inputs"][0]["path"] == str(path)
    runs = answer("simulate", path, "--runs", 1)
    assert runs["checkpoint"]["interval_steps"] == 7
    assert runs["checkpoint"]["mode"] == "sync"
    pinned = answer("simulate", path, "--pin", "pp=1", "--pin", "dp=2")
    assert (pinned["layout"]["pp"], pinned["layout"]["dp"]) == (1, 2)
    longer = answer("simulate", path, "--set", "job.seq_length=256")
    assert longer["step_seconds"] > 1.3 * content["step_seconds"]


@pytest.mark.parametrize("suffix", [".json.gz", ".json"])
def test_a_trace_is_written(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    run("simulate", "laptop", "--pin", "pp=2", "--pin", "dp=1", "--trace", path)
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if suffix == ".json.gz" else raw)
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}


def test_a_trace_on_stdout_stands_alone():
    result = CliRunner().invoke(headway, ["simulate", "laptop", "--pin", "dp=2", "--trace", "-"])
    assert result.exit_code == 0
    assert json.loads(gzip.decompress(result.stdout_bytes))["traceEvents"]


def refused(*words, says, code=2):
    result = run(*words, code=code)
    assert says in result.stderr, result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--runs", "0"], "not in the range"),
        (["--runs", "5", "--seed", "-1"], "not in the range"),
        (["--runs", "5", "--jobs", "0"], "not in the range"),
        (["--runs", "5", "--step"], "--runs plays whole runs"),
        (["--part", "1/2"], "are for whole runs"),
        (["--runs", "5", "--part", "1/2"], "name it with -o"),
        (["--runs", "5", "--part", "3/2", "-o", "-"], "is not K/N"),
        (["--runs", "5", "--backend", "dask"], "is not one of"),
        (["--set", "faults.restart=-5 min", "--runs", "1"], "must be finite and not negative"),
        (["--set", "faults.spares=-1", "--runs", "1"], "spares"),
        (["--set", "checkpoint.interval=0 s", "--runs", "1"], "interval"),
        (["--set", "checkpoint.write=0 GB/s", "--runs", "1"], "write"),
        (["--set", "faults.trace=nowhere.csv", "--runs", "1"], "there is no file"),
        (["--set", "faults.manual={share: 0.1}", "--runs", "1"], "takes"),
        (["--trace", "/proc/nowhere/trace.json.gz"], "cannot be written"),
        (["--pin", "tp"], "field=value"),
        (["--pin", "tq=8"], "did you mean"),
        (["--pin", "tp=eight"], "tp"),
        (["--set", "job.seq_lenght=8"], "did you mean 'seq_length'"),
    ],
)
def test_bad_options(options, says):
    refused("simulate", *LLAMA, *options, says=says)


def test_an_open_layout_is_refused():
    refused("simulate", "llama3-405b-16k-h100", says="run 'headway plan' first")
    refused("simulate", "llama3-405b-16k-h102", says="did you mean")


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (["tp=8", "pp=16", "dp=256"], "needs 32768 GPUs, has 16384"),
        (["tp=8", "pp=16", "dp=100"], "not a multiple of dp 100"),
        (["tp=8", "pp=16", "dp=128", "schedule=interleaved", "vpp=2", "micro_batch_size=2"], "multiples of pp 16"),
        (["tp=8", "pp=200", "dp=8"], "more than the model's 126 layers"),
    ],
)
def test_an_impossible_layout_exits_1(pins, says):
    words = [word for pin in pins for word in ("--pin", pin)]
    refused("simulate", "llama3-405b-16k-h100", *words, says=says, code=1)


def test_damaged_plans(plan, tmp_path):
    path, content = plan
    path.write_text(path.read_text()[:-200])
    refused("simulate", path, says="is not complete JSON")
    path.write_text(to_json(content | {"format_version": 99}))
    refused("simulate", path, says="format_version 99")
    path.write_text(to_json({key: value for key, value in content.items() if key != "layout"}))
    refused("simulate", path, says="layout: is missing")
    wrong = content | {"layout": content["layout"] | {"tp": 0}}
    path.write_text(to_json(wrong))
    refused("simulate", path, says="tp")
    path.write_text(to_json(content | {"layout": content["layout"] | {"stages": [{"layers": 1}, {"layers": 1}]}}))
    refused("simulate", path, says="hold 2 layers", code=1)
    path.write_text("")
    refused("simulate", path, says="holds nothing")
    refused("simulate", tmp_path, says="there is no file")


def test_errors_are_json_too():
    result = run("simulate", "llama3-405b-16k-h100", "--pin", "dp=100", "--json", code=1)
    assert json.loads(result.stdout)["error"]["kind"] == "infeasible"


def test_a_collective():
    content = answer("collective", "all_reduce", "--cluster", "dgx-h100-superpod", "--gpus", 8, "--bytes", "8 GiB")
    assert {"seconds", "algbw_bytes_per_second", "busbw_bytes_per_second", "algorithm", "protocol"} <= content.keys()
    assert content["algbw_bytes_per_second"] == pytest.approx(8 * 2**30 / content["seconds"])
    assert content["busbw_bytes_per_second"] == pytest.approx(content["algbw_bytes_per_second"] * 2 * 7 / 8)
    assert (
        "busbw"
        in run("collective", "all_reduce", "--cluster", "dgx-h100-superpod", "--gpus", 16, "--bytes", "8 GiB").stdout
    )


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
def test_a_collective_as_flows(kind):
    words = ("collective", kind, "--cluster", "llama3-roce-16k", "--gpus", 8192, "--bytes", "8 GiB", "--flows")
    content = answer(*words, "--seed", 3)
    assert content["protocol"] == "fluid"
    assert content["flows"]["flows"] >= content["flows"]["flow_classes"] > 0
    assert content["flows"]["high_seconds"] >= content["seconds"] > content["flows"]["latency_seconds"]
    assert " to " in content["bottleneck"]
    assert any("7:1" in warning for warning in content["warnings"])
    assert any("PFC" in line for line in content["not_modelled"])
    assert content["closed_form"]["seconds"] > 0
    assert answer(*words, "--seed", 3) == content
    assert "bound by" in run(*words).stdout


def test_what_binds_a_collective():
    def bound(cluster, gpus, *more, kind="all_reduce"):
        words = ("collective", kind, "--cluster", cluster, "--gpus", gpus, "--bytes", "8 GiB", *more)
        return answer(*words)["bottleneck"]

    assert bound("dgx-h100-superpod", 8) == "nvswitch links of each GPU"
    assert bound("dgx-a100-superpod", 64) == "NICs"
    assert bound("llama3-roce-16k", 16384, kind="all_to_all") == "links into building (a NIC keeps 1/5.69)"
    assert "building" not in bound("llama3-roce-16k", 16384)  # a ring in order leaves a pod with one node's traffic
    assert bound("dgx-h100-superpod", 8, "--flows").startswith("gpu0 to scale-up0")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["all_reduce", "--cluster", "dgx-h100-superpod", "--gpus", "8", "--bytes", "8"], "has no unit", 2),
        (["all_reduce", "--cluster", "dgx-h100-superpod", "--gpus", "1", "--bytes", "8 GB"], "not in the range", 2),
        (["all_redoce", "--cluster", "dgx-h100-superpod", "--gpus", "8", "--bytes", "8 GB"], "is not one of", 2),
        (["all_reduce", "--cluster", "dgx-h101", "--gpus", "8", "--bytes", "8 GB"], "not shipped", 2),
        (["all_reduce", "--cluster", "laptop", "--gpus", "64", "--bytes", "8 GB"], "needs 64 GPUs", 1),
    ],
)
def test_bad_collectives(words, says, code):
    refused("collective", *words, says=says, code=code)
