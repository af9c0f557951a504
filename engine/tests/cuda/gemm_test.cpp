// The built-in GEMMs with every tactic, compared with sums in double precision.
#include "ops/cuda/kernels/gemm.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda/gemm_problem.h"
#include "ops/cuda/kernels/gemm_params.h"
#include "ops/cuda/kernels/rows.h"

#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_grid.h"
#endif

namespace charonia::cuda {
namespace {

std::string describe(const Case& c, const GemmTactic& tactic) {
  return cat(to_string(c.type), " -> ", to_string(c.out_type), " rows ", c.rows, " n ", c.n, " k ", c.k, " gaps ",
             c.in_gap, " ", c.out_gap, c.packed ? " packed" : "", " offsets ", c.in_offset, " ", c.out_offset,
             ": kernel ", static_cast<int>(tactic.kernel), " ", tactic.tile_rows, " x ", tactic.tile_columns,
             " stages ", tactic.stages, " blocks ", tactic.k_blocks, " sums ", static_cast<int>(tactic.sums));
}

// All tactics of a weight's GEMMs for any number of rows.
std::vector<GemmTactic> all_tactics(const Gemm& gemm, SumOrder order = SumOrder::fixed) {
  std::vector<GemmTactic> all;
  for (const std::int64_t rows : {1, 8, 16, 32, 64, 128, 512, 100000}) {
    auto one = gemm;
    one.rows = rows;
    for (const auto& tactic : gemm_tactics(device_info(0), one, order)) {
      if (std::ranges::find(all, tactic) == all.end()) all.push_back(tactic);
    }
  }
  return all;
}

class BothOrders : public testing::Test {
 protected:
  template <class Body>
  static void in_both_orders(const Body& body) {
#if defined(CHARONIA_CUDA_ON_HOST)
    for (const auto order : {host_grid::Order::descending, host_grid::Order::ascending}) {
      host_grid::set_order(order);
      body();
    }
#else
    body();
#endif
  }
};

using GemmTest = BothOrders;

TEST(GemmPlanTest, parts_cover_k_and_depend_only_on_k) {
  for (std::int64_t k = 1; k < 20000; k += k < 3000 ? 1 : 97) {
    const auto split = split_k(k);
    ASSERT_GE(split.parts, 1);
    ASSERT_LE(split.parts, kMaxKParts);
    ASSERT_EQ(split.length % kKGrain, 0);
    ASSERT_GE(split.parts * split.length, k);
    ASSERT_LT((split.parts - 1) * split.length, k) << "the last part is not empty";
  }
  EXPECT_EQ(split_k(4096).parts, 8);
  EXPECT_EQ(split_k(4096).length, 512);
}

TEST(GemmPlanTest, every_tile_has_its_block) {
  for (const int rows : {1, 2, 15, 16, 17, 40, 64}) {
    for (const int columns : {1, 3, 32}) {
      std::set<std::pair<int, int>> seen;
      for (int i = 0; i < rows * columns; ++i) {
        const auto place = tile_place(i, rows, columns);
        ASSERT_TRUE(place.row_tile >= 0 && place.row_tile < rows && place.column_tile >= 0 &&
                    place.column_tile < columns);
        seen.emplace(place.row_tile, place.column_tile);
      }
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(rows * columns));
    }
  }
}

TEST(GemmPlanTest, tactics_are_distinct_and_fill_the_device_if_possible) {
  DeviceInfo h200 = device_info(0);
  h200.sms = 132;
  h200.shared_bytes = std::size_t{227} << 10;
  for (const std::int64_t rows : {1, 4, 8, 16, 17, 32, 64, 65, 256, 257, 8192}) {
    for (const auto& [n, k] :
         {std::pair<std::int64_t, std::int64_t>{4096, 4096}, {12288, 4096}, {4096, 11008}, {32000, 4096}}) {
      const Gemm gemm{.type = DType::bf16, .rows = rows, .n = n, .k = k};
      const auto any = gemm_tactics(h200, gemm, SumOrder::any);
      for (std::size_t i = 0; i < any.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(any[i] == any[j]);
      }
      const auto tactics = gemm_tactics(h200, gemm);
      ASSERT_FALSE(tactics.empty());
      for (std::size_t i = 0; i < tactics.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(tactics[i] == tactics[j]);
      }
      if (tactics[0].kernel == GemmTactic::Kernel::tile) {
        EXPECT_GE(divide_up(rows, tactics[0].tile_rows) * divide_up(n, tactics[0].tile_columns) * tactics[0].k_blocks,
                  128)
            << "rows " << rows << " n " << n << " k " << k;
      }
    }
  }
}

TEST(GemmPlanTest, sums_of_blocks_are_combined_in_a_cluster_or_the_workspace) {
  using Sums = GemmTactic::Sums;
  DeviceInfo h200 = device_info(0), a100 = device_info(0);
  h200.sms = 132, a100.sms = 108;
  h200.major = 9, a100.major = 8;
  h200.clusters = true, a100.clusters = false;
  const Gemm gemm{.type = DType::bf16, .rows = 40, .n = 4096, .k = 4096};
  ASSERT_EQ(split_k(gemm.k).parts, 8);
  const auto count = [&](const DeviceInfo& device, SumOrder order, Sums sums, int blocks) {
    return std::ranges::count_if(gemm_tactics(device, gemm, order), [&](const GemmTactic& tactic) {
      return tactic.k_blocks == blocks && tactic.sums == sums;
    });
  };
  for (const int blocks : {2, 4}) {
    EXPECT_GT(count(h200, SumOrder::any, Sums::cluster, blocks), 0);
    EXPECT_GT(count(h200, SumOrder::any, Sums::blocks, blocks), 0);
    EXPECT_EQ(count(h200, SumOrder::any, Sums::parts, blocks), 0);
    EXPECT_GT(count(a100, SumOrder::any, Sums::blocks, blocks), 0);
    EXPECT_EQ(count(h200, SumOrder::fixed, Sums::cluster, blocks), 0) << "clusters would add in another order";
    EXPECT_EQ(count(h200, SumOrder::fixed, Sums::blocks, blocks), 0);
    EXPECT_GT(count(h200, SumOrder::fixed, Sums::parts, blocks), 0);
    for (const auto order : {SumOrder::any, SumOrder::fixed}) EXPECT_EQ(count(a100, order, Sums::cluster, blocks), 0);
  }
  EXPECT_GT(count(h200, SumOrder::fixed, Sums::cluster, 8), 0) << "each block has one part, so its sum is the part's";

  GemmTactic tactic{GemmTactic::Kernel::tile, 64, 128, 4, 2};
  const auto bytes = [&](Sums sums) {
    tactic.sums = sums;
    return gemm_workspace_bytes(tactic, gemm) - kGemmCounterBytes;
  };
  EXPECT_EQ(bytes(Sums::parts), 8U * 64 * 4096 * 4);
  EXPECT_EQ(bytes(Sums::blocks), 2U * 64 * 4096 * 4);
  EXPECT_EQ(bytes(Sums::cluster), 0U);
}

TEST_F(GemmTest, every_tactic_computes_the_gemm) {
  const Case cases[] = {
      {.rows = 3, .n = 40, .k = 64, .bias = true},
      {.out_type = DType::f32, .rows = 9, .n = 130, .k = 328, .in_gap = 8, .out_gap = 3},
      {.type = DType::f16, .out_type = DType::f16, .rows = 5, .n = 72, .k = 520, .out_gap = 8, .bias = true},
      {.rows = 18, .n = 65, .k = 136, .out_gap = 7, .out_offset = 1, .bias = true},
      {.type = DType::f16, .out_type = DType::f32, .rows = 2, .n = 17, .k = 8},
      {.type = DType::f16, .out_type = DType::f16, .rows = 17, .n = 75, .k = 712, .bias = true, .packed = true},
      {.out_type = DType::f32, .rows = 6, .n = 42, .k = 1096, .in_gap = 8, .packed = true},
      {.rows = 150, .n = 136, .k = 200, .bias = true},
      {.out_type = DType::f32, .rows = 7, .n = 24, .k = 2200},
      {.type = DType::f32,
       .out_type = DType::f32,
       .rows = 5,
       .n = 70,
       .k = 520,
       .in_gap = 4,
       .out_gap = 1,
       .bias = true},
  };
  for (const auto& c : cases) {
    GemmProblem problem(c);
    auto tactics = all_tactics(problem.gemm());
    for (const auto& tactic : all_tactics(problem.gemm(), SumOrder::any)) {
      if (std::ranges::find(tactics, tactic) == tactics.end()) tactics.push_back(tactic);
    }
    for (const auto& tactic : tactics) {
      SCOPED_TRACE(describe(c, tactic));
      in_both_orders([&] { problem.run(tactic); });
      problem.check();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_F(GemmTest, any_shape_stride_and_address_works) {
  std::mt19937 random(7);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
  for (int i = 0; i < 24; ++i) {
    Case c{.type = kTypes[i % 3],
           .rows = pick(1, 20),
           .n = pick(1, 80),
           .k = pick(1, i % 6 == 5 ? 600 : 150),
           .in_gap = pick(0, 3),
           .out_gap = pick(0, 3),
           .in_offset = pick(0, 2),
           .out_offset = pick(0, 2),
           .bias = pick(0, 1) == 1};
    c.packed = c.type != DType::f32 && pick(0, 1) == 1;
    c.out_type = pick(0, 1) == 1 ? c.type : DType::f32;
    GemmProblem problem(c, static_cast<unsigned>(i));
    const auto tactics = gemm_tactics(device_info(0), problem.gemm());
    const auto& tactic = tactics[static_cast<std::size_t>(pick(0, static_cast<int>(tactics.size()) - 1))];
    SCOPED_TRACE(describe(c, tactic));
    problem.run(tactic);
    problem.check();
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST_F(GemmTest, a_gated_gemm_has_the_bits_of_a_gemm_and_a_gated_activation) {
  for (const auto& c : {Case{.rows = 1, .n = 2 * 37, .k = 1096, .bias = true}, Case{.rows = 8, .n = 2 * 130, .k = 64},
                        Case{.type = DType::f16, .out_type = DType::f16, .rows = 15, .n = 2 * 24, .k = 328},
                        Case{.rows = 19, .n = 2 * 5, .k = 520, .bias = true, .packed = true},
                        Case{.rows = 3, .n = 2 * 44, .k = 2048, .in_gap = 8, .packed = true}}) {
    GemmProblem problem(c);
    const auto inter = c.n / 2, stride = inter + 3;
    for (const auto& tactic : all_tactics(problem.gemm())) {
      if (tactic.kernel != GemmTactic::Kernel::stream) continue;
      SCOPED_TRACE(describe(c, tactic));
      problem.run(tactic);
      problem.check();
      for (const bool silu : {true, false}) {
        GemmMatrix expected(c.type, c.rows, inter, stride), found(c.type, c.rows, inter, stride);
        expected.upload(problem.stream);
        gated_activation(problem.stream, {expected.data(), c.type, c.rows, inter, stride},
                         {problem.out.data(), c.type, c.rows, c.n, problem.out.stride},
                         silu ? ops::Activation::silu : ops::Activation::gelu_tanh);
        expected.download(problem.stream);
        auto gemm = problem.gemm();
        gemm.gate = silu ? Gate::silu : Gate::gelu_tanh;
        gemm.out = found.data();
        gemm.out_stride = stride;
        DeviceMemory workspace(kGemmCounterBytes);
        in_both_orders([&] {
          found.upload(problem.stream);
          cuda::gemm(problem.stream, device_info(0), gemm, tactic, workspace.data());
          std::vector<std::byte> bytes(found.host.size());
          problem.stream.download(bytes.data(), found.device.data(), bytes.size(), "test");
          problem.stream.wait("test");
          ASSERT_EQ(bytes, expected.host) << "the kernel wrote between the rows";
        });
      }
    }
  }
}

TEST_F(GemmTest, unsupported_gated_gemms_are_rejected) {
  GemmProblem problem({.rows = 2, .n = 24, .k = 72});
  DeviceMemory workspace(kGemmCounterBytes);
  const auto stream = gemm_tactics(device_info(0), problem.gemm()).front();
  ASSERT_EQ(stream.kernel, GemmTactic::Kernel::stream);
  const GemmTactic tile{GemmTactic::Kernel::tile, 32, 64, 6};
  const auto rejected = [&](Gemm gemm, const GemmTactic& tactic) {
    gemm.gate = Gate::silu;
    EXPECT_THROW(cuda::gemm(problem.stream, device_info(0), gemm, tactic, workspace.data()), Error);
  };
  rejected(problem.gemm(), tile);
  auto gemm = problem.gemm();
  gemm.out_type = DType::f32;
  rejected(gemm, stream);
  gemm = problem.gemm();
  gemm.n = 23;
  rejected(gemm, stream);
}

// The sums of blocks are added in block order, wherever they are combined and in whatever order the blocks finish.
TEST_F(GemmTest, blocks_of_a_tile_give_the_same_bits_in_a_cluster_and_in_the_workspace) {
  using Kernel = GemmTactic::Kernel;
  using Sums = GemmTactic::Sums;
  for (const auto type : {DType::bf16, DType::f32}) {
    GemmProblem problem(
        {.type = type, .out_type = DType::f32, .rows = 21, .n = 70, .k = 2496, .out_gap = 1, .bias = true});
    ASSERT_EQ(split_k(2496).parts, 8);
    GemmTactic tactic{Kernel::tile, 32, 64, 6};
    if (type == DType::f32) tactic = {Kernel::plain, 8, 64, 3};
    std::vector<std::vector<std::uint32_t>> of_sizes;
    for (const int blocks : {2, 4, 8}) {
      tactic.k_blocks = blocks;
      tactic.sums = Sums::blocks;
      problem.run(tactic);
      problem.check();
      std::vector<std::vector<std::uint32_t>> expected;
      for (std::int64_t r = 0; r < 21; ++r) expected.push_back(problem.row(r));
      of_sizes.push_back(expected[0]);
      tactic.sums = Sums::cluster;
      in_both_orders([&] {
        problem.run(tactic);
        for (std::int64_t r = 0; r < 21; ++r) ASSERT_EQ(problem.row(r), expected[static_cast<std::size_t>(r)]);
      });
      tactic.sums = Sums::parts;
      problem.run(tactic);
      EXPECT_EQ(problem.row(0) == expected[0], blocks == 8) << "only with 8 blocks does a block have one part";
    }
    EXPECT_NE(of_sizes[0], of_sizes[2]) << "other part sizes must give other sums";
  }
}

// Every tactic gives the same bits, for a row alone and in a batch, aligned or not.
TEST_F(GemmTest, a_rows_bits_do_not_depend_on_tactic_or_batch) {
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    constexpr std::int64_t kRows = 19;
    const Case c{.type = type, .out_type = DType::f32, .rows = kRows, .n = 24, .k = 784, .bias = true};
    ASSERT_EQ(split_k(c.k).parts, 3);
    GemmProblem problem(c);
    std::vector<std::vector<std::uint32_t>> expected;
    for (const bool packed : {false, true}) {
      if (packed && type == DType::f32) continue;
      problem.packed = packed;
      for (const auto& tactic : all_tactics(problem.gemm())) {
        SCOPED_TRACE(cat(describe(c, tactic), packed ? " packed" : ""));
        problem.run(tactic);
        for (std::int64_t r = 0; r < kRows; ++r) {
          if (expected.size() <= static_cast<std::size_t>(r)) expected.push_back(problem.row(r));
          ASSERT_EQ(problem.row(r), expected[static_cast<std::size_t>(r)]);
        }
      }
    }
    for (const std::int64_t first : {0, 7, 18}) {
      for (const std::int64_t offset : {0, 1}) {
        auto alone = c;
        alone.rows = 1;
        alone.in_offset = offset;
        GemmProblem one(alone);
        one.weight.copy(problem.weight, one.stream);
        one.bias.copy(problem.bias, one.stream);
        for (std::int64_t i = 0; i < c.k; ++i) one.in.set(offset + i, problem.in.at(first, i));
        one.in.upload(one.stream);
        for (const auto& tactic : gemm_tactics(device_info(0), one.gemm())) {
          SCOPED_TRACE(describe(alone, tactic));
          one.run(tactic);
          ASSERT_EQ(one.row(0), expected[static_cast<std::size_t>(first)]);
        }
      }
    }
  }
}

TEST_F(GemmTest, packed_weights_that_no_kernel_reads_are_rejected) {
  GemmProblem problem({.rows = 2, .n = 24, .k = 72});
  const auto rejected = [&](const Gemm& gemm) {
    DeviceMemory workspace(kGemmCounterBytes);
    EXPECT_THROW(
        cuda::gemm(problem.stream, device_info(0), gemm, gemm_tactics(device_info(0), gemm).front(), workspace.data()),
        Error);
  };
  auto stride = problem.gemm();
  stride.packed = true;
  ASSERT_NE(stride.weight_stride % kPackedK, 0);
  rejected(stride);
  auto type = stride;
  type.weight_stride = 96;
  type.type = type.out_type = DType::f32;
  rejected(type);
}

#if defined(CHARONIA_CUDA_ON_HOST)
// The reads of a warp of the stream kernel: 512 contiguous bytes of a packed weight, with consecutive instructions; of
// a row-major weight 8 times 64 bytes. In both cases every byte once.
TEST_F(GemmTest, a_warp_reads_512_bytes_of_a_packed_weight_on_end) {
  for (const bool packed : {true, false}) {
    for (const std::int64_t rows : {1, 8, 16}) {
      GemmProblem problem({.rows = rows, .n = 64, .k = 1024, .packed = packed});
      const auto gemm = problem.gemm();
      for (const auto& tactic : gemm_tactics(device_info(0), gemm)) {
        if (tactic.kernel != GemmTactic::Kernel::stream) continue;
        SCOPED_TRACE(describe({.rows = rows, .n = 64, .k = 1024, .packed = packed}, tactic));
        std::map<std::pair<unsigned, unsigned>, std::map<unsigned, std::vector<std::int64_t>>> warps;
        host_grid::watch_streaming_loads([&](const host_grid::Place& by, const void* at, std::size_t bytes) {
          ASSERT_EQ(bytes, 16U);
          warps[{by.block.x, by.thread.x / 32}][by.thread.x % 32].push_back(static_cast<const std::byte*>(at) -
                                                                            static_cast<const std::byte*>(gemm.weight));
        });
        problem.run(tactic);
        host_grid::watch_streaming_loads({});
        std::set<std::int64_t> read;
        for (const auto& [warp, lanes] : warps) {
          ASSERT_EQ(lanes.size(), 32U);
          // Two loads of a step read 8 rows each, and each sequence of loads is contiguous.
          const auto streams = static_cast<std::size_t>(tactic.tile_columns / 8);
          for (std::size_t i = 0; i < lanes.at(0).size(); ++i) {
            std::set<std::int64_t> lines;
            for (const auto& [lane, loads] : lanes) {
              ASSERT_EQ(loads.size(), lanes.at(0).size());
              ASSERT_TRUE(read.insert(loads[i]).second) << "an element is read twice";
              lines.insert(loads[i] / 128);
              if (packed) {
                ASSERT_EQ(loads[i], lanes.at(0)[i] + 16 * static_cast<std::int64_t>(lane));
              }
            }
            EXPECT_EQ(lines.size(), packed ? 4U : 8U);
            if (packed && i >= streams) {
              ASSERT_EQ(lanes.at(0)[i], lanes.at(0)[i - streams] + 512);
            }
          }
        }
        EXPECT_EQ(read.size(), 64U * 1024 * 2 / 16);
      }
    }
  }
}
#endif

TEST_F(GemmTest, a_row_that_is_not_finite_does_not_affect_others) {
  const Case c{.rows = 12, .n = 64, .k = 128};
  GemmProblem problem(c);
  for (std::int64_t i = 0; i < c.k; ++i) problem.in.set(3 * c.k + i, std::numeric_limits<float>::quiet_NaN());
  problem.in.upload(problem.stream);
  for (const auto& tactic : gemm_tactics(device_info(0), problem.gemm())) {
    SCOPED_TRACE(describe(c, tactic));
    problem.run(tactic);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) ASSERT_EQ(std::isnan(problem.out.at(r, n)), r == 3);
    }
  }
}

TEST_F(GemmTest, a_bias_is_added_to_the_output) {
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    const Case c{.type = type, .out_type = type, .rows = 3, .n = 1100, .k = 8, .out_gap = 4, .bias = true};
    GemmProblem problem(c);
    std::mt19937 random(3);
    problem.out.fill(random, 2);
    problem.out.upload(problem.stream);
    std::vector<float> before;
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) before.push_back(problem.out.at(r, n));
    }
    auto gemm = problem.gemm();
    add_bias(problem.stream, gemm);
    problem.out.download(problem.stream);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) {
        ASSERT_EQ(problem.out.bits(r, n),
                  encode(type, before[static_cast<std::size_t>(r * c.n + n)] + problem.bias.at(0, n)));
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
