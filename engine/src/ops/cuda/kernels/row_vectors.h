// Vectors of 8 elements of a row: 16 bytes in both 16-bit types, twice 16 in float. If the row's address, stride or
// width does not allow such accesses, the same elements are taken one by one, so results do not depend on it.
#pragma once

#include "ops/cuda/device/portable.h"

namespace charonia::cuda {

inline constexpr int kVector = 8;

// Elements in their memory format. Loads are separate from conversions, so that several can be in flight.
template <class T>
struct Raw {
  static constexpr int kWords = kVector * sizeof(T) / sizeof(uint4);
  uint4 words[kWords];
};

template <class T>
CHARONIA_DEVICE T element(const Raw<T>& raw, int i) {
  constexpr int kPerWord = sizeof(unsigned) / sizeof(T);
  const uint4& four = raw.words[i / (4 * kPerWord)];
  const int at = i / kPerWord % 4;
  const unsigned word = at == 0 ? four.x : at == 1 ? four.y : at == 2 ? four.z : four.w;
  if constexpr (kPerWord == 1) {
    return __uint_as_float(word);
  } else {
    return T{static_cast<std::uint16_t>(i % 2 == 0 ? word & 0xffffU : word >> 16)};
  }
}

CHARONIA_DEVICE unsigned word_of(float x, float) { return __float_as_uint(x); }
template <class T>
CHARONIA_DEVICE unsigned word_of(T low, T high) {
  return static_cast<unsigned>(high.bits) << 16 | low.bits;
}

// Elements [at, at + 8) of a row of n; zeros beyond its end.
template <class T>
CHARONIA_DEVICE Raw<T> load_raw(const T* row, int at, int n, bool aligned) {
  Raw<T> raw;
  if (aligned) {
    if (at < n) {
      CHARONIA_UNROLL
      for (int i = 0; i < Raw<T>::kWords; ++i) raw.words[i] = reinterpret_cast<const uint4*>(row + at)[i];
    } else {
      CHARONIA_UNROLL
      for (int i = 0; i < Raw<T>::kWords; ++i) raw.words[i] = uint4{0, 0, 0, 0};
    }
    return raw;
  }
  constexpr int kPerWord = sizeof(unsigned) / sizeof(T);
  unsigned words[4 * Raw<T>::kWords];
  CHARONIA_UNROLL
  for (int i = 0; i < 4 * Raw<T>::kWords; ++i) {
    const int first = at + i * kPerWord;
    const T low = first < n ? row[first] : T{};
    const T high = kPerWord == 2 && first + 1 < n ? row[first + 1] : T{};
    words[i] = word_of(low, high);
  }
  CHARONIA_UNROLL
  for (int i = 0; i < Raw<T>::kWords; ++i) {
    raw.words[i] = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
  return raw;
}

template <class T>
CHARONIA_DEVICE void to_floats(const Raw<T>& raw, float (&x)[kVector]) {
  CHARONIA_UNROLL
  for (int i = 0; i < kVector; ++i) x[i] = to_float(element(raw, i));
}

template <class T>
CHARONIA_DEVICE void store_floats(T* row, int at, int n, bool aligned, const float (&x)[kVector]) {
  if (at >= n) return;
  if (!aligned) {
    CHARONIA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (at + i < n) row[at + i] = from_float<T>(x[i]);
    }
    return;
  }
  constexpr int kPerWord = sizeof(unsigned) / sizeof(T);
  unsigned words[4 * Raw<T>::kWords];
  CHARONIA_UNROLL
  for (int i = 0; i < 4 * Raw<T>::kWords; ++i) {
    words[i] = word_of(from_float<T>(x[i * kPerWord]), from_float<T>(x[i * kPerWord + kPerWord - 1]));
  }
  CHARONIA_UNROLL
  for (int i = 0; i < Raw<T>::kWords; ++i) {
    reinterpret_cast<uint4*>(row + at)[i] = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
}

}  // namespace charonia::cuda
