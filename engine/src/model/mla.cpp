// Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1). k and v of all heads come
// from one latent of each token, so the cache holds the latent and the rotated elements of k, which all heads share.
//
// All steps use the absorbed form. k = W_k latent, so q k = (W_k^T q) latent, and the sum of the values is W_v times
// the sum of the latents. So no k and no v of a head is ever computed, and prefill and decode have the same arithmetic.
//
// Every rank computes the latents of all tokens, and stores them. Heads are divided.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/blocks.h"
#include "model/layers.h"

namespace charonia::model {
namespace {

constexpr float kNormEps = 1e-6F;  // of the norms of latents in transformers, whatever rms_norm_eps is

class LatentAttention final : public Block {
 public:
  LatentAttention(const ModelConfig& config, const Shard& shard, std::string prefix)
      : config_(config),
        shard_(shard),
        prefix_(std::move(prefix)),
        latent_dim_(config.latent_size),
        row_dim_(config.latent_size + config.rotary_embedding),
        plain_dim_(config.size_per_head - config.rotary_embedding),
        value_dim_(config.value_size_per_head) {}

  std::optional<ops::KvLayer> cache() const override {
    return ops::KvLayer{.kv_heads = 1, .k_dim = row_dim_, .v_dim = 0};
  }

  void plan(Activations& activations) override {
    const auto& types = activations.precision;
    const std::int64_t heads = shard_.heads;
    if (config_.q_latent_size > 0) {
      q_latent_ = activations.rows(config_.q_latent_size, types.residual);
      q_normed_ = activations.rows(config_.q_latent_size, types.activation);
    }
    q_ = activations.rows(std::int64_t{shard_.heads} * config_.size_per_head, types.gemm_out);
    latent_ = activations.rows(row_dim_, types.gemm_out);
    plain_ = activations.rows(heads * plain_dim_, types.activation);
    queries_ = activations.rows(heads * row_dim_, types.gemm_out);
    attended_ = activations.rows(heads * latent_dim_, types.activation);
    values_ = activations.rows(heads * value_dim_, types.activation);
  }

  void load(WeightLoader& loader) override {
    const std::int64_t hidden = config_.hidden_units, q_latent = config_.q_latent_size;
    const auto number = cat(".", shard_.rank, ".weight");
    cache_layer_ = loader.cache_layer;
    if (q_latent > 0) {
      q_latent_weight_ = loader.linear({{{prefix_ + "wq_a.weight", q_latent, hidden}}}, {});
      q_norm_ = loader.norm(prefix_ + "q_latent_norm.weight", q_latent);
    }
    const std::int64_t q_size = std::int64_t{shard_.heads} * config_.size_per_head;
    q_weight_ = loader.linear({{{prefix_ + "wq" + number, q_size, q_latent > 0 ? q_latent : hidden}}}, {});
    latent_weight_ = loader.linear({{{prefix_ + "wkv_a.weight", row_dim_, hidden}}}, {});
    norm_ = loader.norm(prefix_ + "latent_norm.weight", latent_dim_);
    load_heads(loader, number);
    out_weight_ =
        loader.linear({{{prefix_ + "wo" + number, hidden, std::int64_t{shard_.heads} * value_dim_}}}, {});
    how_ = {.norm = data(norm_),
            .norm_eps = kNormEps,
            .cos_sin = data(loader.tables.rotary),
            .rotary_dim = config_.rotary_embedding,
            .interleaved = config_.rotary_interleaved,
            .q_scale = data(loader.tables.q_scales)};
    const float scale = config_.attention_scale > 0 ? config_.attention_scale
                                                    : 1.0F / std::sqrt(static_cast<float>(config_.size_per_head));
    params_ = {.scale = scale};
  }

  void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) override {
    const auto q = step.view(q_), latent = step.view(latent_), plain = step.view(plain_);
    const auto queries = step.view(queries_), attended = step.view(attended_), values = step.view(values_);
    auto q_input = in;
    if (q_latent_weight_) {
      const auto q_latent = step.view(q_latent_);
      q_input = step.view(q_normed_);
      step.linear(q_latent, in, *q_latent_weight_);
      step.ops.rms_norm(q_input, q_latent, {}, {.weight = data(q_norm_), .eps = kNormEps});
    }
    step.linear(q, q_input, *q_weight_);
    step.linear(latent, in, *latent_weight_);
    step.ops.latent_store(queries, plain, q, latent, how_, step.cache, cache_layer_, shard_.heads);
    step.ops.heads_linear(queries, plain, key_weights_);
    step.ops.attention(attended, queries, step.cache, cache_layer_, shard_.heads, params_);
    step.ops.heads_linear(values, attended, value_weights_);
    step.linear(out, values, *out_weight_);
  }

 private:
  // The rows of a head in the file: W_k [plain_dim, latent], then W_v [value_dim, latent]. W_k is transposed here. GGUF
  // files have W_k^T and W_v in two tensors. A quantised weight is dequantised, because W_k^T has other groups.
  void load_heads(WeightLoader& loader, const std::string& number) {
    const std::int64_t k_size = std::int64_t{plain_dim_} * latent_dim_, v_size = std::int64_t{value_dim_} * latent_dim_;
    const bool apart = loader.files.has(prefix_ + "wk_b" + number);
    const auto all = [&](const char* name, std::int64_t rows, std::int64_t cols) {
      return loader.values(prefix_ + name + number, shard_.heads * rows, cols);
    };
    const auto k = apart ? all("wk_b", latent_dim_, plain_dim_) : all("wkv_b", plain_dim_ + value_dim_, latent_dim_);
    const auto v = apart ? all("wv_b", value_dim_, latent_dim_) : std::vector<float>{};
    for (std::int64_t head = 0; head < shard_.heads; ++head) {
      MadeMatrix keys{loader.weight, latent_dim_, plain_dim_, {}}, values{loader.weight, value_dim_, latent_dim_, {}};
      const float* const of_k = k.data() + head * (apart ? k_size : k_size + v_size);
      const float* const of_v = apart ? v.data() + head * v_size : of_k + k_size;
      for (std::int64_t i = 0; i < latent_dim_; ++i) {
        for (std::int64_t j = 0; j < plain_dim_; ++j) {
          keys.append(of_k[apart ? i * plain_dim_ + j : j * latent_dim_ + i]);
        }
      }
      for (std::int64_t i = 0; i < v_size; ++i) values.append(of_v[i]);
      key_weights_.push_back(loader.dense_linear({{keys.matrix()}}));
      value_weights_.push_back(loader.dense_linear({{values.matrix()}}));
    }
  }

  const ModelConfig& config_;
  const Shard& shard_;
  std::string prefix_;
  int latent_dim_, row_dim_, plain_dim_, value_dim_;  // row_dim_: of the cache; plain_dim_: of q, not rotated
  int cache_layer_ = 0;
  Activations::Part q_latent_, q_normed_, q_, latent_, plain_, queries_, attended_, values_;
  std::unique_ptr<ops::Linear> q_latent_weight_;  // null: q comes from the block's input
  std::unique_ptr<ops::Linear> q_weight_, latent_weight_, out_weight_;
  std::vector<std::unique_ptr<ops::Linear>> key_weights_;    // of each head: W_k^T [latent_dim, plain_dim]
  std::vector<std::unique_ptr<ops::Linear>> value_weights_;  // of each head: W_v [value_dim, latent_dim]
  Vector q_norm_, norm_;
  ops::LatentParams how_;
  ops::AttentionParams params_;
};

}  // namespace

std::unique_ptr<Block> make_latent_attention(const ModelConfig& config, const Shard& shard, std::string prefix) {
  return std::make_unique<LatentAttention>(config, shard, std::move(prefix));
}

}  // namespace charonia::model
