"""What a calibration of this machine found that a layer costs beyond its arithmetic and its collectives."""

from __future__ import annotations

import numpy as np

from scenarios.model import Layer, Moe
from simulator.arrays import Bools, Floats
from simulator.compute import Rates
from simulator.moe import local_experts
from simulator.traffic import Ranks

MEBIBYTE, GIGABYTE = 2.0**20, 1e9


def software_seconds(
    rates: Rates,
    layer: Layer,
    ranks: Ranks,
    *,
    sequence_parallel: Bools,
    wrapped: Bools,
    full: Bools,
    activation_bytes: Floats,
    weights: Floats,
) -> Floats:
    """Seconds of one layer and micro-batch (keys: ``topologies.cluster.Measured.host_seconds``).

    Args:
        rates: with what was measured.
        layer: its kind.
        ranks: by axis.
        sequence_parallel: norms and residuals are split over tp.
        wrapped: gradients are reduced layer by layer in every micro-batch (FSDP).
        full: the layer is recomputed.
        activation_bytes: of the rank's tokens, before tensor parallelism splits them.
        weights: of the layer on the rank, before data parallelism shards them.
    """
    cost = rates.fixed_seconds
    again = 1.0 + full / 2.0  # copies lie around collectives, of which a repeated forward has half as many as a layer
    time = cost("layer") + full * cost("recompute_layer") + cost("layer_gigabyte") * 4.0 * weights / GIGABYTE
    mebibytes = activation_bytes / MEBIBYTE
    sequence = cost("tp_sequence_layer") or cost("tp_layer")
    split = np.where(sequence_parallel, sequence, cost("tp_layer")) + full * cost("tp_recompute_layer")
    copied = np.where(sequence_parallel, cost("tp_sequence_mebibyte"), cost("tp_mebibyte"))
    time = time + np.where(ranks.tp > 1, split + copied * mebibytes * again, 0.0)
    if isinstance(layer.feed_forward, Moe):
        routed = mebibytes * layer.feed_forward.top_k / ranks.tp
        time = time + cost("moe_layer") + cost("expert") * local_experts(layer.feed_forward, ranks)
        time = time + cost("moe_mebibyte") * routed
        time = time + np.where(ranks.ep > 1, (cost("ep_layer") + cost("ep_mebibyte") * routed) * again, 0.0)
    return np.asarray(time + np.where(wrapped & (ranks.shards > 1), cost("dp_layer"), 0.0))
