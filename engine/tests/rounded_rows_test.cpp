// Rounding of weights while they are loaded, compared with a slow reference that searches the nearest code.
#include "model/rounded_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "model/rounding.h"
#include "ops/quant_weight.h"

namespace charonia::model {
namespace {

using ops::Code;

// A matrix in a type, with the values that the type holds.
struct Matrix {
  DType type;
  std::int64_t rows, cols;
  std::string bytes = {};
  std::vector<float> values = {};

  void append(float value) {
    const auto half = type == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
    if (type == DType::f32) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else {
      bytes.append(reinterpret_cast<const char*>(&half), sizeof half);
    }
    values.push_back(type == DType::f32 ? value : type == DType::bf16 ? bf16_to_float(half) : f16_to_float(half));
  }
  // Files' data may have any alignment.
  ops::HostMatrix columns(std::int64_t begin, std::int64_t end) const {
    unaligned = " " + bytes;
    const auto first = static_cast<std::size_t>(begin) * size_of(type);
    return {unaligned.data() + 1 + first, type, rows, end - begin, cols};
  }
  mutable std::string unaligned = {};
};

Matrix random_matrix(DType type, std::int64_t rows, std::int64_t cols) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 0.05F);
  Matrix out{type, rows, cols};
  for (std::int64_t r = 0; r < rows; ++r) {
    const float factor = r == 0 ? 0 : std::ldexp(1.0F, static_cast<int>(r % 40) - 30);  // a row of zeros; tiny rows
    for (std::int64_t c = 0; c < cols; ++c) out.append(factor * normal(random));
  }
  return out;
}

float in_type(double value, DType type) {
  const auto wide = static_cast<float>(value);
  if (type == DType::f32) return wide;
  return type == DType::bf16 ? bf16_to_float(float_to_bf16(wide)) : f16_to_float(float_to_f16(wide));
}

// The code whose number is nearest, and of two nearest ones the even one.
std::uint8_t nearest(float value, Code code) {
  int best = -1;
  double least = std::numeric_limits<double>::infinity();
  for (int bits = 0; bits < (code == Code::u4 ? 16 : 256); ++bits) {
    const double number = ops::number_of(code, static_cast<std::uint8_t>(bits)) - (code == Code::u4 ? 8 : 0);
    if (std::isnan(number) || (number == 0 && std::signbit(number) != std::signbit(value) && code == Code::f8_e4m3)) {
      continue;
    }
    const double distance = std::abs(number - double{value});
    if (distance > least || (distance == least && bits % 2 != 0)) continue;
    best = bits, least = distance;
  }
  return static_cast<std::uint8_t>(best);
}

struct Rounded {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
};

Rounded reference(const Matrix& matrix, Code code, std::int64_t group) {
  const double limit = code == Code::i8 ? 127.5 : code == Code::u4 ? 7.5 : 448;
  const float epsilon = matrix.type == DType::bf16  ? 0x1p-7F
                        : matrix.type == DType::f16 ? 0x1p-10F
                                                    : 0x1p-23F;
  Rounded out;
  const auto size = static_cast<std::size_t>(group);
  for (std::size_t at = 0; at < matrix.values.size(); at += size) {
    float most = 0;
    for (std::size_t c = at; c < at + size; ++c) most = std::max(most, std::abs(matrix.values[c]));
    float scale = in_type(static_cast<float>(most / limit), matrix.type);
    if (scale == 0) scale = epsilon;
    out.scales.push_back(scale);
    for (std::size_t c = at; c < at + size; ++c) {
      out.codes.push_back(nearest(in_type(matrix.values[c] / scale, matrix.type), code));
    }
  }
  return out;
}

Rounded read(const RoundedRows& rows, std::int64_t count) {
  Rounded out{std::vector<std::uint8_t>(static_cast<std::size_t>(count * rows.own().cols)),
              std::vector<float>(static_cast<std::size_t>(count * (rows.own().cols / rows.group())))};
  EXPECT_TRUE(rows.read(0, count, out.codes.data(), out.scales.data()));
  return out;
}

class RoundedRowsTest : public ::testing::TestWithParam<std::pair<DType, Code>> {};
INSTANTIATE_TEST_SUITE_P(
    Types, RoundedRowsTest,
    ::testing::Values(std::pair{DType::bf16, Code::i8}, std::pair{DType::bf16, Code::u4},
                      std::pair{DType::bf16, Code::f8_e4m3}, std::pair{DType::f16, Code::i8},
                      std::pair{DType::f16, Code::u4}, std::pair{DType::f16, Code::f8_e4m3},
                      std::pair{DType::f32, Code::i8}, std::pair{DType::f32, Code::f8_e4m3}),
    [](const auto& info) {
      return std::string(to_string(info.param.first)) + "_" + std::string(ops::to_string(info.param.second));
    });

TEST_P(RoundedRowsTest, CodesAndScalesEqualTheReference) {
  const auto [type, code] = GetParam();
  const auto matrix = random_matrix(type, 45, 144);
  for (const std::int64_t group : {0, 16, 48}) {
    const auto expected = reference(matrix, code, group == 0 ? matrix.cols : group);
    const auto found = read(RoundedRows(matrix.columns(0, matrix.cols), {}, code, group), matrix.rows);
    EXPECT_EQ(found.scales, expected.scales) << group;
    EXPECT_EQ(found.codes, expected.codes) << group;
  }
}

TEST_P(RoundedRowsTest, ARangeOfColumnsHasTheScalesOfTheWholeRows) {
  const auto [type, code] = GetParam();
  const auto matrix = random_matrix(type, 45, 96);
  const auto expected = reference(matrix, code, matrix.cols);
  const auto all = matrix.columns(0, matrix.cols);
  const auto from = [&](std::int64_t begin, std::int64_t end) {
    const auto* const data = all.row(0) + static_cast<std::size_t>(begin) * size_of(matrix.type);
    return ops::HostMatrix{data, matrix.type, matrix.rows, end - begin, matrix.cols};
  };
  const auto found = read(RoundedRows(from(32, 64), {from(0, 32), from(64, 96)}, code, 0), matrix.rows);
  EXPECT_EQ(found.scales, expected.scales);
  for (std::int64_t r = 0; r < matrix.rows; ++r) {
    const auto own = found.codes.begin() + r * 32, whole = expected.codes.begin() + r * 96 + 32;
    EXPECT_TRUE(std::equal(own, own + 32, whole)) << r;
  }
}

TEST_P(RoundedRowsTest, AValueThatIsNotFiniteIsReported) {
  const auto [type, code] = GetParam();
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    Matrix matrix{type, 1, 16};
    for (int c = 0; c < 16; ++c) matrix.append(c == 5 ? value : 1);
    std::vector<std::uint8_t> codes(16);
    float scale = 0;
    const auto row = matrix.columns(0, 16);
    EXPECT_FALSE(RoundedRows(row, {}, code, 0).read(0, 1, codes.data(), &scale));
    Matrix finite{type, 1, 16};
    for (int c = 0; c < 16; ++c) finite.append(1);
    EXPECT_FALSE(RoundedRows(finite.columns(0, 16), {row}, code, 0).read(0, 1, codes.data(), &scale));
  }
}

// Every distance between two neighbouring codes, at its middle and next to it.
TEST(RoundedRows, TiesAreRoundedToEven) {
  Matrix matrix{DType::f32, 1, 0};
  matrix.append(448);  // so that the scale is 1
  for (int bits = 0; bits < 0x7e; ++bits) {
    const float low = ops::number_of(Code::f8_e4m3, static_cast<std::uint8_t>(bits));
    const float high = ops::number_of(Code::f8_e4m3, static_cast<std::uint8_t>(bits + 1));
    const float middle = (low + high) / 2;
    for (const float value : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)}) {
      matrix.append(value);
      matrix.append(-value);
    }
  }
  matrix.cols = static_cast<std::int64_t>(matrix.values.size());
  const auto expected = reference(matrix, Code::f8_e4m3, matrix.cols);
  const auto found = read(RoundedRows(matrix.columns(0, matrix.cols), {}, Code::f8_e4m3, 0), 1);
  EXPECT_EQ(found.scales, std::vector{1.0F});
  EXPECT_EQ(found.codes, expected.codes);
}

TEST(RoundedRows, ColumnsOfOtherRanksAreFoundByName) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(other_columns("layers.3.attention.wo.1.weight", 3),
            (Names{"layers.3.attention.wo.0.weight", "layers.3.attention.wo.2.weight"}));
  EXPECT_EQ(other_columns("layers.0.feed_forward.experts.12.w2.0.weight", 2),
            Names{"layers.0.feed_forward.experts.12.w2.1.weight"});
  EXPECT_EQ(other_columns("layers.3.attention.wo.0.weight", 1), Names{});
  EXPECT_EQ(other_columns("layers.3.attention.w_qkv.0.weight", 2), Names{});
}

}  // namespace
}  // namespace charonia::model
