// The kernels: what is compiled once per instruction set. kernels/*.cpp implement this table in one namespace per
// instruction set, dispatch.cpp picks one. Nothing here allocates, throws or knows of threads.
//
// Element types are named by tags, so that bf16 and fp16 are not mistaken for each other.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace charonia::ops::cpu {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

// Weights of a product are packed into panels of 64 output features, zero-padded. A panel lies in memory in the order
// in which it is read:
//   bf16  [ceil(k / 2)][64][2]   the two of a pair belong to neighbouring k
//   fp16  [k][64]
//   fp32  [k][64]
inline constexpr int kPanel = 64;

// Rows of a product that one call takes at most.
inline constexpr int kRowBlock = 48;

// out[r, 0..columns) = sum over k of a[r, k] * panel[k, :] + bias. One accumulator per element, k in ascending order
// (in steps of a pair where the processor multiplies pairs), whatever the number of rows.
struct LinearArgs {
  const void* a = nullptr;  // [rows, k], bf16 for bf16 weights, else f32
  std::int64_t a_stride = 0;
  int rows = 0;  // 1 .. kRowBlock
  std::int64_t k = 0;
  const void* panel = nullptr;
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64
  const float* bias = nullptr;  // [columns] or none
};

// Attention of a tile: vectors [begin, end) of the flattened (query row, head of the group) pairs of one sequence and
// one k/v head; vector i is row i / group, head i % group. k/v of one head in one block: k transposed
// [head_dim][block_len], then v [block_len][head_dim].
struct AttentionArgs {
  const float* q = nullptr;  // of row 0, first head of the group
  std::int64_t q_stride = 0;
  int group = 0, head_dim = 0;
  int begin = 0, end = 0;           // at most kAttentionTile vectors
  std::int32_t first_position = 0;  // of row 0
  const void* kv = nullptr;         // of block 0 and this head
  std::int64_t block_stride = 0;    // elements from block to block
  const std::int32_t* blocks = nullptr;
  int block_len = 0;
  float scale = 0;
  void* out = nullptr;  // of row 0, first head of the group
  std::int64_t out_stride = 0;
  DType out_dtype = DType::f32;
  float* scratch = nullptr;  // attention_scratch(head_dim, block_len) floats, 64-byte aligned
};

inline constexpr int kAttentionTile = 24;
inline constexpr int kWidest = 16;  // floats of the widest vector

constexpr int round_up_to_vector(int n) { return (n + kWidest - 1) / kWidest * kWidest; }

// Positions whose scores are held at a time: whole blocks, so that chunks begin at the same positions for every query.
constexpr int attention_chunk(int block_len) {
  constexpr int kPositions = 256;
  return block_len >= kPositions ? block_len : kPositions / block_len * block_len;
}

constexpr std::int64_t attention_scratch(int head_dim, int block_len) {
  const std::int64_t d = round_up_to_vector(head_dim);
  const std::int64_t scores = round_up_to_vector(attention_chunk(block_len)) + kWidest;
  return kAttentionTile * (2 * d + scores);
}

struct Kernels {
  // By weight type.
  void (*linear_bf16)(const LinearArgs&);
  void (*linear_f16)(const LinearArgs&);
  void (*linear_f32)(const LinearArgs&);

  // By the cache's element type.
  void (*attention_bf16)(const AttentionArgs&);
  void (*attention_f16)(const AttentionArgs&);
  void (*attention_f32)(const AttentionArgs&);

  // One row: residual += delta (when there is one); out = residual / sqrt(mean(residual^2) + eps) * weight.
  void (*rms_norm_bf16)(Bf16* out, float* residual, const float* delta, const float* weight, float eps, std::int64_t n);
  void (*rms_norm_f32)(float* out, float* residual, const float* delta, const float* weight, float eps, std::int64_t n);

  // out = silu(gate) * up.
  void (*silu_mul_bf16)(Bf16* out, const float* gate, const float* up, std::int64_t n);
  void (*silu_mul_f32)(float* out, const float* gate, const float* up, std::int64_t n);

  // One head in place: pairs (d, d + head_dim / 2); cos_sin [head_dim] cosines, then sines.
  void (*rotate)(float* head, const float* cos_sin, int head_dim);

  void (*bf16_from_f32)(Bf16* out, const float* in, std::int64_t n);
  void (*f16_from_f32)(F16* out, const float* in, std::int64_t n);
  void (*f32_from_bf16)(float* out, const Bf16* in, std::int64_t n);
  void (*f32_from_f16)(float* out, const F16* in, std::int64_t n);

  // The greatest of n >= 1 values; NaN when one of them is NaN.
  float (*maximum)(const float* in, std::int64_t n);
  // out[i] = e^((in[i] - shift) * scale), out may be null; returns their sum, in double over runs of 1024.
  double (*exp_sum)(float* out, const float* in, float shift, float scale, std::int64_t n);
};

namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace avx512_bf16 {
const Kernels& kernels();
}

}  // namespace charonia::ops::cpu
