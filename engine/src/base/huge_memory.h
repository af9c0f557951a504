// Large zero-filled memory in huge pages. Decoding mostly reads weights, and with 4 KiB pages address translation costs
// a large part of the memory bandwidth.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

namespace charonia {

// One anonymous mapping, aligned to 2 MiB, zero-filled, in huge pages if the system provides them. The first write to a
// page allocates it, so untouched pages cost nothing.
class HugeMemory {
 public:
  explicit HugeMemory(std::size_t bytes);  // throws Error(resource_exhausted)
  ~HugeMemory();
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t resident_bytes() const;  // bytes whose pages are resident; 0 if the system cannot report it

 private:
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A chunk of a HugeArena; keeps its mapping alive.
using HugeChunk = std::shared_ptr<std::byte>;

// Allocates chunks aligned to 4 KiB, one after another, so that chunks smaller than 2 MiB also lie in huge pages. A
// mapping is freed with its last chunk.
class HugeArena {
 public:
  HugeChunk allocate(std::size_t bytes);  // throws Error(resource_exhausted)

 private:
  std::mutex mutex_;
  std::shared_ptr<HugeMemory> current_;
  std::size_t used_ = 0;
};

}  // namespace charonia
