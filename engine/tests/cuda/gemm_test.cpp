// Our own products against sums in double precision, in every way they can go.
#include "ops/cuda/kernels/gemm.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

#include "base/text.h"
#include "cuda/product_case.h"
#include "ops/cuda/kernels/gemm_params.h"

namespace charonia::cuda {
namespace {

std::string describe(const Case& c, const GemmWay& way) {
  return cat(to_string(c.type), " -> ", to_string(c.out_type), " rows ", c.rows, " n ", c.n, " k ", c.k, " gaps ",
             c.in_gap, " ", c.out_gap, " offsets ", c.in_offset, " ", c.out_offset, ": kernel ",
             static_cast<int>(way.kernel), " ", way.tile_rows, " x ", way.tile_columns, " stages ", way.stages,
             " blocks ", way.k_blocks);
}

// All ways that a weight's products may go: those of any number of rows.
std::vector<GemmWay> all_ways(const Gemm& gemm) {
  std::vector<GemmWay> all;
  for (const std::int64_t rows : {1, 8, 16, 32, 64, 128, 512, 100000}) {
    auto one = gemm;
    one.rows = rows;
    for (const auto& way : gemm_ways(device_info(0), one)) {
      if (std::ranges::find(all, way) == all.end()) all.push_back(way);
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

TEST(GemmPlanTest, parts_cover_k_and_depend_on_it_alone) {
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

TEST(GemmPlanTest, ways_are_distinct_and_fill_the_device_where_they_can) {
  DeviceInfo h200 = device_info(0);
  h200.multiprocessors = 132;
  h200.shared_bytes = std::size_t{227} << 10;
  for (const std::int64_t rows : {1, 4, 8, 16, 17, 32, 64, 65, 256, 257, 8192}) {
    for (const auto& [n, k] :
         {std::pair<std::int64_t, std::int64_t>{4096, 4096}, {12288, 4096}, {4096, 11008}, {32000, 4096}}) {
      const Gemm gemm{.type = DType::bf16, .rows = rows, .n = n, .k = k};
      const auto ways = gemm_ways(h200, gemm);
      ASSERT_FALSE(ways.empty());
      for (std::size_t i = 0; i < ways.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(ways[i] == ways[j]);
      }
      if (ways[0].kernel == GemmWay::Kernel::tile) {
        EXPECT_GE(divide_up(rows, ways[0].tile_rows) * divide_up(n, ways[0].tile_columns) * ways[0].k_blocks, 128)
            << "rows " << rows << " n " << n << " k " << k;
      }
    }
  }
}

TEST_F(GemmTest, every_way_is_the_product) {
  const Case cases[] = {
      {.rows = 3, .n = 40, .k = 64, .bias = true},
      {.out_type = DType::f32, .rows = 9, .n = 130, .k = 328, .in_gap = 8, .out_gap = 3},
      {.type = DType::f16, .out_type = DType::f16, .rows = 5, .n = 72, .k = 520, .out_gap = 8, .bias = true},
      {.rows = 18, .n = 65, .k = 136, .out_gap = 7, .out_offset = 1, .bias = true},
      {.type = DType::f16, .out_type = DType::f32, .rows = 2, .n = 17, .k = 8},
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
    Product product(c);
    for (const auto& way : all_ways(product.gemm())) {
      SCOPED_TRACE(describe(c, way));
      in_both_orders([&] { product.run(way); });
      product.check();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_F(GemmTest, any_shape_stride_and_address_will_do) {
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
    c.out_type = pick(0, 1) == 1 ? c.type : DType::f32;
    Product product(c, static_cast<unsigned>(i));
    const auto ways = gemm_ways(device_info(0), product.gemm());
    const auto& way = ways[static_cast<std::size_t>(pick(0, static_cast<int>(ways.size()) - 1))];
    SCOPED_TRACE(describe(c, way));
    product.run(way);
    product.check();
    if (testing::Test::HasFatalFailure()) return;
  }
}

// The same bits from every way, for a row alone and among others, aligned or not.
TEST_F(GemmTest, a_rows_bits_do_not_depend_on_way_or_company) {
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    constexpr std::int64_t kRows = 19;
    const Case c{.type = type, .out_type = DType::f32, .rows = kRows, .n = 24, .k = 784, .bias = true};
    ASSERT_EQ(split_k(c.k).parts, 3);
    Product product(c);
    std::vector<std::vector<std::uint32_t>> expected;
    for (const auto& way : all_ways(product.gemm())) {
      SCOPED_TRACE(describe(c, way));
      product.run(way);
      for (std::int64_t r = 0; r < kRows; ++r) {
        if (expected.size() <= static_cast<std::size_t>(r)) expected.push_back(product.row(r));
        ASSERT_EQ(product.row(r), expected[static_cast<std::size_t>(r)]);
      }
    }
    for (const std::int64_t first : {0, 7, 18}) {
      for (const std::int64_t offset : {0, 1}) {
        auto alone = c;
        alone.rows = 1;
        alone.in_offset = offset;
        Product one(alone);
        one.weight.copy(product.weight, one.stream);
        one.bias.copy(product.bias, one.stream);
        for (std::int64_t i = 0; i < c.k; ++i) one.in.set(offset + i, product.in.at(first, i));
        one.in.upload(one.stream);
        for (const auto& way : gemm_ways(device_info(0), one.gemm())) {
          SCOPED_TRACE(describe(alone, way));
          one.run(way);
          ASSERT_EQ(one.row(0), expected[static_cast<std::size_t>(first)]);
        }
      }
    }
  }
}

TEST_F(GemmTest, a_row_that_is_not_finite_stays_alone) {
  const Case c{.rows = 12, .n = 64, .k = 128};
  Product product(c);
  for (std::int64_t i = 0; i < c.k; ++i) product.in.set(3 * c.k + i, std::numeric_limits<float>::quiet_NaN());
  product.in.upload(product.stream);
  for (const auto& way : gemm_ways(device_info(0), product.gemm())) {
    SCOPED_TRACE(describe(c, way));
    product.run(way);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) ASSERT_EQ(std::isnan(product.out.at(r, n)), r == 3);
    }
  }
}

TEST_F(GemmTest, a_bias_is_added_to_what_is_there) {
  for (const auto type : {DType::bf16, DType::f16, DType::f32}) {
    const Case c{.type = type, .out_type = type, .rows = 3, .n = 1100, .k = 8, .out_gap = 4, .bias = true};
    Product product(c);
    std::mt19937 random(3);
    product.out.fill(random, 2);
    product.out.upload(product.stream);
    std::vector<float> before;
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) before.push_back(product.out.at(r, n));
    }
    auto gemm = product.gemm();
    add_bias(product.stream, gemm);
    product.out.download(product.stream);
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.n; ++n) {
        ASSERT_EQ(product.out.bits(r, n),
                  encode(type, before[static_cast<std::size_t>(r * c.n + n)] + product.bias.at(0, n)));
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
