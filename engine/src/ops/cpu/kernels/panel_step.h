// One step of a tile with sums in registers: M rows of activations by V vectors of columns, for one k or a pair of k.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

// acc[m][v] += a[m] * w[v] for one k; a[m] is at a + m * a_stride.
template <int M, int V>
inline __attribute__((always_inline)) void step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                const Vec (&w)[V]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Vec x = set1(a[m * a_stride]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = fma(x, w[v], acc[m][v]);
  }
}

template <int M, int V, class W>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                      const W* w) {
  Vec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = load(w + v * kWidth);
  step<M, V>(acc, a, a_stride, weights);
}

#if defined(CHARONIA_NATIVE_PAIRS)
template <int M, int V>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const Bf16* a, std::int64_t a_stride,
                                                      const Bf16* w) {
  PairVec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = load_pairs(w + 2 * v * kWidth);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const PairVec x = set1_pair(a + m * a_stride);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[m][v] = fma_pairs(x, weights[v], acc[m][v]);
  }
}
#else
// First elements of all pairs first, then second elements, so that the unpacked weights fit into sixteen registers.
template <int M, int V>
inline __attribute__((always_inline)) void panel_step(Vec (&acc)[M][V], const float* a, std::int64_t a_stride,
                                                      const Bf16* w) {
  Vec weights[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = first_of(load_pairs(w + 2 * v * kWidth));
  step<M, V>(acc, a, a_stride, weights);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) weights[v] = second_of(load_pairs(w + 2 * v * kWidth));
  step<M, V>(acc, a + 1, a_stride, weights);
}
#endif

}  // namespace
}  // namespace charonia::ops::cpu::CHARONIA_ISA
