// The kinds of cache. Each kind has its own blocks. A block of kind `state` is a slot; kinds of kTableKinds have block
// tables.
#pragma once

#include <array>
#include <cstdint>

namespace charonia {

enum class CacheKind : std::uint8_t {
  full,    // holds all tokens of a sequence
  window,  // holds the tokens that a sliding window still reads
  state,   // holds the state of recurrent layers after all tokens of a sequence
};
inline constexpr std::array kCacheKinds = {CacheKind::full, CacheKind::window, CacheKind::state};
inline constexpr std::array kTableKinds = {CacheKind::full, CacheKind::window};

// One value for each kind.
template <class T>
struct PerKind {
  T full{}, window{}, state{};

  T& operator[](CacheKind kind) {
    return kind == CacheKind::full ? full : kind == CacheKind::window ? window : state;
  }
  const T& operator[](CacheKind kind) const { return const_cast<PerKind&>(*this)[kind]; }
  bool operator==(const PerKind&) const = default;
};

// The block of a kind with the tokens of block `index` of a prefix. Of kind `state`: the state after this block.
struct PrefixPart {
  CacheKind kind = CacheKind::full;
  std::int32_t index = 0;
  bool operator==(const PrefixPart&) const = default;
};

// Copies a block of one kind, in all layers of this kind.
struct BlockCopy {
  std::int32_t from = 0, to = 0;
  CacheKind kind = CacheKind::full;
  bool operator==(const BlockCopy&) const = default;
};

}  // namespace charonia
