// The layout of weights on the device: row-major and packed.
#include "ops/cuda/cuda_weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/cuda/kernels/gemm.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

std::vector<std::uint16_t> fetch(Stream& stream, const CudaLinear& linear) {
  std::vector<std::uint16_t> out(linear.bytes() / 2);
  stream.download(out.data(), linear.weight(), linear.bytes(), "test");
  stream.wait("test");
  return out;
}

// Parts that do not end at a group of 8 rows, with other types and strides.
TEST(CudaWeightsTest, packed_weights_are_the_rows_in_another_order) {
  Stream stream;
  MatrixUpload upload(stream);
  ops::Random random(3);
  for (const std::int64_t k : {1, 31, 32, 100}) {
    std::vector<ops::Matrix> parts;
    for (const auto& [rows, type] : {std::pair{5, DType::bf16}, {1, DType::f32}, {13, DType::f16}}) {
      parts.push_back(ops::Matrix::random(random, type, rows, k, 1, rows % 3));
    }
    std::vector<ops::HostMatrix> hosts;
    for (const auto& part : parts) hosts.push_back(part.host());
    for (const auto type : {DType::bf16, DType::f16}) {
      const CudaLinear by_rows(hosts, {}, type, false, upload), packed(hosts, {}, type, true, upload);
      ASSERT_FALSE(by_rows.packed());
      ASSERT_TRUE(packed.packed());
      ASSERT_EQ(packed.stride(), round_up(k, kPackedK));
      const auto expected = fetch(stream, by_rows), found = fetch(stream, packed);
      ASSERT_EQ(found.size(), static_cast<std::size_t>(24 * packed.stride())) << "the weight must not be stored twice";
      for (std::int64_t row = 0; row < 24; ++row) {
        for (std::int64_t at = 0; at < packed.stride(); ++at) {
          const auto value = row < 19 && at < k ? expected[static_cast<std::size_t>(row * by_rows.stride() + at)] : 0;
          ASSERT_EQ(found[static_cast<std::size_t>(packed_at(row, at, packed.stride()))], value) << row << ", " << at;
        }
      }
    }
  }
}

// More than a chunk of page-locked memory holds.
TEST(CudaWeightsTest, a_large_weight_is_packed_chunk_by_chunk) {
  constexpr std::int64_t kRows = 1100, kCols = 8200;
  std::vector<std::uint16_t> values(kRows * kCols);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i * 2654435761U >> 18);
  Stream stream;
  MatrixUpload upload(stream);
  const ops::HostMatrix host{values.data(), DType::bf16, kRows, kCols};
  const CudaLinear packed({&host, 1}, {}, DType::bf16, true, upload);
  const auto found = fetch(stream, packed);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t k = 0; k < kCols; ++k) {
      ASSERT_EQ(found[static_cast<std::size_t>(packed_at(row, k, packed.stride()))],
                values[static_cast<std::size_t>(row * kCols + k)]);
    }
  }
}

TEST(CudaWeightsTest, every_element_of_a_packed_weight_has_its_own_address) {
  constexpr std::int64_t kRows = 16, kStride = 96;
  std::vector<int> seen(kRows * kStride);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t k = 0; k < kStride; ++k) ++seen.at(static_cast<std::size_t>(packed_at(row, k, kStride)));
  }
  for (const int count : seen) ASSERT_EQ(count, 1);
  EXPECT_EQ(packed_at(9, 40, kStride), 8 * kStride + 256 + 32 + 8);
}

}  // namespace
}  // namespace charonia::cuda
