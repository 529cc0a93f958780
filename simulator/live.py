"""Micro-batches whose activations are alive on a rank at its peak, by the schedule."""

from __future__ import annotations

import numpy as np

from scenarios.layout import SCHEDULES
from simulator.arrays import Floats, LayoutArrays

INTERLEAVED = SCHEDULES.index("interleaved")

Live = tuple[Floats, Floats, Floats]
"""Of the first chunk of a rank, of each between, and of the last; each of shape (layouts, ranks)."""


def live_microbatches(layouts: LayoutArrays, rank: Floats, num_microbatches: Floats) -> Live:
    """Micro-batches whose activations a rank holds at its peak, of its first chunk, each between, and its last.

    ``rank`` has shape (layouts, ranks), and so has each result. Closed forms of the op orders: gpipe all; 1f1b
    ``pp - rank``; interleaved ``2 (pp - rank - 1) + (vpp - 1) pp + 1`` chunk passes, the last chunk filled last; zb-h1
    ``pp`` and zb-h2 ``2 pp - 1``, because weight gradients come late; zbv ``2 pp`` and dualpipe ``2 pp + 1`` chunks, or
    ``pp + 1`` stages of which every rank has two.
    """
    m, pp, v = num_microbatches[:, None], layouts.pp[:, None], layouts.vpp[:, None]
    code = layouts.schedule[:, None]
    gpipe, zb_h1, zbv, dualpipe = (SCHEDULES.index(name) for name in ("gpipe", "zb-h1", "zbv", "dualpipe"))
    most = np.where(code == gpipe, m, np.minimum(m, pp))
    first = np.where((code == gpipe) | (code == zb_h1), most, np.minimum(m, pp - rank))
    none = np.zeros(rank.shape)
    middle, last = none, none
    if np.any(v > 1):
        chunked = v > 1
        passes = np.minimum(2 * (pp - rank - 1) + (v - 1) * pp + 1, m * v)
        again = np.clip(passes - v * pp, 0, np.maximum(m - pp, 0))
        first = np.where(chunked, np.minimum(passes, pp) + again, first)
        middle = np.where(v > 2, np.clip(passes - pp, 0, pp), none)
        last = np.where(chunked, np.clip(passes - (v - 1) * pp, 0, pp), none)
    first = np.where(code == SCHEDULES.index("zb-h2"), np.minimum(m, 2 * pp - 1), first)
    if np.any(code >= zbv):
        vee, dual = (code == zbv) & (v == 2), (code == dualpipe) & (pp > 1)
        first = np.where(vee, np.minimum(m, 2 * pp - rank - 1), np.where(dual & (v == 2), 2 * pp - rank, first))
        last = np.where(vee | (dual & (v == 2)), np.minimum(m, rank + 1), last)
        near = np.minimum(rank, pp - 1 - rank)
        own, other = np.where(rank < pp / 2, pp - near, near + 1), np.where(rank < pp / 2, near + 1, pp - near)
        first, last = np.where(dual & (v == 1), own, first), np.where(dual & (v == 1), other, last)
    return first, middle, last


def interleaved_moments(layouts: LayoutArrays, rank: Floats, num_microbatches: Floats, live: Live) -> list[Live]:
    """Live micro-batches at the moments of the interleaved schedule at which a rank can be fullest; else ``live``.

    In the steady phase each forward is followed by a backward: the sum over the chunks stays while first and last chunk
    trade with those between, which may hold more layers. The fullest moments are where the forwards or the backwards go
    over from one of the three to the next. Chunks between count by their mean. Nothing where no row is interleaved.
    """
    m, pp, v = num_microbatches[:, None], layouts.pp[:, None], layouts.vpp[:, None]
    chunked = (v > 1) & (layouts.schedule[:, None] <= INTERLEAVED)
    if not np.any(chunked):
        return []
    period, total = pp * v, m * v
    ahead = np.minimum(2 * (pp - rank - 1) + (v - 1) * pp + 1, total)

    def counted(number: Floats) -> tuple[Floats, Floats, Floats]:
        rounds, rest = np.floor_divide(number, period), number % period
        first = rounds * pp + np.minimum(rest, pp)
        last = rounds * pp + np.clip(rest - (v - 1) * pp, 0, pp)
        return first, number - first - last, last

    moments = []
    for step in (pp, (v - 1) * pp, period):
        for due in ((step - ahead) % period, (step % period) + 0 * ahead):
            done = np.minimum(due, total - ahead)
            (f_first, f_middle, f_last), (b_last, b_middle, b_first) = counted(ahead + done), counted(done)
            between = np.where(v > 2, (f_middle - b_middle) / np.maximum(v - 2, 1), 0.0)
            here = (f_first - b_first, between, f_last - b_last)
            moments.append(
                (
                    np.where(chunked, here[0], live[0]),
                    np.where(chunked, here[1], live[1]),
                    np.where(chunked, here[2], live[2]),
                )
            )
    return moments
