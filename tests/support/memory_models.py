"""Clusters, models and jobs that the tests of memory share."""

from pathlib import Path

from scenarios.job import Job
from scenarios.model import Attention, Layer, Mlp, ModelSpec
from simulator.arrays import LayoutArrays
from simulator.layers import shares
from simulator.traffic import ranks_of
from topologies.cluster import Cluster
from topologies.document import LoadContext, check


def cluster_of(node="dgx-h100", num_nodes=256):
    content = {"name": "test", "node": node, "num_nodes": num_nodes, "fabric": {"kind": "rail-optimized", "rails": 8}}
    return check(content, Cluster, LoadContext(Path("test.yaml")))


def gpt(layers, hidden, heads, vocab=51200, **changes):
    layer = Layer(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        feed_forward=Mlp(ffn_hidden_size=4 * hidden, gated=False),
    )
    content = {"norm_bias": True, "tied_embeddings": True, **changes}
    return ModelSpec(
        name="gpt",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_kinds={"dense": layer},
        pattern=("dense",) * layers,
        **content,
    )


def llama(layers, hidden, heads, kv_heads, ffn, vocab):
    layer = Layer(
        mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads),
        feed_forward=Mlp(ffn_hidden_size=ffn, gated=True),
    )
    return ModelSpec(
        name="llama", hidden_size=hidden, vocab_size=vocab, layer_kinds={"dense": layer}, pattern=("dense",) * layers
    )


LLAMA3_8B = llama(32, 4096, 32, 8, 14336, 128256)
LLAMA3_70B = llama(80, 8192, 64, 8, 28672, 128256)
SEVEN_BILLION = llama(32, 4096, 32, 32, 11008, 32000)


def job_of(model, seq_length=8192, batch=1024, **changes):
    return Job(model=model, seq_length=seq_length, global_batch_size=batch, **changes)


def shares_of(job, layout):
    arrays = LayoutArrays.of([layout])
    return shares(job, arrays, ranks_of(arrays))
