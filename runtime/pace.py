"""From the seconds of a step to tokens per second, MFU and money: the constants of a plan, worked out once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from planner.plan import Plan
from planner.upkeep import working_watts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a plan does in a step, and what a second of it costs."""

    tokens_per_step: int
    model_flops: float
    """Of a step; causal attention once, no recomputation."""
    peak_flop_per_second: float | None
    """Of all ranks together; None: unknown."""
    usd_per_second: float
    """Rent and electricity; 0: no prices."""
    watts: float
    """Of the facility as while the nodes compute; 0: not stated."""

    @classmethod
    def of(cls, plan: Plan) -> Pace:
        """Work the constants out."""
        scenario, world_size = plan.scenario, plan.layout.world_size
        job, cluster, prices = scenario.job, scenario.cluster, scenario.prices
        peak = cluster.gpu.peak(job.precision)
        watts = working_watts(cluster, math.ceil(world_size / cluster.node.gpus_per_node))
        return cls(
            tokens_per_step=job.tokens_per_step,
            model_flops=job.model.flops_per_token(job.seq_length) * job.tokens_per_step,
            peak_flop_per_second=None if peak is None else world_size * peak,
            usd_per_second=prices.gpu_usd_per_second * world_size + prices.electricity_usd_per_joule * watts,
            watts=watts,
        )

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOPs over the dense peak; None where the peak is unknown, never that of another GPU."""
        peak = self.peak_flop_per_second
        return None if peak is None else self.model_flops / (step_seconds * peak)

    def tokens_per_second(self, step_seconds: float) -> float:
        """Of the whole job."""
        return self.tokens_per_step / step_seconds


def step_words(event: dict[str, Any], pace: Pace) -> str:
    """Tell the step of a journal in a few words: loss, tokens per second, MFU.

    >>> pace = Pace(tokens_per_step=2048, model_flops=1e12, peak_flop_per_second=2e12, usd_per_second=0, watts=0)
    >>> step_words({"loss": 7.25, "seconds": 2.0}, pace)
    'loss 7.2500  1,024 tokens/s  MFU 25.0 %'
    """
    mfu = pace.mfu(event["seconds"])
    words = f"loss {event['loss']:.4f}  {pace.tokens_per_second(event['seconds']):,.0f} tokens/s"
    return words if mfu is None else f"{words}  MFU {100 * mfu:.1f} %"
