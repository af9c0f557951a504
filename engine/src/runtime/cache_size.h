// How many KV blocks the settings ask for: cache_users before cache_size before cache_max_entry_count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "charonia/config.h"

namespace charonia::runtime {

// Memory of one rank.
struct CacheMemory {
  std::size_t block_bytes = 0;  // of one block in all layers
  std::size_t free_bytes = 0;   // that the cache may take
  int ranks = 1;                // that share a cache_size
};

struct CacheBlocks {
  std::int64_t blocks = 0;
  std::string setting;  // what asks for so many, with its value
  std::string remedy;   // how to ask for fewer
};

// May be more than there is room for, or 0. config.session_len must be resolved.
CacheBlocks blocks_asked_for(const EngineConfig& config, const CacheMemory& memory);

// Those, or Error(resource_exhausted) with the numbers and the remedy where they do not fit.
int blocks_that_fit(const EngineConfig& config, const CacheMemory& memory);

// What a rank needs before there is a cache, with the free memory of its device.
struct ModelMemory {
  std::string_view device;  // "cpu" | "cuda" | "null"
  std::size_t weights = 0, activations = 0, kv_block = 0, free_bytes = 0;
};
// Throws Error(resource_exhausted) with the numbers and what to change where not even one KV block fits beside the
// model.
void check_model_fits(const EngineConfig& config, const ModelMemory& memory);

// cache_chunk_size as a number of blocks: -1 is all at once, 0 the square root of their number.
int blocks_per_chunk(int cache_chunk_size, int num_blocks);

// Blocks that hold so many tokens.
std::int64_t blocks_of(std::int64_t tokens, int block_len);

}  // namespace charonia::runtime
