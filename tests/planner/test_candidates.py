from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.candidates import legal_layouts
from planner.rules import broken
from scenarios.layout import RECOMPUTES, SCHEDULES, SHARDINGS
from simulator.arrays import LayoutArrays

SEARCHED = [name for name in SCHEDULES if name != "zb-h2"]  # only where it is pinned


def rows(layouts: LayoutArrays) -> set[tuple[Any, ...]]:
    names = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch_size", "sequence_parallel")
    codes = ("sharding", "schedule", "recompute")
    return set(zip(*(getattr(layouts, name).tolist() for name in (*names, *codes)), strict=True))


def brute_force(gpus: int, layers: int, heads: int, experts: int, batch: int, seq: int) -> set[tuple[Any, ...]]:
    """The rules once more, spelt out for one layout at a time; eight GPUs in one domain, every size divides."""
    found = set()
    counts = range(1, gpus + 1)
    expert_counts = [one for one in range(1, max(experts, 1) + 1) if max(experts, 1) % one == 0]
    for tp, cp, pp, mb in itertools.product(counts, counts, counts, (1, 2, 3, 4, 6, 8, 12, 24)):
        dp = gpus // (tp * cp * pp)
        if tp * cp * pp * dp != gpus or heads % tp or (cp > 1 and seq % (2 * cp)) or batch % (dp * mb):
            continue
        m = batch // (dp * mb)
        if m < pp or pp > layers:
            continue
        for ep, etp, schedule, vpp in itertools.product(expert_counts, {1, tp}, SEARCHED, range(1, 9)):
            if not experts and (ep, etp) != (1, 1):
                continue
            if (tp * cp * dp) % (ep * etp):
                continue
            if pp == 1 and (schedule != "1f1b" or vpp > 1):
                continue
            virtual = {"interleaved": vpp > 1, "zbv": vpp == 2, "dualpipe": vpp == 2}.get(schedule, vpp == 1)
            if not virtual or pp * vpp > layers + (2 if vpp > 1 else 0):
                continue
            if (schedule == "interleaved" and m % pp) or (schedule == "dualpipe" and m < 2 * pp):
                continue
            if schedule == "gpipe":  # as long as 1f1b, with more in memory
                continue
            if vpp > 1 and sum(divmod(-layers, pp * vpp)[1:]) > 2:  # only the first and the last chunk may be shorter
                continue
            for shard, sp in itertools.product(range(4), (False, True)):
                if (dp * cp == 1 and shard) or (pp > 1 and shard >= 2) or (sp and (tp == 1 or seq % (tp * cp))):
                    continue
                found.add((tp, cp, pp, dp, ep, etp, vpp, mb, sp, shard, SCHEDULES.index(schedule), 0))
    return found


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("gpus", [4, 6, 8])
def test_the_enumeration_is_complete_and_sound(
    ask: Any, make_model: Any, make_cluster: Any, gpus: int, experts: int
) -> None:
    model = make_model(6, heads=16, kv_heads=16, experts=experts)
    question = ask(make_cluster(1, gpus), model, batch=24, seq=2048, allow=("zero-bubble",))
    layouts = legal_layouts(question).layouts
    found = rows(layouts)
    assert len(found) == len(layouts), "no layout twice"
    assert found == brute_force(gpus, 6, 16, experts, 24, 2048)


def test_schedules_that_split_the_backward_pass_are_searched_only_where_allowed(ask: Any) -> None:
    plain = {SCHEDULES[code] for code in legal_layouts(ask()).layouts.schedule.tolist()}
    allowed = {SCHEDULES[code] for code in legal_layouts(ask(allow=("zero-bubble",))).layouts.schedule.tolist()}
    pinned = {SCHEDULES[code] for code in legal_layouts(ask(), {"schedule": "zb-h1"}).layouts.schedule.tolist()}
    assert plain == {"1f1b", "interleaved"}
    assert {"zb-h1", "zbv"} <= allowed
    assert pinned == {"zb-h1"}


def test_every_candidate_keeps_every_rule(ask: Any, make_model: Any, make_cluster: Any) -> None:
    question = ask(make_cluster(3), make_model(10, experts=8), batch=48, least_gpus=1)
    layouts = legal_layouts(question).layouts
    picked = np.random.default_rng(0).choice(len(layouts), 200, replace=False)
    assert all(not broken(question, layouts.row(int(row))) for row in picked)


def test_pins_restrict_and_keep_what_they_say(ask: Any) -> None:
    pins = {"tp": 2, "optimizer_sharding": "zero1", "recompute": "full", "rank_order": ("tp", "cp", "ep", "pp", "dp")}
    layouts = legal_layouts(ask(), pins).layouts
    row = layouts.row(0)
    assert set(layouts.tp.tolist()) == {2}
    assert set(layouts.sharding.tolist()) == {SHARDINGS.index("zero1")}
    assert set(layouts.recompute.tolist()) == {RECOMPUTES.index("full")}
    assert row.rank_order == ("tp", "cp", "ep", "pp", "dp")
    degrees = {row[:-1] for row in rows(layouts.take(layouts.dp * layouts.cp > 1))}
    assert degrees <= {row[:-1] for row in rows(legal_layouts(ask()).layouts)}


def test_a_redundant_choice_is_allowed_where_it_is_pinned(ask: Any, make_cluster: Any) -> None:
    single = ask(make_cluster(1, 1))
    assert set(legal_layouts(single).layouts.sharding.tolist()) == {0}
    assert len(legal_layouts(single, {"optimizer_sharding": "zero1"}).layouts)


def test_rejections_are_counted_by_rule_with_an_example(ask: Any, make_model: Any) -> None:
    found = legal_layouts(ask(model=make_model(heads=6, kv_heads=6, ffn=4096)))
    assert found.rejected["ffn_size"] > 0  # 4096 does not divide over 3 and 6
    assert "4096 % 3 = 1" in found.examples["ffn_size"].sentence
    assert found.emptied_by == ()


def test_the_rule_that_empties_the_space_is_named(ask: Any) -> None:
    found = legal_layouts(ask(), {"tp": 3})
    assert not len(found.layouts)
    assert found.emptied_by == ("attention_heads",)


def test_fewer_gpus_are_enumerated_on_request(ask: Any, make_model: Any, make_cluster: Any) -> None:
    cluster, model = make_cluster(1, 7), make_model(2, heads=4, kv_heads=4)
    assert not len(legal_layouts(ask(cluster, model, batch=8)).layouts)
    used = legal_layouts(ask(cluster, model, batch=8, least_gpus=1)).layouts.world_size
    assert used.max() == 4
    assert used.min() == 1


def test_how_layers_recompute_is_left_to_the_stages(ask: Any) -> None:
    assert set(legal_layouts(ask()).layouts.recompute.tolist()) == {RECOMPUTES.index("none")}


def test_a_pinned_gpipe_is_kept(ask: Any) -> None:
    assert {SCHEDULES[code] for code in legal_layouts(ask(), {"schedule": "gpipe"}).layouts.schedule} == {"gpipe"}


def test_copies_of_shards_are_kept_where_they_are_pinned(ask: Any) -> None:
    found = legal_layouts(ask(), {"dp_replicate": 2, "optimizer_sharding": "zero3"})
    assert len(found.layouts)
    assert found.layouts.dp_replicate == 2
    assert set((found.layouts.dp % 2).tolist()) == {0}
    assert "copies_of_shards" in found.rejected
