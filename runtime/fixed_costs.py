"""What small models in real layouts took beyond what the step model says of them: the costs of the software.

The simulator predicts each trial as it predicts any job, with the costs that are known by then; the difference is the
next cost. So whatever the model counts already is taken off, and whatever it lacks is in a cost.
"""

from __future__ import annotations

from typing import Any

from runtime.small_models import DEEP, PAIRS, SHALLOW, Trial
from simulator.phases import phase_seconds
from simulator.step import predict_step
from topologies.cluster import Cluster, Measured

INSIDE, REDUCED, UPDATED = "forward_backward", "gradient_reduction", "optimizer"
FURTHEST = 2.0
"""The bandwidth that a layer shows is not believed beyond this factor from that of its operations alone."""

Trials = dict[str, list[dict[str, float]]]


def with_fixed_costs(cluster: Cluster, trials: Trials) -> Measured:
    """Add to what was measured on a machine the costs of its software.

    Args:
        cluster: the machine, with rates and collectives.
        trials: seconds by phase of both trials of each pair.

    Returns:
        Its measurements with ``host_seconds``, and the bandwidth of elementwise operations that a layer shows.
    """
    known = _Known(cluster, trials)
    known.learn("layer", known.layer("layer"))
    known.update(**_moving(known))
    known.learn("layer_gigabyte", known.layer("wide_few") / _gigabytes(PAIRS["wide_few"][0], layers=1))
    known.learn("recompute_layer", known.layer("recompute"))
    # sequence parallelism first: until its cost is known, the model lets that of tensor parallelism stand in
    for cost, pair in (("tp_sequence_layer", "sp"), ("tp_layer", "tp"), ("dp_layer", "dp")):
        known.learn(cost, known.layer(pair))
    known.learn("tp_recompute_layer", known.layer("tp_recompute"))
    known.learn("tp_mebibyte", known.layer("wide_tp") / _mebibytes("wide_tp"))
    known.learn("tp_sequence_mebibyte", known.layer("wide_sp") / _mebibytes("wide_sp"))
    known.learn("dp_gigabyte", known.layer("wide_dp") / _gigabytes(PAIRS["wide_dp"][0], layers=1))
    few, many = known.layer("few_experts"), known.layer("moe")
    more = PAIRS["moe"][0].experts - PAIRS["few_experts"][0].experts
    known.learn("expert", (many - few) / more)
    known.learn("moe_layer", known.layer("few_experts"))
    known.learn("moe_mebibyte", known.layer("wide_moe") / _routed_mebibytes("wide_moe"))
    known.learn("ep_layer", known.layer("ep"))
    known.learn("ep_mebibyte", known.layer("wide_ep") / _routed_mebibytes("wide_ep"))
    for cost, pair in (("head_mebibyte", "head"), ("tp_head_mebibyte", "tp_head")):
        known.learn(cost, known.beyond(pair, INSIDE) / _logit_mebibytes(pair))
    for cost, pair in (("microbatch", "microbatch"), ("pp_microbatch", "pp")):
        first, second = PAIRS[pair]
        known.learn(cost, known.beyond(pair, INSIDE) / (second.microbatches - first.microbatches))
    known.learn("flat_gigabyte", known.beyond("flat", REDUCED) / _more_gigabytes("flat"))
    # zero1 gathers weights in its update
    known.learn("shard_gigabyte", known.beyond("flat_sharded", REDUCED, UPDATED) / _more_gigabytes("flat_sharded"))
    known.learn("step", known.beyond_one("microbatch", INSIDE, REDUCED, UPDATED))
    return known.measured


class _Known:
    """A machine whose costs are found one after the other."""

    def __init__(self, cluster: Cluster, trials: Trials) -> None:
        assert cluster.measured is not None
        self.cluster, self.trials = cluster, trials
        self.measured = cluster.measured.model_copy(update={"host_seconds": {}})

    def update(self, **changes: Any) -> None:
        """Replace measurements."""
        self.measured = self.measured.model_copy(update=changes)

    def learn(self, cost: str, seconds: float) -> None:
        """Take a cost for known; what is measured below the prediction is no cost."""
        self.update(host_seconds=self.measured.host_seconds | {cost: max(0.0, seconds)})

    def predicted(self, trial: Trial, phases: tuple[str, ...]) -> float:
        """Seconds of phases of a trial, with what is known."""
        machine = self.cluster.model_copy(update={"measured": self.measured})
        parts = predict_step(machine, trial.job, trial.layout).breakdown_seconds
        return sum(phase_seconds(parts, trial.layout, phase) for phase in phases)

    def beyond_one(self, pair: str, *phases: str) -> float:
        """What the first trial of a pair takes beyond its prediction."""
        return sum(self.trials[pair][0][phase] for phase in phases) - self.predicted(PAIRS[pair][0], phases)

    def measured_more(self, pair: str, *phases: str) -> float:
        """What the second trial of a pair takes more than the first."""
        first, second = self.trials[pair]
        return sum(second[phase] - first[phase] for phase in phases)

    def predicted_more(self, pair: str, *phases: str) -> float:
        """The same as predicted."""
        first, second = (self.predicted(trial, phases) for trial in PAIRS[pair])
        return second - first

    def beyond(self, pair: str, *phases: str) -> float:
        """What the second trial of a pair takes more than the first, beyond what is predicted of that."""
        return self.measured_more(pair, *phases) - self.predicted_more(pair, *phases)

    def layer(self, pair: str) -> float:
        """What one layer and micro-batch of a pair takes beyond its prediction."""
        return self.beyond(pair, INSIDE) / (DEEP - SHALLOW) / PAIRS[pair][0].microbatches


def _moving(known: _Known) -> dict[str, float]:
    """Find the bandwidth with which layers of few and of many tokens are as fast as they are.

    Beside what is in proportion to the tokens there is what is not: weights that come from memory, a cost of their own.
    """
    alone = known.measured.memory_bandwidth_bytes_per_second
    rest, moved = {}, {}
    for pair in ("wide_few", "wide"):
        once = known.predicted_more(pair, INSIDE)
        known.update(memory_bandwidth_bytes_per_second=2.0 * alone)
        moved[pair] = 2.0 * (once - known.predicted_more(pair, INSIDE)) * alone  # bytes
        known.update(memory_bandwidth_bytes_per_second=alone)
        rest[pair] = known.measured_more(pair, INSIDE) - (once - moved[pair] / alone)
    slope = (rest["wide"] - rest["wide_few"]) / (moved["wide"] - moved["wide_few"])
    if rest["wide_few"] < slope * moved["wide_few"]:
        slope = rest["wide"] / moved["wide"]
    slowest, fastest = FURTHEST / alone, 1.0 / FURTHEST / alone
    return {"memory_bandwidth_bytes_per_second": 1.0 / min(max(slope, fastest), slowest)}


def _mebibytes(pair: str) -> float:
    """Activations of a micro-batch."""
    trial = PAIRS[pair][0]
    return 4.0 * trial.tokens * trial.hidden_size / 2.0**20


def _routed_mebibytes(pair: str) -> float:
    """Copies of tokens that go to experts."""
    return 2.0 * _mebibytes(pair)


def _logit_mebibytes(pair: str) -> float:
    """Logits that one rank of the second trial has more than one of the first."""
    first, second = PAIRS[pair]
    return 4.0 * second.tokens * (second.vocab_size - first.vocab_size) / second.layout.tp / 2.0**20


def _gigabytes(trial: Trial, *, layers: int) -> float:
    """Weights of layers."""
    return 4e-9 * layers * trial.model.layer_params("layer")


def _more_gigabytes(pair: str) -> float:
    """Weights that the second trial has more than the first."""
    first, second = PAIRS[pair]
    return 4e-9 * (second.model.num_params - first.model.num_params)
