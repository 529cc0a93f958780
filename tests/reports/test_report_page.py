from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from planner.plan import Plan
from reports.document import report
from reports.inputs import assumptions
from reports.timeline import Picture
from simulator.outcome import Measurement, StepTimeline

VOID = {"meta", "br", "hr", "img", "input", "link", "col", "wbr"}


class Page(HTMLParser):
    """Checks that tags balance, and gathers text, attributes and ids."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.problems: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.problems.append(f"</{tag}> closes {self.open[-1:]} at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture
def page(make_plan: Callable[..., Plan], make_measurement: Callable[..., Measurement], timeline: StepTimeline) -> str:
    plan = make_plan()
    rival = make_plan(step_seconds_low=3.0)
    return report(
        plan,
        [make_measurement(plan)],
        [(rival, make_measurement(rival, environment={"contended": True, "foreign_cpu_share": 0.2}))],
        picture=Picture(timeline=timeline, num_microbatches=32),
        files=["plan.json", "measurement.json"],
    )


def test_the_same_input_gives_the_same_bytes(
    make_plan: Callable[..., Plan], make_measurement: Callable[..., Measurement], timeline: StepTimeline
) -> None:
    plan = make_plan()
    pages = {
        report(plan, [make_measurement(plan)], picture=Picture(timeline=timeline, num_microbatches=32))
        for _ in range(2)
    }
    assert len(pages) == 1


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    parsed = Page(page)
    assert parsed.problems == []
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(parsed.tags)
    loads = [one for one in parsed.attributes if one[1] in {"src", "href", "xlink:href", "srcset", "data"}]
    assert loads, "the charts refer to their own markers and clips"
    assert all(value.startswith("#") for _, _, value in loads)
    urls = re.findall(r"url\(([^)]*)\)", page)
    assert all(url.startswith("#") for url in urls)
    assert "@import" not in page


def test_ids_are_unique_and_every_reference_is_met(page: str) -> None:
    parsed = Page(page)
    ids = [value for _, key, value in parsed.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    targets = set(re.findall(r"url\(#([^)]*)\)", page))
    targets |= {value[1:] for _, key, value in parsed.attributes if key.endswith("href")}
    assert targets <= set(ids)


def test_the_head_gives_the_answer_of_the_plan(page: str) -> None:
    text = Page(page).text
    head = text[: text.index("The layout")]
    expected = (
        "TP4 PP2 DP2 SP zero1 1f1b mb1",
        "4 s , and",
        "3.6 s to 4.5 s",
        "40.0 %",
        "40 of 100 TFLOP/s per GPU, bf16",
        "43 days",
        "p10 40 days, p90 47 days",
        "93.0 %",
        "$1.25 M",
        "$625 k per T tokens",
        "250 MWh",
        "242 kW on average",  # 250 MWh over 43 days
        "53.5 GB",  # 10 + 20 + 12 + 2 * 3 + 0.5 + 1 + 4: two micro-batches in flight on the first stage
        "of 76 GB usable",
        "measured 4.2 s a step: the prediction is 4.8 % below that",
        "GEMM rates: made for a test",
    )
    for one in expected:
        assert one.replace(" , ", ", ") in head.replace(" , ", ", "), one


def test_the_waterfall_table_adds_up_to_the_step(page: str) -> None:
    section = page[page.index("Where each second") : page.index("Memory per pipeline stage")]
    table = section[section.rindex("<tbody>") :]
    times = [
        float(value) if unit == "s" else float(value) / 1e3 for value, unit in re.findall(r">([\d.,]+) (s|ms)<", table)
    ]
    assert sum(times[:-1]) == pytest.approx(times[-1])
    assert times[-1] == 4.0
    assert times[0] == pytest.approx(0.4 * 4.0), "the time at peak is MFU times step"


def test_names_from_files_are_escaped_everywhere(
    make_plan: Callable[..., Plan], make_measurement: Callable[..., Measurement], timeline: StepTimeline
) -> None:
    evil = "<script>alert(1)</script>$x^2$"
    plan = make_plan(name=evil, basis=[evil], inputs=[{"path": evil, "sha256": evil}])
    plan.alternatives[0]["lost_because"] = evil
    plan.solver[evil] = evil
    plan.checkpoint["mode"] = evil
    measurement = make_measurement(plan, phases_seconds={evil: 1.0})
    page = report(plan, [measurement], picture=Picture(timeline=timeline, num_microbatches=32), files=[evil, evil])
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert parsed.problems == []
    assert evil in parsed.text


def test_a_contended_measurement_and_its_rival_are_told(page: str) -> None:
    text = Page(page).text
    assert "Caution: the machine was contended while it was measured (others took 20 % of the CPU)" in text
    assert text.count("TP4 PP2 DP2") >= 3


def test_what_was_not_asked_is_said(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(days=None, cost_usd=None, energy_kwh=None, goodput=None, mfu=None)
    text = Page(report(plan)).text
    assert text.count("not asked") >= 3
    assert "MFU unknown" in text
    assert "Pipeline timeline" not in text
    assert "Predicted and measured" not in text


def test_a_layout_that_does_not_fit_says_so(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    plan.predicted["memory_bytes"]["capacity"] = 50e9
    text = Page(report(plan)).text
    assert "This layout does not fit: it needs 53.5 GB and a GPU has 50 GB" in text


def test_every_number_has_its_source(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    told = {(row.group, row.key): (row.value, row.source) for row in assumptions(plan.scenario)}
    assert told["GPU card", "peak.bf16"] == ("100 TFLOP/s", "data sheet, page 3")
    assert told["GPU card", "memory"] == ("80 GB", "data sheet")
    assert told["Node box", "scale_up.bandwidth"] == ("450 GB/s", "data sheet of the box")
    assert told["NIC port", "bandwidth"] == ("50 GB/s", "data sheet of the port")
    assert told["Cluster two-cards", "fabric.efficiency"] == ("1", "headway's default")
    assert told["Job", "seq_length"] == ("1,024", "scenario small")
    assert told["Model toy", "num_layers"] == ("4", "made for a test")
    text = Page(report(plan)).text
    for (_, key), (value, source) in told.items():
        assert f"{key} {value}" in text
        assert source in text


def test_inputs_are_listed_with_their_hashes(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    page = report(plan)
    assert plan.inputs[0]["sha256"] in page
    assert plan.sha256() in page


@pytest.mark.parametrize("pp", [1, 64])
def test_few_and_many_stages(make_plan: Callable[..., Plan], pp: int) -> None:
    parsed = Page(report(make_plan(pp=pp, layers=64)))
    assert parsed.problems == []
    labels = [word for word in parsed.words if re.fullmatch(r"stages? [\d-]+", word.strip())]
    assert len(labels) in ({1} if pp == 1 else {15, 16})
    assert labels[0].strip() == "stage 0"
    assert labels[-1].strip() == f"stage {pp - 1}"


def test_the_memory_table_holds_the_plans_numbers(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    stages: list[dict[str, Any]] = plan.predicted["memory_bytes"]["per_stage"]
    text = Page(report(plan)).text
    for stage in stages:
        assert f"{stage['total_bytes'] / 1e9:.1f} GB" in text


def test_a_played_step_outside_the_band_is_a_caution(make_plan: Callable[..., Plan], timeline: StepTimeline) -> None:
    told = "Caution: played event by event, this step takes 16.5 s"
    assert told in Page(report(make_plan(), picture=Picture(timeline=timeline, num_microbatches=32))).text
    wide = make_plan(step_seconds_high=17.0)
    assert told not in Page(report(wide, picture=Picture(timeline=timeline, num_microbatches=32))).text
    part = Page(report(make_plan(), picture=Picture(timeline=timeline, num_microbatches=8))).text
    assert told not in part
    assert "8 of the 32 micro-batches" in part


def test_the_confirmation_of_the_plan_is_quoted(make_plan: Callable[..., Plan]) -> None:
    played = {
        "runs": 24, "work_seconds": 60 * 86400.0, "whole_work_seconds": 86 * 86400.0, "saves": 5184, "goodput": 0.9312,
        "difference_points": 0.12, "because": [], "rate_spread": 0.0,
    }  # fmt: skip
    quoted = " ".join(Page(report(make_plan(confirmation=played))).text.split())
    assert "24 runs of 60 d of work (5,184 saves), a stretch of the 86 d of the run, played: 93.12%" in quoted
    assert "Confirmed by simulation" not in report(make_plan())
