// Loads a decoder's weights from the files onto the device.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "charonia/error.h"
#include "model/decoder.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

std::vector<ops::HostMatrix> stacked(std::vector<ops::HostMatrix> first, const std::vector<ops::HostMatrix>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

template <class Part>
Part single(std::vector<Part> parts, const std::string& name) {
  if (parts.size() != 1) throw Error(ErrorCode::unsupported, cat(name, " is split into ", parts.size(), " parts"));
  return std::move(parts.front());
}

using QuantParts = std::vector<std::unique_ptr<QuantPart>>;

std::vector<QuantPart*> pointers(const QuantParts& parts) {
  std::vector<QuantPart*> out;
  for (const auto& part : parts) out.push_back(part.get());
  return out;
}

// Converts parts that must have one format to one form of it. `why` names them in the error.
void make_one_format(const std::vector<QuantPart*>& parts, const char* why) {
  QuantPart::unify(parts);
  const auto& first = *parts.front();
  for (const auto* part : parts) {
    if (part->format() == first.format()) continue;
    throw Error(ErrorCode::unsupported,
                cat("tensor ", first.name(), " is quantised to ", ops::to_string(first.format()), ", but ",
                    part->name(), " to ", ops::to_string(part->format()), ": ", why, " must have the same format"));
  }
}

void check_one_order(const QuantPart& a, const QuantPart& b) {
  if (std::ranges::equal(a.order(), b.order())) return;
  throw Error(ErrorCode::unsupported,
              cat("tensor ", a.name(), " and ", b.name(),
                  " have the same inputs, but their columns have different orders (desc_act): ",
                  "use a checkpoint that was quantised with desc_act = false or ", "static_groups = true"));
}

[[noreturn]] void refuse_mixed(const WeightFiles& files, const std::string& a, const std::string& b) {
  const auto& [quantised, other] = files.quantised(a) ? std::pair{a, b} : std::pair{b, a};
  throw Error(ErrorCode::unsupported,
              cat("tensor ", quantised, " is quantised, but ", other,
                  " is not, and they are computed together. Use a checkpoint that quantises both or neither"));
}

float rounded(float value, DType type) {
  if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
  if (type == DType::f16) return f16_to_float(float_to_f16(value));
  return value;
}

// A matrix that is made on the host.
struct Made {
  DType type = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;

  void append(float value) {
    const std::uint16_t half = type == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
    const void* const from = type == DType::f32 ? static_cast<const void*>(&value) : &half;
    const auto* const bytes = static_cast<const std::byte*>(from);
    data.insert(data.end(), bytes, bytes + size_of(type));
  }
  ops::HostMatrix matrix() const { return {data.data(), type, rows, cols, 0}; }
};

// Makes a matrix with a row for each row of `parts`; add_row(values, out) appends its values.
template <class AddRow>
Made made(const std::vector<ops::HostMatrix>& parts, DType type, AddRow add_row) {
  Made out{.type = type, .cols = parts.front().cols, .data = {}};
  for (const auto& part : parts) out.rows += part.rows;
  out.data.reserve(static_cast<std::size_t>(out.rows * out.cols) * size_of(type));
  std::vector<float> values(static_cast<std::size_t>(out.cols));
  for (const auto& part : parts) {
    for (std::int64_t row = 0; row < part.rows; ++row) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = float_at(part.row(row), i, part.dtype);
      add_row(values, out);
    }
  }
  return out;
}

// Splits a matrix into the sum of two matrices of a 16-bit type: the rounded values, and the rounded rounding errors.
// Together they keep 16 bits of a value with bf16 and 22 with fp16.
std::array<Made, 2> halves(const std::vector<ops::HostMatrix>& parts, DType type) {
  return {made(parts, type,
               [](const auto& values, Made& out) {
                 for (const float value : values) out.append(value);
               }),
          made(parts, type, [type](const auto& values, Made& out) {
            for (const float value : values) out.append(value - rounded(value, type));
          })};
}

// Rows divided by their lengths, in the weight type.
Made unit_rows(const std::vector<ops::HostMatrix>& parts, DType type) {
  return made(parts, type, [type](const auto& values, Made& out) {
    double sum = 0;
    for (const float value : values) sum += double{value} * value;
    constexpr float kMin = 1e-12F;  // a row of zeros stays zero
    const float length = std::max(rounded(static_cast<float>(std::sqrt(sum)), type), kMin);
    for (const float value : values) out.append(value / length);
  });
}

ops::Activation activation_of(const ModelConfig& config) {
  if (config.activation == "clamped_swiglu") {
    return {ops::Activation::clamped_swiglu, config.swiglu_limit, config.swiglu_alpha};
  }
  return config.activation == "gelu_tanh" ? ops::Activation::gelu_tanh : ops::Activation::silu;
}

std::size_t scratch_bytes(const ModelConfig& config, const Shard& shard, const ops::Device& device, DType weight,
                          int rows) {
  return shard.expert_inter == 0 ? 0 : device.experts_scratch_bytes(experts_shape(config, shard, weight), rows);
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits)
    : config_(config),
      shard_(config, files.manifest(), ops.rank()),
      ops_(ops),
      limits_(limits),
      precision_(ops.precision(data_type(config))),
      activation_(activation_of(config)),
      embedding_scale_(rounded(config.embedding_scale, precision_.weight)),
      tables_(config, limits.max_positions, limits.max_rows),
      activations_(config, shard_, precision_, limits,
                   scratch_bytes(config, shard_, ops, precision_.weight, limits.max_rows)) {
  make_tables();
  layers_.resize(static_cast<std::size_t>(config.num_layer));
  for (int i = 0; i < config.num_layer; ++i) {
    auto& layer = layers_[static_cast<std::size_t>(i)];
    load_attention(files, i, layer);
    load_feed_forward(files, i, layer);
    set_params(i, layer);
    files.drop_pages();  // otherwise the weights would be in this process's memory twice until all are loaded
  }
  load_output(files);
  activation_memory_ = ops_.allocate(activations_.bytes);
}

std::unique_ptr<ops::Linear> Decoder::count(std::unique_ptr<ops::Linear> made) {
  weight_bytes_ += static_cast<std::int64_t>(made->bytes());
  weight_bytes_per_step_ += static_cast<std::int64_t>(made->bytes());
  return made;
}

std::unique_ptr<ops::Linear> Decoder::linear(const WeightFiles& files, std::span<const Wanted> weights,
                                             const std::vector<ops::HostMatrix>& bias) {
  const bool quantised = files.quantised(weights.front().name);
  for (const auto& one : weights) {
    if (files.quantised(one.name) != quantised) refuse_mixed(files, weights.front().name, one.name);
  }
  if (!quantised) {
    std::vector<ops::HostMatrix> parts;
    for (const auto& one : weights) parts = stacked(std::move(parts), files.get(one.name, one.rows, one.cols));
    return count(ops_.make_linear(parts, bias, precision_.weight));
  }
  QuantParts parts;
  for (const auto& one : weights) {
    for (auto& part : files.get_quantised(one.name, one.rows, one.cols)) parts.push_back(std::move(part));
  }
  make_one_format(pointers(parts), "stacked weights");
  for (const auto& part : parts) check_one_order(*parts.front(), *part);
  std::vector<const ops::QuantSource*> sources;
  for (const auto& part : parts) sources.push_back(part.get());
  return count(ops_.make_quantised_linear(sources, bias, precision_.weight));
}

std::vector<float> Decoder::norm_values(const WeightFiles& files, const std::string& name, std::int64_t n) const {
  auto weight = files.get_vector(name, n);
  if (config_.norm_unit_offset) {
    for (auto& value : weight) value += 1;
  }
  return weight;
}

Decoder::Vector Decoder::norm(const WeightFiles& files, const std::string& name, std::int64_t n) const {
  return device_vector(norm_values(files, name, n));
}

Decoder::Vector Decoder::device_vector(std::span<const float> values) const {
  auto buffer = ops_.allocate(values.size_bytes());
  ops_.upload(buffer->data(), values.data(), values.size_bytes());
  return buffer;
}

void Decoder::load_attention(const WeightFiles& files, int index, Layer& layer) {
  const std::int64_t hidden = config_.hidden_units;
  const std::string at = cat("layers.", index, "."), qkv = at + "attention.w_qkv", out = at + "attention.wo";
  const std::string number = cat(".", shard_.rank);
  if (config_.pre_norms) layer.attention_norm = norm(files, at + "attention_norm.weight", hidden);
  if (config_.post_norms) layer.attention_post_norm = norm(files, at + "attention_post_norm.weight", hidden);
  if (config_.qk_norm) load_qk_norm(files, at + "attention.", layer);
  if (config_.attention_sinks) {
    const auto sinks = files.get_vector(at + "attention.sinks.weight", config_.head_num);
    layer.sinks = device_vector(std::span(sinks).subspan(static_cast<std::size_t>(shard_.rank * shard_.heads),
                                                         static_cast<std::size_t>(shard_.heads)));
  }
  std::vector<ops::HostMatrix> qkv_bias, out_bias;
  if (config_.attn_bias) qkv_bias = files.get(qkv + number + ".bias", shard_.qkv_size, 1);
  // The ranks' outputs are summed, so only rank 0 adds the bias.
  if (config_.attn_output_bias && shard_.rank == 0) out_bias = files.get(out + ".0.bias", hidden, 1);
  layer.qkv = linear(files, {{{qkv + number + ".weight", shard_.qkv_size, hidden}}}, qkv_bias);
  layer.attention_out = linear(files, {{{out + number + ".weight", hidden, shard_.q_size}}}, out_bias);
}

void Decoder::load_qk_norm(const WeightFiles& files, const std::string& at, Layer& layer) const {
  const std::int64_t dim = config_.size_per_head;
  const auto load = [&](const char* name, int heads, int first, int count) {
    auto weight = norm_values(files, at + name, config_.qk_norm_rows ? heads * dim : dim);
    if (!config_.qk_norm_rows) return device_vector(weight);
    return device_vector(
        std::span(weight).subspan(static_cast<std::size_t>(first * dim), static_cast<std::size_t>(count * dim)));
  };
  layer.q_norm = load("q_norm.weight", config_.head_num, shard_.rank * shard_.heads, shard_.heads);
  layer.k_norm =
      load("k_norm.weight", config_.kv_head_num, shard_.rank * config_.kv_head_num / shard_.ranks, shard_.kv_heads);
}

void Decoder::load_feed_forward(const WeightFiles& files, int index, Layer& layer) {
  const std::int64_t hidden = config_.hidden_units;
  const std::string at = cat("layers.", index, "."), forward = at + "feed_forward.";
  if (config_.pre_norms && !config_.parallel_block) layer.ffn_norm = norm(files, at + "ffn_norm.weight", hidden);
  if (config_.post_norms) layer.ffn_post_norm = norm(files, at + "ffn_post_norm.weight", hidden);
  if (!has_experts(config_, index)) return load_mlp(files, forward, shard_.inter, layer);
  if (shard_.shared_inter > 0) load_mlp(files, forward + "shared.", shard_.shared_inter, layer);
  load_router(files, forward, layer);
  load_experts(files, forward, layer);
}

void Decoder::load_mlp(const WeightFiles& files, const std::string& at, std::int64_t inter, Layer& layer) {
  const std::int64_t hidden = config_.hidden_units;
  const std::string number = cat(".", shard_.rank);
  const auto weight = [&](const char* name, std::int64_t n, std::int64_t k) {
    return Wanted{at + name + number + ".weight", n, k};
  };
  std::vector<ops::HostMatrix> gate_up_bias, down_bias;
  if (config_.mlp_bias) {
    gate_up_bias =
        stacked(files.get(at + "w1" + number + ".bias", inter, 1), files.get(at + "w3" + number + ".bias", inter, 1));
    if (shard_.rank == 0) down_bias = files.get(at + "w2.0.bias", hidden, 1);
  }
  layer.gate_up = linear(files, {{weight("w1", inter, hidden), weight("w3", inter, hidden)}}, gate_up_bias);
  layer.down = linear(files, {{weight("w2", hidden, inter)}}, down_bias);
}

void Decoder::load_router(const WeightFiles& files, const std::string& at, Layer& layer) {
  const std::int64_t hidden = config_.hidden_units, experts = config_.num_experts;
  auto parts = files.get(at + "gate.weight", experts, hidden);
  const bool wider = precision_.weight != DType::f32 &&
                     std::ranges::any_of(parts, [](const auto& part) { return part.dtype == DType::f32; });
  std::array<Made, 2> split;
  if (config_.router_fp32 && wider) {
    split = halves(parts, precision_.weight);
    parts = {split[0].matrix(), split[1].matrix()};
  }
  if (config_.shared_expert_gate) parts = stacked(std::move(parts), files.get(at + "shared_gate.weight", 1, hidden));
  std::vector<ops::HostMatrix> bias;
  if (config_.router_logit_bias) {
    bias = {single(files.get(at + "gate.bias", experts, 1), "gate.bias")};
    bias.resize(parts.size());
  } else if (config_.router_bias) {
    layer.router_bias = device_vector(files.get_vector(at + "gate.bias", experts));
  }
  layer.router = count(ops_.make_linear(parts, bias, precision_.weight));
  layer.choice = {.top_k = config_.experts_per_token,
                  .renormalize = config_.renormalize_experts,
                  .score = config_.router_score == "sigmoid" ? ops::RouterScore::sigmoid : ops::RouterScore::softmax,
                  .bias = layer.router_bias ? layer.router_bias->as<float>() : nullptr,
                  .groups = config_.router_groups,
                  .top_groups = config_.router_top_groups,
                  .norm_min = config_.router_norm_min,
                  .scale = config_.router_scale};
}

void Decoder::load_experts(const WeightFiles& files, const std::string& at, Layer& layer) {
  const std::int64_t hidden = config_.hidden_units;
  const std::string number = cat(".", shard_.rank);
  std::vector<std::array<Wanted, 3>> experts;
  for (int e = 0; e < config_.num_experts; ++e) {
    const auto weight = [&](const char* name, std::int64_t n, std::int64_t k) {
      return Wanted{cat(at, "experts.", e, ".", name, number, ".weight"), n, k};
    };
    const auto size = shard_.expert_inter;
    experts.push_back({weight("w1", size, hidden), weight("w3", size, hidden), weight("w2", hidden, size)});
  }
  const auto& first = experts.front().front().name;
  const bool quantised = files.quantised(first);
  for (const auto& expert : experts) {
    for (const auto& one : expert) {
      if (files.quantised(one.name) != quantised) refuse_mixed(files, first, one.name);
    }
  }
  const auto biases = expert_biases(files, at);
  layer.experts = quantised ? quantised_experts(files, experts, biases) : dense_experts(files, experts, biases);
  const auto bytes = static_cast<std::int64_t>(layer.experts->bytes());
  weight_bytes_ += bytes;
  weight_bytes_per_step_ += bytes / config_.num_experts * config_.experts_per_token;
}

// One entry for each expert; without data if the model has no such biases.
std::vector<ops::ExpertBiases> Decoder::expert_biases(const WeightFiles& files, const std::string& at) const {
  std::vector<ops::ExpertBiases> out(static_cast<std::size_t>(config_.num_experts));
  for (int e = 0; config_.expert_bias && e < config_.num_experts; ++e) {
    const auto get = [&](const char* name, int rank, std::int64_t rows) {
      const auto bias = cat(at, "experts.", e, ".", name, ".", rank, ".bias");
      return single(files.get(bias, rows, 1), bias);
    };
    auto& biases = out[static_cast<std::size_t>(e)];
    biases.gate = get("w1", shard_.rank, shard_.expert_inter);
    biases.up = get("w3", shard_.rank, shard_.expert_inter);
    // The ranks' outputs are summed, so only rank 0 adds the bias.
    if (shard_.rank == 0) biases.down = get("w2", 0, config_.hidden_units);
  }
  return out;
}

std::unique_ptr<ops::Experts> Decoder::dense_experts(const WeightFiles& files,
                                                     std::span<const std::array<Wanted, 3>> experts,
                                                     const std::vector<ops::ExpertBiases>& biases) {
  std::vector<ops::ExpertSource> sources;
  const auto get = [&](const Wanted& one) { return single(files.get(one.name, one.rows, one.cols), one.name); };
  for (const auto& [gate, up, down] : experts) {
    sources.push_back({get(gate), get(up), get(down), biases[sources.size()]});
  }
  return ops_.make_experts(sources, precision_.weight);
}

std::unique_ptr<ops::Experts> Decoder::quantised_experts(const WeightFiles& files,
                                                         std::span<const std::array<Wanted, 3>> experts,
                                                         const std::vector<ops::ExpertBiases>& biases) {
  QuantParts gate_up, down;
  const auto get = [&](const Wanted& one) {
    return single(files.get_quantised(one.name, one.rows, one.cols), one.name);
  };
  for (const auto& expert : experts) {
    gate_up.push_back(get(expert[0]));
    gate_up.push_back(get(expert[1]));
    down.push_back(get(expert[2]));
    check_one_order(*gate_up[gate_up.size() - 2], *gate_up.back());
  }
  make_one_format(pointers(gate_up), "gate and up of a layer's experts");
  make_one_format(pointers(down), "the last matrices of a layer's experts");
  std::vector<ops::QuantExpertSource> sources;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    sources.push_back({gate_up[2 * e].get(), gate_up[2 * e + 1].get(), down[e].get(), biases[e]});
  }
  return ops_.make_quantised_experts(sources, precision_.weight);
}

void Decoder::load_output(const WeightFiles& files) {
  const std::int64_t hidden = config_.hidden_units;
  const std::string table = "tok_embeddings.weight";
  embedding_ = ops_.make_embedding(single(files.get(table, config_.vocab_size, hidden), table), precision_.weight);
  files.drop_pages();
  weight_bytes_ += static_cast<std::int64_t>(embedding_->bytes());
  final_norm_ = norm(files, "norm.weight", hidden);
  const Wanted output{cat("output.", shard_.rank, ".weight"), shard_.logits, hidden};
  if (config_.normalize_output) {
    const auto unit = unit_rows(files.get(output.name, output.rows, output.cols), precision_.weight);
    output_ = count(ops_.make_linear({{unit.matrix()}}, {}, precision_.weight));
  } else {
    output_ = linear(files, {{output}}, {});
  }
  files.drop_pages();
}

void Decoder::make_tables() {
  if (tables_.rows() > 0) {
    rotary_ = device_vector(tables_.global_table());
    if (tables_.has_local()) local_rotary_ = device_vector(tables_.local_table());
  }
  if (has_q_scales(config_)) q_scales_ = device_vector(q_scales(config_, limits_.max_positions));
  if (config_.alibi) {
    const auto all = alibi_slopes(config_.head_num);
    slopes_ = device_vector(std::span(all).subspan(static_cast<std::size_t>(shard_.rank * shard_.heads),
                                                   static_cast<std::size_t>(shard_.heads)));
  }
}

void Decoder::set_params(int index, Layer& layer) const {
  const int window = window_of(config_, index);
  const float* const table = data(window > 0 && local_rotary_ ? local_rotary_ : rotary_);
  layer.rotary = {.cos_sin = has_rotation(config_, index) ? table : nullptr,
                  .rotary_dim = config_.rotary_embedding,
                  .interleaved = config_.rotary_interleaved,
                  .q_norm = data(layer.q_norm),
                  .k_norm = data(layer.k_norm),
                  .norm_eps = config_.norm_eps,
                  .norm_after = config_.qk_norm_after_rotary,
                  .q_scale = data(q_scales_)};
  const float scale = config_.attention_scale > 0 ? config_.attention_scale
                                                  : 1.0F / std::sqrt(static_cast<float>(config_.size_per_head));
  layer.attention = {.scale = scale,
                     .window = window,
                     .soft_cap = config_.attention_soft_cap,
                     .alibi = data(slopes_),
                     .sinks = data(layer.sinks)};
}

}  // namespace charonia::model
