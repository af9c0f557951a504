#include "model/decoder.h"

#include <cmath>

#include "base/text.h"
#include "charonia/error.h"
#include "model/rope.h"

namespace charonia::model {
namespace {

std::vector<ops::HostMatrix> stacked(std::initializer_list<std::vector<ops::HostMatrix>> lists) {
  std::vector<ops::HostMatrix> out;
  for (const auto& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits)
    : config_(config),
      ops_(ops),
      limits_(limits),
      precision_(ops.precision(weight_dtype(config.weight_type))),
      activations_(config, precision_, limits) {
  const std::int64_t hidden = config.hidden_units, inter = config.inter_size, vocab = config.vocab_size;
  const std::int64_t q_size = std::int64_t{config.head_num} * config.size_per_head;
  const std::int64_t qkv_size = q_size + 2 * std::int64_t{config.kv_head_num} * config.size_per_head;
  if (config.kv_head_num < 1 || config.head_num % config.kv_head_num != 0) {
    throw Error(ErrorCode::invalid_argument,
                cat("head_num = ", config.head_num, " is no multiple of kv_head_num = ", config.kv_head_num));
  }
  if (config.rotary_embedding != config.size_per_head || config.size_per_head % 2 != 0) {
    throw Error(ErrorCode::unsupported, cat("rotary_embedding = ", config.rotary_embedding,
                                            " must be size_per_head = ", config.size_per_head, ", an even number"));
  }
  attention_scale_ = 1.0F / std::sqrt(static_cast<float>(config.size_per_head));

  const auto linear = [&](std::vector<ops::HostMatrix> weight, std::vector<ops::HostMatrix> bias) {
    auto out = ops_.make_linear(weight, bias, precision_.weight);
    weight_bytes_per_step_ += static_cast<std::int64_t>(out->bytes());
    return out;
  };
  const auto bias_of = [&](bool has, const std::string& name, std::int64_t n) {
    return has ? files.get(name, n, 1) : std::vector<ops::HostMatrix>{};
  };
  const auto norm = [&](const std::string& name) { return device_vector(files.get_vector(name, hidden)); };

  layers_.resize(static_cast<std::size_t>(config.num_layer));
  for (int i = 0; i < config.num_layer; ++i) {
    const std::string at = cat("layers.", i, ".");
    auto& layer = layers_[static_cast<std::size_t>(i)];
    layer.attention_norm = norm(at + "attention_norm.weight");
    layer.ffn_norm = norm(at + "ffn_norm.weight");
    layer.qkv = linear(files.get(at + "attention.w_qkv.0.weight", qkv_size, hidden),
                       bias_of(config.attn_bias, at + "attention.w_qkv.0.bias", qkv_size));
    layer.attention_out = linear(files.get(at + "attention.wo.0.weight", hidden, q_size),
                                 bias_of(config.attn_output_bias, at + "attention.wo.0.bias", hidden));
    const std::string ffn = at + "feed_forward.";
    layer.gate_up =
        linear(stacked({files.get(ffn + "w1.0.weight", inter, hidden), files.get(ffn + "w3.0.weight", inter, hidden)}),
               stacked({bias_of(config.mlp_bias, ffn + "w1.0.bias", inter),
                        bias_of(config.mlp_bias, ffn + "w3.0.bias", inter)}));
    layer.down =
        linear(files.get(ffn + "w2.0.weight", hidden, inter), bias_of(config.mlp_bias, ffn + "w2.0.bias", hidden));
  }
  const auto table = files.get("tok_embeddings.weight", vocab, hidden);
  if (table.size() != 1) throw Error(ErrorCode::unsupported, "tok_embeddings.weight is split into parts");
  embedding_ = ops_.make_embedding(table.front(), precision_.weight);
  final_norm_ = norm("norm.weight");
  output_ =
      linear(files.get(config.tie_word_embeddings ? "tok_embeddings.weight" : "output.weight", vocab, hidden), {});
  weight_bytes_ = weight_bytes_per_step_ + static_cast<std::int64_t>(embedding_->bytes());
  rotary_ = device_vector(rotary_table(config, limits.max_positions));

  activation_memory_ = ops_.allocate(activations_.bytes);
}

Decoder::Activations::Activations(const ModelConfig& config, const ops::Precision& precision,
                                  const ops::StepLimits& limits) {
  const std::int64_t hidden = config.hidden_units, inter = config.inter_size;
  const std::int64_t q_size = std::int64_t{config.head_num} * config.size_per_head;
  const std::int64_t qkv_size = q_size + 2 * std::int64_t{config.kv_head_num} * config.size_per_head;
  const DType act = precision.activation, res = precision.residual, product = precision.product;
  const auto place = [this](int rows, std::int64_t cols, DType dtype) {
    constexpr std::size_t kAlignment = 256;
    const Activation out{bytes, dtype, cols};
    const auto size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * size_of(dtype);
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    return out;
  };
  residual = place(limits.max_rows, hidden, res);
  delta = place(limits.max_rows, hidden, product);
  normed = place(limits.max_rows, hidden, act);
  qkv = place(limits.max_rows, qkv_size, product);
  attended = place(limits.max_rows, q_size, act);
  gate_up = place(limits.max_rows, 2 * inter, product);
  gated = place(limits.max_rows, inter, act);
  last_residual = place(limits.max_sequences, hidden, res);
  last_delta = place(limits.max_sequences, hidden, product);
  last_normed = place(limits.max_sequences, hidden, act);
  logits = place(limits.max_sequences, config.vocab_size, DType::f32);
}

Decoder::MemoryNeeds Decoder::memory_needs(const ModelConfig& config, const ops::Ops& ops,
                                           const ops::StepLimits& limits) {
  const auto precision = ops.precision(weight_dtype(config.weight_type));
  const std::int64_t hidden = config.hidden_units, inter = config.inter_size, vocab = config.vocab_size;
  const std::int64_t heads = config.head_num, kv_heads = config.kv_head_num, dim = config.size_per_head;
  const std::int64_t layer = hidden * (2 * heads + 2 * kv_heads) * dim + 3 * hidden * inter;
  const std::int64_t elements =
      layer * config.num_layer + 2 * vocab * hidden;  // the output layer has a copy of its own
  const std::int64_t floats = (2 * std::int64_t{config.num_layer} + 1) * hidden + limits.max_positions * dim;
  return {
      static_cast<std::size_t>(elements) * size_of(precision.weight) + static_cast<std::size_t>(floats) * sizeof(float),
      Activations(config, precision, limits).bytes,
      ops.kv_block_bytes({config.num_layer, config.kv_head_num, config.size_per_head, limits.block_len, precision.kv})};
}

void Decoder::prepare(ops::KvCache& cache) {
  cache_ = &cache;
  issue_ = [this](const ops::StepShape& shape) { issue(shape); };
  std::vector<const ops::Linear*> linears;
  for (const auto& layer : layers_) {
    for (const auto* linear : {&layer.qkv, &layer.attention_out, &layer.gate_up, &layer.down}) {
      linears.push_back(linear->get());
    }
  }
  linears.push_back(output_.get());
  ops_.prepare(limits_, linears, issue_);
}

void Decoder::launch(const ops::StepInput& input) {
  ops_.begin_step(input);
  ops_.run_step(issue_);
}

void Decoder::issue(const ops::StepShape& shape) {
  const auto residual = view(activations_.residual, shape.rows), delta = view(activations_.delta, shape.rows);
  const auto normed = view(activations_.normed, shape.rows), qkv = view(activations_.qkv, shape.rows);
  const auto attended = view(activations_.attended, shape.rows);
  const auto gate_up = view(activations_.gate_up, shape.rows), gated = view(activations_.gated, shape.rows);

  ops_.embed(residual, *embedding_);
  ops::Tensor pending{};  // what the next norm adds to the residual stream
  for (int i = 0; i < config_.num_layer; ++i) {
    const auto& layer = layers_[static_cast<std::size_t>(i)];
    ops_.rms_norm(normed, residual, pending, layer.attention_norm->as<float>(), config_.norm_eps);
    ops_.linear(qkv, normed, *layer.qkv);
    ops_.rotary_store(qkv, rotary_->as<float>(), *cache_, i, config_.head_num);
    ops_.attention(attended, qkv, *cache_, i, config_.head_num, attention_scale_);
    ops_.linear(delta, attended, *layer.attention_out);
    ops_.rms_norm(normed, residual, delta, layer.ffn_norm->as<float>(), config_.norm_eps);
    ops_.linear(gate_up, normed, *layer.gate_up);
    ops_.silu_mul(gated, gate_up);
    ops_.linear(delta, gated, *layer.down);
    pending = delta;
  }

  if (shape.logits_rows == 0) return;
  const auto last_residual = view(activations_.last_residual, shape.logits_rows),
             last_delta = view(activations_.last_delta, shape.logits_rows);
  const auto last_normed = view(activations_.last_normed, shape.logits_rows),
             logits = view(activations_.logits, shape.logits_rows);
  ops_.gather_rows(last_residual, residual);
  ops_.gather_rows(last_delta, delta);
  ops_.rms_norm(last_normed, last_residual, last_delta, final_norm_->as<float>(), config_.norm_eps);
  ops_.linear(logits, last_normed, *output_);
  ops_.sample(logits);
}

ops::KvLayout Decoder::kv_layout(int block_len) const {
  return {config_.num_layer, config_.kv_head_num, config_.size_per_head, block_len, precision_.kv};
}

ops::Tensor Decoder::view(const Activation& activation, std::int64_t rows) const {
  return {activation_memory_->as<std::byte>() + activation.offset, activation.dtype, rows, activation.cols,
          activation.cols};
}

std::unique_ptr<ops::Buffer> Decoder::device_vector(std::span<const float> values) {
  auto buffer = ops_.allocate(values.size_bytes());
  ops_.upload(buffer->data(), values.data(), values.size_bytes());
  return buffer;
}

}  // namespace charonia::model
