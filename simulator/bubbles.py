"""What a pipeline waits beyond the work of its slowest rank, in closed form for every schedule.

A step is as long as the longest path through its ops. Which paths can be the longest was found by playing the orders
of ``simulator.schedule`` with stages that are alike but for one that takes longer: the one with the head, the last in
model order. Each path below counts what it holds beyond ``num_microbatches`` times the work of the slowest rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scenarios.layout import SCHEDULES
from simulator.arrays import Floats, LayoutArrays

ZB_H1, ZB_H2, ZBV, DUALPIPE = (SCHEDULES.index(name) for name in ("zb-h1", "zb-h2", "zbv", "dualpipe"))
SPLITTING = SCHEDULES.index("interleaved") + 1
"""Schedules from here on split weight gradients off."""


class Passes(NamedTuple):
    """Seconds of one micro-batch on one virtual stage, or on all: what waits for a neighbour, and what does not."""

    forward: Floats
    backward: Floats
    """Gradient of the input, with what is recomputed for it."""
    weight: Floats

    @property
    def total(self) -> Floats:
        """All of it."""
        return self.forward + self.backward + self.weight

    def each(self, layouts: LayoutArrays, slowest: Passes, sent: Floats) -> tuple[Passes, Passes]:
        """Return an ordinary virtual stage, and what the stage with the head takes beyond it.

        Args:
            layouts: how many of them there are.
            slowest: the rank that takes longest.
            sent: what sending adds to each forward and each backward.
        """
        both_ends = (layouts.schedule == DUALPIPE) & (layouts.vpp == 1)  # the mirrored rank holds the head as well
        holding = np.where(both_ends, 2.0, 1.0)
        others = [
            (whole - holding * own) / np.maximum(layouts.pp - holding, 1.0) / layouts.vpp
            for whole, own in zip(self, slowest, strict=True)
        ]
        extra = [holding * (own - layouts.vpp * other) for own, other in zip(slowest, others, strict=True)]
        return Passes(others[0] + sent, others[1] + sent, others[2]), Passes(*extra)


def split_bubble(layouts: LayoutArrays, micro: Floats, one: Passes, more: Passes) -> Floats:
    """Return what schedules with split-off weight gradients leave idle; 0 for the others.

    Args:
        layouts: schedule and degrees.
        micro: micro-batches of a step.
        one: an ordinary virtual stage.
        more: what the stage with the head takes beyond it.
    """
    kinds = {ZB_H1: _zb_h1, ZB_H2: _zb_h2, ZBV: _zbv, DUALPIPE: _dualpipe}
    bubble = np.zeros(len(layouts))
    for schedule, longest in kinds.items():
        rows = layouts.schedule == schedule
        if rows.any():
            work, surplus = (Passes(*(part[rows] for part in passes)) for passes in (one, more))
            half = (layouts.vpp[rows] == 1) & (schedule == DUALPIPE)  # two half-length pipelines, one each way
            ranks = np.where(half, layouts.pp[rows] / 2.0, layouts.pp[rows])
            idle = np.maximum(longest(ranks, micro[rows], work, surplus), 0.0)
            bubble[rows] = np.where(ranks > 1, idle, 0.0)
    return bubble


def _zb_h1(pp: Floats, m: Floats, one: Passes, more: Passes) -> Floats:
    """(pp - 1)(F + B - W) (Qi et al. 2024, table 1), less where a heavy last stage has more of W to fill in with."""
    ramp, filled = (pp - 1) * one.forward, np.minimum(pp, m)
    return np.maximum(ramp, ramp + (pp - 1) * one.backward - (filled - 1) * one.weight - filled * more.weight)


def _zb_h2(pp: Floats, _: Floats, one: Passes, more: Passes) -> Floats:
    """(pp - 1)(F + B - 2 W) (Qi et al. 2024, table 1), because ranks need not end a step together.

    The optimizer's check comes after the update.
    """
    return (pp - 1) * (one.forward + one.backward - 2 * one.weight) - (2 * pp - 1) * more.weight


def _zbv(pp: Floats, m: Floats, one: Passes, more: Passes) -> Floats:
    """ZB-V (Qi et al. 2024, controllable memory): rank 0 holds both ends.

    Either it is busy all the time but for a start or an end, or others are, or few micro-batches wait for their own way
    down the V and up again.
    """
    f, b, w = one
    idle = m * more.total - more.forward - more.backward
    few = np.maximum(2 * pp - 1 - m, 0.0)
    filled = np.maximum(-np.minimum(few, m - 1), pp - 2 - 3 * few)
    chain = np.where(m < pp, 2 * (pp - m) * np.maximum(f, w), -2 * np.minimum(m - pp, pp - 1) * w)
    paths = [
        few * f,
        few * (f + b) + filled * w - more.weight,
        few * f + (pp - 1) * b - pp * w - more.weight,
        (pp - 1) * f - idle,
        (pp - 1 + few) * b - few * w - idle,
        2 * (pp - 1) * b + chain - idle,
    ]
    return np.asarray(np.max(np.stack(paths), axis=0))


def _dualpipe(pp: Floats, _: Floats, one: Passes, more: Passes) -> Floats:
    """DualPipe without a gain from overlap: rank 0 holds both ends.

    The report of DeepSeek-V3, table 2, has (pp - 1)(F + 2 B - W) in these terms; the second path is one F shorter.
    """
    f, b, w = one
    late, step = (pp - 1) * w, more.total
    paths = [
        (pp - 1) * b - late,
        (pp - 2) * f + 2 * (pp - 1) * b - late - 2 * (pp - 1) * step - more.weight,
        (pp - 1) * f + (2 * pp - 3) * b - late - (2 * pp - 3) * step - more.weight,
        2 * (pp - 1) * f + (pp - 1) * b - late - (2 * pp - 1) * step,
        (2 * pp - 3) * b - late - (pp - 2) * step - more.weight,
        2 * (pp - 1) * b - f - late - (pp - 1) * step - more.weight,
    ]
    return np.asarray(np.max(np.stack(paths), axis=0))
