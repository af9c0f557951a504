// Counts the bytes of a request's rows of logits in results that still exist.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace charonia::runtime {

class UnreadRows {
 public:
  // Adds `bytes`. They are subtracted when the last copy of the returned pointer is destroyed, on any thread. The
  // pointer may outlive this object.
  std::shared_ptr<const void> add(std::int64_t bytes) {
    if (!bytes_) bytes_ = std::make_shared<std::atomic<std::int64_t>>(0);
    *bytes_ += bytes;
    return {nullptr, [count = bytes_, bytes](const void*) { *count -= bytes; }};
  }

  std::int64_t bytes() const { return bytes_ ? bytes_->load() : 0; }

 private:
  std::shared_ptr<std::atomic<std::int64_t>> bytes_;  // null before the first row, because few requests have rows
};

}  // namespace charonia::runtime
