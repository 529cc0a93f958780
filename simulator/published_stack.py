"""The software stack of a published row: what the row declares, then the rules of ``published_stacks.yaml``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from scenarios.stack import Stack
from simulator.published import PublishedRun
from topologies.document import Document, load
from topologies.errors import InputError

RULES = Path(__file__).parent / "published_stacks.yaml"


class Rule(Document):
    """Facts for the rows that match every condition given."""

    text: str | None = None
    before: str | None = None
    architecture: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    stack: dict[str, str | bool]
    reason: str


class GradientRule(Document):
    """Format in which the rows that match reduce gradients."""

    text: str | None = None
    dtype: tuple[str, ...] = ()
    precision: Literal["fp32", "bf16"]
    reason: str


class Rules(Document):
    """All rules, in order."""

    rules: tuple[Rule, ...]
    gradients: tuple[GradientRule, ...]


@cache
def stack_rules() -> Rules:
    """Return the rules that headway ships."""
    return load(RULES, Rules)


def described(run: PublishedRun) -> str:
    """Return the text that the rules look at."""
    layout = run.layout
    parts = [
        run.source_group,
        *(run.source.get(key) for key in ("title", "repo", "path", "table")),
        run.notes,
        run.precision.get("recipe"),
        run.hardware.get("system"),
        layout.get("overlap"),
        layout.get("recompute_detail"),
        layout.get("offload"),
    ]
    return " | ".join(str(part) for part in parts if part).lower()


def stack_of(run: PublishedRun, architecture: str) -> Stack:
    """Return the stack of a row.

    Raises:
        InputError: the row declares a field that a stack does not have.
    """
    text = described(run)
    facts: dict[str, Any] = dict(run.stack)
    graph = run.layout.get("cuda_graph")
    if graph is not None:
        facts.setdefault("cuda_graph", _graph(str(graph).lower()))
    for rule in stack_rules().rules:
        if _matches(rule, text, run, architecture):
            facts = {**rule.stack, **facts}
    if run.date and re.fullmatch(r"\d{4}-\d{2}", run.date):
        facts.setdefault("date", run.date)
    try:
        return Stack.model_validate(facts)
    except ValidationError as error:
        raise InputError(f"is no stack: {error.errors()[0]['msg']}", key="stack") from None


def gradient_precision_of(run: PublishedRun) -> Literal["fp32", "bf16"]:
    """Return the format in which a row reduces gradients."""
    text = described(run)
    dtype = run.precision.get("dtype")
    return next(
        rule.precision
        for rule in stack_rules().gradients
        if (rule.text is None or re.search(rule.text, text)) and (not rule.dtype or dtype in rule.dtype)
    )


def _matches(rule: Rule, text: str, run: PublishedRun, architecture: str) -> bool:
    return (
        (rule.text is None or re.search(rule.text, text) is not None)
        and (rule.before is None or (run.date is not None and run.date < rule.before))
        and (not rule.architecture or architecture in rule.architecture)
        and (not rule.precision or run.precision.get("dtype") in rule.precision)
    )


def _graph(text: str) -> str:
    if text.startswith("none"):
        return "none"
    return "full" if "full_" in text or "full-" in text else "partial"
