"""Who holds what: the place of each rank in the layout and its share of the model. No torch needed."""

from __future__ import annotations

from dataclasses import dataclass

from scenarios.layout import Layout
from scenarios.model import ModelSpec
from simulator.stages import stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """The part of the model that one virtual pipeline stage holds: layers ``first`` to ``last`` (exclusive)."""

    index: int
    first: int
    last: int
    embedding: bool
    head: bool
    modes: str
    """What each of its layers recomputes: f all, s what the layout selects, n nothing."""


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the place of a rank on each axis.

    >>> coordinates(Layout(tp=2, dp=2, pp=2), 5)
    {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}
    """
    place: dict[str, int] = {}
    for axis in layout.rank_order:
        if axis != "ep":  # experts are spread over the ranks of the dense axes
            rank, place[axis] = divmod(rank, getattr(layout, axis))
    return place


def rank_at(layout: Layout, **place: int) -> int:
    """Return the rank at a place; axes that are not given are 0.

    >>> rank_at(Layout(tp=2, dp=2, pp=2), pp=1, tp=1)
    5
    """
    rank, stride = 0, 1
    for axis in layout.rank_order:
        if axis != "ep":
            rank += place.get(axis, 0) * stride
            stride *= getattr(layout, axis)
    return rank


def shares(model: ModelSpec, layout: Layout) -> tuple[StageShare, ...]:
    """Divide a model into the virtual stages of a layout, in model order."""
    slots = layout.pp * layout.vpp
    if layout.stages:
        counts = tuple(stage.layers for stage in layout.stages)
    else:
        counts = stage_layers(model.num_layers, layout.pp, layout.vpp)
    result, first = [], 0
    for index, layers in enumerate(counts):
        stage = layout.stages[index] if layout.stages else None
        modes = ("f" if layout.recompute == "full" else "s" if layout.recompute == "selective" else "n") * layers
        result.append(
            StageShare(
                index=index,
                first=first,
                last=first + layers,
                embedding=index == 0,
                head=index == slots - 1,
                modes=modes if stage is None else stage.modes(layout.recompute),
            )
        )
        first += layers
    return tuple(result)


def stages_of(layout: Layout, pipeline_rank: int) -> tuple[int, ...]:
    """Return the virtual stages on a pipeline rank: a loop, or a V for the V-shaped schedules.

    >>> stages_of(Layout(pp=2, vpp=2, schedule="interleaved"), 1)
    (1, 3)
    >>> stages_of(Layout(pp=2, vpp=2, schedule="zbv"), 0)
    (0, 3)
    """
    if layout.schedule == "zbv" and layout.pp > 1:
        return pipeline_rank, 2 * layout.pp - 1 - pipeline_rank
    return tuple(pipeline_rank + chunk * layout.pp for chunk in range(layout.vpp))
