// The instructions of hopper.h, compared with plain loops: on the emulated device and on a GPU (scripts/gpu_check.sh
// probe). The lines that begin with "figure" are for gpu_check.
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <functional>
#include <random>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda/device_arrays.h"
#include "cuda/hopper_probe.h"

namespace charonia::cuda {
namespace {

using Halves = std::vector<std::uint16_t>;
constexpr Swizzle kSwizzles[] = {Swizzle::none, Swizzle::of_32, Swizzle::of_64, Swizzle::of_128};

std::uint16_t to_half(DType type, float x) { return type == DType::bf16 ? float_to_bf16(x) : float_to_f16(x); }
float from_half(DType type, std::uint16_t x) { return type == DType::bf16 ? bf16_to_float(x) : f16_to_float(x); }

// n numbers; whole ones have exact sums.
Halves numbers(DType type, std::size_t n, unsigned seed, bool whole) {
  std::mt19937 random(seed);
  Halves out(n);
  for (auto& x : out) {
    const auto drawn = static_cast<float>(random() % 4096) / 2048 - 1;
    x = to_half(type, whole ? std::round(drawn * 8) : drawn);
  }
  return out;
}

class HopperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_info(0);
    if (!device.clusters)
      GTEST_SKIP() << device.name << " has no barriers and TMA copies: compute capability 9.0 is needed";
    wgmma_ = device.wgmma;
  }
  bool wgmma_ = false;
  Stream stream_;
};

TEST_F(HopperTest, bulk_copies_fill_a_ring_through_many_phases) {
  std::vector<float> in(10 * kBulkChunk);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  const DeviceArray<float> from(stream_, in), to(stream_, std::vector<float>(in.size(), -1));
  probe_bulk(stream_, {from.data(), to.data(), static_cast<int>(in.size())});
  for (auto& x : in) x += 1;
  EXPECT_EQ(to.host(), in);
}

// The bytes of a box in shared memory.
std::vector<unsigned char> expected_box(const TensorBox& box, const Halves& data, const int* at) {
  const auto size = size_of(box.type), width = static_cast<std::size_t>(box.box[0]) * size;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(data.data());
  std::size_t rows = 1;
  for (int i = 1; i < box.rank; ++i) rows *= static_cast<std::size_t>(box.box[static_cast<std::size_t>(i)]);
  std::vector<unsigned char> out(rows * width);
  for (std::size_t row = 0; row < rows; ++row) {
    for (int column = 0; column < box.box[0]; ++column) {
      std::int64_t index = at[0] + column, offset = index * static_cast<std::int64_t>(size);
      bool inside = index >= 0 && index < box.sizes[0];
      auto rest = static_cast<std::int64_t>(row);
      for (std::size_t i = 1; i < static_cast<std::size_t>(box.rank); ++i) {
        index = at[i] + rest % box.box[i];
        rest /= box.box[i];
        inside = inside && index >= 0 && index < box.sizes[i];
        offset += index * box.strides[i];
      }
      if (!inside) continue;
      // Pieces of 16 bytes change places within 8 rows: piece p of row r goes to p ^ (r / (128 / width)).
      const std::size_t in_row = static_cast<std::size_t>(column) * size;
      std::size_t piece = in_row / 16;
      if (box.swizzle != Swizzle::none) piece ^= row / (128 / width) % (width / 16);
      std::memcpy(out.data() + row * width + piece * 16 + in_row % 16, bytes + offset, size);
    }
  }
  return out;
}

TEST_F(HopperTest, boxes_of_every_swizzle_and_rank_are_copied) {
  const auto data = numbers(DType::bf16, 8 * 6 * 40 * 72, 1, false);
  const DeviceArray<std::uint16_t> from(stream_, data);
  for (const auto swizzle : kSwizzles) {
    for (const int rank : {2, 3, 4, -2, -4}) {
      const auto type = rank < 0 ? DType::i8 : DType::bf16;
      const int element = static_cast<int>(size_of(type));
      const int columns = (swizzle == Swizzle::none ? 48 : static_cast<int>(swizzle)) / element;
      TensorBox box{.data = from.data(),
                    .type = type,
                    .rank = std::abs(rank),
                    .sizes = {140 / element, 40, 6, 8},
                    .strides = {0, 144, 40 * 144, 6 * 40 * 144},
                    .box = {columns, 16, 3, 2},
                    .swizzle = swizzle};
      // Inside, and beyond the end and the beginning of several dimensions.
      for (const std::array<int, 4> at : {std::array{0, 0, 0, 0}, {8, 3, 2, 5}, {48, 30, 5, 7}, {-8, -3, -1, -1}}) {
        SCOPED_TRACE(cat(to_string(type), " swizzle ", static_cast<int>(swizzle), " rank ", box.rank, " at ", at[0]));
        const auto expected = expected_box(box, data, at.data());
        const DeviceArray<unsigned char> to(stream_, std::vector<unsigned char>(expected.size(), 0xee));
        BoxProbe probe{make_tensor_map(box), {}, box.rank, static_cast<int>(expected.size()), to.data()};
        std::ranges::copy(at, probe.at);
        probe_box(stream_, probe);
        ASSERT_EQ(to.host(), expected);
      }
    }
  }
}

struct Factors {
  Halves a, b;  // [64, 64], [n, 64]
};

// Runs wgmma, or mma if `factor` is empty, and returns [64, n]. d: the initial sums.
template <class Sum>
std::vector<Sum> product(Stream& stream, DType type, int n, std::optional<Factor> factor, Swizzle swizzle, bool add,
                         const Factors& host, const std::vector<Sum>& d) {
  const bool transposed = factor == Factor::registers_transposed;
  auto turned = host.b;
  for (int row = 0; transposed && row < n; ++row) {
    for (int k = 0; k < kProbeK; ++k) {
      turned[static_cast<std::size_t>(k * n + row)] = host.b[static_cast<std::size_t>(row * kProbeK + k)];
    }
  }
  const DeviceArray<std::uint16_t> a(stream, host.a), b(stream, turned);
  const DeviceArray<Sum> out(stream, d);
  const int columns = swizzle == Swizzle::none ? 8 : static_cast<int>(swizzle) / 2;
  const auto map = [&](const DeviceArray<std::uint16_t>& of, int rows, int width) {
    return make_tensor_map({.data = of.data(),
                            .type = type == DType::i8 ? DType::f16 : type,  // in pairs
                            .sizes = {width, rows},
                            .strides = {0, 2 * width},
                            .box = {columns, rows},
                            .swizzle = swizzle});
  };
  const ProductProbe probe{.a_map = map(a, kProbeM, kProbeK),
                           .b_map = transposed ? map(b, kProbeK, n) : map(b, n, kProbeK),
                           .a = a.data(),
                           .b = b.data(),
                           .out = out.data(),
                           .swizzle = swizzle,
                           .add = add};
  if (factor) {
    probe_wgmma(stream, type, n, *factor, probe);
  } else {
    probe_mma(stream, type, n, probe);
  }
  return out.host();
}

TEST_F(HopperTest, products_of_every_shape_and_swizzle_are_exact) {
  if (!wgmma_) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  for (const auto type : {DType::bf16, DType::f16}) {
    for (const int n : {32, 64, 128, 256}) {
      const Factors host{numbers(type, kProbeM * kProbeK, 2, true),
                         numbers(type, static_cast<std::size_t>(n) * kProbeK, 3, true)};
      std::vector<float> plain(static_cast<std::size_t>(kProbeM * n));
      for (std::size_t i = 0; i < plain.size(); ++i) {
        for (std::size_t k = 0; k < kProbeK; ++k) {
          plain[i] += from_half(type, host.a[i / static_cast<std::size_t>(n) * kProbeK + k]) *
                      from_half(type, host.b[i % static_cast<std::size_t>(n) * kProbeK + k]);
        }
      }
      for (const auto factor : {Factor::shared, Factor::written, Factor::registers, Factor::registers_transposed}) {
        for (const auto swizzle : kSwizzles) {
          const bool fits = swizzle != Swizzle::none && static_cast<int>(swizzle) <= 2 * n;
          if (factor == Factor::registers_transposed && !fits) continue;
          const bool add = swizzle == Swizzle::of_128;
          SCOPED_TRACE(cat(to_string(type), " n ", n, " factor ", static_cast<int>(factor), " swizzle ",
                           static_cast<int>(swizzle)));
          auto expected = plain;
          if (add) {
            for (auto& x : expected) x += 3;
          }
          const std::vector<float> before(plain.size(), add ? 3.0F : std::nanf(""));
          ASSERT_EQ(product(stream_, type, n, factor, swizzle, add, host, before), expected);
        }
      }
    }
  }
}

TEST_F(HopperTest, products_of_integers_are_exact) {
  if (!wgmma_) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  std::mt19937 random(6);
  const auto pairs = [&](int rows) {
    Halves out(static_cast<std::size_t>(rows) * kProbeK);
    for (auto& x : out) x = static_cast<std::uint16_t>(random());
    std::fill_n(out.begin(), kProbeK, std::uint16_t{0x8080});  // the greatest sum
    return out;
  };
  for (const int n : {128, 256}) {
    const Factors host{pairs(kProbeM), pairs(n)};
    const auto number = [](std::uint16_t pair, int i) {
      return static_cast<int>(static_cast<std::int8_t>(pair >> 8 * i));
    };
    std::vector<int> plain(static_cast<std::size_t>(kProbeM * n));
    for (std::size_t i = 0; i < plain.size(); ++i) {
      for (std::size_t k = 0; k < 2 * kProbeK; ++k) {
        plain[i] += number(host.a[i / static_cast<std::size_t>(n) * kProbeK + k / 2], k % 2) *
                    number(host.b[i % static_cast<std::size_t>(n) * kProbeK + k / 2], k % 2);
      }
    }
    for (const auto swizzle : kSwizzles) {
      for (const bool add : {false, true}) {
        SCOPED_TRACE(cat("n ", n, " swizzle ", static_cast<int>(swizzle), " add ", add));
        constexpr int kBefore = (1 << 30) + 1;  // more bits than a float has
        auto expected = plain;
        for (auto& x : expected) x += add ? kBefore : 0;
        ASSERT_EQ(
            product(stream_, DType::i8, n, Factor::shared, swizzle, add, host, std::vector<int>(plain.size(), kBefore)),
            expected);
      }
    }
  }
}

// Reports which share of the bits of wgmma's sums are those of mma's. Reproducible mode may use wgmma if it is all of
// them. Differences up to the rounding of float sums are no failure.
TEST_F(HopperTest, bits_of_wgmma_and_mma) {
  if (!wgmma_) GTEST_SKIP() << "wgmma needs compute capability 9.0 and kernels for 90a";
  constexpr int kN = 64;
  for (const auto type : {DType::bf16, DType::f16}) {
    for (const int k_used : {16, kProbeK}) {
      Factors host{numbers(type, kProbeM * kProbeK, 4, false), numbers(type, kN * kProbeK, 5, false)};
      for (std::size_t i = 0; i < host.a.size(); ++i) {
        if (static_cast<int>(i) % kProbeK >= k_used) host.a[i] = 0;
      }
      const std::vector<float> zeros(kProbeM * kN);
      const auto ours = product(stream_, type, kN, Factor::registers, Swizzle::of_128, false, host, zeros);
      const auto theirs = product(stream_, type, kN, {}, Swizzle::of_128, false, host, zeros);
      std::size_t equal = 0;
      for (std::size_t i = 0; i < ours.size(); ++i) {
        equal += std::bit_cast<std::uint32_t>(ours[i]) == std::bit_cast<std::uint32_t>(theirs[i]) ? 1 : 0;
        ASSERT_NEAR(ours[i], theirs[i], 64 * 0x1p-20);
      }
      const auto share = 100 * static_cast<double>(equal) / static_cast<double>(ours.size());
      std::printf("figure %.4f %% equal bits of wgmma and mma, %s, k %d\n", share, std::string(to_string(type)).c_str(),
                  k_used);
#if defined(CHARONIA_CUDA_ON_HOST)
      EXPECT_EQ(equal, ours.size());
#endif
    }
  }
}

TEST(TensorMapTest, wrong_boxes_are_rejected_with_the_value) {
  alignas(16) static const std::uint16_t data[64] = {};
  const TensorBox right{.data = data, .sizes = {8, 8}, .strides = {0, 16}, .box = {8, 8}};
  EXPECT_NO_THROW(check(right));
  const auto expect = [&](std::string_view text, const std::function<void(TensorBox&)>& change) {
    auto wrong = right;
    change(wrong);
    try {
      check(wrong);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string_view(error.what()).find(text), std::string_view::npos) << error.what();
    }
  };
  expect("aligned to 16", [](TensorBox& box) { box.data = data + 1; });
  expect("fp32", [](TensorBox& box) { box.type = DType::f32; });
  expect("5 dimensions", [](TensorBox& box) { box.rank = 5; });
  expect("dimension 1 has 0 elements", [](TensorBox& box) { box.sizes[1] = 0; });
  expect("a stride of 24 bytes", [](TensorBox& box) { box.strides[1] = 24; });
  expect("a box of 257", [](TensorBox& box) { box.box[1] = 257; });
  expect("a box of 8 bytes", [](TensorBox& box) { box.box[0] = 4; });
  expect("the swizzle has 64", [](TensorBox& box) { box.swizzle = Swizzle::of_64; });
}

}  // namespace
}  // namespace charonia::cuda
