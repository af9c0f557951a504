// Sequences with random q, k and v, the device's attention over their blocks, and the expected result in double.
//
// Cache slots that a step must not read hold NaN, and so do padding rows. Block tables end with invalid blocks, and
// begin with invalid blocks before a window.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

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

// Sequences with random q, k and v in random blocks.
struct World {
  AttentionShape shape;
  DType type;
  std::vector<int> lengths;
  std::vector<Matrix> qkv;  // [sequence][length, (heads + 2 kv_heads) * head_dim]
  std::vector<std::vector<std::int32_t>> tables;
  int blocks = 0;
  float scale;
  int window = 0;
  float soft_cap = 0;
  std::vector<float> slopes;  // [heads], or empty
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
  }

  // Quantises the cache: k and v become the values that are read from it, rounded to their type.
  void quantise(int bits) {
    quant_bits = bits;
    unquantised = qkv;
    for (std::size_t s = 0; s < qkv.size(); ++s) {
      for (int position = 0; position < lengths[s]; ++position) {
        for (int h = 0; h < 2 * shape.kv_heads; ++h) {
          const auto head = stored(static_cast<int>(s), position, h);
          for (int d = 0; d < shape.head_dim; ++d) {
            qkv[s].set(position, (shape.heads + h) * shape.head_dim + d, static_cast<float>(head.value(d)));
          }
        }
      }
    }
  }
  QuantisedHead stored(int sequence, int position, int kv_head) const {
    std::vector<float> x;
    for (int d = 0; d < shape.head_dim; ++d) {
      x.push_back(
          unquantised[static_cast<std::size_t>(sequence)].at(position, (shape.heads + kv_head) * shape.head_dim + d));
    }
    return {x, quant_bits};
  }

  CacheLayer layer(void* data, DType cache_type) const {
    return {data, cache_type, shape.kv_heads, shape.head_dim, shape.block_len, quant_bits};
  }

  // Like cache(), quantised: data that must not be read has NaN as its zero.
  std::vector<std::byte> quantised_cache(const std::vector<Chunk>& chunks) const {
    const auto there = layer(nullptr, type);
    std::vector<std::byte> out(static_cast<std::size_t>(there.block_bytes() * blocks), std::byte{0xff});
    for (const auto& chunk : chunks) {
      for (int position = first_read(chunk.begin); position < chunk.end; ++position) {
        const auto block =
            tables[static_cast<std::size_t>(chunk.sequence)][static_cast<std::size_t>(position / shape.block_len)];
        for (int h = 0; h < 2 * shape.kv_heads; ++h) {
          write_head(out, there, block, h, position % shape.block_len, stored(chunk.sequence, position, h));
        }
      }
    }
    return out;
  }

  // The first position that is read for rows from `position` on.
  int first_read(int position) const {
    return window == 0 ? 0 : std::max(0, position - window + 1) / kAttentionTile * kAttentionTile;
  }

  // The cache after the rows of `chunks` are stored, without data beyond them or before the window.
  Matrix cache(const std::vector<Chunk>& chunks, DType cache_type) const {
    const int dim = shape.head_dim, kv_heads = shape.kv_heads;
    Matrix out(cache_type, std::int64_t{blocks} * 2 * kv_heads * shape.block_len, dim);
    for (std::int64_t r = 0; r < out.rows; ++r) {
      for (int d = 0; d < dim; ++d) out.set(r, d, std::numeric_limits<float>::quiet_NaN());
    }
    for (const auto& chunk : chunks) {
      const auto& rows = qkv[static_cast<std::size_t>(chunk.sequence)];
      for (int position = first_read(chunk.begin); position < chunk.end; ++position) {
        const auto block =
            tables[static_cast<std::size_t>(chunk.sequence)][static_cast<std::size_t>(position / shape.block_len)];
        for (int h = 0; h < 2 * kv_heads; ++h) {
          const auto to = (std::int64_t{block} * 2 * kv_heads + h) * shape.block_len + position % shape.block_len;
          for (int d = 0; d < dim; ++d) out.set(to, d, rows.at(position, (shape.heads + h) * dim + d));
        }
      }
    }
    return out;
  }

  struct Options {
    int sms = 6;
    bool reproducible = false;
    bool plan_of_all = false;  // the step's items are also made for layers without a window
    DType cache_type = DType::f32, q_type = DType::f32, out_type = DType::f32;
    int padding = 0;      // rows
    bool repeat = false;  // first runs the same into another output
    int q_gap = 0;        // additional elements between rows, aligned to 16 bytes or not
  };
  Options options() const {
    Options o;
    o.cache_type = o.q_type = o.out_type = type;
    return o;
  }

  Matrix run(const std::vector<Chunk>& chunks, const Options& options) const {
    auto device = device_info(0);
    auto used = shape;
    device.sms = used.sms = options.sms;
    used.reproducible = options.reproducible;
    used.window = options.plan_of_all ? 0 : window;

    std::vector<std::int32_t> starts = {0}, positions, flat, begin;
    int last = 0;
    for (const auto& chunk : chunks) {
      for (int i = chunk.begin; i < chunk.end; ++i) positions.push_back(i);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
      begin.push_back(static_cast<std::int32_t>(flat.size()));
      const auto& table = tables[static_cast<std::size_t>(chunk.sequence)];
      flat.insert(flat.end(), table.begin(), table.begin() + divide_up(chunk.end, shape.block_len));
      std::fill_n(flat.begin() + begin.back(), first_read(chunk.begin) / shape.block_len, 1 << 28);
      flat.push_back(1 << 28);
      last = std::max(last, chunk.end);
    }
    const auto rows = static_cast<std::int64_t>(positions.size());
    Matrix q(options.q_type, rows + options.padding, qkv.front().cols, 8 + options.q_gap);
    for (std::int64_t r = 0; r < q.rows; ++r) {
      for (std::int64_t c = 0; c < q.cols; ++c) q.set(r, c, std::numeric_limits<float>::quiet_NaN());
    }
    std::int64_t r = 0;
    for (const auto& chunk : chunks) {
      for (int i = chunk.begin; i < chunk.end; ++i, ++r) {
        for (int c = 0; c < shape.heads * shape.head_dim; ++c) {
          q.set(r, c, qkv[static_cast<std::size_t>(chunk.sequence)].at(i, c));
        }
      }
    }
    Matrix out(options.out_type, q.rows, shape.heads * shape.head_dim, 8);
    for (std::int64_t row = 0; row < out.rows; ++row) {
      for (std::int64_t c = 0; c < out.cols; ++c) out.set(row, c, kUntouched);
    }

    AttentionPlan plan;
    plan_attention(used, {starts, positions, {}, 0}, begin, plan);
    const auto bounds = attention_bounds(used, static_cast<int>(rows), static_cast<int>(chunks.size()), last);
    const std::vector<std::int32_t> counts = {static_cast<std::int32_t>(plan.decode.size()),
                                              static_cast<std::int32_t>(plan.prefill.size())};
    plan.decode.resize(static_cast<std::size_t>(bounds.decode_items), AttentionItem{.table = 1 << 28, .num_rows = 1});
    plan.prefill.resize(static_cast<std::size_t>(bounds.prefill_items), AttentionItem{.table = 1 << 28, .num_rows = 1});

    Stream stream;
    const DeviceArray<std::byte> cache_bytes(
        stream, quant_bits != 0 ? quantised_cache(chunks) : cache(chunks, options.cache_type).bytes);
    const MatrixOnDevice q_there(stream, q), out_there(stream, out);
    const DeviceArray<AttentionItem> decode(stream, plan.decode), prefill(stream, plan.prefill);
    const DeviceArray<std::int32_t> counts_there(stream, counts), tables_there(stream, flat);
    const DeviceMemory workspace(attention_workspace_bytes(used, bounds));
    const AttentionWork work{.decode = decode.data(),
                             .prefill = prefill.data(),
                             .counts = counts_there.data(),
                             .max_decode = bounds.decode_items,
                             .max_prefill = bounds.prefill_items,
                             .block_tables = tables_there.data(),
                             .workspace = workspace.data(),
                             .max_partials = bounds.partials};
    const DeviceArray<float> slopes_there(stream, slopes);
    const ops::AttentionParams how{.scale = scale,
                                   .window = window,
                                   .soft_cap = soft_cap,
                                   .alibi = slopes.empty() ? nullptr : slopes_there.data()};
    const auto in_cache = layer(cache_bytes.data(), options.cache_type);
    if (options.repeat) {
      const MatrixOnDevice other(stream, out);
      attention(stream, device, other.tensor(), q_there.tensor(), in_cache, used, how, work);
    }
    attention(stream, device, out_there.tensor(), q_there.tensor(), in_cache, used, how, work);
    auto result = out_there.host();
    for (std::int64_t row = rows; row < result.rows; ++row) {
      for (std::int64_t c = 0; c < result.cols; ++c) EXPECT_EQ(result.at(row, c), kUntouched);
    }
    return result;
  }

  // One head of one row in double, and the sum of the absolute values of its terms.
  struct Expected {
    std::vector<double> value, magnitude;
  };
  Expected reference(int sequence, int position, int head) const {
    const auto& rows = qkv[static_cast<std::size_t>(sequence)];
    const int dim = shape.head_dim, k = (shape.heads + head / shape.group()) * dim, v = k + shape.kv_heads * dim;
    std::vector<double> p;
    const int first = window == 0 ? 0 : std::max(0, position - window + 1);
    for (int i = first; i <= position; ++i) {
      double score = 0;
      for (int d = 0; d < dim; ++d) {
        score += static_cast<double>(rows.at(position, head * dim + d)) * static_cast<double>(rows.at(i, k + d));
      }
      score *= static_cast<double>(scale);
      if (soft_cap != 0) score = static_cast<double>(soft_cap) * std::tanh(score / static_cast<double>(soft_cap));
      if (!slopes.empty()) score += static_cast<double>(slopes[static_cast<std::size_t>(head)]) * (i - position);
      p.push_back(score);
    }
    const double maximum = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (auto& x : p) sum += x = std::exp(x - maximum);
    Expected out{std::vector<double>(static_cast<std::size_t>(dim)),
                 std::vector<double>(static_cast<std::size_t>(dim))};
    for (int i = first; i <= position; ++i) {
      for (std::size_t d = 0; d < out.value.size(); ++d) {
        const double x =
            p[static_cast<std::size_t>(i - first)] / sum * static_cast<double>(rows.at(i, v + static_cast<int>(d)));
        out.value[d] += x;
        out.magnitude[d] += std::abs(x);
      }
    }
    return out;
  }

  // Compares some heads of some rows with the reference, including the first and the last row of each chunk.
  void check(Random& random, const std::vector<Chunk>& chunks, const Matrix& out, double rounding_of_p,
             double rounding_of_out) const {
    int row = 0;
    for (const auto& chunk : chunks) {
      for (int probe = 0; probe < 5; ++probe) {
        const int i = probe == 0   ? 0
                      : probe == 1 ? chunk.end - chunk.begin - 1
                                   : uniform(random, 0, chunk.end - chunk.begin - 1);
        const int head = probe == 0 ? shape.heads - 1 : uniform(random, 0, shape.heads - 1);
        const auto expected = reference(chunk.sequence, chunk.begin + i, head);
        for (int d = 0; d < shape.head_dim; ++d) {
          const auto at = static_cast<std::size_t>(d);
          const double bound = 4e-6 * expected.magnitude[at] + 2 * rounding_of_p * expected.magnitude[at] +
                               rounding_of_out * std::abs(expected.value[at]) + 1e-7;
          ASSERT_NEAR(out.at(row + i, head * shape.head_dim + d), expected.value[at], bound)
              << "heads " << shape.heads << "/" << shape.kv_heads << " head size " << shape.head_dim << " block "
              << shape.block_len << ' ' << to_string(type) << " row " << i << " at " << chunk.begin + i << " head "
              << head;
        }
      }
      row += chunk.end - chunk.begin;
    }
  }

  // Sets a window, a soft cap, slopes: some of them, or all.
  void weigh(Random& random, int kinds, int max_window) {
    if ((kinds & 1) != 0) window = uniform(random, 1, max_window);
    if ((kinds & 2) != 0) soft_cap = 0.5F + static_cast<float>(uniform(random, 0, 100)) / 25;
    if ((kinds & 4) == 0) return;
    for (int h = 0; h < shape.heads; ++h) slopes.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / 8));
  }

  static constexpr float kUntouched = 77;
};

inline constexpr std::array kTiledDims = {32, 64, 96, 128, 256};
inline constexpr std::array kBlockLens = {1, 3, 16, 20, 64, 128, 300};
inline constexpr std::array kGroups = {1, 2, 3, 4, 5, 6, 7, 8, 16};

template <std::size_t n>
int one_of(Random& random, const std::array<int, n>& from) {
  return from[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(n) - 1))];
}

inline AttentionShape shape_of(int kv_heads, int group, int head_dim, int block_len) {
  return {.heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = head_dim, .block_len = block_len};
}

// Prompt chunks, whole prompts and decodes.
inline std::vector<Chunk> random_chunks(Random& random, const std::vector<int>& lengths) {
  std::vector<Chunk> chunks;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const int end = lengths[s], kind = uniform(random, 0, 2);
    const int begin = kind == 0 ? end - 1 : kind == 1 ? 0 : uniform(random, 0, end - 1);
    chunks.push_back({static_cast<int>(s), begin, end});
  }
  std::shuffle(chunks.begin(), chunks.end(), random);
  return chunks;
}

}  // namespace charonia::cuda
