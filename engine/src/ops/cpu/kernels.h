// The kernels: what is compiled once per instruction set. kernels/*.cpp implement this table in one namespace per
// instruction set, dispatch.cpp picks one. Nothing here allocates, throws or knows of threads.
//
// Element types are named by tags, so that bf16 and fp16 are not mistaken for each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "ops/norm_params.h"
#include "ops/quant_weight.h"

namespace charonia::ops::cpu {

struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
// Integers of a quantised KV cache, by the byte: one of 8 bits; or two of 4, as kv_quant.h packs them.
struct Q8 {
  std::uint8_t bits;
};
struct Q4 {
  std::uint8_t bits;
};

// Weights of a GEMM are packed into panels of 64 output features, zero-padded. A panel lies in memory in the order
// in which it is read:
//   bf16  [ceil(k / 2)][64][2]   the two of a pair belong to neighbouring k
//   fp16  [k][64]
//   fp32  [k][64]
inline constexpr int kPanel = 64;

// Rows of a GEMM that one call takes at most.
inline constexpr int kRowBlock = 48;
// The same of linear_bf16_widened, and from how many rows on it widens the weights too, once for all of them.
inline constexpr int kWidenedRowBlock = 256, kWidenedFrom = 48;

// out[r, 0..columns) = sum over k of a[r, k] * panel[k, :] + bias. One accumulator per element, k in ascending order
// (in steps of a pair or of a tile where the processor multiplies those), whatever the number of rows.
struct LinearArgs {
  const void* a = nullptr;  // [rows, k], bf16 for bf16 weights, else f32
  std::int64_t a_stride = 0;
  int rows = 0;  // 1 .. kRowBlock
  std::int64_t k = 0;
  const void* panel = nullptr;
  int panels = 1;        // 2: another panel lies behind it; where Kernels::two_panel_rows allows it
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64, of two panels 65 .. 128
  const float* bias = nullptr;  // [columns] or none
};

// A quantised weight (quant_weight.h) whose activations stay as they are, packed into panels of 64 output features too.
// A panel is its groups, one behind the other; of each
//   codes   [ceil(group / 8) * 8 * bits / 32][64] words of 32 bits: 8 codes of a feature, or 4. Those of even k
//           are in the lower half, the first of them lowest, those of odd k in the upper half. i8 is stored as code +
//           128. Behind the group's last k lie codes whose number is zero.
//   scales  [64] f32, f16, bf16 or f8_e8m0
//   zeros   [64] int8, where the weight has them; of u4 zero - 8
// Lines of 64 bytes are not cut by any of these.
struct QuantPanel {
  Code code = Code::u4;
  DType scale_type = DType::f32;
  bool has_zeros = false;
  std::int64_t k = 0, group = 0;

  constexpr std::int64_t groups() const { return k / group; }
  // Bytes of a group: of its codes; where its scales begin, and its zeros; all.
  constexpr std::int64_t scales() const { return (group + 7) / 8 * kPanel * (code_bits() == 4 ? 4 : 8); }
  constexpr std::int64_t zeros() const { return scales() + kPanel * static_cast<std::int64_t>(size_of(scale_type)); }
  constexpr std::int64_t group_bytes() const { return zeros() + (has_zeros ? kPanel : 0); }
  constexpr std::int64_t bytes() const { return groups() * group_bytes(); }
  constexpr int code_bits() const { return code == Code::u4 || code == Code::f4_e2m1 ? 4 : 8; }
};

// Rows of such a GEMM that one call takes at most.
inline constexpr int kQuantRowBlock = 256;
// Where a group is no multiple of this, tiles read beyond its end, less than so many k, and multiply that with zeros:
// behind the last k of a row there must be as many finite numbers.
inline constexpr int kQuantAlign = 32;

// out[r, c] = sum over groups g, ascending, of scale[g, c] * (sum over k of g of a[r, k] * number[k, c]
//                                                             - zero[g, c] * sums[r, g]) + bias[c],
// where number is that of the code, for u4 code - 8. The inner sum runs over k as that of LinearArgs does, from zero
// on: one k after the other where a is f32, in steps of a pair or of a tile where it is bf16. It is rounded as these
// steps round; then zero * sum is subtracted by one fma and scale * that added by another. Numbers and zeros are exact
// in bf16 and scales in f32, so no weight is rounded.
struct QuantLinearArgs {
  const void* a = nullptr;  // [rows, k], bf16 for quant_linear_bf16, else f32
  std::int64_t a_stride = 0;
  const float* sums = nullptr;  // [rows, groups]: of a group's activations, where the weight has zeros
  std::int64_t sums_stride = 0;
  int rows = 0;  // 1 .. kQuantRowBlock
  QuantPanel shape;
  const void* panel = nullptr;
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64
  const float* bias = nullptr;  // [columns] or none
};

// A row of bf16 activations as fixed-point numbers of 16 bits, for weights of integers (u4, i8) and of f4_e2m1 in a
// QuantPanel. A block is up to kBlock columns of a group, which is padded with zeros to a multiple of 8. A number is
// x / scale rounded to nearest, ties to even, where scale is the least power of two, from 2^-126 on, for which all
// numbers of the block are two signed bytes, 32639 at most. So every x of at least 2^-6 of the largest's power of two is
// exact, and others are off by half a scale, at most 2^-14.99 of the largest. A prepared row is
//   numbers [groups][group] int16; or for dot products of bytes, [groups][group / 4][2][4] int8: of four numbers the
//           upper bytes, then the lower, all signed: 256 * upper + lower. The four are those whose codes are the bytes
//           of a word, or their lower or upper halves.
//   scales  [groups][blocks] f32; NaN where an x of the block is not finite, whose numbers then are 0
//   sums    [groups][blocks] int32: of a block's numbers
struct FixedRow {
  static constexpr std::int64_t kBlock = 128;  // 128 * 255 * 2^15 is below 2^31
  // Columns of a group from which on this is faster than floats: a block has its costs.
  static constexpr std::int64_t kLeastGroup = 16;

  constexpr explicit FixedRow(const QuantPanel& shape)
      : group((shape.group + 7) / 8 * 8), blocks((group + kBlock - 1) / kBlock), groups(shape.groups()) {}
  // Bytes from the row's beginning on. Numbers are written by the line.
  constexpr std::int64_t scales() const { return lines(2 * groups * group) + kLine; }
  constexpr std::int64_t sums() const { return scales() + lines(4 * groups * blocks); }
  constexpr std::int64_t bytes() const { return sums() + lines(4 * groups * blocks); }

  std::int64_t group, blocks;  // columns of a group, and its blocks
  std::int64_t groups;

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr std::int64_t lines(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
};

// A weight of 8-bit integers that is multiplied with activations of 8-bit integers. Its panels of 64 output features
// hold
//   codes        [ceil(k / 4)][64][4] int8, zeros beyond k
//   corrections  [groups][64] int32: -128 times the sum of a group's codes. Some dot products take activations
//   unsigned,
//                as code + 128, and begin with this.
//   scales       [groups][64] f32
//   zeros        [groups][64] int32, where the weight has zeros
// A group that is not the whole row has a multiple of 4 columns.
struct IntegerPanel {
  std::int64_t k = 0, group = 0;
  bool has_zeros = false;

  constexpr std::int64_t groups() const { return k / group; }
  constexpr std::int64_t corrections() const {
    return (k + 3) / 4 * 4 * kPanel;
  }  // bytes from the panel's beginning on
  constexpr std::int64_t scales() const { return corrections() + groups() * kPanel * 4; }
  constexpr std::int64_t zeros() const { return scales() + groups() * kPanel * 4; }
  constexpr std::int64_t bytes() const { return zeros() + (has_zeros ? groups() * kPanel * 4 : 0); }
};

// The columns of a group, at most: 65536 * 127 * 255 is below 2^31.
inline constexpr std::int64_t kIntegerGroup = 65536;
// Rows of activations are padded with zeros to a multiple of this.
inline constexpr std::int64_t kIntegerAlign = 64;
// Rows that one call takes at most.
inline constexpr int kIntegerRowBlock = 64;
// Matrix tiles take 64 k at a time: they multiply with whole rows and with groups of a multiple of that.
constexpr bool integer_tiles_take(const IntegerPanel& shape) { return shape.groups() == 1 || shape.group % 64 == 0; }

// out[r, c] = scales[r] * (sum over groups, ascending, of scale[g, c] * d[r, g, c]) + bias[c], where d is the whole
// number sum over k of a group of a[r, k] * (code[k, c] - zero[g, c]), converted to float: every instruction set gives
// the same bits. A row whose scale is NaN gives NaN.
struct IntegerLinearArgs {
  const std::int8_t* a = nullptr;      // codes in [-127, 127]: [rows, k rounded up to kIntegerAlign], zeros beyond k
  std::int64_t a_stride = 0;           // bytes, a multiple of 4; of the next two as well
  const float* scales = nullptr;       // [rows]
  const std::int32_t* sums = nullptr;  // [rows, groups]: of a group's codes; where the weight has zeros
  int rows = 0;                        // 1 .. kIntegerRowBlock
  IntegerPanel shape;
  const void* panel = nullptr;
  int panels = 1;        // 2: another panel lies behind it; where Kernels::two_integer_panel_rows allows it
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64, of two panels 65 .. 128
  const float* bias = nullptr;  // [columns] or none
};

// Attention of a tile: vectors [begin, end) of the flattened (query row, head of the group) pairs of one sequence and
// one KV head; vector i is row i / group, head i % group. KV of one head in one block: k transposed
// [head_dim][block_len], then v [block_len][head_dim]. Of bf16 both are in pairs of rows: k [head_dim / 2][block_len][2],
// v [block_len / 2][head_dim][2], where block_len is odd with [head_dim] behind it. Instruction sets that multiply pairs
// of bf16 round queries and weights to bf16 for it. A quantised cache has integers there (of 4 bits: bytes
// [head_dim / 2][block_len] and [block_len][head_dim / 2]), and behind them, f16 and [block_len] each, the scales of k,
// its zeros, the scales of v and its zeros.
//
// A context is worked through in splits of attention_split() positions. The state of a tile after one or more splits is
// [vectors][attention_state(head_dim)] floats: per vector the weighted sum of the values, and behind it, from
// round_up_to_vector(head_dim) on, the largest score, the sum of the weights relative to it, and what is to be added
// to every element of the weighted sum (0 where the cache is not quantised).
struct AttentionArgs {
  const float* q = nullptr;  // of row 0, first head of the group
  std::int64_t q_stride = 0;
  int group = 0, head_dim = 0;
  int begin = 0, end = 0;           // at most kAttentionTile vectors
  std::int32_t first_position = 0;  // of row 0
  const void* kv = nullptr;         // of block 0 and this head
  std::int64_t block_stride = 0;    // bytes from block to block
  const std::int32_t* blocks = nullptr;
  int block_len = 0;
  float scale = 0;                // positive
  int window = 0;                 // keys that a query sees; 0: all
  float soft_cap = 0;             // 0: none
  const float* slopes = nullptr;  // [group]; null: none
  void* out = nullptr;            // of row 0, first head of the group
  std::int64_t out_stride = 0;
  DType out_dtype = DType::f32;
  float* scratch = nullptr;  // attention_scratch(head_dim, block_len) floats, 64-byte aligned
};

inline constexpr int kAttentionTile = 48;
inline constexpr int kWidest = 16;  // floats of the widest vector

constexpr int round_up_to_vector(int n) { return (n + kWidest - 1) / kWidest * kWidest; }

// Positions whose scores are held at a time: whole blocks, so that chunks begin at the same positions for every query.
constexpr int attention_chunk(int block_len) {
  constexpr int kPositions = 256;
  return block_len >= kPositions ? block_len : kPositions / block_len * block_len;
}

// Positions of a split: whole chunks. Splits are computed each from nothing and merged in ascending order, so it does
// not matter whether one thread computes all of a tile or several share in it.
constexpr int attention_split(int block_len) { return 2 * attention_chunk(block_len); }

// The first position that the query at `position` sees.
constexpr int attention_first(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

constexpr std::int64_t attention_state(int head_dim) { return round_up_to_vector(head_dim) + kWidest; }

constexpr std::int64_t attention_scratch(int head_dim, int block_len) {
  const std::int64_t scores = round_up_to_vector(attention_chunk(block_len)) + kWidest;
  constexpr int kScales = 4;  // rows of scales and zeros of a quantised cache, with the sums of the queries behind them
  return kAttentionTile * (round_up_to_vector(head_dim) + 2 * attention_state(head_dim) + scores) + kScales * scores +
         2 * round_up_to_vector(kAttentionTile);
}

struct Kernels {
  // By weight type.
  void (*linear_bf16)(const LinearArgs&);
  // Up to how many rows linear_bf16 takes two panels at once: memory gives a thread that reads two streams some 7 %
  // more than one that reads one.
  int two_panel_rows;
  // Bit for bit what linear_bf16 gives, for activations that were widened to f32: once for all panels, rather than for
  // every panel anew. Null where the processor multiplies bf16 itself.
  void (*linear_bf16_widened)(const LinearArgs&);
  void (*linear_f16)(const LinearArgs&);
  void (*linear_f32)(const LinearArgs&);

  // By the type of the activations. Of bf16: null where the processor does not multiply pairs of bf16 itself; there
  // activations are widened before, once for all panels.
  void (*quant_linear_bf16)(const QuantLinearArgs&);
  void (*quant_linear_f32)(const QuantLinearArgs&);
  // Of fixed-point activations (FixedRow), of u4, i8 and f4_e2m1: out[r, c] = sum over groups, ascending, of scale[g, c]
  // * (sum over blocks of the group, ascending, of scale[r, block] * d) + bias[c], where d is the sum over k of the block
  // of number[r, k] * (number of code[k, c] - zero[g, c]), exact, and then rounded to float. a: prepared rows, a_stride
  // in bytes. For AVX-512 it needs AVX512_VNNI, which not all processors of the set have. Null: not in this set.
  void (*quant_linear_fixed)(const QuantLinearArgs&);
  void (*fixed_from_bf16)(std::byte* out, const Bf16* in, const QuantPanel& shape);
  // sums[g] = the sum of a group's activations: in lanes of a vector, which are added at last.
  void (*group_sums_bf16)(float* sums, const Bf16* a, std::int64_t group, std::int64_t groups);
  void (*group_sums_f32)(float* sums, const float* a, std::int64_t group, std::int64_t groups);

  // A GEMM of integers: by what every processor of the instruction set has; by its dot products of bytes (AVX512_VNNI,
  // or AVX-VNNI for AVX2) and by matrix tiles of bytes (integer_tiles_take), which not all of them have. Null: not in
  // this set.
  void (*linear_i8)(const IntegerLinearArgs&);
  void (*linear_i8_vnni)(const IntegerLinearArgs&);
  void (*linear_i8_tiles)(const IntegerLinearArgs&);
  // Up to how many rows the first two take two panels at once.
  int two_integer_panel_rows;
  // One row of activations: codes round(x / s), ties to even, in [-127, 127], and zeros behind them up to a multiple of
  // kIntegerAlign. s = `scale`, or where that is 0 max |x| / 127. Returns s; where an x is not finite NaN, with codes
  // of zero; a row of zeros has s = 0.
  float (*integers_from_bf16)(std::int8_t* out, const Bf16* in, float scale, std::int64_t n);
  float (*integers_from_f32)(std::int8_t* out, const float* in, float scale, std::int64_t n);
  // out[g] = the sum of a group's codes.
  void (*sum_integers)(std::int32_t* out, const std::int8_t* codes, std::int64_t group, std::int64_t groups);

  // By the cache's element type. A whole tile; or one split of it, whose state is stored.
  void (*attention_bf16)(const AttentionArgs&);
  void (*attention_f16)(const AttentionArgs&);
  void (*attention_f32)(const AttentionArgs&);
  void (*attention_q8)(const AttentionArgs&);
  void (*attention_q4)(const AttentionArgs&);
  void (*attention_split_bf16)(const AttentionArgs&, int split, float* state);
  void (*attention_split_f16)(const AttentionArgs&, int split, float* state);
  void (*attention_split_f32)(const AttentionArgs&, int split, float* state);
  void (*attention_split_q8)(const AttentionArgs&, int split, float* state);
  void (*attention_split_q4)(const AttentionArgs&, int split, float* state);
  // The output of a tile from the states of its `splits` splits, which lie one behind the other. Changes the first.
  void (*attention_merge)(const AttentionArgs&, float* states, int splits);

  // One row of Operations::rms_norm(). delta and out may be null; out may be residual.
  void (*rms_norm_bf16)(Bf16* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
  void (*rms_norm_f32)(float* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
  float (*sum_of_squares)(const float* x, std::int64_t n);
  void (*normalise)(float* x, float factor, const float* weight, std::int64_t n);  // x = x * factor * weight

  // out = silu(gate) * up.
  void (*silu_mul_bf16)(Bf16* out, const float* gate, const float* up, std::int64_t n);
  void (*silu_mul_f32)(float* out, const float* gate, const float* up, std::int64_t n);
  // out = gelu_tanh(gate) * up.
  void (*gelu_tanh_mul_bf16)(Bf16* out, const float* gate, const float* up, std::int64_t n);
  void (*gelu_tanh_mul_f32)(float* out, const float* gate, const float* up, std::int64_t n);

  void (*soft_cap)(float* x, float cap, std::int64_t n);                         // x = cap * tanh(x / cap)
  void (*scale)(float* x, float factor, std::int64_t n);                         // x *= factor
  void (*add_scaled)(float* out, const float* x, float factor, std::int64_t n);  // out += x * factor

  // One head in place: pairs (d, d + rotary_dim / 2); cos_sin [rotary_dim] cosines, then sines.
  void (*rotate)(float* head, const float* cos_sin, int rotary_dim);
  void (*rotate_interleaved)(float* head, const float* cos_sin, int rotary_dim);  // pairs (2 d, 2 d + 1)

  void (*bf16_from_f32)(Bf16* out, const float* in, std::int64_t n);
  void (*f16_from_f32)(F16* out, const float* in, std::int64_t n);
  void (*f32_from_bf16)(float* out, const Bf16* in, std::int64_t n);
  void (*f32_from_f16)(float* out, const F16* in, std::int64_t n);

  // The smallest and the largest of n >= 1 values, for kv_range(); NaN when one of them is NaN or infinite.
  void (*min_and_max)(const float* in, std::int64_t n, float* minimum, float* greatest);
  // out[i] = kv_quantise(in[i], scale, zero, bits), bit for bit, where `most` is kv_quant_max(bits).
  void (*quantise)(std::uint8_t* out, const float* in, float scale, float zero, int most, std::int64_t n);

  // The largest of n >= 1 values; NaN when one of them is NaN.
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
namespace amx {
const Kernels& kernels();
}

}  // namespace charonia::ops::cpu
