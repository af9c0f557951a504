// Sequences in a KV cache, one step of rotation, store and attention over them, and the expected results in double.
#pragma once

#include <algorithm>
#include <numeric>
#include <utility>

#include "attention_reference.h"
#include "ops_support.h"
#include "quantised_head.h"
#include "rotary_reference.h"

namespace charonia::ops {

struct Shape {
  int heads, kv_heads, head_dim, block_len;
  DType weight;  // of the model; it determines the other types
  int quant_bits = 0;
};

inline Shape random_shape(Random& random) {
  constexpr std::array kDims = {2, 6, 16, 32, 48, 64, 80, 96, 128, 256};
  constexpr std::array kBlocks = {1, 3, 16, 20, 64, 128, 300};
  constexpr std::array kGroups = {1, 2, 3, 4, 7, 32};
  const int kv_heads = uniform(random, 1, 3);
  return {kGroups[static_cast<std::size_t>(uniform(random, 0, 5))] * kv_heads, kv_heads,
          kDims[static_cast<std::size_t>(uniform(random, 0, 9))],
          kBlocks[static_cast<std::size_t>(uniform(random, 0, 6))],
          kWeightTypes[static_cast<std::size_t>(uniform(random, 0, 2))]};
}

// The variations of model families on plain rotation and attention.
struct Variant {
  bool rotated = true;
  int rotary_dim = 0;   // 0: the whole head
  int row_shift = 0;    // != 0: position p uses row (7 p + row_shift) % positions of the table
  bool interleaved = false;
  bool normed = false;      // q and k, per head
  bool norm_after = false;  // applies the norm after the rotation
  bool norm_rows = false;   // the norm is over all heads of q, and over all heads of k
  bool v_norm = false;      // heads of v, without weights
  bool v_from_k = false;    // v is k before its norm and rotation
  bool scaled = false;  // q, by position
  int window = 0;
  float soft_cap = 0;
  bool alibi = false;
  bool sinks = false;
  bool scaled_kv = false;  // scales of an FP8 cache
};

// A cache with several sequences in random blocks, and their qkv rows before rotation. If the cache holds integers,
// rotations are quarter turns: then k is the same in any arithmetic, and no integer is rounded to the other side.
struct World {
  Shape shape;
  Variant variant;
  DType kv, gemm_out;
  std::vector<int> lengths;
  std::vector<Matrix> qkv;  // [sequence][length, (heads + 2 kv_heads) * head_dim]
  int rotary_dim = 0;
  int positions = 0;                  // of the longest sequence
  std::vector<float> cos_sin;         // [positions, rotary_dim]
  std::vector<float> q_norm, k_norm;  // [head_dim], or [heads * head_dim]
  std::vector<float> q_scale;         // [positions]
  std::vector<float> slopes, sinks;   // [heads]
  std::vector<float> k_scales, v_scales;  // [kv_heads]
  float norm_eps = 0.25F;             // large enough to matter
  std::vector<std::int32_t> tables;   // [sequences, table_stride]
  std::int64_t table_stride = 0;
  std::int64_t columns = 0;
  int blocks = 0;

  World(Random& random, const Ops& ops, const Shape& s, std::vector<int> sequence_lengths, const Variant& v = {})
      : shape(s),
        variant(v),
        kv(ops.precision(s.weight).kv),
        gemm_out(ops.precision(s.weight).gemm_out),
        lengths(std::move(sequence_lengths)),
        rotary_dim(v.rotary_dim == 0 ? s.head_dim : v.rotary_dim),
        positions(*std::max_element(lengths.begin(), lengths.end())),
        columns((s.heads + 2 * s.kv_heads) * s.head_dim) {
    table_stride = (positions + s.block_len - 1) / s.block_len + 1;
    std::vector<std::int32_t> free(static_cast<std::size_t>(table_stride) * lengths.size() + 3);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    blocks = static_cast<int>(free.size());
    tables.assign(free.begin(), free.begin() + table_stride * static_cast<std::ptrdiff_t>(lengths.size()));
    for (const int n : lengths) qkv.push_back(Matrix::random(random, gemm_out, n, columns));
    for (int p = 0; p < positions; ++p) {
      for (int half = 0; half < 2; ++half) {
        for (int d = 0; d < rotary_dim / 2; ++d) {
          const double angle = p * std::pow(10000.0, -2.0 * d / rotary_dim);
          const double quarter = std::array{0.0, 1.0, 0.0, -1.0}[static_cast<std::size_t>((p + d + 1 - half) % 4)];
          cos_sin.push_back(static_cast<float>(s.quant_bits != 0 ? quarter
                                               : half == 0       ? std::cos(angle)
                                                                 : std::sin(angle)));
        }
      }
      q_scale.push_back(1 + 0.01F * static_cast<float>(p % 50));
    }
    std::normal_distribution<float> normal(0, 1);
    for (int d = 0; d < (v.norm_rows ? s.heads : 1) * s.head_dim; ++d) {
      q_norm.push_back(normal(random)), k_norm.push_back(normal(random));
    }
    for (int h = 0; h < s.kv_heads; ++h) {
      k_scales.push_back(0.013F * static_cast<float>(uniform(random, 1, 50)));
      v_scales.push_back(0.017F * static_cast<float>(uniform(random, 1, 50)));
    }
    for (int h = 0; h < s.heads; ++h) {
      slopes.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / s.heads));
      sinks.push_back(h % 5 == 4 ? 100.0F : 5 * std::cos(static_cast<float>(h)));  // 100: keys get no weight
    }
  }

  KvLayout layout() const {
    return kv_layout(2, shape.kv_heads, shape.head_dim, shape.block_len, kv, shape.quant_bits);
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape.head_dim)); }
  int turned_by(int position) const {
    return variant.row_shift == 0 ? position : (7 * position + variant.row_shift) % positions;
  }

  // Runs one step over rows [begin, end) of each sequence, in the given order. Returns attention's output and the
  // rotated qkv.
  struct Chunk {
    int sequence, begin, end;
  };
  std::pair<Matrix, Matrix> step(Ops& ops, KvCache& cache, const std::vector<Chunk>& chunks, DType out_type) const {
    std::vector<std::int32_t> starts = {0}, at, table, turned;
    for (const auto& p : chunks) {
      for (int i = p.begin; i < p.end; ++i) at.push_back(i), turned.push_back(turned_by(i));
      starts.push_back(static_cast<std::int32_t>(at.size()));
      const auto from = tables.begin() + p.sequence * table_stride;
      table.insert(table.end(), from, from + table_stride);
    }
    if (variant.row_shift == 0) turned.clear();
    Matrix rows(gemm_out, static_cast<std::int64_t>(at.size()), columns, 8);
    std::int64_t r = 0;
    for (const auto& p : chunks) {
      for (int i = p.begin; i < p.end; ++i, ++r) {
        for (std::int64_t c = 0; c < columns; ++c) rows.set(r, c, qkv[static_cast<std::size_t>(p.sequence)].at(i, c));
      }
    }
    const std::vector<std::int32_t> ids(at.size(), 0);
    const DeviceMatrix device_rows(ops, rows), out(ops, out_type, rows.rows, shape.heads * shape.head_dim, 8);
    std::vector<std::unique_ptr<Buffer>> memory;
    const auto device = [&](bool wanted, const std::vector<float>& values) -> const float* {
      if (!wanted) return nullptr;
      memory.push_back(ops.allocate(values.size() * sizeof(float)));
      ops.upload(memory.back()->data(), values.data(), values.size() * sizeof(float));
      return memory.back()->as<float>();
    };
    const std::int64_t q_size = std::int64_t{shape.heads} * shape.head_dim,
                       k_size = std::int64_t{shape.kv_heads} * shape.head_dim;
    const DeviceMatrix squares(ops, DType::f32, rows.rows, 2);
    const RotaryParams rotary{.cos_sin = device(variant.rotated, cos_sin),
                              .rotary_dim = rotary_dim,
                              .interleaved = variant.interleaved,
                              .q_norm = device(variant.normed, q_norm),
                              .k_norm = device(variant.normed, k_norm),
                              .norm_eps = norm_eps,
                              .norm_after = variant.norm_after,
                              .v_norm = variant.v_norm,
                              .v_from_k = variant.v_from_k,
                              .squares = variant.norm_rows ? squares.floats() : nullptr,
                              .q_count = q_size,
                              .k_count = k_size,
                              .q_scale = device(variant.scaled, q_scale),
                              .k_scales = device(variant.scaled_kv, k_scales),
                              .v_scales = device(variant.scaled_kv, v_scales)};
    const AttentionParams how{.scale = scale(),
                              .window = variant.window,
                              .soft_cap = variant.soft_cap,
                              .alibi = device(variant.alibi, slopes),
                              .sinks = device(variant.sinks, sinks),
                              .v_scales = device(variant.scaled_kv, v_scales)};
    run_step(ops,
             {.ids = ids, .attention = {starts, at, {table}, table_stride, turned}, .logits_rows = {}, .sample = {}},
             [&] {
               if (variant.norm_rows) ops.qk_squares(squares.tensor(), device_rows.tensor(), q_size, k_size);
               ops.rotary_store(device_rows.tensor(), rotary, cache, 1, shape.heads);
               ops.attention(out.tensor(), device_rows.tensor(), cache, 1, shape.heads, how);
             });
    return {out.host(), device_rows.host()};
  }

  bool has_scales() const { return shape.quant_bits == kKvFp8 && variant.scaled_kv; }

  // A head of q (head < heads), k or v after rotary_store, before rounding.
  std::vector<double> rotated(int sequence, int position, int head) const {
    const RotaryReference reference{.heads = shape.heads,
                                    .kv_heads = shape.kv_heads,
                                    .dim = shape.head_dim,
                                    .rotary_dim = variant.rotated ? rotary_dim : 0,
                                    .interleaved = variant.interleaved,
                                    .normed = variant.normed,
                                    .norm_after = variant.norm_after,
                                    .norm_rows = variant.norm_rows,
                                    .v_norm = variant.v_norm,
                                    .v_from_k = variant.v_from_k,
                                    .scaled = variant.scaled,
                                    .eps = norm_eps,
                                    .cos_sin = cos_sin,
                                    .q_norm = q_norm,
                                    .k_norm = k_norm,
                                    .q_scale = q_scale};
    auto out = reference(qkv[static_cast<std::size_t>(sequence)], position, head, position, turned_by(position)).value;
    if (has_scales() && head < shape.heads) {
      for (auto& x : out) x *= k_scales[static_cast<std::size_t>(head / (shape.heads / shape.kv_heads))];
    }
    return out;
  }
  // The values that the cache returns for one token's k or v of a head.
  std::vector<double> stored(std::vector<double> row, float fp8_scale) const {
    if (shape.quant_bits != 0) return through_codes(row, shape.quant_bits, fp8_scale);
    for (auto& x : row) x = rounded(kv, x);
    return row;
  }

  // Attention of one head of one row in double, with k and v as stored. The query is the device's own, from `row` of
  // the rotated rows, because another rounding of it would change every score.
  using Expected = AttentionReference::Result;
  Expected reference(int sequence, int position, int head, const Matrix& rows, std::int64_t row,
                     bool rounded_query) const {
    const int kv_head = head / (shape.heads / shape.kv_heads), dim = shape.head_dim;
    std::vector<double> q;
    for (int d = 0; d < dim; ++d) {
      const double x = rows.at(row, head * dim + d);
      q.push_back(rounded_query ? rounded(DType::bf16, x) : x);
    }
    const auto at = static_cast<std::size_t>(kv_head);
    const float k_scale = has_scales() ? k_scales[at] : 1, v_scale = has_scales() ? v_scales[at] : 1;
    std::vector<std::vector<double>> keys, values;
    for (int p = variant.window == 0 ? 0 : std::max(0, position - variant.window + 1); p <= position; ++p) {
      keys.push_back(stored(rotated(sequence, p, shape.heads + kv_head), k_scale));
      values.push_back(stored(rotated(sequence, p, shape.heads + shape.kv_heads + kv_head), v_scale));
      for (auto& x : values.back()) x *= v_scale;
    }
    const double slope = variant.alibi ? slopes[static_cast<std::size_t>(head)] : 0;
    AttentionReference reference{scale(), variant.soft_cap, slope};
    if (variant.sinks) reference.sink = sinks[static_cast<std::size_t>(head)];
    return reference(q, keys, values);
  }
};

}  // namespace charonia::ops
