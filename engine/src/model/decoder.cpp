#include "model/decoder.h"

#include <algorithm>
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

// Rows [begin, end) of the parts as they are stacked.
std::vector<ops::HostMatrix> rows_of(const std::vector<ops::HostMatrix>& parts, std::int64_t begin, std::int64_t end) {
  std::vector<ops::HostMatrix> out;
  for (const auto& part : parts) {
    const auto first = std::clamp<std::int64_t>(begin, 0, part.rows),
               last = std::clamp<std::int64_t>(end, 0, part.rows);
    if (first < last) out.push_back({part.row(first), part.dtype, last - first, part.cols, part.stride});
    begin -= part.rows;
    end -= part.rows;
  }
  return out;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits)
    : config_(config),
      shard_(config, ops.rank(), ops.ranks()),
      ops_(ops),
      limits_(limits),
      precision_(ops.precision(weight_dtype(config.weight_type))),
      activations_(config, shard_, precision_, limits) {
  const std::int64_t hidden = config.hidden_units, inter = shard_.inter, vocab = config.vocab_size;
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
  const auto weight = [&](const std::string& name, std::int64_t n, std::int64_t k) {
    return files.get(cat(name, ".", shard_.rank, ".weight"), n, k);
  };
  const auto bias = [&](bool has, const std::string& name, std::int64_t n) {
    return has ? files.get(cat(name, ".", shard_.rank, ".bias"), n, 1) : std::vector<ops::HostMatrix>{};
  };
  const bool first = shard_.rank == 0;  // adds the biases of products that are summed over the ranks
  const auto norm = [&](const std::string& name) { return device_vector(files.get_vector(name, hidden)); };

  layers_.resize(static_cast<std::size_t>(config.num_layer));
  for (int i = 0; i < config.num_layer; ++i) {
    const std::string at = cat("layers.", i, ".");
    auto& layer = layers_[static_cast<std::size_t>(i)];
    layer.attention_norm = norm(at + "attention_norm.weight");
    layer.ffn_norm = norm(at + "ffn_norm.weight");
    const std::string qkv = at + "attention.w_qkv", out = at + "attention.wo";
    layer.qkv = linear(weight(qkv, shard_.qkv_size, hidden), bias(config.attn_bias, qkv, shard_.qkv_size));
    layer.attention_out =
        linear(weight(out, hidden, shard_.q_size), bias(config.attn_output_bias && first, out, hidden));
    const std::string gate = at + "feed_forward.w1", up = at + "feed_forward.w3", down = at + "feed_forward.w2";
    layer.gate_up = linear(stacked({weight(gate, inter, hidden), weight(up, inter, hidden)}),
                           stacked({bias(config.mlp_bias, gate, inter), bias(config.mlp_bias, up, inter)}));
    layer.down = linear(weight(down, hidden, inter), bias(config.mlp_bias && first, down, hidden));
  }
  const auto table = files.get("tok_embeddings.weight", vocab, hidden);
  if (table.size() != 1) throw Error(ErrorCode::unsupported, "tok_embeddings.weight is split into parts");
  embedding_ = ops_.make_embedding(table.front(), precision_.weight);
  final_norm_ = norm("norm.weight");
  const auto output = files.get(config.tie_word_embeddings ? "tok_embeddings.weight" : "output.weight", vocab, hidden);
  output_ = linear(rows_of(output, shard_.first_logit, shard_.first_logit + shard_.logits), {});
  weight_bytes_ = weight_bytes_per_step_ + static_cast<std::int64_t>(embedding_->bytes());
  rotary_ = device_vector(rotary_table(config, limits.max_positions));

  activation_memory_ = ops_.allocate(activations_.bytes);
}

Decoder::Activations::Activations(const ModelConfig& config, const Shard& shard, const ops::Precision& precision,
                                  const ops::StepLimits& limits) {
  const std::int64_t hidden = config.hidden_units;
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
  qkv = place(limits.max_rows, shard.qkv_size, product);
  attended = place(limits.max_rows, shard.q_size, act);
  gate_up = place(limits.max_rows, 2 * shard.inter, product);
  gated = place(limits.max_rows, shard.inter, act);
  last_residual = place(limits.max_sequences, hidden, res);
  last_delta = place(limits.max_sequences, hidden, product);
  last_normed = place(limits.max_sequences, hidden, act);
  logits = place(limits.max_sequences, shard.ranks * shard.logits_share, DType::f32);
  if (shard.ranks > 1) logits_share = place(limits.max_sequences, shard.logits_share, DType::f32);
}

Decoder::MemoryNeeds Decoder::memory_needs(const ModelConfig& config, const ops::Ops& ops,
                                           const ops::StepLimits& limits) {
  const auto precision = ops.precision(weight_dtype(config.weight_type));
  const Shard shard(config, ops.rank(), ops.ranks());
  const std::int64_t hidden = config.hidden_units, dim = config.size_per_head;
  const std::int64_t layer = hidden * (shard.qkv_size + shard.q_size) + 3 * hidden * shard.inter;
  const std::int64_t elements = layer * config.num_layer + (config.vocab_size + shard.logits) * hidden;
  const std::int64_t floats = (2 * std::int64_t{config.num_layer} + 1) * hidden + limits.max_positions * dim;
  return {
      static_cast<std::size_t>(elements) * size_of(precision.weight) + static_cast<std::size_t>(floats) * sizeof(float),
      Activations(config, shard, precision, limits).bytes,
      ops.kv_block_bytes({config.num_layer, shard.kv_heads, config.size_per_head, limits.block_len, precision.kv})};
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
    ops_.rotary_store(qkv, rotary_->as<float>(), *cache_, i, shard_.heads);
    ops_.attention(attended, qkv, *cache_, i, shard_.heads, attention_scale_);
    ops_.linear(delta, attended, *layer.attention_out);
    if (shard_.ranks > 1) ops_.all_reduce(delta);
    ops_.rms_norm(normed, residual, delta, layer.ffn_norm->as<float>(), config_.norm_eps);
    ops_.linear(gate_up, normed, *layer.gate_up);
    ops_.silu_mul(gated, gate_up);
    ops_.linear(delta, gated, *layer.down);
    if (shard_.ranks > 1) ops_.all_reduce(delta);
    pending = delta;
  }

  if (shape.logits_rows == 0) return;
  const auto last_residual = view(activations_.last_residual, shape.logits_rows),
             last_delta = view(activations_.last_delta, shape.logits_rows);
  const auto last_normed = view(activations_.last_normed, shape.logits_rows);
  ops_.gather_rows(last_residual, residual);
  ops_.gather_rows(last_delta, delta);
  ops_.rms_norm(last_normed, last_residual, last_delta, final_norm_->as<float>(), config_.norm_eps);
  auto logits = view(activations_.logits, shape.logits_rows);
  if (shard_.ranks > 1) {
    const auto share = view(activations_.logits_share, shape.logits_rows);
    auto mine = share;
    mine.cols = shard_.logits;
    ops_.linear(mine, last_normed, *output_);
    ops_.all_gather(logits, share);
    logits.cols = config_.vocab_size;
  } else {
    ops_.linear(logits, last_normed, *output_);
  }
  // On every rank: the same logits give the same tokens, and the next step takes them from the rank's own memory.
  ops_.sample(logits);
}

ops::KvLayout Decoder::kv_layout(int block_len) const {
  return {config_.num_layer, shard_.kv_heads, config_.size_per_head, block_len, precision_.kv};
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
