#include "model/shard.h"

#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "model/layers.h"

namespace charonia::model {

Shard::Shard(const ModelConfig& config, int of, int count) : rank(of), ranks(count) {
  check_model(config);
  if (config.kv_head_num < 1 || config.head_num % config.kv_head_num != 0) {
    throw Error(ErrorCode::invalid_argument,
                cat("head_num = ", config.head_num, " is no multiple of kv_head_num = ", config.kv_head_num));
  }
  const auto refuse = [&](const auto&... what) {
    throw Error(ErrorCode::invalid_argument,
                cat("tensor_para_size = ", ranks, ": the model cannot be split so, ", what...));
  };
  if (config.head_num % ranks != 0) refuse("head_num = ", config.head_num, " is no multiple of it");
  const auto layers = layers_of(config);
  if (layers.dense > 0) {
    if (config.inter_size % ranks != 0) refuse("inter_size = ", config.inter_size, " is no multiple of it");
    inter = config.inter_size / ranks;
  }
  if (layers.experts > 0) {
    const int size = config.expert_inter_size;
    if (size % ranks != 0) refuse("expert_inter_size = ", size, " is no multiple of it");
    expert_inter = size / ranks;
  }
  if (config.kv_head_num % ranks != 0 && ranks % config.kv_head_num != 0) {
    refuse("kv_head_num = ", config.kv_head_num, " is neither a multiple nor a divisor of it");
  }
  heads = config.head_num / ranks;
  kv_heads = std::max(1, config.kv_head_num / ranks);
  q_size = std::int64_t{heads} * config.size_per_head;
  qkv_size = q_size + 2 * std::int64_t{kv_heads} * config.size_per_head;

  constexpr std::int64_t kAlignment = 4;  // of logits: 16 bytes
  const std::int64_t vocab = config.vocab_size;
  logits_share = ranks == 1 ? vocab : (vocab + ranks * kAlignment - 1) / (ranks * kAlignment) * kAlignment;
  if ((ranks - 1) * logits_share >= vocab) refuse("vocab_size = ", vocab, " leaves the last rank nothing");
  first_logit = rank * logits_share;
  logits = std::min(logits_share, vocab - first_logit);
}

}  // namespace charonia::model
