"""Where a published log says what a machine really took, carried over to other sizes and ranks.

At the ranks and sizes of the log the answer is the log. Ranks that all stand in one domain know nothing of a log across
domains, and the reverse.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simulator.arrays import Floats
from topologies.cluster import Cluster
from topologies.curves import CollectiveKind, Curve

Model = Callable[[CollectiveKind, float, Floats], Floats]
"""Seconds of a collective of so many ranks by size, by NCCL's model."""
ALIKE: dict[CollectiveKind, CollectiveKind] = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}
"""Collectives that go round the same ring once."""


def curve_for(kind: CollectiveKind, cluster: Cluster, ranks: float) -> Curve | None:
    """Return the log that is nearest in ranks, of this collective or else of one like it; None: there is none."""
    outside = ranks > cluster.domain_size
    curves = [
        one for file in cluster.node.curves for one in file.curves if (one.ranks > cluster.domain_size) == outside
    ]
    for wanted in (kind, ALIKE.get(kind)):
        found = [one for one in curves if one.kind == wanted]
        if found:
            return min(found, key=lambda one: abs(np.log(one.ranks / ranks)))
    return None


def scaled_by(curve: Curve, cluster: Cluster, ranks: float, size_bytes: Floats, own: Floats, model: Model) -> Floats:
    """Return the time of other ranks: the model's at the bandwidth of the log, and what the log took beyond that.

    The ratio at the largest size of the log is one of bandwidth. What smaller sizes took beyond it is a start; every
    level of a tree over domains pays it, so that it grows with the logarithm of their number.

    Args:
        curve: the log.
        cluster: whose domains count.
        ranks: of the collective.
        size_bytes: of its buffers.
        own: what the model says of it.
        model: of any other.
    """
    sizes, times = np.array(curve.sizes_bytes), np.array(list(curve.times_seconds.values()))
    told = model(curve.kind, curve.ranks, sizes)
    share = times[-1] / told[-1]
    beyond = np.interp(np.log(np.maximum(size_bytes, 1.0)), np.log(sizes), times - share * told)
    levels = [np.log2(max(np.ceil(count / cluster.domain_size), 2.0)) for count in (ranks, curve.ranks)]
    return np.asarray(share * own + np.where(beyond > 0, levels[0] / levels[1], 1.0) * beyond)
