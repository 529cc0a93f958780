"""Collectives by size against published logs: those that a curve of the catalog is, and others that it never saw."""

from pathlib import Path

import numpy as np
import pytest

from simulator.collective_answer import answer_collective
from simulator.collectives import collective_seconds, without_logs
from simulator.log_curves import curve_for
from topologies.catalog import find, load_cluster
from topologies.cluster import Cluster
from topologies.console import say
from topologies.curves import Curve
from topologies.document import LoadContext, check, read_mapping
from topologies.errors import InputError
from topologies.units import parse_quantity

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
SYSTEMS = read_mapping(REFERENCE / "published_busbw.yaml")["systems"]
LOGS = read_mapping(REFERENCE / "published_times.yaml")["logs"]
NOT_FITTED = [log for log in LOGS if not log.get("fitted")]
FRESH = [log for log in NOT_FITTED if not log.get("seen")]


def system(name, **node):
    content = {**SYSTEMS[name], "name": name}
    if node:
        content["node"] = {**content["node"], **node}
    return check(content, Cluster, LoadContext(REFERENCE / "published_busbw.yaml"))


def errors(log, cluster=None):
    """Predicted over measured time, less 1, by size in bytes."""
    cluster = cluster or system(log["system"])
    found = {}
    for text, time in log["times"].items():
        size = parse_quantity(text, "bytes")
        found[size] = collective_seconds(log["kind"], cluster, log["ranks"], size).seconds
        found[size] = found[size] / parse_quantity(time, "seconds") - 1
    return found


def ident(log):
    return f"{log['system']} {log['kind']} {log['source'][:40]}"


@pytest.mark.parametrize("log", [log for log in LOGS if log.get("fitted")], ids=ident)
def test_a_log_of_the_catalog_is_repeated(log):
    assert max(abs(error) for error in errors(log).values()) < 1e-3


@pytest.mark.parametrize("log", NOT_FITTED, ids=ident)
def test_logs_that_no_curve_saw(log):
    """From 1 to 512 MiB within 15 % for four sizes of five, or the log says why not."""
    found = errors(log)
    for size, error in found.items():
        say(f"{ident(log)} {size / 2**20:g} MiB {100 * error:+.1f} %")
    far = sum(abs(error) > 0.15 for error in found.values())
    assert (far > 0.2 * len(found) or max(map(abs, found.values())) > 0.2) == ("explained" in log)


def test_most_sizes_of_other_logs_are_met():
    """And by NCCL's tuning model alone they are not."""
    with_logs = [error for log in FRESH for error in errors(log).values()]
    alone = [error for log in FRESH for error in errors(log, without_logs(system(log["system"]))).values()]
    share, before = (np.mean(np.abs(one) <= 0.15) for one in (with_logs, alone))
    assert share > 0.75 > 0.5 > before


def test_by_hand_between_sizes_and_beyond_them():
    """Bandwidth as at the largest size; what smaller ones took beyond it is interpolated, and grows with a tree."""
    cluster = system("p5", curves=["efa-p5"])
    bare, curve = without_logs(cluster), curve_for("all_reduce", cluster, 16)
    times = dict(zip(curve.sizes_bytes, curve.times_seconds.values(), strict=True))

    def model(size, ranks=16):
        return collective_seconds("all_reduce", bare, ranks, size).seconds

    def taken(size, ranks=16):
        return collective_seconds("all_reduce", cluster, ranks, size).seconds

    share = times[2.0**34] / model(2.0**34)
    start, more = (times[size] - share * model(size) for size in (2.0**20, 2.0**21))
    middle = 2**20 * np.sqrt(2)
    assert taken(middle) == pytest.approx(share * model(middle) + (start + more) / 2)
    assert taken(2**10) == pytest.approx(share * model(2**10) + start)
    assert taken(2**36) == pytest.approx(share * model(2**36))
    (pool,) = cluster.pools
    cluster = cluster.model_copy(update={"pools": (pool.model_copy(update={"num_nodes": 16}),)})
    bare = without_logs(cluster)
    assert taken(2**20, 128) == pytest.approx(share * model(2**20, 128) + 4 * start)


def test_a_log_speaks_for_its_side_of_the_domain_and_its_collectives():
    a100, p4de = load_cluster("dgx-a100-superpod"), system("p4de")
    assert curve_for("all_gather", a100, 8).kind == curve_for("reduce_scatter", a100, 4).kind == "all_gather"
    assert curve_for("all_reduce", a100, 16) is None
    assert curve_for("broadcast", a100, 8) is None
    assert [curve_for("all_reduce", p4de, ranks).ranks for ranks in (8, 16)] == [8, 16]
    bare = without_logs(a100)
    assert collective_seconds("all_reduce", a100, 64, 2**24) == collective_seconds("all_reduce", bare, 64, 2**24)
    assert collective_seconds("all_reduce", a100, 8, 2**24, algorithm="ring") == collective_seconds(
        "all_reduce", bare, 8, 2**24, algorithm="ring"
    )


def test_the_answer_says_what_it_rests_on():
    said = answer_collective("all_reduce", system("p5"), 16, 2**24)
    assert said.basis.startswith("a log of 16 ranks: aws-samples")
    assert said.as_json()["basis"] == said.basis
    other = answer_collective("reduce_scatter", load_cluster("dgx-a100-superpod"), 8, 2**24)
    assert other.basis.startswith("NCCL's tuning model, corrected by all_gather in a log of 8 ranks: microsoft")
    assert answer_collective("all_reduce", load_cluster("dgx-h100-superpod"), 64, 2**24).basis == "NCCL's tuning model"


def test_a_log_of_the_catalog_is_found_and_a_wrong_one_refused():
    assert find("efa-p5").curves[0].ranks == 16
    for times, match in (
        ({"2 MiB": "3 us", "1 MiB": "2 us"}, "sizes must grow"),
        ({"1 MiB": "0 us", "2 MiB": "2 us"}, "above 0"),
        ({"much": "1 us", "2 MiB": "2 us"}, "much"),
    ):
        with pytest.raises(InputError, match=match):
            content = {"kind": "all_reduce", "ranks": 8, "origin": "test", "times": times}
            check(content, Curve, LoadContext(Path("curve.yaml")))
