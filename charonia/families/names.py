"""Maps canonical tensor names to a family's names, from a table of the family's module names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from charonia.families.layer_attributes import LayerAttributes
from charonia.families.spec import ModelConfig, TensorMap, TensorPart

_Range = tuple[int, int]
MTP = "mtp."  # before the canonical names of an MTP layer's tensors


@dataclass(frozen=True)
class MtpNames:
    """Module names of the layer for multi-token prediction. {}: the number after the last layer's. The defaults are
    DeepSeek's."""

    layer: str = "model.layers.{}."
    norm: str = "model.layers.{}.shared_head.norm"
    embedding_norm: str = "model.layers.{}.enorm"
    hidden_norm: str = "model.layers.{}.hnorm"
    join: str = "model.layers.{}.eh_proj"


@dataclass(frozen=True)
class Names:
    """Module names of a family. Names within a layer follow the layer's prefix. The defaults are Llama's."""

    layer: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    output: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"  # only with ModelConfig.post_norms
    ffn_norm: str = "post_attention_layernorm"
    ffn_post_norm: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    )  # a single name: one stacked tensor
    qkv_interleaved: bool = False  # the stacked tensor is [KV head][q heads of its group, k, v][head_dim]
    attention_output: str = "self_attn.o_proj"
    per_layer_table: str = "model.embed_tokens_per_layer"  # this and the next five only with per_layer_embedding
    per_layer_projection: str = "model.per_layer_model_projection"
    per_layer_norm: str = "model.per_layer_projection_norm"
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_output: str = "per_layer_projection"
    per_layer_post_norm: str = "post_per_layer_input_norm"
    layer_scalar: str = "layer_scalar"  # the full name; only with ModelConfig.layer_scalars
    sinks: str = "self_attn.sinks"  # the full name; only with ModelConfig.attention_sinks
    delta: str = "linear_attn."  # modules of a gated delta net
    delta_grouped: bool = False  # in_proj_qkvz and in_proj_ba, grouped by k head, instead of qkv, z, b and a
    conv_in: str = "conv.in_proj"  # this and the next two: only in layers with a short convolution
    conv: str = "conv.conv"
    conv_out: str = "conv.out_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"  # the same name as `gate`: one stacked tensor, gate first
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    router_bias: str = "mlp.gate.e_score_correction_bias"  # the full name; only with ModelConfig.router_bias
    router_bias_row: bool = False  # its shape is [1, experts]
    shared: str = "mlp.shared_expert."  # its modules have the same names as an expert's
    shared_gate: str = "mlp.shared_expert_gate"
    # The next four only with expert_norms. The first is a full name.
    router_norm: str = "router.scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_post_norm: str = "post_feedforward_layernorm_2"
    shared_post_norm: str = "post_feedforward_layernorm_1"
    expert_scales: str = "router.per_expert_scale"  # the full name; only with expert_scales
    mtp: MtpNames = MtpNames()


LLAMA_NAMES = Names()


class _Map:
    def __init__(self) -> None:
        self.tensors: TensorMap = {}

    def vector(self, canonical: str, name: str, size: int) -> None:
        self.full_vector(canonical, f"{name}.weight", size)

    def full_vector(self, canonical: str, full_name: str, size: int) -> None:
        self.tensors[f"{canonical}.weight"] = (TensorPart(full_name, (size,)),)

    def linear(
        self, canonical: str, has_bias: bool, *parts: tuple[str, int, int], rows: tuple[_Range, ...] | None = None
    ) -> None:
        """parts: (name, out, in), stacked. rows: ranges of the single part, in stacking order."""
        ranges: tuple[_Range | None, ...] = rows if rows is not None else (None,)
        self.tensors[f"{canonical}.weight"] = tuple(
            TensorPart(f"{name}.weight", (out, into), taken) for name, out, into in parts for taken in ranges
        )
        if has_bias:
            self.tensors[f"{canonical}.bias"] = tuple(
                TensorPart(f"{name}.bias", (out,), taken) for name, out, _ in parts for taken in ranges
            )


def family_tensors(config: ModelConfig, names: Names = LLAMA_NAMES) -> TensorMap:
    """Return every canonical tensor of docs/contracts.md that the model has. Shapes are `(out, in)` and `(out,)`."""
    hidden = config.hidden_units
    made = _Map()
    table = (config.vocab_size, hidden)
    made.tensors["tok_embeddings.weight"] = (TensorPart(f"{names.embedding}.weight", table),)
    made.vector("norm", names.norm, hidden)
    if not config.tie_word_embeddings:
        made.tensors["output.weight"] = (TensorPart(f"{names.output}.weight", table),)
    per_layer = config.per_layer_embedding
    if per_layer:
        columns = config.num_layer * per_layer
        made.linear("per_layer_embeddings", False, (names.per_layer_table, config.per_layer_vocab_size, columns))
        made.linear("per_layer_projection", False, (names.per_layer_projection, columns, hidden))
        made.vector("per_layer_projection_norm", names.per_layer_norm, per_layer)
    for layer, attributes in enumerate(config.layers):
        ours, theirs = f"layers.{layer}", names.layer.format(layer)
        if config.pre_norms:
            made.vector(f"{ours}.attention_norm", theirs + names.attention_norm, hidden)
        if config.pre_norms and not config.parallel_block:
            made.vector(f"{ours}.ffn_norm", theirs + names.ffn_norm, hidden)
        if config.post_norms:
            made.vector(f"{ours}.attention_post_norm", theirs + names.attention_post_norm, hidden)
            made.vector(f"{ours}.ffn_post_norm", theirs + names.ffn_post_norm, hidden)
        if config.layer_scalars:
            made.full_vector(f"{ours}.scalar", theirs + names.layer_scalar, 1)
        if per_layer:
            made.linear(f"{ours}.per_layer.gate", False, (theirs + names.per_layer_gate, per_layer, hidden))
            made.linear(f"{ours}.per_layer.projection", False, (theirs + names.per_layer_output, hidden, per_layer))
            made.vector(f"{ours}.per_layer_post_norm", theirs + names.per_layer_post_norm, hidden)
        if attributes.mixer == "delta_net":
            _delta_net(made, config, names, f"{ours}.delta", theirs + names.delta)
        elif attributes.mixer == "short_conv":
            _short_conv(made, config, names, f"{ours}.conv", theirs)
        else:
            _attention(made, config, attributes, names, f"{ours}.attention", theirs)
        if attributes.ffn == "experts":
            _experts(made, config, names, f"{ours}.feed_forward", theirs)
        else:
            inter = attributes.inter_size or config.inter_size
            _feed_forward(made, config, inter, names, f"{ours}.feed_forward", theirs)
    return made.tensors


def mtp_tensors(config: ModelConfig, names: Names = LLAMA_NAMES) -> TensorMap:
    """Return every canonical tensor of the layer for multi-token prediction, which has the attributes of the last
    layer."""
    hidden, number, theirs = config.hidden_units, config.num_layer, names.mtp
    one = replace(config, num_layer=1, layers=config.layers[-1:])
    layer = family_tensors(one, replace(names, layer=theirs.layer.format(number)))
    made = _Map()
    made.tensors = {name: parts for name, parts in layer.items() if name.startswith("layers.")}
    made.vector("norm", theirs.norm.format(number), hidden)
    made.vector("enorm", theirs.embedding_norm.format(number), hidden)
    made.vector("hnorm", theirs.hidden_norm.format(number), hidden)
    made.linear("eh_proj", False, (theirs.join.format(number), hidden, 2 * hidden))
    return {f"{MTP}{name}": parts for name, parts in made.tensors.items()}


def _latent_attention(made: _Map, config: ModelConfig, ours: str, theirs: str) -> None:
    """Add the tensors of multi-head latent attention, whose modules have the same names in all families."""
    hidden, heads, head, theirs = config.hidden_units, config.head_num, config.size_per_head, f"{theirs}self_attn."
    latent, q_latent, values = config.latent_size, config.q_latent_size, config.value_size_per_head
    if q_latent:
        made.linear(f"{ours}.wq_a", False, (f"{theirs}q_a_proj", q_latent, hidden))
        made.vector(f"{ours}.q_latent_norm", f"{theirs}q_a_layernorm", q_latent)
        made.linear(f"{ours}.wq.0", False, (f"{theirs}q_b_proj", heads * head, q_latent))
    else:
        made.linear(f"{ours}.wq.0", False, (f"{theirs}q_proj", heads * head, hidden))
    rotated = config.rotary_embedding
    made.linear(f"{ours}.wkv_a", False, (f"{theirs}kv_a_proj_with_mqa", latent + rotated, hidden))
    made.vector(f"{ours}.latent_norm", f"{theirs}kv_a_layernorm", latent)
    made.linear(f"{ours}.wkv_b.0", False, (f"{theirs}kv_b_proj", heads * (head - rotated + values), latent))
    made.linear(f"{ours}.wo.0", False, (f"{theirs}o_proj", hidden, heads * values))


def _attention(made: _Map, config: ModelConfig, layer: LayerAttributes, names: Names, ours: str, theirs: str) -> None:
    if config.latent_size:
        return _latent_attention(made, config, ours, theirs)
    hidden, head, kv_heads = config.hidden_units, config.head_size(layer), config.kv_heads(layer)
    q_size, kv_size = config.head_num * head, kv_heads * head
    if len(names.qkv) == 1:
        ranges = _interleaved(head, config.head_num, kv_heads) if names.qkv_interleaved else None
        part = (theirs + names.qkv[0], q_size + 2 * kv_size, hidden)
        split = ((0, q_size), (q_size, q_size + kv_size), (q_size + kv_size, q_size + 2 * kv_size))
        made.linear(f"{ours}.w_qkv.0", config.attn_bias, part, rows=ranges or split)
    elif config.attention_gate:
        _gated_qkv(made, config, names, ours, theirs)
    else:
        count = 1 if layer.kv_source else 2 if layer.values == "keys" else 3
        sizes = list(zip(names.qkv, (q_size, kv_size, kv_size), strict=True))[:count]
        made.linear(f"{ours}.w_qkv.0", config.attn_bias, *((theirs + name, size, hidden) for name, size in sizes))
    if config.qk_norm:
        q_norm, k_norm = (q_size, kv_size) if config.qk_norm_rows else (head, head)
        made.vector(f"{ours}.q_norm", theirs + names.q_norm, q_norm)
    if config.qk_norm and not layer.kv_source:
        made.vector(f"{ours}.k_norm", theirs + names.k_norm, k_norm)
    if config.attention_sinks:
        made.tensors[f"{ours}.sinks.weight"] = (TensorPart(theirs + names.sinks, (config.head_num,)),)
    made.linear(f"{ours}.wo.0", config.attn_output_bias, (theirs + names.attention_output, hidden, q_size))


def _delta_net(made: _Map, config: ModelConfig, names: Names, ours: str, theirs: str) -> None:
    """The rows of w_qkvz are all q heads, then k, v and z; those of w_ba are b of all v heads, then a."""
    hidden, kernel = config.hidden_units, config.conv_kernel
    k_heads, v_heads = config.delta_k_heads, config.delta_v_heads
    k_size, v_size, group = k_heads * config.delta_k_dim, v_heads * config.delta_v_dim, v_heads // k_heads
    channels = 2 * k_size + v_size
    if names.delta_grouped:
        k_dim, v_dim = config.delta_k_dim, group * config.delta_v_dim
        qkvz, ba = (f"{theirs}in_proj_qkvz", channels + v_size, hidden), (f"{theirs}in_proj_ba", 2 * v_heads, hidden)
        made.linear(f"{ours}.w_qkvz.0", False, qkvz, rows=_grouped(k_heads, (k_dim, k_dim, v_dim, v_dim)))
        made.linear(f"{ours}.w_ba.0", False, ba, rows=_grouped(k_heads, (group, group)))
    else:
        qkv, z = (f"{theirs}in_proj_qkv", channels, hidden), (f"{theirs}in_proj_z", v_size, hidden)
        made.linear(f"{ours}.w_qkvz.0", False, qkv, z)
        made.linear(f"{ours}.w_ba.0", False, *((f"{theirs}in_proj_{name}", v_heads, hidden) for name in "ba"))
    # The file's tensor is [channels, 1, kernel].
    made.tensors[f"{ours}.conv_qkv.0.weight"] = (
        TensorPart(f"{theirs}conv1d.weight", (channels, kernel), stack=channels),
    )
    made.tensors[f"{ours}.a_log.weight"] = (TensorPart(f"{theirs}A_log", (v_heads,)),)
    made.tensors[f"{ours}.dt_bias.weight"] = (TensorPart(f"{theirs}dt_bias", (v_heads,)),)
    made.vector(f"{ours}.norm", f"{theirs}norm", config.delta_v_dim)
    made.linear(f"{ours}.w_out.0", False, (f"{theirs}out_proj", hidden, v_size))


@lru_cache(2)  # the same in every layer
def _grouped(groups: int, sizes: tuple[int, ...]) -> tuple[_Range, ...]:
    """Return the row ranges of a tensor of `groups` groups, each with parts of these sizes: the first parts of all
    groups, then the second parts, and so on."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        (group * sum(sizes) + start, group * sum(sizes) + start + size)
        for start, size in zip(starts, sizes, strict=True)
        for group in range(groups)
    )


def _short_conv(made: _Map, config: ModelConfig, names: Names, ours: str, theirs: str) -> None:
    hidden, kernel, bias = config.hidden_units, config.conv_kernel, config.conv_bias
    made.linear(f"{ours}.w_in.0", bias, (theirs + names.conv_in, 3 * hidden, hidden))
    # The file's tensor is [hidden, 1, kernel].
    weight = TensorPart(f"{theirs}{names.conv}.weight", (hidden, kernel), stack=hidden)
    made.tensors[f"{ours}.w_conv.0.weight"] = (weight,)
    if bias:
        made.tensors[f"{ours}.w_conv.0.bias"] = (TensorPart(f"{theirs}{names.conv}.bias", (hidden,)),)
    made.linear(f"{ours}.w_out.0", bias, (theirs + names.conv_out, hidden, hidden))


def _gated_qkv(made: _Map, config: ModelConfig, names: Names, ours: str, theirs: str) -> None:
    """The q projection has q and its gate of each head in turn."""
    head, heads = config.size_per_head, config.head_num
    sizes = {"weight": (config.hidden_units,)} | ({"bias": ()} if config.attn_bias else {})
    rows = _grouped(heads, (head, head))
    for kind, width in sizes.items():
        q_and_gate = [TensorPart(f"{theirs}{names.qkv[0]}.{kind}", (2 * heads * head, *width), taken) for taken in rows]
        k_and_v = [TensorPart(f"{theirs}{name}.{kind}", (config.kv_head_num * head, *width)) for name in names.qkv[1:]]
        made.tensors[f"{ours}.w_qkv.0.{kind}"] = (*q_and_gate[:heads], *k_and_v)
        made.tensors[f"{ours}.w_gate.0.{kind}"] = tuple(q_and_gate[heads:])


@lru_cache(1)  # the same in every layer
def _interleaved(head: int, q_heads: int, kv_heads: int) -> tuple[_Range, ...]:
    """Return the row ranges of the q heads, then the k heads, then the v heads, of a tensor that is grouped by KV head.
    `head`: size of a head."""
    heads = q_heads // kv_heads
    starts = [group * (heads + 2) * head for group in range(kv_heads)]
    q = [(start, start + heads * head) for start in starts]
    k = [(end, end + head) for _, end in q]
    v = [(end, end + head) for _, end in k]
    return (*q, *k, *v)


def _feed_forward(made: _Map, config: ModelConfig, inter: int, names: Names, ours: str, theirs: str) -> None:
    hidden, bias = config.hidden_units, config.mlp_bias
    if names.gate == names.up:
        both = (theirs + names.gate, 2 * inter, hidden)
        made.linear(f"{ours}.w1.0", bias, both, rows=((0, inter),))
        made.linear(f"{ours}.w3.0", bias, both, rows=((inter, 2 * inter),))
    else:
        made.linear(f"{ours}.w1.0", bias, (theirs + names.gate, inter, hidden))
        made.linear(f"{ours}.w3.0", bias, (theirs + names.up, inter, hidden))
    made.linear(f"{ours}.w2.0", bias, (theirs + names.down, hidden, inter))


def _experts(made: _Map, config: ModelConfig, names: Names, ours: str, theirs: str) -> None:
    hidden, inter = config.hidden_units, config.expert_inter_size
    made.linear(f"{ours}.gate", False, (theirs + names.router, config.num_experts, hidden))
    if config.router_bias:
        shape = (1, config.num_experts) if names.router_bias_row else (config.num_experts,)
        made.tensors[f"{ours}.gate.bias"] = (TensorPart(theirs + names.router_bias, shape),)
    if config.shared_expert_inter_size:
        shared, size = theirs + names.shared, config.shared_expert_inter_size
        made.linear(f"{ours}.shared.w1.0", config.mlp_bias, (shared + names.expert_gate, size, hidden))
        made.linear(f"{ours}.shared.w3.0", config.mlp_bias, (shared + names.expert_up, size, hidden))
        made.linear(f"{ours}.shared.w2.0", config.mlp_bias, (shared + names.expert_down, hidden, size))
    if config.expert_norms:
        made.full_vector(f"{ours}.gate_norm", theirs + names.router_norm, hidden)
        made.vector(f"{ours}.experts_norm", theirs + names.experts_norm, hidden)
        made.vector(f"{ours}.experts_post_norm", theirs + names.experts_post_norm, hidden)
        made.vector(f"{ours}.shared_post_norm", theirs + names.shared_post_norm, hidden)
    if config.expert_scales:
        made.full_vector(f"{ours}.expert_scales", theirs + names.expert_scales, config.num_experts)
    if config.shared_expert_gate:
        made.linear(f"{ours}.shared_gate", False, (theirs + names.shared_gate, 1, hidden))
    for index in range(config.num_experts):
        expert, own = f"{ours}.experts.{index}", theirs + names.expert.format(index)
        made.linear(f"{expert}.w1.0", config.expert_bias, (own + names.expert_gate, inter, hidden))
        made.linear(f"{expert}.w3.0", config.expert_bias, (own + names.expert_up, inter, hidden))
        made.linear(f"{expert}.w2.0", config.expert_bias, (own + names.expert_down, hidden, inter))
