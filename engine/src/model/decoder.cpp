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

Decoder::Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, int positions, int max_rows,
                 int max_logits_rows)
    : config_(config), ops_(ops), precision_(ops.precision(weight_dtype(config.weight_type))) {
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
    layer.gate_up = linear(stacked({files.get(ffn + "w1.0.weight", inter, hidden),
                                    files.get(ffn + "w3.0.weight", inter, hidden)}),
                           stacked({bias_of(config.mlp_bias, ffn + "w1.0.bias", inter),
                                    bias_of(config.mlp_bias, ffn + "w3.0.bias", inter)}));
    layer.down = linear(files.get(ffn + "w2.0.weight", hidden, inter),
                        bias_of(config.mlp_bias, ffn + "w2.0.bias", hidden));
  }
  const auto table = files.get("tok_embeddings.weight", vocab, hidden);
  if (table.size() != 1) throw Error(ErrorCode::unsupported, "tok_embeddings.weight is split into parts");
  embedding_ = ops_.make_embedding(table.front(), precision_.weight);
  final_norm_ = norm("norm.weight");
  output_ = linear(files.get(config.tie_word_embeddings ? "tok_embeddings.weight" : "output.weight", vocab, hidden), {});
  weight_bytes_ = weight_bytes_per_step_ + static_cast<std::int64_t>(embedding_->bytes());
  rotary_ = device_vector(rotary_table(config, positions));

  const DType act = precision_.activation, res = precision_.residual;
  residual_ = activations(max_rows, hidden, res);
  delta_ = activations(max_rows, hidden, res);
  normed_ = activations(max_rows, hidden, act);
  qkv_ = activations(max_rows, qkv_size, res);
  attended_ = activations(max_rows, q_size, act);
  gate_up_ = activations(max_rows, 2 * inter, res);
  gated_ = activations(max_rows, inter, act);
  last_residual_ = activations(max_logits_rows, hidden, res);
  last_delta_ = activations(max_logits_rows, hidden, res);
  logits_ = activations(max_logits_rows, vocab, DType::f32);
}

ops::Tensor Decoder::forward(const StepInput& input, ops::KvCache& cache) {
  const auto rows = static_cast<std::int64_t>(input.ids.size());
  const std::int64_t hidden = config_.hidden_units, inter = config_.inter_size;
  const std::int64_t q_size = std::int64_t{config_.head_num} * config_.size_per_head;
  const std::int64_t qkv_size = q_size + 2 * std::int64_t{config_.kv_head_num} * config_.size_per_head;
  const DType act = precision_.activation, res = precision_.residual;

  const auto residual = view(*residual_, res, rows, hidden);
  const auto delta = view(*delta_, res, rows, hidden);
  const auto normed = view(*normed_, act, rows, hidden);
  const auto qkv = view(*qkv_, res, rows, qkv_size);
  const auto attended = view(*attended_, act, rows, q_size);
  const auto gate_up = view(*gate_up_, res, rows, 2 * inter);
  const auto gated = view(*gated_, act, rows, inter);

  ops_.embed(residual, *embedding_, input.ids);
  ops::Tensor pending{};  // what the next norm adds to the residual stream
  for (int i = 0; i < config_.num_layer; ++i) {
    const auto& layer = layers_[static_cast<std::size_t>(i)];
    ops_.rms_norm(normed, residual, pending, layer.attention_norm->as<float>(), config_.norm_eps);
    ops_.linear(qkv, normed, *layer.qkv);
    ops_.rotary_store(qkv, rotary_->as<float>(), cache, i, config_.head_num, input.attention);
    ops_.attention(attended, qkv, cache, i, config_.head_num, attention_scale_, input.attention);
    ops_.linear(delta, attended, *layer.attention_out);
    ops_.rms_norm(normed, residual, delta, layer.ffn_norm->as<float>(), config_.norm_eps);
    ops_.linear(gate_up, normed, *layer.gate_up);
    ops_.silu_mul(gated, gate_up);
    ops_.linear(delta, gated, *layer.down);
    pending = delta;
  }

  const auto wanted = static_cast<std::int64_t>(input.logits_rows.size());
  const auto logits = view(*logits_, DType::f32, wanted, config_.vocab_size);
  if (wanted == 0) return logits;
  const auto last_residual = view(*last_residual_, res, wanted, hidden);
  const auto last_delta = view(*last_delta_, res, wanted, hidden);
  const auto last_normed = view(*normed_, act, wanted, hidden);
  ops_.gather_rows(last_residual, residual, input.logits_rows);
  ops_.gather_rows(last_delta, delta, input.logits_rows);
  ops_.rms_norm(last_normed, last_residual, last_delta, final_norm_->as<float>(), config_.norm_eps);
  ops_.linear(logits, last_normed, *output_);
  return logits;
}

ops::KvLayout Decoder::kv_layout(int block_len) const {
  return {config_.num_layer, config_.kv_head_num, config_.size_per_head, block_len, precision_.kv};
}

ops::Tensor Decoder::view(const ops::Buffer& buffer, DType dtype, std::int64_t rows, std::int64_t cols) const {
  return {buffer.data(), dtype, rows, cols, cols};
}

std::unique_ptr<ops::Buffer> Decoder::device_vector(std::span<const float> values) {
  auto buffer = ops_.allocate(values.size_bytes());
  ops_.upload(buffer->data(), values.data(), values.size_bytes());
  return buffer;
}

std::unique_ptr<ops::Buffer> Decoder::activations(int rows, std::int64_t cols, DType dtype) {
  return ops_.allocate(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) * size_of(dtype));
}

}  // namespace charonia::model
