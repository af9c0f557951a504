// The layout of packed weights on the device.
#include "ops/cuda/cuda_weights.h"

#include <gtest/gtest.h>

#include "ops/cuda/kernels/gemm.h"
#include "ops_support.h"

namespace charonia::cuda {
namespace {

// Parts that do not end at a group of 8 rows, with other types and strides; the last one is larger than a chunk of
// page-locked memory.
TEST(CudaWeightsTest, packed_weights_are_the_rows_in_another_order) {
  Stream stream;
  MatrixUpload upload(stream);
  ops::Random random(3);
  for (const std::int64_t k : {1, 31, 32, 100, 8200}) {
    std::vector<ops::Matrix> parts;
    for (const auto& [rows, type] : {std::pair{5, DType::bf16}, {1, DType::f32}, {k == 8200 ? 1100 : 13, DType::f16}}) {
      parts.push_back(ops::Matrix::random(random, type, rows, k, 1, rows % 3));
    }
    std::vector<ops::HostMatrix> hosts;
    for (const auto& part : parts) hosts.push_back(part.host());
    for (const auto type : {DType::bf16, DType::f16}) {
      const CudaLinear packed(hosts, {}, type, true, upload);
      const auto stride = packed.stride(), rows = 6 + parts[2].rows, all = round_up(rows, kPackedRows);
      ASSERT_TRUE(packed.packed());
      ASSERT_EQ(stride, round_up(k, kPackedK));
      ops::Matrix found(type, all, stride);
      ASSERT_EQ(packed.bytes(), found.bytes.size()) << "the weight must not be stored twice";
      stream.download(found.bytes.data(), packed.weight(), packed.bytes(), "test");
      stream.wait("test");
      for (std::int64_t row = 0; row < all; ++row) {
        const auto& part = parts[row < 5 ? 0 : row < 6 ? 1 : 2];
        for (std::int64_t i = 0; i < stride; ++i) {
          const bool inside = row < rows && i < k;
          const double value = inside ? ops::rounded(type, part.at(row < 5 ? row : row < 6 ? 0 : row - 6, i)) : 0;
          const auto at = packed_at(row, i, stride);
          ASSERT_EQ(found.at(at / stride, at % stride), value) << "row " << row << ", column " << i << " of " << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace charonia::cuda
