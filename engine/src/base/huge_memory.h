// Large zero-filled memory in huge pages. Reading weights is what decoding does, and with 4 KiB pages a good part of
// the bandwidth goes into address translation.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

namespace charonia {

// One anonymous mapping, 2 MiB aligned, zero-filled, in huge pages where the system gives them. Pages come with the
// first write, so what is never touched costs nothing.
class HugeMemory {
 public:
  explicit HugeMemory(std::size_t bytes);  // throws Error(resource_exhausted)
  ~HugeMemory();
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t resident_bytes() const;  // of it that have pages in memory; 0 where the system does not tell

 private:
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A chunk of a HugeArena; keeps its mapping alive.
using HugeChunk = std::shared_ptr<std::byte>;

// Hands out 4 KiB aligned chunks, one behind the other, so that chunks that are no multiple of 2 MiB lie in huge pages
// too. A mapping is given back when the last of its chunks is gone.
class HugeArena {
 public:
  HugeChunk allocate(std::size_t bytes);  // throws Error(resource_exhausted)

 private:
  std::mutex mutex_;
  std::shared_ptr<HugeMemory> current_;
  std::size_t used_ = 0;
};

}  // namespace charonia
