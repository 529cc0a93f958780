"""What divides over what, and what fits where: model sizes over degrees, groups of ranks over domains and nodes."""

from __future__ import annotations

import numpy as np

from planner.rule import Rule, everywhere, left, lefts, splits, splits_or_repeats

SPLITTING: tuple[Rule, ...] = (
    Rule(
        "precision",
        (),
        lambda q, x: everywhere(q.cluster.gpu.peak(q.job.precision) is not None, x),
        lambda q, _: (
            f"{q.cluster.gpu.name} does not multiply matrices in {q.job.precision}; "
            f"it does {', '.join(q.cluster.gpu.peak_flop_per_second)}"
        ),
    ),
    Rule(
        "layers",
        ("pp",),
        lambda q, x: x.pp <= q.num_layers,
        lambda q, x: f"pp {x.pp} stages need at least as many layers, the model has {q.num_layers}",
    ),
    Rule(
        "attention_heads",
        ("tp",),
        lambda q, x: splits(q.heads, x.tp),
        lambda q, x: f"{q.heads[0]} attention heads do not divide over tp {x.tp} ({lefts(q.heads, x.tp)})",
    ),
    Rule(
        "kv_heads",
        ("tp",),
        lambda q, x: splits_or_repeats(q.kv_heads, x.tp),
        lambda q, x: f"{q.kv_heads[0]} key-value heads neither divide over tp {x.tp} nor repeat evenly on it",
    ),
    Rule(
        "ffn_size",
        ("tp",),
        lambda q, x: splits(q.ffn_sizes, x.tp),
        lambda q, x: f"the feed-forward size does not divide over tp {x.tp} ({lefts(q.ffn_sizes, x.tp)})",
    ),
    Rule(
        "mamba_size",
        ("tp",),
        lambda q, x: splits(q.mamba_sizes, x.tp) & splits_or_repeats(q.mamba_groups, x.tp),
        lambda q, x: f"the Mamba mixer does not divide over tp {x.tp} ({lefts(q.mamba_sizes, x.tp) or 'groups'})",
    ),
    Rule(
        "nvlink_domain",
        ("tp",),
        lambda q, x: (x.tp <= q.largest_domain) | q.allows("tp-across-domains"),
        lambda q, x: (
            f"tp {x.tp} does not fit in the {q.scale_up_name} domain of {q.largest_domain} GPUs, and across it "
            "every layer would wait for the NICs; 'allow: [tp-across-domains]' in the scenario permits it"
        ),
    ),
    Rule(
        "gpus",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (
            (x.world_size <= q.cluster.num_gpus)
            & (x.world_size >= (q.cluster.num_gpus if q.least_gpus is None else q.least_gpus))
        ),
        lambda q, x: (
            f"tp {x.tp} x cp {x.cp} x pp {x.pp} x dp {x.dp} = {x.world_size} GPUs, the cluster has {q.cluster.num_gpus}"
        ),
    ),
    Rule(
        "domain_capacity",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (x.cp * x.pp * x.dp <= q.groups_in_domains(x.tp)) | (x.tp > q.largest_domain),
        lambda q, x: (
            f"{x.cp * x.pp * x.dp} groups of tp {x.tp} are needed, and the {q.scale_up_name} domains "
            f"({q.domains_text}) hold {int(q.groups_in_domains(np.array([x.tp]))[0])} whole ones"
        ),
    ),
    Rule(
        "network",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (x.world_size <= q.largest_domain) | (q.cluster.node.nic is not None),
        lambda q, x: f"{x.world_size} GPUs lie on several nodes of {q.largest_domain}, and the nodes have no NIC",
    ),
    Rule(
        "sequence_over_cp",
        ("cp",),
        lambda q, x: (x.cp == 1) | (q.job.seq_length % (2 * x.cp) == 0),
        lambda q, x: (
            f"context parallelism cuts the sequence into 2 x cp blocks (zigzag, so that causal work is equal): "
            f"{left(q.job.seq_length, 2 * x.cp)}"
        ),
    ),
    Rule(
        "cp_needs_attention",
        ("cp",),
        lambda q, x: (x.cp == 1) | bool(q.heads),
        lambda q, x: f"cp {x.cp} splits attention, and the model has none",
    ),
    Rule(
        "global_batch",
        ("dp", "micro_batch_size"),
        lambda q, x: q.job.global_batch_size % np.maximum(x.dp * x.micro_batch_size, 1) == 0,
        lambda q, x: (
            f"the global batch of {q.job.global_batch_size} sequences does not divide over dp {x.dp} x "
            f"micro-batch {x.micro_batch_size} ({left(q.job.global_batch_size, x.dp * x.micro_batch_size)})"
        ),
    ),
    Rule(
        "dense_has_no_experts",
        ("ep", "etp"),
        lambda q, x: bool(q.num_experts) | ((x.ep == 1) & (x.etp == 1)),
        lambda q, x: f"ep {x.ep} x etp {x.etp} spread experts, and the model is dense",
    ),
    Rule(
        "experts",
        ("ep",),
        lambda q, x: splits(q.num_experts, x.ep),
        lambda q, x: f"the experts do not divide over ep {x.ep} ({lefts(q.num_experts, x.ep)})",
    ),
    Rule(
        "expert_ffn_size",
        ("etp",),
        lambda q, x: splits(q.expert_ffn_sizes, x.etp),
        lambda q, x: f"the expert's size does not divide over etp {x.etp} ({lefts(q.expert_ffn_sizes, x.etp)})",
    ),
    Rule(
        "etp_inside_tp",
        ("tp", "etp"),
        lambda _, x: x.tp % x.etp == 0,
        lambda _, x: f"an expert is split inside the tp group: {left(x.tp, x.etp)}",
    ),
    Rule(
        "expert_groups",
        ("tp", "cp", "dp", "ep", "etp"),
        lambda _, x: (x.tp * x.cp * x.dp) % (x.ep * x.etp) == 0,
        lambda _, x: (
            f"ep {x.ep} x etp {x.etp} = {x.ep * x.etp} does not divide the {x.tp * x.cp * x.dp} GPUs of a stage "
            f"(tp {x.tp} x cp {x.cp} x dp {x.dp})"
        ),
    ),
    Rule(
        "copies_of_shards",
        ("dp",),
        lambda _, x: x.dp % x.dp_replicate == 0,
        lambda _, x: f"dp {x.dp} does not divide into the pinned dp_replicate groups",
    ),
    Rule(
        "heads_over_cp",
        ("tp", "cp"),
        lambda q, x: splits(q.heads, x.tp * x.cp) if x.cp_comm == "all-to-all" else np.ones(len(x), dtype=bool),
        lambda q, x: f"cp_comm all-to-all gives whole heads to tp x cp ranks ({lefts(q.heads, x.tp * x.cp)})",
    ),
    Rule(
        "sequence_parallel",
        ("tp", "cp", "sequence_parallel"),
        lambda q, x: ~x.sequence_parallel | ((x.tp > 1) & (q.job.seq_length % (x.tp * x.cp) == 0)),
        lambda q, x: (
            "sequence parallelism splits inside the tp group and needs tp > 1"
            if x.tp == 1
            else f"sequence parallelism: {left(q.job.seq_length, x.tp * x.cp)} over tp x cp"
        ),
    ),
)
"""Each after those that make its numbers meaningful."""
