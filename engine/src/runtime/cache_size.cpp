#include "runtime/cache_size.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/error.h"
#include "runtime/step_sizes.h"

namespace charonia::runtime {
namespace {

std::string text(std::size_t bytes) { return bytes_text(static_cast<std::int64_t>(bytes)); }

}  // namespace

std::int64_t blocks_of(std::int64_t tokens, int block_len) { return (tokens + block_len - 1) / block_len; }

CacheBlocks blocks_asked_for(const EngineConfig& config, const CacheMemory& memory) {
  const auto per_session = blocks_of(config.session_len, config.cache_block_seq_len);
  if (config.cache_users > 0) {
    const int tokens = config.cache_user_tokens > 0 ? config.cache_user_tokens : config.session_len;
    return {config.cache_users * blocks_of(tokens, config.cache_block_seq_len),
            cat("cache_users = ", config.cache_users, " with ", tokens, " tokens each (",
                config.cache_user_tokens > 0 ? "cache_user_tokens" : "session_len", ")"),
            config.cache_user_tokens > 0 ? "Lower cache_users or cache_user_tokens"
                                         : "Lower cache_users, or set cache_user_tokens below session_len"};
  }
  if (!config.cache_size.empty()) {
    const auto bytes = parse_bytes(config.cache_size);
    if (!bytes)
      throw Error(ErrorCode::invalid_argument, cat("cache_size = '", config.cache_size, "' is no memory size"));
    const auto of_rank = static_cast<std::size_t>(*bytes) / static_cast<std::size_t>(memory.ranks);
    const auto blocks = static_cast<std::int64_t>(of_rank / memory.block_bytes);
    return {blocks, cat("cache_size = ", config.cache_size),
            cat(blocks < 1 ? "Raise cache_size, or lower cache_block_seq_len (now " : "Lower cache_size (block: ",
                blocks < 1 ? cat(config.cache_block_seq_len) : cat(config.cache_block_seq_len, " tokens"), ")")};
  }
  const double entry = config.cache_max_entry_count;
  const auto setting = cat("cache_max_entry_count = ", entry);
  const auto remedy = cat("Lower cache_max_entry_count or cache_block_seq_len (now ", config.cache_block_seq_len, ")");
  if (entry >= 1) return {static_cast<std::int64_t>(entry), setting, remedy};
  require_step_sizes(config);
  // A share of what is free, but not more than max_batch_size sequences of full length can fill.
  const auto share =
      std::floor(entry * static_cast<double>(memory.free_bytes) / static_cast<double>(memory.block_bytes));
  return {std::min(static_cast<std::int64_t>(share), config.max_batch_size * per_session), setting,
          cat("Lower cache_block_seq_len (now ", config.cache_block_seq_len, ")")};
}

int blocks_that_fit(const EngineConfig& config, const CacheMemory& memory) {
  const auto asked = blocks_asked_for(config, memory);
  const auto most = static_cast<std::int64_t>(memory.free_bytes / memory.block_bytes);
  if (asked.blocks >= 1 && asked.blocks <= std::min<std::int64_t>(most, std::numeric_limits<int>::max())) {
    return static_cast<int>(asked.blocks);
  }
  if (asked.blocks < 1) {
    throw Error(ErrorCode::resource_exhausted,
                cat("the KV cache holds no block: ", asked.setting, " is less than one of ", text(memory.block_bytes),
                    memory.ranks > 1 ? cat(" on each of ", memory.ranks, " ranks") : "", " (", text(memory.free_bytes),
                    " are free beside the model). ", asked.remedy, ", or free memory"));
  }
  throw Error(ErrorCode::resource_exhausted,
              cat("the KV cache does not fit: ", asked.setting, " takes ", asked.blocks, " blocks of ",
                  text(memory.block_bytes), " each, and the ", text(memory.free_bytes),
                  " that are free beside the model hold ", most, ". ", asked.remedy, ", or free memory"));
}

void check_model_fits(const EngineConfig& config, const ModelMemory& memory) {
  require_step_sizes(config);
  if (memory.weights + memory.activations + memory.kv_block <= memory.free_bytes) return;
  throw Error(ErrorCode::resource_exhausted,
              cat("the model does not fit: its weights take ", text(memory.weights), ", the activations of ",
                  config.token_budget, " tokens (token_budget) and ", config.max_batch_size,
                  " sequences (max_batch_size) ", text(memory.activations), ", one KV block ", text(memory.kv_block),
                  ", and ", text(memory.free_bytes), " are free on the device (", memory.device,
                  "). Take a smaller or quantised model, a larger tensor_para_size, a lower token_budget or "
                  "max_batch_size, or free memory"));
}

int blocks_per_chunk(int cache_chunk_size, int num_blocks) {
  if (cache_chunk_size < 0) return num_blocks;
  if (cache_chunk_size > 0) return std::min(cache_chunk_size, num_blocks);
  return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(num_blocks))));
}

}  // namespace charonia::runtime
