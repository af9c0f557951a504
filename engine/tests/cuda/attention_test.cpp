// Attention over blocks on the device against double precision, and what its bits may depend on.
//
// The slots of the cache that a step must not read hold NaN, and so do padding rows; tables end with blocks that do not
// exist, and begin with such where a window has left them behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "device_arrays.h"
#include "ops/cuda/kernels/attention.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "ops/cuda/kernels/attention_tile.h"
#endif
#include "ops_support.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;
using ops::Random;
using ops::uniform;

struct Piece {
  int sequence, begin, end;  // rows at positions [begin, end)
};

// Sequences with random q, k and v in blocks that lie anywhere.
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
  std::vector<float> slopes;  // [heads], or none

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

  // The first position that is read for rows from `position` on.
  int first_read(int position) const {
    return window == 0 ? 0 : std::max(0, position - window + 1) / kAttentionTile * kAttentionTile;
  }

  // As the cache is when the rows of `pieces` are in it, and nothing beyond or before the window.
  Matrix cache(const std::vector<Piece>& pieces, DType cache_type) const {
    const int dim = shape.head_dim, kv_heads = shape.kv_heads;
    Matrix out(cache_type, std::int64_t{blocks} * 2 * kv_heads * shape.block_len, dim);
    for (std::int64_t r = 0; r < out.rows; ++r) {
      for (int d = 0; d < dim; ++d) out.set(r, d, std::numeric_limits<float>::quiet_NaN());
    }
    for (const auto& piece : pieces) {
      const auto& rows = qkv[static_cast<std::size_t>(piece.sequence)];
      for (int position = first_read(piece.begin); position < piece.end; ++position) {
        const auto block =
            tables[static_cast<std::size_t>(piece.sequence)][static_cast<std::size_t>(position / shape.block_len)];
        for (int h = 0; h < 2 * kv_heads; ++h) {
          const auto to = (std::int64_t{block} * 2 * kv_heads + h) * shape.block_len + position % shape.block_len;
          for (int d = 0; d < dim; ++d) out.set(to, d, rows.at(position, (shape.heads + h) * dim + d));
        }
      }
    }
    return out;
  }

  struct Options {
    int multiprocessors = 6;
    bool reproducible = false;
    bool plan_of_all = false;  // the step's items are made for layers without a window, too
    DType cache_type = DType::f32, q_type = DType::f32, out_type = DType::f32;
    int padding = 0;      // rows
    bool repeat = false;  // the same into another out before
    int q_gap = 0;        // elements more from row to row: 16 bytes or not
  };
  Options options() const {
    Options o;
    o.cache_type = o.q_type = o.out_type = type;
    return o;
  }

  Matrix run(const std::vector<Piece>& pieces, const Options& options) const {
    auto device = device_info(0);
    auto used = shape;
    device.multiprocessors = used.multiprocessors = options.multiprocessors;
    used.reproducible = options.reproducible;
    used.window = options.plan_of_all ? 0 : window;

    std::vector<std::int32_t> starts = {0}, positions, flat, begin;
    int last = 0;
    for (const auto& piece : pieces) {
      for (int i = piece.begin; i < piece.end; ++i) positions.push_back(i);
      starts.push_back(static_cast<std::int32_t>(positions.size()));
      begin.push_back(static_cast<std::int32_t>(flat.size()));
      const auto& table = tables[static_cast<std::size_t>(piece.sequence)];
      flat.insert(flat.end(), table.begin(), table.begin() + divide_up(piece.end, shape.block_len));
      std::fill_n(flat.begin() + begin.back(), first_read(piece.begin) / shape.block_len, 1 << 28);
      flat.push_back(1 << 28);
      last = std::max(last, piece.end);
    }
    const auto rows = static_cast<std::int64_t>(positions.size());
    Matrix q(options.q_type, rows + options.padding, qkv.front().cols, 8 + options.q_gap);
    for (std::int64_t r = 0; r < q.rows; ++r) {
      for (std::int64_t c = 0; c < q.cols; ++c) q.set(r, c, std::numeric_limits<float>::quiet_NaN());
    }
    std::int64_t r = 0;
    for (const auto& piece : pieces) {
      for (int i = piece.begin; i < piece.end; ++i, ++r) {
        for (int c = 0; c < shape.heads * shape.head_dim; ++c) {
          q.set(r, c, qkv[static_cast<std::size_t>(piece.sequence)].at(i, c));
        }
      }
    }
    Matrix out(options.out_type, q.rows, shape.heads * shape.head_dim, 8);
    for (std::int64_t row = 0; row < out.rows; ++row) {
      for (std::int64_t c = 0; c < out.cols; ++c) out.set(row, c, kUntouched);
    }

    AttentionPlan plan;
    plan_attention(used, {starts, positions, {}, 0}, begin, plan);
    const auto bounds = attention_bounds(used, static_cast<int>(rows), static_cast<int>(pieces.size()), last);
    const std::vector<std::int32_t> counts = {static_cast<std::int32_t>(plan.decode.size()),
                                              static_cast<std::int32_t>(plan.prefill.size())};
    plan.decode.resize(static_cast<std::size_t>(bounds.decode_items), AttentionItem{.table = 1 << 28, .num_rows = 1});
    plan.prefill.resize(static_cast<std::size_t>(bounds.prefill_items), AttentionItem{.table = 1 << 28, .num_rows = 1});

    Stream stream;
    const DeviceArray<std::byte> cache_bytes(stream, cache(pieces, options.cache_type).bytes);
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
    const CacheLayer layer{cache_bytes.data(), options.cache_type, shape.kv_heads, shape.head_dim, shape.block_len};
    if (options.repeat) {
      const MatrixOnDevice other(stream, out);
      attention(stream, device, other.tensor(), q_there.tensor(), layer, used, how, work);
    }
    attention(stream, device, out_there.tensor(), q_there.tensor(), layer, used, how, work);
    auto result = out_there.host();
    for (std::int64_t row = rows; row < result.rows; ++row) {
      for (std::int64_t c = 0; c < result.cols; ++c) EXPECT_EQ(result.at(row, c), kUntouched);
    }
    return result;
  }

  // One head of one row in double, and the sum of what was added up in it, without signs.
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
    const double greatest = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (auto& x : p) sum += x = std::exp(x - greatest);
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

  // Holds a few heads of a few rows, the first and the last of each piece among them, against the reference.
  void check(Random& random, const std::vector<Piece>& pieces, const Matrix& out, double rounding_of_p,
             double rounding_of_out) const {
    int row = 0;
    for (const auto& piece : pieces) {
      for (int probe = 0; probe < 5; ++probe) {
        const int i = probe == 0   ? 0
                      : probe == 1 ? piece.end - piece.begin - 1
                                   : uniform(random, 0, piece.end - piece.begin - 1);
        const int head = probe == 0 ? shape.heads - 1 : uniform(random, 0, shape.heads - 1);
        const auto expected = reference(piece.sequence, piece.begin + i, head);
        for (int d = 0; d < shape.head_dim; ++d) {
          const auto at = static_cast<std::size_t>(d);
          const double bound = 4e-6 * expected.magnitude[at] + 2 * rounding_of_p * expected.magnitude[at] +
                               rounding_of_out * std::abs(expected.value[at]) + 1e-7;
          ASSERT_NEAR(out.at(row + i, head * shape.head_dim + d), expected.value[at], bound)
              << "heads " << shape.heads << "/" << shape.kv_heads << " head size " << shape.head_dim << " block "
              << shape.block_len << ' ' << to_string(type) << " row " << i << " at " << piece.begin + i << " head "
              << head;
        }
      }
      row += piece.end - piece.begin;
    }
  }

  // A window, a soft cap, slopes: some of them, or all.
  void weigh(Random& random, int kinds, int most_window) {
    if ((kinds & 1) != 0) window = uniform(random, 1, most_window);
    if ((kinds & 2) != 0) soft_cap = 0.5F + static_cast<float>(uniform(random, 0, 100)) / 25;
    if ((kinds & 4) == 0) return;
    for (int h = 0; h < shape.heads; ++h) slopes.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / 8));
  }

  static constexpr float kUntouched = 77;
};

constexpr std::array kTiledDims = {32, 64, 96, 128, 256};
constexpr std::array kBlockLens = {1, 3, 16, 20, 64, 128, 300};
constexpr std::array kGroups = {1, 2, 3, 4, 5, 6, 7, 8, 16};

template <std::size_t n>
int one_of(Random& random, const std::array<int, n>& from) {
  return from[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(n) - 1))];
}

AttentionShape shape_of(int kv_heads, int group, int head_dim, int block_len) {
  return {.heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = head_dim, .block_len = block_len};
}

// Chunks of prompts, whole prompts and decodes.
std::vector<Piece> random_pieces(Random& random, const std::vector<int>& lengths) {
  std::vector<Piece> pieces;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    const int end = lengths[s], kind = uniform(random, 0, 2);
    const int begin = kind == 0 ? end - 1 : kind == 1 ? 0 : uniform(random, 0, end - 1);
    pieces.push_back({static_cast<int>(s), begin, end});
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

#if defined(CHARONIA_CUDA_ON_HOST)
template <int kUnits>
void check_layout() {
  std::vector<int> uses(64 * kUnits, 0);
  for (int row = 0; row < 64; ++row) {
    for (int unit = 0; unit < kUnits; ++unit)
      ++uses.at(static_cast<std::size_t>(unit_offset<kUnits>(row, unit) / kUnitBytes));
  }
  EXPECT_EQ(std::count(uses.begin(), uses.end(), 1), 64 * kUnits) << "a place for every unit";
  const auto bank = [](int offset) { return 1U << offset / kUnitBytes % 8; };
  for (int row = 0; row < 64; row += 8) {
    for (int unit = 0; unit < kUnits; ++unit) {
      unsigned banks = 0;
      for (int i = 0; i < 8; ++i) banks |= bank(unit_offset<kUnits>(row + i, unit));
      EXPECT_EQ(banks, 0xffU) << "a matrix of 8 rows: " << row << ' ' << unit;
    }
  }
  for (int first = 0; first < 64 * kUnits; first += 8) {
    unsigned banks = 0;
    for (int i = first; i < first + 8; ++i) banks |= bank(unit_offset<kUnits>(i / kUnits, i % kUnits));
    EXPECT_EQ(banks, 0xffU) << "a copy of 8 units from " << first;
  }
  for (int row = 0; row < 8; ++row) {
    for (int by = 0; by < kUnits; by += 4) {
      for (int unit = 0; unit < 4; ++unit) {
        EXPECT_EQ(unit_offset_by<kUnits>(unit_offset<kUnits>(row, unit), by), unit_offset<kUnits>(row, unit + by));
      }
    }
    for (int by = 0; by < kUnits; by += 2) {
      for (int unit = 0; unit < 2; ++unit) {
        EXPECT_EQ(unit_offset_by<kUnits>(unit_offset<kUnits>(row, unit), by), unit_offset<kUnits>(row, unit + by));
      }
    }
  }
}

TEST(CudaAttentionTest, tiles_in_shared_memory_have_no_bank_conflicts) {
  check_layout<4>();
  check_layout<8>();
  check_layout<12>();
  check_layout<16>();
  check_layout<32>();
}
#endif

TEST(CudaAttentionTest, mixed_steps_equal_attention_in_double) {
  Random random(1);
  for (int trial = 0; trial < 20; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)];
    const World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)),
                      type, {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 60, 200)});
    const auto pieces = random_pieces(random, world.lengths);
    auto options = world.options();
    options.padding = trial % 3;
    in_both_orders([&] {
      const auto out = world.run(pieces, options);
      world.check(random, pieces, out, ops::rounding(type), ops::rounding(type));
    });
  }
}

// Thread blocks then take many short units in turn, and copies run ahead over several of them.
TEST(CudaAttentionTest, decodes_of_many_sequences_by_few_thread_blocks_are_right) {
  Random random(9);
  for (const int dim : kTiledDims) {
    std::vector<int> lengths;
    std::vector<Piece> pieces;
    for (int s = 0; s < 14; ++s) {
      lengths.push_back(s % 3 == 0 ? uniform(random, 1, 200) : uniform(random, 1, 64));
      pieces.push_back({s, lengths.back() - 1, lengths.back()});
    }
    const World world(random, shape_of(2, 2, dim, 24), DType::bf16, lengths);
    auto options = world.options();
    options.multiprocessors = 1;
    in_both_orders([&] {
      const auto out = world.run(pieces, options);
      world.check(random, pieces, out, ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    });
  }
}

TEST(CudaAttentionTest, groups_that_no_tile_holds_are_right) {
  Random random(2);
  for (const int group : {17, 40, 71, 130}) {
    const World world(random, shape_of(1, group, 32, 16), DType::bf16, {70, 34});
    const std::vector<Piece> pieces = {{0, 69, 70}, {1, 30, 34}};
    world.check(random, pieces, world.run(pieces, world.options()), ops::rounding(DType::bf16),
                ops::rounding(DType::bf16));
  }
}

TEST(CudaAttentionTest, rows_whose_positions_are_cut_into_pieces_are_right) {
  Random random(3);
  for (const bool reproducible : {false, true}) {
    for (const int dim : {32, 64, 256}) {
      const World world(random, shape_of(1, 3, dim, 20), DType::bf16, {1100, 700});
      const std::vector<Piece> pieces = {{0, 1099, 1100}, {1, 699, 700}};
      auto options = world.options();
      options.multiprocessors = 132;
      options.reproducible = reproducible;
      options.repeat = true;  // the counters must be left as they were
      world.check(random, pieces, world.run(pieces, options), ops::rounding(DType::bf16), ops::rounding(DType::bf16));
    }
    const World world(random, shape_of(1, 2, 32, 64), DType::f16, {1300});
    const std::vector<Piece> pieces = {{0, 1180, 1300}};
    auto options = world.options();
    options.multiprocessors = 132;
    options.reproducible = reproducible;
    options.repeat = true;
    in_both_orders([&] {
      world.check(random, pieces, world.run(pieces, options), ops::rounding(DType::f16), ops::rounding(DType::f16));
    });
  }
}

// How the sequence came: cut into steps of any sizes, beside other sequences, on devices that cut its positions or not.
TEST(CudaAttentionTest, reproducible_neither_chunks_nor_batch_nor_cuts_change_a_bit) {
  Random random(4);
  for (const int trial : {0, 1, 2}) {
    const int dim = trial == 0 ? 64 : trial == 1 ? 32 : 256;
    const int n = trial == 0 ? 1150 : 560;
    const World world(random, shape_of(1, trial == 1 ? 5 : 2, dim, trial == 1 ? 64 : 21), DType::bf16, {n, 90, 30});
    auto options = world.options();
    options.reproducible = true;
    options.multiprocessors = 1;
    const int begin = n - 60;  // rows before are computed by others
    const auto whole = world.run({{0, begin, n}}, options);
    for (int at = begin; at < n;) {
      const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
      options.multiprocessors = at % 2 == 0 ? 132 : 1;
      const auto out = world.run({{1, 20, 21 + at % 60}, {0, at, end}, {2, 29, 30}}, options);
      for (int i = at; i < end; ++i) {
        ASSERT_TRUE(whole.same_bits(i - begin, out, 1 + at % 60 + i - at)) << "head size " << dim << " position " << i;
      }
      at = end;
    }
    // Decodes, cut and not.
    for (const int position : {begin, n - 1}) {
      for (const int multiprocessors : {1, 132}) {
        options.multiprocessors = multiprocessors;
        const auto out = world.run({{0, position, position + 1}}, options);
        ASSERT_TRUE(whole.same_bits(position - begin, out, 0)) << "head size " << dim << " decode at " << position;
      }
      // Among so many, none is worth cutting.
      options.multiprocessors = 1;
      const auto out = world.run(std::vector<Piece>(6, {0, position, position + 1}), options);
      for (int copy = 0; copy < 6; ++copy) {
        ASSERT_TRUE(whole.same_bits(position - begin, out, copy)) << "head size " << dim << " decode at " << position;
      }
    }
  }
}

TEST(CudaAttentionTest, uncut_decodes_have_the_bits_of_prefills_in_any_mode) {
  Random random(5);
  for (const int dim : kTiledDims) {
    const World world(random, shape_of(1, 4, dim, 16), dim == 96 ? DType::f16 : DType::bf16, {150});
    const auto whole = world.run({{0, 100, 150}}, world.options());
    for (const int position : {100, 127, 128, 149}) {
      ASSERT_TRUE(whole.same_bits(position - 100, world.run({{0, position, position + 1}}, world.options()), 0))
          << "head size " << dim << " position " << position;
    }
  }
}

TEST(CudaAttentionTest, any_head_size_and_element_types_are_right_in_float) {
  Random random(6);
  constexpr std::array kDims = {2, 16, 48, 80, 128};
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
  for (int trial = 0; trial < 12; ++trial) {
    const World world(random, shape_of(2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kBlockLens)),
                      kTypes[static_cast<std::size_t>(trial % 3)], {uniform(random, 1, 70), uniform(random, 30, 150)});
    auto options = world.options();
    // Values stand in q and out's type without another rounding when that is float.
    options.out_type = trial % 2 == 0 ? DType::f32 : DType::bf16;
    if (trial % 4 == 0) options.q_type = DType::f32;
    options.q_gap = trial % 5;
    const auto pieces = random_pieces(random, world.lengths);
    in_both_orders([&] {
      world.check(random, pieces, world.run(pieces, options), 0,
                  options.out_type == DType::f32 ? 0 : ops::rounding(options.out_type));
    });
  }
}

TEST(CudaAttentionTest, the_plain_kernel_does_not_depend_on_chunks_or_batch_or_cuts) {
  Random random(7);
  const World world(random, shape_of(1, 2, 40, 20), DType::f32, {1030, 20});
  auto options = world.options();
  const auto whole = world.run({{0, 1000, 1030}}, options);
  options.multiprocessors = 132;
  ASSERT_TRUE(whole.same_bits(29, world.run({{1, 3, 20}, {0, 1029, 1030}}, options), 17));
  ASSERT_TRUE(whole.same_bits(12, world.run({{0, 1012, 1014}}, options), 0));
}

TEST(CudaAttentionTest, windows_caps_and_slopes_equal_attention_in_double) {
  Random random(10);
  for (int trial = 0; trial < 28; ++trial) {
    const auto type = trial % 2 == 0 ? DType::bf16 : DType::f16;
    const int dim = kTiledDims[static_cast<std::size_t>(trial % 5)];
    World world(random, shape_of(dim < 128 ? 2 : 1, one_of(random, kGroups), dim, one_of(random, kBlockLens)), type,
                {uniform(random, 1, 40), uniform(random, 1, 150), uniform(random, 100, 300)});
    world.weigh(random, 1 + trial % 7, trial % 3 == 0 ? 200 : 70);
    const auto pieces = random_pieces(random, world.lengths);
    auto options = world.options();
    options.padding = trial % 3;
    options.plan_of_all = trial % 2 == 0;
    in_both_orders([&] {
      const auto out = world.run(pieces, options);
      world.check(random, pieces, out, ops::rounding(type), ops::rounding(type));
    });
  }
}

TEST(CudaAttentionTest, windows_caps_and_slopes_are_right_in_the_plain_kernel) {
  Random random(11);
  constexpr std::array kDims = {2, 16, 80, 128};
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
  for (int trial = 0; trial < 21; ++trial) {
    World world(random, shape_of(2, one_of(random, kGroups), one_of(random, kDims), one_of(random, kBlockLens)),
                kTypes[static_cast<std::size_t>(trial % 3)], {uniform(random, 1, 70), uniform(random, 100, 200)});
    world.weigh(random, 1 + trial % 7, 80);
    auto options = world.options();
    options.out_type = DType::f32;
    options.q_type = DType::f32;
    options.plan_of_all = trial % 2 == 0;
    const auto pieces = random_pieces(random, world.lengths);
    in_both_orders([&] { world.check(random, pieces, world.run(pieces, options), 0, 0); });
  }
}

// Many short units in turn, of which some are pieces that lie before the window: they keep copies and products in step.
TEST(CudaAttentionTest, cut_rows_in_a_window_are_right) {
  Random random(12);
  for (const bool reproducible : {false, true}) {
    for (const bool plan_of_all : {false, true}) {
      for (const int dim : {64, 256}) {
        World world(random, shape_of(1, 3, dim, 20), DType::bf16, {1400, 1100, 50});
        world.window = dim == 64 ? 700 : 90;
        const std::vector<Piece> pieces = {{0, 1399, 1400}, {1, 1099, 1100}, {2, 49, 50}};
        auto options = world.options();
        options.multiprocessors = 132;
        options.reproducible = reproducible;
        options.plan_of_all = plan_of_all;
        options.repeat = true;
        world.check(random, pieces, world.run(pieces, options), ops::rounding(DType::bf16), ops::rounding(DType::bf16));
      }
      World world(random, shape_of(1, 2, 32, 64), DType::f16, {1700});
      world.window = plan_of_all ? 100 : 1100;
      const std::vector<Piece> pieces = {{0, 1590, 1700}};
      auto options = world.options();
      options.multiprocessors = 132;
      options.reproducible = reproducible;
      options.plan_of_all = plan_of_all;
      options.repeat = true;
      in_both_orders([&] {
        world.check(random, pieces, world.run(pieces, options), ops::rounding(DType::f16), ops::rounding(DType::f16));
      });
    }
  }
}

TEST(CudaAttentionTest, reproducible_neither_cuts_nor_the_widest_window_of_a_step_change_a_bit) {
  Random random(13);
  for (const int trial : {0, 1, 2, 3}) {
    const int n = 1180, begin = n - 50;
    World world(random,
                shape_of(1, trial == 1 ? 5 : 2,
                         trial == 2   ? 256
                         : trial == 1 ? 32
                                      : 64,
                         21),
                DType::bf16, {n, 90});
    world.window = trial == 3 ? 0 : std::array{600, 530, 77}[static_cast<std::size_t>(trial)];
    if (trial != 0) {
      world.soft_cap = 2;
      world.slopes.assign(static_cast<std::size_t>(world.shape.heads), 0.01F);
    }
    auto options = world.options();
    options.reproducible = true;
    options.multiprocessors = 1;
    const auto whole = world.run({{0, begin, n}}, options);
    for (int at = begin; at < n;) {
      const int end = std::min(n, at + (at == begin ? 1 : uniform(random, 1, 40)));
      options.multiprocessors = at % 2 == 0 ? 132 : 1;
      options.plan_of_all = at % 3 == 0;
      const auto out = world.run({{1, 20, 40}, {0, at, end}}, options);
      for (int i = at; i < end; ++i) ASSERT_TRUE(whole.same_bits(i - begin, out, 20 + i - at)) << trial << ' ' << i;
      at = end;
    }
    for (const int position : {begin, n - 17, n - 1}) {
      for (const int multiprocessors : {1, 132}) {
        for (const bool plan_of_all : {false, true}) {
          options.multiprocessors = multiprocessors;
          options.plan_of_all = plan_of_all;
          const auto out = world.run({{0, position, position + 1}}, options);
          ASSERT_TRUE(whole.same_bits(position - begin, out, 0)) << trial << " decode at " << position;
        }
      }
    }
  }
}

// A window that nothing is outside of goes through the other version of the kernels.
TEST(CudaAttentionTest, a_window_of_everything_changes_no_bit) {
  Random random(14);
  for (const int dim : {64, 80}) {
    World world(random, shape_of(1, 4, dim, 16), DType::bf16, {150, 70});
    const std::vector<Piece> pieces = {{0, 100, 150}, {1, 69, 70}};
    const auto plain = world.run(pieces, world.options());
    world.window = 150;
    const auto windowed = world.run(pieces, world.options());
    for (int row = 0; row < 51; ++row) ASSERT_TRUE(plain.same_bits(row, windowed, row)) << dim;
  }
}

// Rows of q that 16-byte copies cannot reach go to the plain kernel.
TEST(CudaAttentionTest, unaligned_rows_are_right) {
  Random random(8);
  const World world(random, shape_of(1, 2, 64, 16), DType::bf16, {40});
  auto options = world.options();
  options.q_gap = 3;
  const std::vector<Piece> pieces = {{0, 20, 40}};
  world.check(random, pieces, world.run(pieces, options), 0, ops::rounding(DType::bf16));
}

}  // namespace
}  // namespace charonia::cuda
