// The gated delta rule over the rows of a sequence, for a strip of up to kDeltaStrip columns of the state of one v
// head.
//
//   state   [k_dim][kDeltaStrip] floats
//   a row   s = alpha s + k (beta (v - alpha s^T k))^T;  o = s^T q
//
// Columns of the state do not depend on each other. Each sum over k_dim has one accumulator per column and runs in
// ascending order, and rows follow one after the other. So bits depend neither on the number of rows of a call nor on
// the other columns.
//
// Bound: arithmetic. A row takes four operations on each vector of the state: the decay, the update, and the products
// with q and with the next row's k. The three are one pass over the state: one load and one store for four operations.
// The strip of a head with 128 elements has 16 KiB, so it stays in the L1 cache between rows.
#include "ops/cpu/kernels/vec.h"

namespace charonia::ops::cpu::CHARONIA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif
constexpr int kColumns = kVectors * kWidth;
static_assert(kDeltaStrip % kColumns == 0);

inline Vec load_some(const float* p, int n) {
  if (n >= kWidth) return load(p);
  return n > 0 ? load_n(p, n) : zero();
}

inline void store_some(float* p, Vec x, int n) {
  if (n >= kWidth) return store(p, x);
  if (n > 0) store_n(p, x, n);
}

// One pass over the state: writes to = alpha from + k delta^T. Returns o = to^T q and, if `ahead`, sums = to^T next_k.
template <bool ahead>
inline __attribute__((always_inline)) void step(float* to, const float* from, int k_dim, const float* q, const float* k,
                                                const float* next_k, Vec alpha, const Vec (&delta)[kVectors],
                                                Vec (&o)[kVectors], Vec (&sums)[kVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) o[j] = sums[j] = zero();
#pragma GCC unroll 2
  for (int i = 0; i < k_dim; ++i) {
    const Vec qs = set1(q[i]), ks = set1(k[i]), next = ahead ? set1(next_k[i]) : zero();
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = std::int64_t{i} * kDeltaStrip + j * kWidth;
      const Vec s = fma(ks, delta[j], mul(alpha, load(from + at)));
      store(to + at, s);
      o[j] = fma(qs, s, o[j]);
      if (ahead) sums[j] = fma(next, s, sums[j]);
    }
  }
}

// kColumns columns of the strip, from `column` on.
void columns_of(const DeltaArgs& args, int column) {
  const float *from = args.from == nullptr ? nullptr : args.from + column, *q = args.q, *k = args.k,
              *gates = args.gates;
  float *const to = args.to + column, *v = args.v + column;
  const int n = args.columns - column;
  Vec sums[kVectors];  // s^T k
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) sums[j] = zero();
  if (args.from == nullptr) {
    for (int i = 0; i < args.k_dim; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) store(to + std::int64_t{i} * kDeltaStrip + j * kWidth, zero());
    }
    from = to;
  }
  for (int i = 0; i < args.k_dim && args.from != nullptr; ++i) {
    const Vec ks = set1(k[i]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sums[j] = fma(ks, load(from + std::int64_t{i} * kDeltaStrip + j * kWidth), sums[j]);
    }
  }
  for (int row = 0; row < args.rows; ++row) {
    const Vec beta = set1(gates[0]), alpha = set1(gates[args.alpha]);
    Vec delta[kVectors], o[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      delta[j] = mul(beta, sub(load_some(v + j * kWidth, n - j * kWidth), mul(alpha, sums[j])));
    }
    if (row + 1 < args.rows) {
      step<true>(to, from, args.k_dim, q, k, k + args.stride, alpha, delta, o, sums);
    } else {
      step<false>(to, from, args.k_dim, q, k, nullptr, alpha, delta, o, sums);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store_some(v + j * kWidth, o[j], n - j * kWidth);
    from = to;
    q += args.stride, k += args.stride, v += args.stride, gates += args.gates_stride;
  }
}

}  // namespace

void delta_net(const DeltaArgs& args) {
  for (int column = 0; column < args.columns; column += kColumns) columns_of(args, column);
}

}  // namespace charonia::ops::cpu::CHARONIA_ISA
