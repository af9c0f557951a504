#include "model/decoder.h"

#include "model/layers.h"

namespace charonia::model {

void Decoder::prepare(ops::KvCache& cache) {
  cache_ = &cache;
  issue_ = [this](const ops::StepShape& shape) { issue(shape); };
  ops_.prepare(limits_, issue_);
}

void Decoder::launch(const ops::StepInput& input) {
  auto step = input;
  if (tables_.by_prompt()) step.attention.rotary_rows = rotary_rows(input);
  ops_.begin_step(step);
  if (!input.block_copies.empty()) ops_.copy_blocks(*cache_, input.block_copies);
  ops_.run_step(issue_);
}

// Also writes the spare rows of the tables. The write is ordered after earlier steps, which read them.
std::span<const std::int32_t> Decoder::rotary_rows(const ops::StepInput& input) {
  auto& rows = rotary_rows_[rotary_rows_index_];
  rotary_rows_index_ = (rotary_rows_index_ + 1) % rotary_rows_.size();
  tables_.place(input.attention, input.prompt_tokens, rows, spare_);
  const auto upload = [&](const Vector& table, std::span<const float> values) {
    if (values.empty()) return;
    ops_.upload(table->as<float>() + spare_.first_row * config_.rotary_embedding, values.data(), values.size_bytes());
  };
  upload(rotary_, spare_.global);
  upload(local_rotary_, spare_.local);
  return rows;
}

void Decoder::issue(const ops::StepShape& shape) {
  const auto residual = view(activations_.residual, shape.rows), delta = view(activations_.delta, shape.rows);
  const auto normed = view(activations_.normed, shape.rows), qkv = view(activations_.qkv, shape.rows);
  const auto attended = view(activations_.attended, shape.rows);
  const ops::Tensor unwritten{nullptr, normed.dtype, normed.rows, normed.cols, normed.stride};
  ops_.embed(residual, *embedding_, embedding_scale_);
  ops::Tensor pending{};  // the tensor that the next norm adds to the residual stream
  const float* pending_norm = nullptr;
  for (int i = 0; i < config_.num_layer; ++i) {
    const auto& layer = layers_[static_cast<std::size_t>(i)];
    if (!config_.parallel_block) ops_.announce_linear(*layer.qkv);
    ops_.rms_norm(normed, residual, pending, norm_params(layer.attention_norm, pending_norm));
    ops_.linear(qkv, normed, *layer.qkv);
    ops_.rotary_store(qkv, rotary_params(layer, qkv), *cache_, i, shard_.heads);
    ops_.attention(attended, qkv, *cache_, i, shard_.heads, layer.attention);
    ops_.linear(delta, attended, *layer.attention_out);
    if (shard_.ranks > 1) ops_.all_reduce(delta);
    if (config_.parallel_block) {
      ops_.rms_norm(unwritten, residual, delta, norm_params({}, {}));
    } else {
      if (!layer.experts) ops_.announce_linear(*layer.gate_up);
      ops_.rms_norm(normed, residual, delta, norm_params(layer.ffn_norm, data(layer.attention_post_norm)));
    }
    issue_feed_forward(layer, delta, normed, shape);
    if (shard_.ranks > 1) ops_.all_reduce(delta);
    pending = delta;
    pending_norm = data(layer.ffn_post_norm);
  }

  if (shape.logits_rows == 0) return;
  const auto last_residual = view(activations_.last_residual, shape.logits_rows),
             last_delta = view(activations_.last_delta, shape.logits_rows);
  const auto last_normed = view(activations_.last_normed, shape.logits_rows);
  ops_.gather_rows(last_residual, residual);
  ops_.gather_rows(last_delta, delta);
  ops_.announce_linear(*output_);
  ops_.rms_norm(last_normed, last_residual, last_delta, norm_params(final_norm_, pending_norm));
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
  if (config_.logits_scale != 1 || config_.logit_soft_cap > 0) {
    ops_.scale_logits(logits, config_.logits_scale, config_.logit_soft_cap);
  }
  // Every rank samples. Equal logits give equal tokens, and the next step reads them from the rank's own memory.
  ops_.sample(logits);
}

ops::NormParams Decoder::norm_params(const Vector& weight, const float* delta_weight) const {
  return {.weight = data(weight),
          .eps = config_.norm_eps,
          .delta_weight = delta_weight,
          .delta_scale = config_.residual_multiplier,
          .subtract_mean = config_.layer_norm};
}

// If q and k have norms over all heads, issues the sums of their squares.
ops::RotaryParams Decoder::rotary_params(const Layer& layer, const ops::Tensor& qkv) {
  auto out = layer.rotary;
  if (!config_.qk_norm_rows) return out;
  const auto squares = view(activations_.squares, qkv.rows);
  const std::int64_t k_size = std::int64_t{shard_.kv_heads} * config_.size_per_head;
  ops_.qk_squares(squares, qkv, shard_.q_size, k_size);
  if (shard_.ranks > 1) ops_.all_reduce(squares);
  out.squares = static_cast<const float*>(squares.data);
  // If ranks share KV heads, the sum counts every KV head equally often, so the mean is right.
  out.q_count = shard_.q_size * shard_.ranks;
  out.k_count = k_size * shard_.ranks;
  return out;
}

// delta [rows, hidden] = this rank's part of the layer's feed-forward of `normed`.
void Decoder::issue_feed_forward(const Layer& layer, const ops::Tensor& delta, const ops::Tensor& normed,
                                 const ops::StepShape& shape) {
  if (layer.experts) return issue_experts(layer, delta, normed, shape);
  issue_mlp(layer, delta, view(activations_.gate_up, shape.rows), view(activations_.gated, shape.rows), normed);
}

void Decoder::issue_mlp(const Layer& layer, const ops::Tensor& out, const ops::Tensor& gate_up,
                        const ops::Tensor& gated, const ops::Tensor& normed) {
  ops_.announce_linear(*layer.down);
  ops_.gated_linear(gated, gate_up, normed, *layer.gate_up, activation_);
  ops_.linear(out, gated, *layer.down);
}

void Decoder::issue_experts(const Layer& layer, const ops::Tensor& delta, const ops::Tensor& normed,
                            const ops::StepShape& shape) {
  auto router = view(activations_.router, shape.rows);
  router.cols = layer.router->out_features();
  ops_.linear(router, normed, *layer.router);
  ops::SharedExpert shared;
  if (layer.down) {
    shared.out = view(activations_.shared, shape.rows);
    issue_mlp(layer, shared.out, view(activations_.shared_gate_up, shape.rows),
              view(activations_.shared_gated, shape.rows), normed);
  }
  if (config_.shared_expert_gate) {
    --router.cols;
    shared.gate = static_cast<const float*>(router.data) + router.cols;
    shared.gate_stride = router.stride;
  }
  ops_.experts(delta, normed, router, *layer.experts, layer.choice, activation_,
               activation_memory_->as<std::byte>() + activations_.experts_scratch, shared);
}

ops::Tensor Decoder::view(const Activations::Part& part, std::int64_t rows) const {
  return {activation_memory_->as<std::byte>() + part.offset, part.dtype, rows, part.cols, part.cols};
}

}  // namespace charonia::model
