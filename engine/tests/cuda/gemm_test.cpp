// The built-in GEMMs with every tactic, compared with sums in double precision.
#include "ops/cuda/kernels/gemm.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <set>

#include "base/text.h"
#include "cuda/gemm_problem.h"
#include "ops/cuda/kernels/gemm_params.h"
#include "ops/cuda/kernels/rows.h"

#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_grid.h"
#endif

namespace charonia::cuda {
namespace {

using Kernel = GemmTactic::Kernel;
using Sums = GemmTactic::Sums;
using ops::uniform;

std::string describe(const Case& c, const GemmTactic& tactic) {
  return cat(to_string(c.type), " -> ", to_string(c.out_type), " rows ", c.rows, " n ", c.n, " k ", c.k, " gaps ",
             c.in_gap, " ", c.out_gap, c.packed ? " packed" : "", " offsets ", c.in_offset, " ", c.out_offset,
             ": kernel ", static_cast<int>(tactic.kernel), " ", tactic.tile_rows, " x ", tactic.tile_columns,
             " stages ", tactic.stages, " blocks ", tactic.k_blocks, " sums ", static_cast<int>(tactic.sums));
}

// All tactics of a weight's GEMMs for any number of rows.
std::vector<GemmTactic> all_tactics(const Gemm& gemm, std::initializer_list<SumOrder> orders = {SumOrder::fixed}) {
  std::vector<GemmTactic> all;
  for (const auto order : orders) {
    for (const std::int64_t rows : {1, 8, 16, 32, 64, 128, 512, 100000}) {
      auto one = gemm;
      one.rows = rows;
      for (const auto& tactic : gemm_tactics(device_info(0), one, order)) {
        if (std::ranges::find(all, tactic) == all.end()) all.push_back(tactic);
      }
    }
  }
  return all;
}

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
    for (const std::int64_t n : {4096, 12288, 32000}) {
      const auto tactics = gemm_tactics(h200, {.type = DType::bf16, .rows = rows, .n = n, .k = 4096});
      ASSERT_FALSE(tactics.empty());
      for (const auto& tactic : tactics) EXPECT_EQ(std::ranges::count(tactics, tactic), 1);
      const auto& best = tactics[0];
      if (best.kernel != Kernel::tile) continue;
      EXPECT_GE(divide_up(rows, best.tile_rows) * divide_up(n, best.tile_columns) * best.k_blocks, 128)
          << "rows " << rows << " n " << n;
    }
  }
}

TEST(GemmPlanTest, sums_of_blocks_are_combined_in_a_cluster_or_the_workspace) {
  DeviceInfo h200 = device_info(0), a100 = device_info(0);
  h200.sms = 132, a100.sms = 108;
  h200.major = 9, a100.major = 8;
  h200.clusters = true, a100.clusters = false;
  const Gemm gemm{.type = DType::bf16, .rows = 40, .n = 4096, .k = 4096};
  // Whether a tactic has this number of blocks and combines their sums in this way.
  const auto has = [&](const DeviceInfo& device, SumOrder order, Sums sums, int blocks) {
    return std::ranges::any_of(gemm_tactics(device, gemm, order), [&](const GemmTactic& tactic) {
      return tactic.k_blocks == blocks && tactic.sums == sums;
    });
  };
  for (const int blocks : {2, 4}) {
    EXPECT_TRUE(has(h200, SumOrder::any, Sums::cluster, blocks));
    EXPECT_TRUE(has(h200, SumOrder::any, Sums::blocks, blocks));
    EXPECT_FALSE(has(h200, SumOrder::any, Sums::parts, blocks));
    EXPECT_TRUE(has(a100, SumOrder::any, Sums::blocks, blocks));
    EXPECT_FALSE(has(h200, SumOrder::fixed, Sums::cluster, blocks)) << "clusters would add in another order";
    EXPECT_FALSE(has(h200, SumOrder::fixed, Sums::blocks, blocks));
    EXPECT_TRUE(has(h200, SumOrder::fixed, Sums::parts, blocks));
    for (const auto order : {SumOrder::any, SumOrder::fixed}) EXPECT_FALSE(has(a100, order, Sums::cluster, blocks));
  }
  EXPECT_TRUE(has(h200, SumOrder::fixed, Sums::cluster, 8)) << "each block has one part, so its sum is the part's";

  const auto bytes = [&](Sums sums) {
    return gemm_workspace_bytes({Kernel::tile, 64, 128, 4, 2, sums}, gemm) - kGemmCounterBytes;
  };
  EXPECT_EQ(bytes(Sums::parts), 8U * 64 * 4096 * 4);
  EXPECT_EQ(bytes(Sums::blocks), 2U * 64 * 4096 * 4);
  EXPECT_EQ(bytes(Sums::cluster), 0U);
}

TEST(GemmTest, every_tactic_computes_the_gemm) {
  constexpr auto bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;
  const Case cases[] = {
      {.rows = 3, .n = 40, .k = 64, .bias = true},
      {.out_type = f32, .rows = 9, .n = 130, .k = 328, .in_gap = 8, .out_gap = 3},
      {.type = f16, .out_type = f16, .rows = 5, .n = 72, .k = 520, .out_gap = 8, .bias = true},
      {.out_type = bf16, .rows = 18, .n = 65, .k = 136, .out_gap = 7, .out_offset = 1, .bias = true},
      {.type = f16, .out_type = f32, .rows = 2, .n = 17, .k = 8},
      {.type = f16, .out_type = f16, .rows = 17, .n = 75, .k = 712, .bias = true, .packed = true},
      {.out_type = f32, .rows = 6, .n = 42, .k = 1096, .in_gap = 8, .packed = true},
      {.rows = 150, .n = 136, .k = 200, .bias = true},
      {.out_type = f32, .rows = 7, .n = 24, .k = 2200},
      {.type = f32, .out_type = f32, .rows = 5, .n = 70, .k = 520, .in_gap = 4, .out_gap = 1, .bias = true},
  };
  for (const auto& c : cases) {
    GemmProblem problem(c);
    for (const auto& tactic : all_tactics(problem.gemm(), {SumOrder::fixed, SumOrder::any})) {
      SCOPED_TRACE(describe(c, tactic));
      in_both_orders([&] { problem.run(tactic); });
      problem.check();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(GemmTest, any_shape_stride_and_address_works) {
  ops::Random random(7);
  for (int i = 0; i < 24; ++i) {
    Case c{.type = ops::kWeightTypes[static_cast<std::size_t>(i % 3)],
           .rows = uniform(random, 1, 20),
           .n = uniform(random, 1, 80),
           .k = uniform(random, 1, i % 6 == 5 ? 600 : 150),
           .in_gap = uniform(random, 0, 3),
           .out_gap = uniform(random, 0, 3),
           .in_offset = uniform(random, 0, 2),
           .out_offset = uniform(random, 0, 2),
           .bias = uniform(random, 0, 1) == 1};
    c.packed = c.type != DType::f32 && uniform(random, 0, 1) == 1;
    c.out_type = uniform(random, 0, 1) == 1 ? c.type : DType::f32;
    GemmProblem problem(c, static_cast<unsigned>(i));
    const auto tactics = gemm_tactics(device_info(0), problem.gemm());
    const auto& tactic = tactics[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(tactics.size()) - 1))];
    SCOPED_TRACE(describe(c, tactic));
    problem.run(tactic);
    problem.check();
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(GemmTest, a_gated_gemm_has_the_bits_of_a_gemm_and_a_gated_activation) {
  for (const auto& c : {Case{.rows = 1, .n = 2 * 37, .k = 1096, .bias = true}, Case{.rows = 8, .n = 2 * 130, .k = 64},
                        Case{.type = DType::f16, .out_type = DType::f16, .rows = 15, .n = 2 * 24, .k = 328},
                        Case{.rows = 19, .n = 2 * 5, .k = 520, .bias = true, .packed = true},
                        Case{.rows = 3, .n = 2 * 44, .k = 2048, .in_gap = 8, .packed = true}}) {
    GemmProblem problem(c);
    const MatrixOnDevice out(problem.stream, all_nan(c.type, c.rows, c.n / 2, 3));
    for (const auto& tactic : all_tactics(problem.gemm())) {
      if (!supports_gates(tactic)) continue;
      SCOPED_TRACE(describe(c, tactic));
      problem.run(tactic);
      problem.check();
      for (const bool silu : {true, false}) {
        gated_activation(problem.stream, out.tensor(), problem.out.tensor(),
                         silu ? ops::Activation::silu : ops::Activation::gelu_tanh);
        const auto expected = out.host();
        auto gemm = problem.gemm();
        gemm.gate = silu ? Gate::silu : Gate::gelu_tanh;
        gemm.out = out.tensor().data;
        gemm.out_stride = out.tensor().stride;
        const DeviceMemory workspace(gemm_workspace_bytes(tactic, gemm));
        in_both_orders([&] {
          out.upload(all_nan(c.type, c.rows, c.n / 2, 3));
          cuda::gemm(problem.stream, device_info(0), gemm, tactic, workspace.data());
          ASSERT_EQ(out.host().bytes, expected.bytes) << "also between the rows";
        });
      }
    }
  }
}

// Tiles that lie in one block, at the end of a range, or in many blocks; with and without a ring that is used again.
TEST(GemmTest, bulk_copies_give_the_bits_of_the_stream_kernel_however_blocks_share_the_tiles) {
  if (!device_info(0).clusters) GTEST_SKIP() << "bulk copies need compute capability 9.0";
  for (const auto& c : {Case{.rows = 1, .n = 72, .k = 2048, .bias = true}, Case{.rows = 8, .n = 40, .k = 4616},
                        Case{.rows = 3, .n = 200, .k = 264}, Case{.rows = 20, .n = 24, .k = 1032},
                        Case{.type = DType::f16, .out_type = DType::f32, .rows = 11, .n = 129, .k = 776}}) {
    GemmProblem problem(c);
    problem.run({Kernel::stream, c.rows > 8 ? 16 : 8, 16, 4, 1});
    const auto expected = problem.result.bytes;
    auto few = problem.gemm();
    few.rows = std::min<std::int64_t>(few.rows, 16);
    auto tactics = gemm_tactics(device_info(0), few);
    std::erase_if(tactics, [](const GemmTactic& one) { return one.kernel != Kernel::bulk; });
    ASSERT_FALSE(tactics.empty());
    for (auto tactic : tactics) {
      for (const int blocks : {1, 3, 6, 50}) {
        tactic.k_blocks = blocks;
        SCOPED_TRACE(describe(c, tactic));
        problem.run(tactic);
        ASSERT_EQ(problem.result.bytes, expected);
      }
    }
  }
}

// The sums of blocks are added in block order, wherever they are combined and in whatever order the blocks finish.
TEST(GemmTest, blocks_of_a_tile_give_the_same_bits_in_a_cluster_and_in_the_workspace) {
  for (const auto type : {DType::bf16, DType::f32}) {
    GemmProblem problem(
        {.type = type, .out_type = DType::f32, .rows = 21, .n = 70, .k = 2496, .out_gap = 1, .bias = true});
    ASSERT_EQ(split_k(2496).parts, 8);
    GemmTactic tactic{Kernel::tile, 32, 64, 6};
    if (type == DType::f32) tactic = {Kernel::plain, 8, 64, 3};
    std::vector<ops::Matrix> of_sizes;
    for (const int blocks : {2, 4, 8}) {
      tactic.k_blocks = blocks;
      tactic.sums = Sums::blocks;
      problem.run(tactic);
      problem.check();
      const auto& expected = of_sizes.emplace_back(problem.result);
      tactic.sums = Sums::cluster;
      in_both_orders([&] {
        problem.run(tactic);
        ASSERT_EQ(problem.result.bytes, expected.bytes);
      });
      tactic.sums = Sums::parts;
      problem.run(tactic);
      EXPECT_EQ(problem.result.bytes == expected.bytes, blocks == 8) << "only with 8 blocks does a block have one part";
    }
    EXPECT_NE(of_sizes[0].bytes, of_sizes[2].bytes) << "other part sizes must give other sums";
  }
}

// Every tactic gives the same bits, for a row alone and in a batch, aligned or not.
TEST(GemmTest, a_rows_bits_do_not_depend_on_tactic_or_batch) {
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    constexpr std::int64_t kRows = 19;
    const Case c{.type = type, .out_type = DType::f32, .rows = kRows, .n = 24, .k = 784, .bias = true};
    ASSERT_EQ(split_k(c.k).parts, 3);
    GemmProblem rows(c);
    rows.run(all_tactics(rows.gemm()).front());
    const auto expected = rows.result;
    const auto expect_same = [&](GemmProblem& problem, const std::vector<GemmTactic>& tactics, std::int64_t first) {
      for (const auto& tactic : tactics) {
        SCOPED_TRACE(describe(problem.c, tactic));
        problem.run(tactic);
        for (std::int64_t r = 0; r < problem.c.rows; ++r) {
          ASSERT_TRUE(problem.result.same_bits(r, expected, first + r)) << r;
        }
      }
    };
    expect_same(rows, all_tactics(rows.gemm()), 0);
    if (type != DType::f32) {
      auto packed = rows.packed();
      expect_same(packed, all_tactics(packed.gemm()), 0);
    }
    for (const std::int64_t first : {0, 7, 18}) {
      for (const std::int64_t offset : {0, 1}) {
        auto one = rows.slice(first, 1, offset);
        expect_same(one, gemm_tactics(device_info(0), one.gemm()), first);
      }
    }
  }
}

#if defined(CHARONIA_CUDA_ON_HOST)
// The reads of a warp of the stream kernel: 512 contiguous bytes of a packed weight, with consecutive instructions; of
// a row-major weight 8 times 64 bytes. In both cases every byte once.
TEST(GemmTest, a_warp_reads_512_bytes_of_a_packed_weight_on_end) {
  for (const bool packed : {true, false}) {
    for (const std::int64_t rows : {1, 8, 16}) {
      GemmProblem problem({.rows = rows, .n = 64, .k = 1024, .packed = packed});
      const auto gemm = problem.gemm();
      for (const auto& tactic : gemm_tactics(device_info(0), gemm)) {
        if (tactic.kernel != Kernel::stream) continue;
        SCOPED_TRACE(describe(problem.c, tactic));
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
              ASSERT_TRUE(!packed || loads[i] == lanes.at(0)[i] + 16 * static_cast<std::int64_t>(lane));
            }
            EXPECT_EQ(lines.size(), packed ? 4U : 8U);
            ASSERT_TRUE(!packed || i < streams || lanes.at(0)[i] == lanes.at(0)[i - streams] + 512);
          }
        }
        EXPECT_EQ(read.size(), 64U * 1024 * 2 / 16);
      }
    }
  }
}
#endif

TEST(GemmTest, a_row_that_is_not_finite_does_not_affect_others) {
  GemmProblem problem({.rows = 12, .n = 64, .k = 128});
  for (std::int64_t i = 0; i < 128; ++i) problem.host.in.set(3, i, std::nanf(""));
  problem.in.upload(problem.host.in);
  for (const auto& tactic : gemm_tactics(device_info(0), problem.gemm())) {
    SCOPED_TRACE(describe(problem.c, tactic));
    problem.run(tactic);
    for (std::int64_t r = 0; r < 12; ++r) {
      for (std::int64_t n = 0; n < 64; ++n) ASSERT_EQ(std::isnan(problem.result.at(r, n)), r == 3);
    }
  }
}

TEST(GemmTest, a_bias_is_added_to_the_output) {
  ops::Random random(3);
  for (const auto type : ops::kWeightTypes) {
    GemmProblem problem({.type = type, .out_type = type, .rows = 3, .n = 1100, .k = 8, .out_gap = 4, .bias = true});
    const auto before = ops::Matrix::random(random, type, 3, 1100, 2, 4);
    problem.out.upload(before);
    add_bias(problem.stream, problem.gemm());
    problem.download();
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t n = 0; n < 1100; ++n) {
        const float sum = before.at(r, n) + problem.host.bias.at(0, n);
        ASSERT_EQ(problem.result.at(r, n), static_cast<float>(ops::rounded(type, sum)));
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
