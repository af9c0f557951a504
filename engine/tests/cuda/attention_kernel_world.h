// Sequences with random q, k and v, the device's attention over their blocks, and the expected result in double.
//
// Cache slots whose values a step must not use hold NaN, and so do padding rows. Block tables end with invalid blocks, and
// begin with a block of NaN before a window: the engine's tables begin with block 0, which may be of any sequence.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "attention_reference.h"
#include "device_arrays.h"
#include "ops/cuda/kernels/attention.h"
#include "ops_support.h"
#include "quantised_head.h"

namespace charonia::cuda {

using ops::Matrix;
using ops::Random;
using ops::uniform;

struct Chunk {
  int sequence, begin, end;  // rows at positions [begin, end)
};
using Chunks = std::vector<Chunk>;

inline constexpr std::array kTiledDims = {32, 64, 96, 128, 256};
inline constexpr std::array kBlockLens = {1, 3, 16, 20, 64, 128, 300};
inline constexpr std::array kGroups = {1, 2, 3, 4, 5, 6, 7, 8, 16};

template <class T, std::size_t n>
T one_of(Random& random, const std::array<T, n>& from) {
  return from[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(n) - 1))];
}

inline AttentionShape shape_of(int kv_heads, int group, int head_dim, int block_len) {
  return {.heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = head_dim, .block_len = block_len};
}

// Sequences with random q, k and v in random blocks.
struct World {
  AttentionShape shape;
  DType type;
  std::vector<int> lengths;
  std::vector<Matrix> qkv;  // [sequence][length, (heads + 2 kv_heads) * head_dim]
  std::vector<std::vector<std::int32_t>> tables;
  int blocks = 0;
  std::int32_t unowned;  // a block of no sequence
  float scale;
  int window = 0;
  float soft_cap = 0;
  std::vector<float> slopes, sinks;  // [heads], or empty
  std::vector<float> v_scales;       // [kv_heads], or empty; of an FP8 cache
  int quant_bits = 0;
  std::vector<Matrix> unquantised;  // original qkv, if qkv holds the values of a quantised cache

  World(Random& random, const AttentionShape& s, DType t, std::vector<int> sequence_lengths)
      : shape(s),
        type(t),
        lengths(std::move(sequence_lengths)),
        scale(1.3F / std::sqrt(static_cast<float>(s.head_dim))) {
    for (const int n : lengths) {
      qkv.push_back(Matrix::random(random, type, n, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, 1, 8));
      blocks += static_cast<int>(divide_up(n, shape.block_len));
    }
    std::vector<std::int32_t> free(static_cast<std::size_t>(blocks += 2));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    for (const int n : lengths) {
      const auto needed = divide_up(n, shape.block_len);
      tables.emplace_back(free.end() - needed, free.end());
      free.resize(free.size() - static_cast<std::size_t>(needed));
    }
    unowned = free.front();
  }

  // Bit 0 of `kinds` sets a window, bit 1 a soft cap, bit 2 slopes, bit 3 sinks.
  void weigh(Random& random, int kinds, int max_window) {
    if ((kinds & 1) != 0) window = uniform(random, 1, max_window);
    if ((kinds & 2) != 0) soft_cap = 0.5F + static_cast<float>(uniform(random, 0, 100)) / 25;
    for (int h = 0; (kinds & 4) != 0 && h < shape.heads; ++h) slopes.push_back(std::exp2(-static_cast<float>(h + 1)));
    for (int h = 0; (kinds & 8) != 0 && h < shape.heads; ++h) {
      sinks.push_back(h % 5 == 4 ? 100.0F : 5 * std::cos(static_cast<float>(h)));  // 100: keys get no weight
    }
  }

  // Gives an FP8 cache scales of v.
  void scale_values() {
    for (int h = 0; quant_bits == ops::kKvFp8 && h < shape.kv_heads; ++h) {
      v_scales.push_back(0.3F * static_cast<float>(h + 1));
    }
  }

  // Quantises the cache: k and v become the values that are read from it, rounded to their type.
  void quantise(int bits) {
    quant_bits = bits;
    unquantised = qkv;
    for (std::size_t s = 0; s < qkv.size(); ++s) {
      for (int position = 0; position < lengths[s]; ++position) {
        for (int h = 0; h < 2 * shape.kv_heads; ++h) {
          const auto head = stored(s, position, h);
          for (int d = 0; d < shape.head_dim; ++d) {
            qkv[s].set(position, (shape.heads + h) * shape.head_dim + d, static_cast<float>(head.value(d)));
          }
        }
      }
    }
  }
  ops::QuantisedHead stored(std::size_t sequence, int position, int kv_head) const {
    std::vector<float> x;
    for (int d = 0; d < shape.head_dim; ++d) {
      x.push_back(unquantised[sequence].at(position, (shape.heads + kv_head) * shape.head_dim + d));
    }
    return {x, quant_bits};
  }

  CacheLayer layer(void* data) const {
    return {data, type, shape.kv_heads, shape.head_dim, shape.block_len, quant_bits};
  }

  // The first position in the blocks of a sequence whose rows from `position` on are computed.
  int first_stored(int position) const {
    return window == 0 ? 0 : std::max(0, position - window + 1) / shape.block_len * shape.block_len;
  }

  // The cache after the rows of `chunks` are stored. Data beyond them or in blocks before the window is NaN, or has NaN
  // as its zero.
  std::vector<std::byte> cache(const Chunks& chunks) const {
    const auto there = layer(nullptr);
    std::vector<std::byte> out(static_cast<std::size_t>(there.block_bytes() * blocks), std::byte{0xff});
    for (const auto& chunk : chunks) {
      const auto s = static_cast<std::size_t>(chunk.sequence);
      for (int position = first_stored(chunk.begin); position < chunk.end; ++position) {
        const auto block = tables[s][static_cast<std::size_t>(position / shape.block_len)];
        const int slot = position % shape.block_len;
        for (int h = 0; h < 2 * shape.kv_heads; ++h) {
          if (quant_bits != 0) {
            write_head(out, there, block, h, slot, stored(s, position, h));
          } else {
            const auto size = size_of(type), from = static_cast<std::size_t>(position * qkv[s].stride) +
                                                    static_cast<std::size_t>((shape.heads + h) * shape.head_dim);
            std::memcpy(out.data() + static_cast<std::size_t>(there.k_at(block, h, slot)) * size,
                        qkv[s].bytes.data() + from * size, static_cast<std::size_t>(shape.head_dim) * size);
          }
        }
      }
    }
    return out;
  }

  struct Options {
    DType q_type, out_type;
    int sms = 6;
    bool reproducible = false;
    bool plan_of_all = false;  // the step's items are also made for layers without a window
    int padding = 0;           // rows
    bool repeat = false;       // first runs the same into another output: the counters must be zero again
    int q_gap = 0;             // additional elements between rows of q, besides a head; aligned to 16 bytes or not
    bool plain = false;        // the kernel that does not round probabilities
    bool wgmma = false;        // the kernel with products of warpgroups takes the prefill items
  };
  Options options() const { return {type, type}; }

  Matrix run(const Chunks& chunks, const Options& options) const {
    auto device = device_info(0);
    auto used = shape;
    device.sms = used.sms = options.sms;
    used.reproducible = options.reproducible;
    used.window = options.plan_of_all ? 0 : window;
    used.wgmma = options.wgmma;

    std::vector<std::int32_t> starts = {0}, positions, flat, begin;
    int last = 0;
    for (const auto& chunk : chunks) {
      for (int i = chunk.begin; i < chunk.end; ++i) positions.push_back(i);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
      begin.push_back(static_cast<std::int32_t>(flat.size()));
      const auto& table = tables[static_cast<std::size_t>(chunk.sequence)];
      flat.insert(flat.end(), table.begin(), table.begin() + divide_up(chunk.end, shape.block_len));
      std::fill_n(flat.begin() + begin.back(), first_stored(chunk.begin) / shape.block_len, unowned);
      flat.push_back(1 << 28);
      last = std::max(last, chunk.end);
    }
    const auto rows = std::ssize(positions);
    Matrix q(options.q_type, rows + options.padding, qkv.front().cols, shape.head_dim + options.q_gap);
    std::ranges::fill(q.bytes, std::byte{0xff});  // NaN
    std::int64_t r = 0;
    for (const auto& chunk : chunks) {
      for (int i = chunk.begin; i < chunk.end; ++i, ++r) {
        for (int c = 0; c < shape.heads * shape.head_dim; ++c) {
          q.set(r, c, qkv[static_cast<std::size_t>(chunk.sequence)].at(i, c));
        }
      }
    }
    constexpr float kUntouched = 77;
    Matrix out(options.out_type, q.rows, shape.heads * shape.head_dim, 8);
    out.fill(kUntouched);

    AttentionPlan plan;
    plan_attention(used, {starts, positions, {}, 0}, begin, plan);
    const auto bounds = attention_bounds(used, static_cast<int>(rows), static_cast<int>(chunks.size()), last);
    if (used.wgmma && quant_bits != 0) {
      EXPECT_TRUE(widen_plan(used, std::numeric_limits<std::int64_t>::max(), plan, flat));
    }
    const std::vector<std::int32_t> counts = {static_cast<std::int32_t>(plan.decode.size()),
                                              static_cast<std::int32_t>(plan.prefill.size())};
    plan.decode.resize(static_cast<std::size_t>(bounds.decode_items), AttentionItem{.table = 1 << 28, .num_rows = 1});
    plan.prefill.resize(static_cast<std::size_t>(bounds.prefill_items), AttentionItem{.table = 1 << 28, .num_rows = 1});

    Stream stream;
    const DeviceArray<std::byte> cache_there(stream, cache(chunks));
    const MatrixOnDevice q_there(stream, q), out_there(stream, out), other(stream, out);
    const DeviceArray<AttentionItem> decode(stream, plan.decode), prefill(stream, plan.prefill);
    const DeviceArray<std::int32_t> counts_there(stream, counts), tables_there(stream, flat);
    const DeviceMemory workspace(attention_workspace_bytes(used, bounds));
    const auto wide_block = dequantised(layer(nullptr), nullptr).block_bytes();
    const DeviceMemory wide(static_cast<std::size_t>(plan.wide_blocks * wide_block));
    const AttentionWork work{.decode = decode.data(),
                             .prefill = prefill.data(),
                             .counts = counts_there.data(),
                             .max_decode = bounds.decode_items,
                             .max_prefill = bounds.prefill_items,
                             .block_tables = tables_there.data(),
                             .workspace = workspace.data(),
                             .max_partials = bounds.partials,
                             .num_blocks = blocks,
                             .wide = wide.data(),
                             .wide_at = plan.wide_at,
                             .wide_blocks = plan.wide_blocks};
    const DeviceArray<float> slopes_there(stream, slopes), sinks_there(stream, sinks), v_scales_there(stream, v_scales);
    const ops::AttentionParams how{.scale = scale,
                                   .window = window,
                                   .soft_cap = soft_cap,
                                   .alibi = slopes.empty() ? nullptr : slopes_there.data(),
                                   .sinks = sinks.empty() ? nullptr : sinks_there.data(),
                                   .v_scales = v_scales.empty() ? nullptr : v_scales_there.data()};
    const auto in_cache = layer(cache_there.data());
    if (options.repeat) attention(stream, device, other.tensor(), q_there.tensor(), in_cache, used, how, work);
    attention(stream, device, out_there.tensor(), q_there.tensor(), in_cache, used, how, work);
    auto result = out_there.host();
    for (std::int64_t row = rows; row < result.rows; ++row) EXPECT_TRUE(result.same_bits(row, out, row));
    return result;
  }

  // One head of one row in double.
  ops::AttentionReference::Result reference(int sequence, int position, int head) const {
    const auto& rows = qkv[static_cast<std::size_t>(sequence)];
    const auto vector = [&](int row, int of_head) {
      std::vector<double> out;
      for (int d = 0; d < shape.head_dim; ++d) out.push_back(rows.at(row, of_head * shape.head_dim + d));
      return out;
    };
    const int kv_head = head / shape.group(), k = shape.heads + kv_head;
    std::vector<std::vector<double>> keys, values;
    for (int p = window == 0 ? 0 : std::max(0, position - window + 1); p <= position; ++p) {
      keys.push_back(vector(p, k));
      values.push_back(vector(p, k + shape.kv_heads));
      for (auto& x : values.back()) x *= v_scales.empty() ? 1 : v_scales[static_cast<std::size_t>(kv_head)];
    }
    const double slope = slopes.empty() ? 0 : slopes[static_cast<std::size_t>(head)];
    ops::AttentionReference reference{scale, soft_cap, slope};
    if (!sinks.empty()) reference.sink = sinks[static_cast<std::size_t>(head)];
    return reference(vector(position, head), keys, values);
  }

  // Compares some heads of some rows with the reference, including the first and the last row of each chunk.
  void check(Random& random, const Chunks& chunks, const Matrix& out, bool plain) const {
    int row = 0;
    for (const auto& chunk : chunks) {
      const int rows = chunk.end - chunk.begin;
      for (int probe = 0; probe < 5; ++probe) {
        const int i = probe == 0 ? 0 : probe == 1 ? rows - 1 : uniform(random, 0, rows - 1);
        const int head = probe == 0 ? shape.heads - 1 : uniform(random, 0, shape.heads - 1);
        const auto expected = reference(chunk.sequence, chunk.begin + i, head);
        for (int d = 0; d < shape.head_dim; ++d) {
          const auto at = static_cast<std::size_t>(d);
          const double value = expected.out[at], size = std::abs(value) + expected.spread[at];
          const double bound = (4e-6 + (plain ? 0 : 2 * ops::rounding(type))) * size +
                               ops::rounding(out.dtype) * std::abs(value) + 1e-7;
          ASSERT_NEAR(out.at(row + i, head * shape.head_dim + d), value, bound)
              << "heads " << shape.heads << "/" << shape.kv_heads << " head size " << shape.head_dim << " block "
              << shape.block_len << ' ' << to_string(type) << " bits " << quant_bits << " window " << window << " cap "
              << soft_cap << " row " << i << " at " << chunk.begin + i << " head " << head;
        }
      }
      row += rows;
    }
  }
  void expect_reference(Random& random, const Chunks& chunks, const Options& options) const {
    in_both_orders([&] { check(random, chunks, run(chunks, options), options.plain); });
  }
};

// Prompt chunks, whole prompts and decodes.
inline Chunks random_chunks(Random& random, const std::vector<int>& lengths) {
  Chunks chunks;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const int end = lengths[s], kind = uniform(random, 0, 2);
    const int begin = kind == 0 ? end - 1 : kind == 1 ? 0 : uniform(random, 0, end - 1);
    chunks.push_back({static_cast<int>(s), begin, end});
  }
  std::shuffle(chunks.begin(), chunks.end(), random);
  return chunks;
}

}  // namespace charonia::cuda
