// Quantised k and v: kv_quant.h compared with an independent implementation, and the kernels of every instruction set
// with it bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_world.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/kernels.h"
#include "ops/kv_quant.h"
#include "ops_support.h"
#include "quant_support.h"

namespace charonia::ops {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Quantised {
  std::uint16_t scale = 0, zero = 0;  // f16
  std::vector<std::uint8_t> q;
  double value(std::size_t i) const {
    return static_cast<double>(static_cast<float>(q[i]) * f16_to_float(scale) + f16_to_float(zero));
  }
};

// Uses only the header.
Quantised quantised(const std::vector<float>& x, int bits) {
  float lo = x[0], hi = x[0];
  for (const float v : x) lo = kv_lesser(lo, v), hi = kv_greater(hi, v);
  const auto range = kv_range(lo, hi, bits);
  Quantised out{float_to_f16(range.scale), float_to_f16(range.zero), {}};
  for (const float v : x) out.q.push_back(kv_quantise(v, f16_to_float(out.scale), f16_to_float(out.zero), bits));
  return out;
}

// Heads of many kinds and sizes.
std::vector<std::vector<float>> heads(Random& random) {
  std::vector<std::vector<float>> out;
  for (int i = 0; i < 400; ++i) {
    std::vector<float> x(static_cast<std::size_t>(2 * uniform(random, 1, 130)));
    const float size = std::exp2(static_cast<float>(uniform(random, -30, 12)));
    const float middle = i % 3 == 0 ? 0 : size * static_cast<float>(uniform(random, -4, 4));
    std::normal_distribution<float> normal(middle, size);
    for (auto& v : x) v = i % 7 == 0 ? std::nearbyint(normal(random)) : normal(random);
    if (i % 50 == 1) std::fill(x.begin(), x.end(), x[0]);
    if (i % 50 == 2) x[0] = -0.0F, x[1] = 0;
    out.push_back(std::move(x));
  }
  return out;
}

TEST(KvQuant, EqualsTheDocumentedIntegers) {
  Random random(70);
  for (const auto& x : heads(random)) {
    for (const int bits : {8, 4}) {
      const auto got = quantised(x, bits);
      const auto expected = through_codes({x.begin(), x.end()}, bits);
      for (std::size_t i = 0; i < x.size(); ++i) {
        ASSERT_LE(got.q[i], kv_quant_max(bits));
        ASSERT_EQ(got.value(i), expected[i]) << x[i] << " of " << x.size() << ", " << bits << " bits";
      }
    }
  }
}

TEST(KvQuant, RoundsToEvenWithinItsRange) {
  EXPECT_EQ(kv_quantise(0.5F, 1, 0, 8), 0);
  EXPECT_EQ(kv_quantise(1.5F, 1, 0, 8), 2);
  EXPECT_EQ(kv_quantise(2.5F, 1, 0, 8), 2);
  EXPECT_EQ(kv_quantise(-3, 1, 0, 8), 0);
  EXPECT_EQ(kv_quantise(300, 1, 0, 8), 255);
  EXPECT_EQ(kv_quantise(300, 1, 0, 4), 15);
  EXPECT_EQ(kv_quantise(7, 0, 5, 8), 0) << "the scale is 0";
  EXPECT_EQ(kv_quantise(7, 0, kNaN, 8), 0);
  for (int packed = 0; packed < 256; ++packed) {
    const auto byte = static_cast<std::uint8_t>(packed);
    EXPECT_EQ(kv_pack(static_cast<std::uint8_t>(byte & 15U), static_cast<std::uint8_t>(byte >> 4)), byte);
  }
  EXPECT_EQ(kv_pack(3, 12), 0xc3);
}

TEST(KvQuant, AHeadOfEqualElementsIsRoundedToHalfPrecision) {
  for (const float x : {0.0F, -0.0F, 1.0F, -2.5F, 0.1F, 1e-9F}) {
    const auto got = quantised({x, x, x, x}, 8);
    EXPECT_EQ(got.scale, 0);
    EXPECT_EQ(got.q[3], 0);
    EXPECT_EQ(got.value(0), rounded(DType::f16, static_cast<double>(x)));
  }
  EXPECT_EQ(quantised({-0.0F, 0.0F}, 4).zero, 0) << "-0 and 0 must have one zero";
}

TEST(KvQuant, ValuesThatAreNotFiniteGiveNan) {
  for (const auto& x : {std::vector<float>{1, kNaN, 2}, {kNaN, 1, 2}, {1, 2, kInfinity}, {-kInfinity, 2, kInfinity}}) {
    const auto got = quantised(x, 8);
    EXPECT_EQ(got.scale, 0);
    EXPECT_TRUE(std::isnan(got.value(0)));
  }
  const auto far = quantised({-1e6F, 0, 1e6F}, 8);
  EXPECT_EQ(f16_to_float(far.zero), -kKvF16Max);
  EXPECT_TRUE(std::isfinite(far.value(2)));
}

// Every code, the middle between every two numbers and the floats next to it, and larger magnitudes than 448.
TEST(KvQuant, Fp8RoundsToTheNearestNumberAndSaturates) {
  std::vector<float> all{1e-30F, 0x1p-10F, 447.9F, 448, 456, 464, 465, 480, 1e30F, kInfinity};
  for (int code = 0; code < 0x7f; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    const int exponent = code / 8, mantissa = code % 8;
    const auto number =
        static_cast<float>(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
    EXPECT_EQ(e4m3_to_float(bits), number);
    EXPECT_EQ(e4m3_to_float(static_cast<std::uint8_t>(bits | 0x80)), -number);
    EXPECT_EQ(float_to_e4m3(number), bits);
    EXPECT_EQ(float_to_e4m3(-number), bits | 0x80);
    if (code == 0x7e) break;
    const float middle = (number + e4m3_to_float(static_cast<std::uint8_t>(code + 1))) / 2;
    for (const float x : {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, 1e3F)}) all.push_back(x);
  }
  for (const float x : all) {
    EXPECT_EQ(e4m3_to_float(float_to_e4m3(x)), nearest_e4m3(x)) << x;
    EXPECT_EQ(e4m3_to_float(float_to_e4m3(-x)), -nearest_e4m3(x)) << x;
  }
  EXPECT_EQ(float_to_e4m3(kNaN), 0x7f);
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7f)) && std::isnan(e4m3_to_float(0xff)));
}

class KvQuantKernels : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, KvQuantKernels, testing::ValuesIn(device_names()), [](const auto& i) { return i.param; });

TEST_P(KvQuantKernels, KernelsEqualTheHeaderBitByBit) {
  const auto& kernels = *cpu::instruction_set(GetParam()).kernels;
  Random random(72);
  auto all = heads(random);
  for (std::size_t i = 0; i < 40; ++i) {
    auto odd = all[i];
    odd[static_cast<std::size_t>(uniform(random, 0, static_cast<int>(odd.size()) - 1))] = i % 3 == 0   ? kNaN
                                                                                          : i % 3 == 1 ? kInfinity
                                                                                                       : -kInfinity;
    all.push_back(std::move(odd));
  }
  for (const auto& x : all) {
    const auto n = static_cast<std::int64_t>(x.size());
    for (const int bits : {8, 4}) {
      const auto expected = quantised(x, bits);
      float lo = 0, hi = 0;
      kernels.min_and_max(x.data(), n, &lo, &hi);
      const auto range = kv_range(lo, hi, bits);
      ASSERT_EQ(float_to_f16(range.scale), expected.scale);
      ASSERT_EQ(float_to_f16(range.zero), expected.zero);
      std::vector<std::uint8_t> q(x.size() + 1, 77);
      kernels.quantise(q.data(), x.data(), f16_to_float(expected.scale), f16_to_float(expected.zero),
                       kv_quant_max(bits), n);
      EXPECT_EQ(q.back(), 77);
      q.pop_back();
      ASSERT_EQ(q, expected.q);
    }
  }
}

}  // namespace
}  // namespace charonia::ops
