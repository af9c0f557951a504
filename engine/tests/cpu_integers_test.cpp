// The CPU's 8-bit integer kernels, per instruction set and multiplication method, compared with exact integers and the
// order of operations of kernels.h, bit by bit.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/huge_memory.h"
#include "base/text.h"
#include "emulated_tiles.h"
#include "ops/cpu/amx.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/integer_panel.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/integer_tiles.h"
#include "ops_support.h"

namespace charonia::ops {
namespace {

// Tiles whose multiplication is the operation of TDPBSSD.
struct EmulatedIntegerTiles : EmulatedTiles {
  template <int C, int A, int B>
  static void multiply() {
    ASSERT_TRUE(configured);
    for (int m = 0; m < tiles[C].rows; ++m) {
      for (int n = 0; n < 16; ++n) {
        std::int32_t sum = 0;
        std::memcpy(&sum, &tiles[C].data[static_cast<std::size_t>(m)][static_cast<std::size_t>(4 * n)], 4);
        for (int k = 0; k < 16; ++k) {
          for (int i = 0; i < 4; ++i) sum += byte(tiles[A], m, 4 * k + i) * byte(tiles[B], k, 4 * n + i);
        }
        std::memcpy(&tiles[C].data[static_cast<std::size_t>(m)][static_cast<std::size_t>(4 * n)], &sum, 4);
      }
    }
  }

 private:
  static int byte(const Tile& tile, int row, int index) {
    return static_cast<std::int8_t>(tile.data[static_cast<std::size_t>(row)][static_cast<std::size_t>(index)]);
  }
};

struct Method {
  std::string name;
  void (*linear)(const cpu::IntegerLinearArgs&) = nullptr;
  int two_panel_rows = 0;
  bool tiles = false;
};

std::vector<Method> methods() {
  std::vector<Method> out;
  for (const auto& [name, kernels] : cpu::instruction_sets()) {
    const auto best = cpu::integer_kernels(*kernels);
    out.push_back({cat(name, ", plain"), kernels->linear_i8, kernels->two_integer_panel_rows});
    if (best.linear != kernels->linear_i8) {
      out.push_back({cat(name, ", dot products"), best.linear, kernels->two_integer_panel_rows});
    }
    if (best.tiles != nullptr) out.push_back({cat(name, ", tiles"), best.tiles, 0, true});
  }
  out.push_back({"emulated tiles", cpu::linear_integer_tiles<EmulatedIntegerTiles>, 0, true});
  return out;
}

// A weight of two panels and rows of activations.
struct IntegerGemm {
  cpu::IntegerPanel shape;
  int rows, columns;
  std::int64_t stride;
  std::vector<std::uint8_t> weight;  // [128, k]
  std::vector<float> scales, bias;
  std::vector<std::int8_t> zeros, a;  // a: for each row codes, then a scale and 60 bytes, then sums
  HugeMemory panels;

  IntegerGemm(Random& random, int r, int n, std::int64_t k, std::int64_t group, bool has_zeros, bool extreme)
      : shape{k, group, has_zeros},
        rows(r),
        columns(n),
        stride((k + 63) / 64 * 64 + 64 + 4 * shape.groups()),
        panels(2 * static_cast<std::size_t>(shape.bytes())) {
    for (int i = 0; i < 128 * k; ++i) {
      weight.push_back(static_cast<std::uint8_t>(extreme ? -128 : uniform(random, -128, 127)));
    }
    std::uniform_real_distribution<float> factor(0.5F, 1.5F);
    for (int i = 0; i < 128 * shape.groups(); ++i) {
      scales.push_back(factor(random));
      if (has_zeros) zeros.push_back(static_cast<std::int8_t>(extreme ? 127 : uniform(random, -128, 127)));
    }
    if (n % 2 == 1) {
      for (int i = 0; i < n; ++i) bias.push_back(factor(random));
    }
    a.resize(static_cast<std::size_t>(rows * stride));
    for (int row = 0; row < rows; ++row) {
      const auto behind = a.data() + row * stride + shape_k();
      set_scale(row, factor(random));
      auto* const sums = reinterpret_cast<std::int32_t*>(behind + 64);
      for (std::int64_t g = 0; g < shape.groups(); ++g) {
        std::int32_t sum = 0;
        for (std::int64_t i = g * group; i < (g + 1) * group; ++i) {
          const int code = extreme ? (row % 2 == 0 ? 127 : -127) : uniform(random, -127, 127);
          a[static_cast<std::size_t>(row * stride + i)] = static_cast<std::int8_t>(code);
          sum += code;
        }
        sums[g] = sum;
      }
    }
    for (std::int64_t p = 0; p < 2; ++p) {
      const auto first = static_cast<std::size_t>(p * 64);
      const auto features = std::min<std::int64_t>(64, columns - p * 64);
      if (features <= 0) break;
      cpu::pack_integers(panels.data() + p * shape.bytes(), shape, features, weight.data() + p * 64 * k,
                         scales.data() + first * static_cast<std::size_t>(shape.groups()),
                         has_zeros ? zeros.data() + first * static_cast<std::size_t>(shape.groups()) : nullptr);
    }
  }

  std::int64_t shape_k() const { return (shape.k + 63) / 64 * 64; }
  float scale(int row) const {
    float value = 0;
    std::memcpy(&value, a.data() + row * stride + shape_k(), sizeof value);
    return value;
  }
  void set_scale(int row, float value) { std::memcpy(a.data() + row * stride + shape_k(), &value, sizeof value); }

  std::vector<float> expected() const {
    std::vector<float> out;
    for (int row = 0; row < rows; ++row) {
      for (int j = 0; j < columns; ++j) {
        float sum = 0;
        for (std::int64_t g = 0; g < shape.groups(); ++g) {
          const auto at = static_cast<std::size_t>(j * shape.groups() + g);
          std::int64_t d = 0;
          for (std::int64_t i = g * shape.group; i < (g + 1) * shape.group; ++i) {
            const int code = static_cast<std::int8_t>(weight[static_cast<std::size_t>(j * shape.k + i)]);
            d += a[static_cast<std::size_t>(row * stride + i)] * (code - (shape.has_zeros ? zeros[at] : 0));
          }
          EXPECT_EQ(d, static_cast<std::int32_t>(d));
          const float product = scales[at] * static_cast<float>(d);
          sum = g == 0 ? product : sum + product;
        }
        sum = scale(row) * sum;
        out.push_back(bias.empty() ? sum : sum + bias[static_cast<std::size_t>(j)]);
      }
    }
    return out;
  }

  // Computes rows [first, first + count), between columns of NaN that must not be written.
  std::vector<float> run(const Method& method, int first, int count) const {
    const std::int64_t out_stride = columns + 3;
    std::vector<float> out(static_cast<std::size_t>(count * out_stride), NAN);
    const bool together = count <= method.two_panel_rows;
    for (int p = 0; p * 64 < columns; p += together ? 2 : 1) {
      const int both = together ? std::min(128, columns) : std::min(64, columns - p * 64);
      method.linear({.a = a.data() + first * stride,
                     .a_stride = stride,
                     .scales = reinterpret_cast<const float*>(a.data() + first * stride + shape_k()),
                     .sums = reinterpret_cast<const std::int32_t*>(a.data() + first * stride + shape_k() + 64),
                     .rows = count,
                     .shape = shape,
                     .panel = panels.data() + p * shape.bytes(),
                     .panels = both > 64 ? 2 : 1,
                     .out = out.data() + p * 64,
                     .out_stride = out_stride,
                     .columns = both,
                     .bias = bias.empty() ? nullptr : bias.data() + p * 64});
    }
    std::vector<float> result;
    for (int row = 0; row < count; ++row) {
      const auto* const from = out.data() + row * out_stride;
      result.insert(result.end(), from, from + columns);
      for (int j = columns; j < out_stride; ++j) EXPECT_TRUE(std::isnan(from[j]));
    }
    return result;
  }

  // Runs all rows together, and some of them in a separate call.
  void check(Random& random, const std::string& what) const {
    const auto want = expected();
    for (const auto& method : methods()) {
      if (method.tiles && !integer_tiles_take(shape)) continue;
      const int count = uniform(random, 1, rows), some = uniform(random, 0, rows - count);
      for (const auto& [first, length] : {std::pair{0, rows}, std::pair{some, count}}) {
        const auto out = run(method, first, length);
        for (std::size_t i = 0; i < out.size(); ++i) {
          const float exact = want[static_cast<std::size_t>(first * columns) + i];
          ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(exact))
              << method.name << ": " << out[i] << " instead of " << exact << ", element " << i << " of rows " << first
              << " + " << length << ", " << columns << " features, " << what;
        }
      }
    }
  }
};

TEST(CpuIntegersTest, all_multiplication_methods_give_the_same_bits) {
  Random random(31);
  for (int trial = 0; trial < 48; ++trial) {
    const int rows = trial < 14 ? trial + 1 : uniform(random, 1, cpu::kIntegerRowBlock);
    const bool long_k = trial % 12 == 5;  // more than one piece of a panel
    std::int64_t k = uniform(random, 1, long_k ? 2200 : 200), group = k;
    if (trial % 3 == 1) {
      group = std::array{64, 128, 32, 4, 36}[static_cast<std::size_t>(trial % 5)];
      k = group * uniform(random, 1, 4);
    }
    IntegerGemm(random, rows, uniform(random, 1, 128), k, group, trial % 4 == 2, false).check(random, cat("k ", k));
  }
}

TEST(CpuIntegersTest, the_greatest_codes_do_not_overflow) {
  Random random(32);
  for (const bool zeros : {false, true}) {
    IntegerGemm(random, 2, 3, cpu::kIntegerGroup, cpu::kIntegerGroup, zeros, true).check(random, "extreme");
    IntegerGemm(random, 7, 64, 300, 300, zeros, true).check(random, "extreme");
  }
}

TEST(CpuIntegersTest, rows_become_codes_and_a_scale_as_defined) {
  Random random(33);
  constexpr float kMax = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  for (const auto& [name, kernels] : cpu::instruction_sets()) {
    for (int trial = 0; trial < 200; ++trial) {
      const int n = uniform(random, 1, 150), kind = trial % 10;
      const DType type = trial % 2 == 0 ? DType::f32 : DType::bf16;
      auto row = Matrix::random(random, type, 1, n, kind == 4 ? 1e-44F : kind == 5 ? 1e30F : 1);
      const int at = uniform(random, 0, n - 1);
      if (kind == 1) row = Matrix(type, 1, n);
      if (kind == 2) row.set(0, at, trial % 4 == 2 ? NAN : -kInfinity);
      if (kind == 3) row.set(0, at, type == DType::f32 ? -kMax : 3e38F);
      if (kind == 6) {  // ties: multiples of one half with a scale of 1
        for (int i = 0; i < n; ++i) row.set(0, i, static_cast<float>(uniform(random, -254, 254)) / 2);
        row.set(0, at, 127);
      }
      if (kind == 0) {  // quotients at one half, and the floats next to it
        row.set(0, at, 127 * 0.7F);
        for (int i = 0; i < n; ++i) {
          if (i == at) continue;
          const float half = (static_cast<float>(uniform(random, -126, 125)) + 0.5F) * 0.7F;
          const int side = uniform(random, -1, 1);
          row.set(0, i, side == 0 ? half : std::nextafter(half, side < 0 ? -kInfinity : kInfinity));
        }
      }
      if (kind == 8) row.set(0, at, kLeast);
      const float given = kind == 7 ? 0.01F : kind == 9 ? kLeast : 0;
      std::vector<std::int8_t> codes(static_cast<std::size_t>((n + 63) / 64 * 64 + 1), 99);
      const float scale =
          type == DType::f32
              ? kernels->integers_from_f32(codes.data(), reinterpret_cast<const float*>(row.bytes.data()), given, n)
              : kernels->integers_from_bf16(codes.data(), reinterpret_cast<const cpu::Bf16*>(row.bytes.data()), given,
                                            n);
      float greatest = 0;
      bool finite = true;
      for (int i = 0; i < n; ++i) {
        greatest = std::max(greatest, std::abs(row.at(0, i)));
        finite = finite && std::isfinite(row.at(0, i));
      }
      const float expected = given > 0 ? given : greatest / 127.0F;
      if (finite) {
        EXPECT_EQ(scale, expected) << name;
      } else {
        EXPECT_TRUE(std::isnan(scale)) << name;
      }
      std::int32_t sum = 0;
      for (std::size_t i = 0; i < codes.size() - 1; ++i) {
        float code = 0;
        if (i < static_cast<std::size_t>(n) && finite && expected > 0) {
          code = std::nearbyint(row.at(0, static_cast<std::int64_t>(i)) / expected);
          code = std::min(127.0F, std::max(-127.0F, code));
        }
        sum += static_cast<int>(code);
        ASSERT_EQ(codes[i], static_cast<int>(code)) << name << ", element " << i << " of " << n << ", kind " << kind;
      }
      EXPECT_EQ(codes.back(), 99);
      std::int32_t got = 0;
      kernels->sum_integers(&got, codes.data(), n, 1);
      EXPECT_EQ(got, sum);
    }
  }
}

}  // namespace
}  // namespace charonia::ops
