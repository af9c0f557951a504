// Stores the KV of sequences that have ended in files or host memory, and loads it for later sequences with the same
// prefix (settings kv_offload_path and kv_offload_memory). Used by the engine thread.
//
// It stores all blocks of kind `full`. Units of other kinds are stored for a few places where later sequences may begin
// (Scheduler::hit_ends()): those that the next token reads there. A lookup ends at the last place that has all its
// units.
//
// offer() only notes the blocks. work() copies some of them to the thread of KvFiles, a bounded number of bytes between
// two steps, and all when the engine is idle. A block or unit that was evicted before is not stored.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/cache_kind.h"
#include "cache/block_manager.h"
#include "cache/units.h"
#include "runtime/executor.h"
#include "runtime/kv_files.h"
#include "runtime/load_tracker.h"
#include "schedule/offload.h"

namespace charonia {
struct EngineInfo;
}

namespace charonia::runtime {

// Throws Error, with the remedy, if the device, the settings or the free memory do not allow kv_offload_path or
// kv_offload_memory. free_bytes: of host memory, beside everything else.
void check_offload(const EngineConfig& config, std::string_view device, std::int64_t free_bytes,
                   std::vector<std::string>& warnings);

// Returns a hash of everything on which the bits of KV depend: the weights and attributes of the model, settings and
// kernels that change them, the layout of the cache, and the engine's build. weights_dir: as in Engine.
// max_positions: the longest sequence that the executor computes; info.config.session_len may be lower.
std::string kv_identity(const std::filesystem::path& weights_dir, const EngineInfo& info, int max_positions);

class KvOffload final : public schedule::Offload {
 public:
  // info: with settings that check_offload() allows. options.changed: called from another thread when work() or a Load
  // may continue. The references must outlive it.
  KvOffload(const std::filesystem::path& weights_dir, const EngineInfo& info, int max_positions, Executor& executor,
            const cache::BlockManager& blocks, const LoadTracker& load, KvFiles::Options options,
            std::vector<std::string>& warnings);

  Found find(const std::string& scope, std::span<const cache::TokenId> tokens, std::int32_t first,
             bool shares) override;

  // Stores the blocks of these nodes, which hold the beginning of `tokens`, and the units of hit_ends, when the steps
  // that are launched now are settled.
  void offer(const std::string& scope, std::span<const cache::TokenId> tokens,
             const std::vector<cache::PrefixNode>& nodes, std::span<const std::int32_t> hit_ends);
  // Called after each step. in_flight: a step is launched and not settled.
  void settled(bool in_flight);
  bool has_work() const { return !ready_.empty() && files_->has_room(); }
  // idle: nothing else waits for the engine thread. Throws only errors of the device.
  void work(bool idle);
  // Stores all blocks that were offered, and waits until they are written, for at most kFlush. Throws nothing. Drops
  // them if they would be in memory, which ends with the engine.
  void flush();
  // Deletes the blocks of these tokens from the first one on that has a token after the first `known_good`.
  void forget(const std::string& scope, std::span<const cache::TokenId> tokens, std::size_t known_good = 0);
  // Drops the offers, because the contents of blocks may be wrong.
  void drop();
  void close() { files_->close(); }

  static constexpr std::int64_t kBytesPerStep = std::int64_t{8} << 20;  // to copy between two steps
  std::int64_t query_tokens() const { return query_tokens_; }           // looked up
  std::int64_t bytes() const { return files_->bytes(); }
  std::int64_t unfilled_bytes() const { return files_->unfilled_bytes(); }

 private:
  struct Offer {
    KvFiles::PrefixPtr prefix;
    std::vector<cache::PrefixNode> nodes;
    std::size_t next = 0;  // the first part that is not stored yet
  };
  using Offers = std::deque<Offer>;
  class Reader;

  std::int32_t first_needed(const cache::Units& kind, std::int32_t blocks) const;
  bool has_units(const KvFiles::Prefix& prefix, std::int32_t first, std::int32_t end) const;
  cache::BlockId block_of(CacheKind kind, const cache::PrefixNode& node) const;  // -1: evicted
  std::string size_warning(const EngineInfo& info) const;  // empty: none
  std::int64_t store_next();  // bytes of the file; -1: there is nothing to do, or no room
  bool is_faster(std::int64_t tokens, std::int64_t bytes, bool shares);
  void lose(const std::string& why);  // drops the offers and logs why

  const std::int32_t block_len_;
  const PerKind<std::size_t> block_bytes_;
  Executor& executor_;
  const cache::BlockManager& blocks_;
  const LoadTracker& load_;
  KvFiles::Owner files_;
  // Offers after the last step, before it, and those whose steps are settled.
  Offers fresh_, launched_, ready_;
  std::size_t offered_blocks_ = 0;
  int skipped_ = 0;  // lookups whose blocks were not loaded, because computing is faster
  std::int64_t query_tokens_ = 0;
};

}  // namespace charonia::runtime
