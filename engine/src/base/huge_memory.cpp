#include "base/huge_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kArenaMapping = std::size_t{1} << 30;

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

HugeMemory::HugeMemory(std::size_t bytes) : mapping_bytes_(round_up(bytes, kPage) + kHugePage), bytes_(bytes) {
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw Error(ErrorCode::resource_exhausted, cat("cannot map ", bytes, " bytes of memory"));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) + (round_up(address, kHugePage) - address);
#if defined(MADV_HUGEPAGE)
  madvise(data_, round_up(bytes, kPage),
          MADV_HUGEPAGE);  // only advice: a kernel without huge pages may reject it
#endif
}

HugeMemory::~HugeMemory() { munmap(mapping_, mapping_bytes_); }

std::size_t HugeMemory::resident_bytes() const {
  std::size_t resident = 0;
#if defined(__linux__)
  std::array<unsigned char, 4096> pages;  // the lowest bit is set if the page is resident
  for (std::size_t begin = 0; begin < bytes_; begin += pages.size() * kPage) {
    const auto n = (std::min(pages.size() * kPage, bytes_ - begin) + kPage - 1) / kPage;
    if (mincore(data_ + begin, n * kPage, pages.data()) != 0) return 0;
    const auto there = std::count_if(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(n),
                                     [](unsigned char page) { return (page & 1U) != 0; });
    resident += static_cast<std::size_t>(there) * kPage;
  }
#endif
  return std::min(resident, bytes_);
}

HugeChunk HugeArena::allocate(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kPage);
  const std::lock_guard lock(mutex_);
  if (current_ == nullptr || current_->bytes() - used_ < bytes) {
    current_ = std::make_shared<HugeMemory>(std::max(bytes, kArenaMapping));
    used_ = 0;
  }
  auto* const data = current_->data() + used_;
  used_ += bytes;
  return {current_, data};
}

}  // namespace charonia
