// KV that is kept outside the device's memory, as the scheduler uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/cache_kind.h"
#include "cache/block_manager.h"

namespace charonia::schedule {

// The KV of the next blocks of a sequence, which is being read. Destroying it ends the reading.
class Load {
 public:
  // end: index of the block after the last one. parts: the blocks of kind `full`, in order, then the units that the
  // token after block end - 1 reads. Blocks and units before the first block of `parts` are in the cache.
  Load(std::int32_t end, std::vector<PrefixPart> parts) : end(end), parts_(std::move(parts)) {}
  virtual ~Load() = default;

  enum class Next {
    copied,
    waits,   // the part is not read yet
    failed,  // this part and the parts after it will not come
  };
  bool done() const { return next_ == parts_.size(); }
  // The next part. Requires that it is not done.
  const PrefixPart& part() const { return parts_[next_]; }
  virtual std::int64_t bytes() const = 0;  // of the next part
  // Copies the next part to this block or unit of its kind. Does not wait for a disk. Called between steps.
  Next next(cache::BlockId to) {
    const auto out = copy(to);
    next_ += out == Next::copied ? 1 : 0;
    return out;
  }

  const std::int32_t end;

 protected:
  virtual Next copy(cache::BlockId to) = 0;

 private:
  std::vector<PrefixPart> parts_;
  std::size_t next_ = 0;
};

class Offload {
 public:
  virtual ~Offload() = default;

  struct Found {
    std::unique_ptr<Load> load;  // null: nothing to load, or reading would take longer than computing
    // So many blocks of kind `full` are stored, but not the units that the next token reads. 0: none.
    std::int32_t branch = 0;
  };
  // Begins to read the blocks `first`, `first` + 1, ... of the prefix `tokens`, which has whole blocks. scope: as in
  // SeqOptions. shares: other sequences run.
  virtual Found find(const std::string& scope, std::span<const cache::TokenId> tokens, std::int32_t first,
                     bool shares) = 0;
};

}  // namespace charonia::schedule
