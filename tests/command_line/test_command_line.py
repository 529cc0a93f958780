"""The root of the command line: light, lazy, honest exit codes."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from planner import cli
from planner.cli import COMMANDS, headway
from planner.doctor import PACKAGES, examine

HEAVY = {"torch", "pulp", "matplotlib", "numpy", "simpy", "scipy", "networkx"}


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['headway', '--help']\n"
        "from planner.cli import headway\n"
        "headway(standalone_mode=False)\n"
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stderr.replace("'", '"'))}
    assert not loaded & HEAVY
    assert "calibrate" in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_explains_itself(name):
    result = CliRunner().invoke(headway, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_a_small_plan_imports_nothing_heavy():
    """A second of waiting is mostly imports: solvers, events and graphs come with the questions that need them."""
    heavy = HEAVY - {"numpy", "simpy"} | {"highspy", "rich.progress", "simulator.step_player"}
    code = (
        "import sys\n"
        "from planner.cli import headway\n"
        "headway(['plan', 'laptop', '--json'], standalone_mode=False)\n"
        f"loaded = {heavy} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format_version"] == 1


def test_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(headway, ["plam"]).exit_code == 2


def test_an_unexpected_error_is_ours_and_exits_2(monkeypatch, capsys):
    def explode(*words, **options):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(cli, "headway", explode)
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    assert "bug in headway" in capsys.readouterr().err


def test_doctor_finds_this_installation_whole():
    result = CliRunner().invoke(headway, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0
    assert all(checks[name]["state"] == "ok" for name in PACKAGES)
    assert checks["solver"]["found"].startswith("HiGHS")


def test_doctor_notices_a_stranger_with_our_name(monkeypatch):
    import topologies

    monkeypatch.setattr(topologies, "PRODUCT", "another product")
    broken = [check for check in examine() if check.state == "broken"]
    assert [check.name for check in broken] == ["topologies"]
    assert CliRunner().invoke(headway, ["doctor"]).exit_code == 1
