"""A ModelSpec as Megatron-LM's flags."""

from __future__ import annotations

from runtime.emit.recipe import refuse
from scenarios.model import Attention, Layer, Mla, Mlp, ModelSpec, Moe

Flags = dict[str, str | None]
"""By flag, the words of its value with blanks between them; None: a switch."""
TRAINER = "Megatron-LM"


def model_flags(model: ModelSpec, seq_length: int) -> tuple[Flags, list[str]]:
    """Describe a decoder.

    Returns:
        The flags, and what the user must check because a ModelSpec does not know it.

    Raises:
        InputError: the GPT model of Megatron-LM cannot be built like this.
    """
    _refuse_odd_parts(model)
    flags: Flags = {
        "--num-layers": str(model.num_layers),
        "--hidden-size": str(model.hidden_size),
        "--seq-length": str(seq_length),
        "--max-position-embeddings": str(max(seq_length, model.position_embeddings, model.max_seq_length or 0)),
        "--position-embedding-type": "learned_absolute" if model.position_embeddings else "rope",
        "--normalization": "LayerNorm" if model.norm_bias else "RMSNorm",
        "--vocab-size": str(model.vocab_size),
        "--make-vocab-size-divisible-by": "1",
    }
    if not model.tied_embeddings:
        flags["--untie-embeddings-and-output-weights"] = None
    if model.mtp_layers:
        flags["--mtp-num-layers"] = str(model.mtp_layers)
    flags |= _mixer_flags(model) | _feed_forward_flags(model)
    notes = ["a plan does not know the base of the rotary positions, nor their scaling: add --rotary-base"]
    if model.position_embeddings:
        notes = []
    if not any(part.gated for part in _feed_forwards(model)):
        notes.append("a plan does not know the activation of ungated feed-forward parts: Megatron's default is GELU")
    if any(isinstance(part, Moe) for part in _feed_forwards(model)):
        notes.append("a plan does not know how the router scores and balances: add --moe-router-* as the model needs")
    return flags, notes


def _layers(model: ModelSpec) -> list[Layer]:
    return [model.layer_kinds[name] for name in model.kind_counts]


def _feed_forwards(model: ModelSpec) -> list[Mlp | Moe]:
    return [layer.feed_forward for layer in _layers(model) if layer.feed_forward is not None]


def _refuse_odd_parts(model: ModelSpec) -> None:
    hint = "emit for another trainer, or change the model"
    for name, layer in model.layer_kinds.items():
        if name in model.kind_counts and (
            not isinstance(layer.mixer, Attention | Mla) or layer.feed_forward is None or layer.norms != 2
        ):
            what = f"a layer of the kind {layer.kind} with {layer.norms} norms is not its GPT layer"
            raise refuse(TRAINER, what, hint, f"model.layer_kinds.{name}")
    odd = {
        "embedding_norm": model.embedding_norm,
        "embedding_size": model.embedding_size not in (None, model.hidden_size),
        "head_bias": model.head_bias,
        "final_norm": not model.final_norm,
    }
    for key, present in odd.items():
        if present:
            raise refuse(TRAINER, f"{key} = {getattr(model, key)} has no flag", hint, f"model.{key}")
    mixers = {layer.mixer for layer in _layers(model)}
    if len(mixers) > 1:
        raise refuse(TRAINER, "its layers have different attention", hint, "model.layer_kinds")
    for key in ("chunk", "sinks", "qk_norm_whole"):
        if any(isinstance(mixer, Attention) and getattr(mixer, key) for mixer in mixers):
            raise refuse(TRAINER, f"attention with {key} is not emitted", hint, "model.layer_kinds")


def _mixer_flags(model: ModelSpec) -> Flags:
    mixer = _layers(model)[0].mixer
    if isinstance(mixer, Mla):
        flags: Flags = {
            "--multi-latent-attention": None,
            "--num-attention-heads": str(mixer.heads),
            "--kv-lora-rank": str(mixer.kv_lora_rank),
            "--qk-head-dim": str(mixer.qk_nope_head_dim),
            "--qk-pos-emb-head-dim": str(mixer.qk_rope_head_dim),
            "--v-head-dim": str(mixer.v_head_dim),
            "--qk-layernorm": None,
        }
        return flags if mixer.q_lora_rank is None else flags | {"--q-lora-rank": str(mixer.q_lora_rank)}
    assert isinstance(mixer, Attention)
    flags = {"--num-attention-heads": str(mixer.heads), "--kv-channels": str(mixer.head_dim)}
    if mixer.kv_heads != mixer.heads:
        flags |= {"--group-query-attention": None, "--num-query-groups": str(mixer.kv_heads)}
    if mixer.qkv_bias and not mixer.output_bias:
        flags["--add-qkv-bias"] = None
    if mixer.qk_norm:
        flags["--qk-layernorm"] = None
    if mixer.window is not None:
        flags["--window-size"] = f"{mixer.window - 1},0"
    return flags


def _feed_forward_flags(model: ModelSpec) -> Flags:
    dense = [part for part in _feed_forwards(model) if isinstance(part, Mlp)]
    sparse = [part for part in _feed_forwards(model) if isinstance(part, Moe)]
    hint = "emit for another trainer, or change the model"
    if len(dense) > 1 or len(sparse) > 1:
        raise refuse(TRAINER, "its layers have feed-forward parts of different sizes", hint, "model.layer_kinds")
    parts: list[Mlp | Moe] = [*dense, *sparse]
    if len({(part.gated, part.bias) for part in parts}) > 1:
        raise refuse(TRAINER, "some feed-forward parts are gated or biased and others not", hint, "model.layer_kinds")
    flags: Flags = {"--ffn-hidden-size": str(parts[0].ffn_hidden_size)}
    if parts[0].gated:
        flags["--swiglu"] = None
    if not parts[0].bias:
        flags["--disable-bias-linear"] = None
    if sparse:
        moe = sparse[0]
        flags |= {
            "--num-experts": str(moe.num_experts),
            "--moe-router-topk": str(moe.top_k),
            "--moe-ffn-hidden-size": str(moe.ffn_hidden_size),
            "--moe-grouped-gemm": None,
        }
        if dense:
            flags["--moe-layer-freq"] = moe_layers(model)
        if moe.shared_ffn_hidden_size:
            flags["--moe-shared-expert-intermediate-size"] = str(moe.shared_ffn_hidden_size)
        if moe.shared_gate:
            flags["--moe-shared-expert-gate"] = None
    return flags


def moe_layers(model: ModelSpec) -> str:
    """Write ``--moe-layer-freq``: a list with 1 for each layer of experts.

    >>> from scenarios.model import load_model
    >>> moe_layers(load_model("deepseek-v3"))
    '([0]*3+[1]*58)'
    """
    runs: list[tuple[int, int]] = []
    for layer in model.layers:
        sparse = int(isinstance(layer.feed_forward, Moe))
        if runs and runs[-1][0] == sparse:
            runs[-1] = (sparse, runs[-1][1] + 1)
        else:
            runs.append((sparse, 1))
    return "(" + "+".join(f"[{sparse}]*{count}" for sparse, count in runs) + ")"
