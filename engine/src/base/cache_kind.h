// The kinds of KV cache. Each kind has its own blocks and block tables.
#pragma once

#include <array>
#include <cstdint>

namespace charonia {

enum class CacheKind : std::uint8_t {
  full,    // holds all tokens of a sequence
  window,  // holds the tokens that a sliding window still reads
};
inline constexpr std::array kCacheKinds = {CacheKind::full, CacheKind::window};

// One value for each kind.
template <class T>
struct PerKind {
  T full{}, window{};

  T& operator[](CacheKind kind) { return kind == CacheKind::full ? full : window; }
  const T& operator[](CacheKind kind) const { return kind == CacheKind::full ? full : window; }
  bool operator==(const PerKind&) const = default;
};

// Copies a block of one kind, in all layers of this kind.
struct BlockCopy {
  std::int32_t from = 0, to = 0;
  CacheKind kind = CacheKind::full;
  bool operator==(const BlockCopy&) const = default;
};

}  // namespace charonia
