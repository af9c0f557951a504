// The kernels, which are compiled once per instruction set. kernels/*.cpp implement this table in one namespace per
// instruction set; dispatch.cpp selects one. Kernels do not allocate, throw or use threads.
//
// Element types have tag types, so that bf16 and fp16 are not confused.
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
// Bytes of a quantised KV cache: one integer of 8 bits, or two of 4 bits, packed as in kv_quant.h.
struct Q8 {
  std::uint8_t bits;
};
struct Q4 {
  std::uint8_t bits;
};
// FP8 E4M3.
struct F8 {
  std::uint8_t bits;
};

// GEMM weights are packed into panels of 64 output features, padded with zeros. The memory order of a panel is the
// order of reading:
//   bf16  [ceil(k / 2)][64][2]   pairs of neighbouring k
//   fp16  [k][64]
//   fp32  [k][64]
inline constexpr int kPanel = 64;

// Maximum rows of one GEMM call.
inline constexpr int kRowBlock = 48;
// The same for linear_bf16_widened. With kWidenedFrom rows or more it also widens the weights, once for all rows.
inline constexpr int kWidenedRowBlock = 256, kWidenedFrom = 48;

// out[r, 0..columns) = sum over k of a[r, k] * panel[k, :] + bias. One accumulator per element, k in ascending order
// (in steps of a pair or a tile, if the processor multiplies those), for any number of rows.
struct LinearArgs {
  const void* a = nullptr;  // [rows, k], bf16 for bf16 weights, else f32
  std::int64_t a_stride = 0;
  int rows = 0;  // 1 .. kRowBlock
  std::int64_t k = 0;
  const void* panel = nullptr;
  int panels = 1;        // 2: also the next panel in memory; only if Kernels::two_panel_rows allows it
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64; with two panels 65 .. 128
  const float* bias = nullptr;  // [columns] or null
};

// A quantised weight (quant_weight.h) whose activations are not converted, packed into panels of 64 output features. A
// panel is a sequence of groups. Each group has
//   codes   [ceil(group / 8) * 8 * bits / 32][64] words of 32 bits: 8 or 4 codes of a feature. Codes of even k are in
//           the lower half, the first of them lowest; codes of odd k are in the upper half. i8 is stored as code + 128.
//           After the group's last k come codes of the number zero.
//   scales  [64] f32, f16, bf16 or f8_e8m0
//   zeros   [64] int8, if the weight has zeros; for u4: zero - 8
// All of these are multiples of 64-byte cache lines.
struct QuantPanel {
  Code code = Code::u4;
  DType scale_type = DType::f32;
  bool has_zeros = false;
  std::int64_t k = 0, group = 0;

  constexpr std::int64_t groups() const { return k / group; }
  // Byte offsets of a group's scales and zeros (the codes come first), and the total size.
  constexpr std::int64_t scales() const { return (group + 7) / 8 * kPanel * (code_bits() == 4 ? 4 : 8); }
  constexpr std::int64_t zeros() const { return scales() + kPanel * static_cast<std::int64_t>(size_of(scale_type)); }
  constexpr std::int64_t group_bytes() const { return zeros() + (has_zeros ? kPanel : 0); }
  constexpr std::int64_t bytes() const { return groups() * group_bytes(); }
  constexpr int code_bits() const { return code == Code::u4 || code == Code::f4_e2m1 ? 4 : 8; }
};

// Maximum rows of one call of such a GEMM.
inline constexpr int kQuantRowBlock = 256;
// If a group is not a multiple of this, tiles read beyond its end, less than this number of k, and multiply with zeros.
// After the last k of a row there must be as many finite numbers.
inline constexpr int kQuantAlign = 32;

// out[r, c] = sum over groups g, ascending, of scale[g, c] * (sum over k of g of a[r, k] * number[k, c]
//                                                             - zero[g, c] * sums[r, g]) + bias[c],
// where number is the number of the code (for u4: code - 8). The inner sum starts at zero and runs over k as in
// LinearArgs: one k at a time if a is f32, in steps of a pair or a tile if a is bf16. It is rounded like these steps.
// Then one fma subtracts zero * sum, and another adds scale * the result. Numbers and zeros are exact in bf16 and
// scales in f32, so no weight is rounded.
struct QuantLinearArgs {
  const void* a = nullptr;  // [rows, k], bf16 for quant_linear_bf16, else f32
  std::int64_t a_stride = 0;
  const float* sums = nullptr;  // [rows, groups]: sums of a group's activations, if the weight has zeros
  std::int64_t sums_stride = 0;
  int rows = 0;  // 1 .. kQuantRowBlock
  QuantPanel shape;
  const void* panel = nullptr;
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64
  const float* bias = nullptr;  // [columns] or null
};

// A row of bf16 activations as 16-bit fixed-point numbers, for integer weights (u4, i8) and f4_e2m1 in a QuantPanel. A
// block has up to kBlock columns of a group; the group is padded with zeros to a multiple of 8. A number is x / scale,
// rounded to nearest, ties to even. The scale is the smallest power of two, at least 2^-126, so that all numbers of the
// block fit two signed bytes (at most 32639). So every x with at least 2^-6 times the power of two of the largest is
// exact. Others have an error of up to half a scale, at most 2^-14.99 of the largest. A prepared row is
//   numbers [groups][group] int16; or, for byte dot products, [groups][group / 4][2][4] int8: the upper bytes of four
//           numbers, then the lower bytes, all signed: 256 * upper + lower. The four belong to the codes in the bytes
//           of a word, or in their lower or upper halves.
//   scales  [groups][blocks] f32; NaN if an x of the block is not finite; its numbers are then 0
//   sums    [groups][blocks] int32: sums of a block's numbers
struct FixedRow {
  static constexpr std::int64_t kBlock = 128;  // 128 * 255 * 2^15 is below 2^31
  // With smaller groups, floats are faster, because each block has a fixed cost.
  static constexpr std::int64_t kLeastGroup = 16;

  constexpr explicit FixedRow(const QuantPanel& shape)
      : group((shape.group + 7) / 8 * 8), blocks((group + kBlock - 1) / kBlock), groups(shape.groups()) {}
  // Byte offsets in the row. Numbers are written in whole cache lines.
  constexpr std::int64_t scales() const { return lines(2 * groups * group) + kLine; }
  constexpr std::int64_t sums() const { return scales() + lines(4 * groups * blocks); }
  constexpr std::int64_t bytes() const { return sums() + lines(4 * groups * blocks); }

  std::int64_t group, blocks;  // columns of a group, and its blocks
  std::int64_t groups;

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr std::int64_t lines(std::int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
};

// An 8-bit integer weight that is multiplied with 8-bit integer activations. Its panels of 64 output features hold
//   codes        [ceil(k / 4)][64][4] int8, zeros beyond k
//   corrections  [groups][64] int32: -128 times the sum of a group's codes. Some dot products take unsigned activations
//                (code + 128); their sums start with this value.
//   scales       [groups][64] f32
//   zeros        [groups][64] int32, if the weight has zeros
// A group that is not the whole row has a multiple of 4 columns.
struct IntegerPanel {
  std::int64_t k = 0, group = 0;
  bool has_zeros = false;

  constexpr std::int64_t groups() const { return k / group; }
  constexpr std::int64_t corrections() const { return (k + 3) / 4 * 4 * kPanel; }  // byte offset in the panel
  constexpr std::int64_t scales() const { return corrections() + groups() * kPanel * 4; }
  constexpr std::int64_t zeros() const { return scales() + groups() * kPanel * 4; }
  constexpr std::int64_t bytes() const { return zeros() + (has_zeros ? groups() * kPanel * 4 : 0); }
};

// Maximum columns of a group: 65536 * 127 * 255 is below 2^31.
inline constexpr std::int64_t kIntegerGroup = 65536;
// Rows of activations are padded with zeros to a multiple of this.
inline constexpr std::int64_t kIntegerAlign = 64;
// Maximum rows of one call.
inline constexpr int kIntegerRowBlock = 64;
// Matrix tiles take 64 k at a time, so they support whole rows, and groups of a multiple of 64.
constexpr bool integer_tiles_take(const IntegerPanel& shape) { return shape.groups() == 1 || shape.group % 64 == 0; }

// out[r, c] = scales[r] * (sum over groups, ascending, of scale[g, c] * d[r, g, c]) + bias[c]. d is the exact integer
// sum over k of a group of a[r, k] * (code[k, c] - zero[g, c]), converted to float, so every instruction set gives the
// same bits. A row whose scale is NaN gives NaN.
struct IntegerLinearArgs {
  const std::int8_t* a = nullptr;      // codes in [-127, 127]: [rows, k rounded up to kIntegerAlign], zeros beyond k
  std::int64_t a_stride = 0;           // bytes, a multiple of 4; also the stride of the next two
  const float* scales = nullptr;       // [rows]
  const std::int32_t* sums = nullptr;  // [rows, groups]: sums of a group's codes, if the weight has zeros
  int rows = 0;                        // 1 .. kIntegerRowBlock
  IntegerPanel shape;
  const void* panel = nullptr;
  int panels = 1;        // 2: also the next panel in memory; only if Kernels::two_integer_panel_rows allows it
  float* out = nullptr;  // [rows, columns]
  std::int64_t out_stride = 0;
  int columns = 0;              // 1 .. 64; with two panels 65 .. 128
  const float* bias = nullptr;  // [columns] or null
};

// Attention of a tile: vectors [begin, end) of the flattened (query row, head of the group) pairs of one sequence and
// one KV head; vector i is row i / group, head i % group. KV of one head in one block: k transposed
// [head_dim][block_len], then v [block_len][head_dim]. For bf16 both are in pairs of rows: k [head_dim /
// 2][block_len][2], v [block_len / 2][head_dim][2], followed by [head_dim] if block_len is odd. Instruction sets that
// multiply pairs of bf16 round queries and weights to bf16. A quantised cache has integers instead (with 4 bits: bytes
// [head_dim / 2][block_len] and [block_len][head_dim / 2]), followed by four rows of f16 [block_len]: scales of k,
// zeros of k, scales of v, zeros of v. With a latent_dim the cache has no v: values are the first latent_dim elements
// of k, and are copied from k into the scratch memory, in the layout of v.
//
// A context is processed in splits of attention_split() positions. The state of a tile after one or more splits is
// [vectors][attention_state(head_dim)] floats. Each vector has the weighted sum of the values and, from
// round_up_to_vector(head_dim) on, the largest score, the sum of the weights relative to it, and an offset to add to
// every element of the weighted sum (0 if the cache is not quantised).
struct AttentionArgs {
  const float* q = nullptr;  // of row 0, first head of the group
  std::int64_t q_stride = 0;
  int group = 0, head_dim = 0;
  int latent_dim = 0;               // at most head_dim; 0: values are v, and have head_dim elements
  int begin = 0, end = 0;           // at most kAttentionTile vectors
  std::int32_t first_position = 0;  // of row 0
  const void* kv = nullptr;         // of block 0 and this head
  std::int64_t block_stride = 0;    // bytes between blocks
  const std::int32_t* blocks = nullptr;
  int block_len = 0;
  float scale = 0;                // positive
  int window = 0;                 // keys that a query attends to; 0: all
  float soft_cap = 0;             // 0: no cap
  const float* slopes = nullptr;  // [group]; null: no ALiBi
  const float* sinks = nullptr;   // [group]; null: none. Added to the sum of a vector's weights when out is written
  float value_scale = 1;          // factor of out
  void* out = nullptr;            // of row 0, first head of the group
  std::int64_t out_stride = 0;
  DType out_dtype = DType::f32;
  float* scratch = nullptr;  // attention_scratch(head_dim, block_len, latent_dim) floats, 64-byte aligned

  constexpr int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

inline constexpr int kAttentionTile = 48;
inline constexpr int kWidest = 16;  // floats of the widest vector

constexpr int round_up_to_vector(int n) { return (n + kWidest - 1) / kWidest * kWidest; }

// Number of positions whose scores are kept at a time: whole blocks, so that chunks begin at the same positions for
// every query.
constexpr int attention_chunk(int block_len) {
  constexpr int kPositions = 256;
  return block_len >= kPositions ? block_len : kPositions / block_len * block_len;
}

// Positions of a split: whole chunks. Each split starts from an empty state, and splits are merged in ascending order.
// So the result does not depend on how threads share a tile.
constexpr int attention_split(int block_len) { return 2 * attention_chunk(block_len); }

// The first position that the query at `position` attends to.
constexpr int attention_first(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

constexpr std::int64_t attention_state(int head_dim) { return round_up_to_vector(head_dim) + kWidest; }

constexpr std::int64_t attention_scratch(int head_dim, int block_len, int latent_dim = 0) {
  const std::int64_t scores = round_up_to_vector(attention_chunk(block_len)) + kWidest;
  constexpr int kScales = 4;  // rows of scales and zeros of a quantised cache, followed by the sums of the queries
  return kAttentionTile * (round_up_to_vector(head_dim) + 2 * attention_state(head_dim) + scores) + kScales * scores +
         2 * round_up_to_vector(kAttentionTile) + std::int64_t{latent_dim} * attention_chunk(block_len);
}

inline constexpr int kDeltaStrip = 32;  // DeltaNetParams::kStrip

// Rows of one sequence, for one strip of the state of one v head, with normalised q and k:
//   s = alpha s + k (beta (v - alpha s^T k))^T;  o = s^T q
struct DeltaArgs {
  const float* from = nullptr;  // [k_dim][kDeltaStrip]: the state before the first row; null: zeros
  float* to = nullptr;          // the same: the state after the last row; may be `from`
  const float* q = nullptr;     // of the first row, [k_dim]
  const float* k = nullptr;
  float* v = nullptr;            // of the first row, [columns]; replaced by o
  std::int64_t stride = 0;       // between rows of q, k and v
  const float* gates = nullptr;  // of the first row: beta, and alpha `alpha` elements after it
  std::int64_t alpha = 0, gates_stride = 0;
  int rows = 0, k_dim = 0;  // >= 1
  int columns = 0;          // 1 .. kDeltaStrip
};

inline constexpr int kLowRankGroup = 4;  // LowRank::kGroup

// The products of a LoRA adapter for some rows of a step (kernels/low_rank.cpp). Strides are in elements.
struct LowRankArgs {
  const std::int32_t* rows = nullptr;  // [count]: rows of `in` and of `out`
  int count = 0;
  const void* in = nullptr;
  std::int64_t in_stride = 0, in_features = 0;
  const void* a = nullptr;                 // of all ranks, as in LowRank, with the type of `in`
  const float* scales = nullptr;           // [all ranks]
  std::int64_t first_rank = 0, ranks = 0;  // that the call computes: whole groups, or the last ranks; or those of `b`
  float* t = nullptr;                      // [count, all ranks]
  std::int64_t t_stride = 0;
  const void* b = nullptr;  // panels of LowRank's B, with the type of `in`
  float* out = nullptr;
  std::int64_t out_stride = 0, first_column = 0, columns = 0;
};

// Operations::short_conv() of one sequence, for `channels` neighbouring channels. Every stride is in elements.
struct ShortConvArgs {
  // [rows, channels] u; with gate_distance > 0: B, and C and x at this distance and twice it
  const float* in = nullptr;
  std::int64_t in_stride = 0;
  std::int64_t gate_distance = 0;  // 0: not gated
  std::int64_t rows = 0, channels = 0;
  const float* weight = nullptr;  // [kernel, channels]
  const float* bias = nullptr;    // [channels]; null: none
  int kernel = 0;                 // 2 to kMaxShortConv
  bool silu = false;
  std::int64_t column_stride = 0;    // of `weight`, `state_in` and `state_out`: all channels of the layer
  const float* state_in = nullptr;   // [kernel - 1, channels]; null: zeros
  float* state_out = nullptr;        // the same; may be state_in
  void* out = nullptr;               // [rows, channels]
  std::int64_t out_stride = 0;
};
inline constexpr int kMaxShortConv = 4;

struct Kernels {
  // By weight type.
  void (*linear_bf16)(const LinearArgs&);
  // linear_bf16 takes two panels together for up to this number of rows: a thread that reads two memory streams gets
  // about 7 % more bandwidth than with one.
  int two_panel_rows;
  // Gives the same bits as linear_bf16 for activations that were widened to f32 once for all panels instead of for
  // every panel. Null if the processor multiplies bf16 itself.
  void (*linear_bf16_widened)(const LinearArgs&);
  void (*linear_f16)(const LinearArgs&);
  void (*linear_f32)(const LinearArgs&);

  // By activation type. quant_linear_bf16 is null if the processor does not multiply pairs of bf16; then activations
  // are widened once for all panels.
  void (*quant_linear_bf16)(const QuantLinearArgs&);
  void (*quant_linear_f32)(const QuantLinearArgs&);
  // For fixed-point activations (FixedRow) with u4, i8 and f4_e2m1: out[r, c] = sum over groups, ascending, of scale[g,
  // c] * (sum over blocks of the group, ascending, of scale[r, block] * d) + bias[c]. d is the exact sum over k of the
  // block of number[r, k] * (number of code[k, c] - zero[g, c]), then rounded to float. a: prepared rows, a_stride in
  // bytes. With AVX-512 it needs AVX512_VNNI, which not all processors of the set have. Null: not in this set.
  void (*quant_linear_fixed)(const QuantLinearArgs&);
  void (*fixed_from_bf16)(std::byte* out, const Bf16* in, const QuantPanel& shape);
  // sums[g] = the sum of a group's activations, accumulated in the lanes of a vector, which are added at the end.
  void (*group_sums_bf16)(float* sums, const Bf16* a, std::int64_t group, std::int64_t groups);
  void (*group_sums_f32)(float* sums, const float* a, std::int64_t group, std::int64_t groups);

  // GEMMs with integers: with instructions that every processor of the set has; with byte dot products (AVX512_VNNI, or
  // AVX-VNNI for AVX2); and with matrix tiles of bytes (integer_tiles_take). Not all processors of the set have the
  // last two. Null: not in this set.
  void (*linear_i8)(const IntegerLinearArgs&);
  void (*linear_i8_vnni)(const IntegerLinearArgs&);
  void (*linear_i8_tiles)(const IntegerLinearArgs&);
  // The first two take two panels together for up to this number of rows.
  int two_integer_panel_rows;
  // Converts one row of activations to codes round(x / s), ties to even, in [-127, 127], padded with zeros to a
  // multiple of kIntegerAlign. s = `scale`, or max |x| / 127 if that is 0. Returns s. If an x is not finite, returns
  // NaN and all codes are 0. A row of zeros has s = 0.
  float (*integers_from_bf16)(std::int8_t* out, const Bf16* in, float scale, std::int64_t n);
  float (*integers_from_f32)(std::int8_t* out, const float* in, float scale, std::int64_t n);
  // out[g] = the sum of a group's codes.
  void (*sum_integers)(std::int32_t* out, const std::int8_t* codes, std::int64_t group, std::int64_t groups);

  // By the cache's element type. attention_*: a whole tile. attention_split_*: one split of it, whose state is stored.
  void (*attention_bf16)(const AttentionArgs&);
  void (*attention_f16)(const AttentionArgs&);
  void (*attention_f32)(const AttentionArgs&);
  void (*attention_f8)(const AttentionArgs&);
  void (*attention_q8)(const AttentionArgs&);
  void (*attention_q4)(const AttentionArgs&);
  void (*attention_split_bf16)(const AttentionArgs&, int split, float* state);
  void (*attention_split_f16)(const AttentionArgs&, int split, float* state);
  void (*attention_split_f32)(const AttentionArgs&, int split, float* state);
  void (*attention_split_f8)(const AttentionArgs&, int split, float* state);
  void (*attention_split_q8)(const AttentionArgs&, int split, float* state);
  void (*attention_split_q4)(const AttentionArgs&, int split, float* state);
  // Computes the output of a tile from the states of its `splits` splits, which are contiguous. Overwrites the first
  // state.
  void (*attention_merge)(const AttentionArgs&, float* states, int splits);

  // One row of Operations::rms_norm(). delta and out may be null; out may be residual.
  void (*rms_norm_bf16)(Bf16* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
  void (*rms_norm_f32)(float* out, float* residual, const float* delta, const NormParams& how, std::int64_t n);
  float (*sum_of_squares)(const float* x, std::int64_t n);
  void (*normalise)(float* x, float factor, const float* weight, std::int64_t n);  // x = x * factor * weight

  void (*silu_mul_bf16)(Bf16* out, const float* gate, const float* up, std::int64_t n);
  void (*silu_mul_f32)(float* out, const float* gate, const float* up, std::int64_t n);
  void (*gelu_tanh_mul_bf16)(Bf16* out, const float* gate, const float* up, std::int64_t n);
  void (*gelu_tanh_mul_f32)(float* out, const float* gate, const float* up, std::int64_t n);
  void (*clamped_swiglu_bf16)(Bf16* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n);
  void (*clamped_swiglu_f32)(float* out, const float* gate, const float* up, float limit, float alpha, std::int64_t n);

  void (*sigmoid_gate_bf16)(Bf16* x, const float* gate, std::int64_t n);  // x *= sigmoid(gate)
  void (*sigmoid_gate_f32)(float* x, const float* gate, std::int64_t n);
  // One head of Operations::gated_norm().
  void (*gated_norm_bf16)(Bf16* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n);
  void (*gated_norm_f32)(float* out, const float* x, const float* gate, const float* weight, float eps, std::int64_t n);

  void (*delta_net)(const DeltaArgs&);

  void (*low_rank_down_bf16)(const LowRankArgs&);  // t = scale * A in
  void (*low_rank_down_f32)(const LowRankArgs&);
  void (*low_rank_up_bf16)(const LowRankArgs&);  // out += B t
  void (*low_rank_up_f32)(const LowRankArgs&);

  // By the type of `out`.
  void (*short_conv_bf16)(const ShortConvArgs&);
  void (*short_conv_f32)(const ShortConvArgs&);

  void (*soft_cap)(float* x, float cap, std::int64_t n);                         // x = cap * tanh(x / cap)
  void (*scale)(float* x, float factor, std::int64_t n);                         // x *= factor
  void (*add_scaled)(float* out, const float* x, float factor, std::int64_t n);  // out += x * factor

  // Rotates one head in place: pairs (d, d + rotary_dim / 2); cos_sin [rotary_dim] has cosines, then sines.
  void (*rotate)(float* head, const float* cos_sin, int rotary_dim);
  void (*rotate_interleaved)(float* head, const float* cos_sin, int rotary_dim);  // pairs (2 d, 2 d + 1)

  void (*bf16_from_f32)(Bf16* out, const float* in, std::int64_t n);
  void (*f16_from_f32)(F16* out, const float* in, std::int64_t n);
  void (*f32_from_bf16)(float* out, const Bf16* in, std::int64_t n);
  void (*f32_from_f16)(float* out, const F16* in, std::int64_t n);

  // The smallest and the largest of n >= 1 values, for kv_range(); NaN if a value is NaN or infinite.
  void (*min_and_max)(const float* in, std::int64_t n, float* minimum, float* greatest);
  // out[i] = kv_quantise(in[i], scale, zero, bits), bit for bit; `most` is kv_quant_max(bits).
  void (*quantise)(std::uint8_t* out, const float* in, float scale, float zero, int most, std::int64_t n);

  // The largest of n >= 1 values; NaN if one is NaN.
  float (*maximum)(const float* in, std::int64_t n);
  // out[i] = e^((in[i] - shift) * scale), out may be null; returns their sum, accumulated as double every 1024 values.
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
