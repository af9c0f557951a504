// Rejected arguments of the kernels on single rows. ops_rows_test.cpp, which all devices share, tests the results.
#include "ops/cuda/kernels/rows.h"

#include <gtest/gtest.h>

#include <string>

#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"

namespace charonia::cuda {
namespace {

using ops::Matrix;

// Only the combinations of types in a model's steps are compiled. Others are rejected, and nothing is written.
TEST(CudaRowsTest, unsupported_combinations_of_types_are_rejected) {
  Stream stream;
  const auto refused = [](auto call, const std::string& part) {
    expect_error(ErrorCode::internal, {part}, [&] { call(); });
  };
  const MatrixOnDevice floats(stream, Matrix(DType::f32, 2, 16)), halves(stream, Matrix(DType::f16, 2, 16)),
      brains(stream, Matrix(DType::bf16, 2, 16)), wide(stream, Matrix(DType::bf16, 2, 32));
  const DeviceArray<std::int32_t> ids(stream, {0, 0});
  const auto* const weight = static_cast<const float*>(floats.tensor().data);
  refused([&] { embed(stream, brains.tensor(), halves.tensor().data, DType::f16, ids.data(), ids.data()); },
          "embed: out is bf16 and must be fp32");
  refused([&] { rms_norm(stream, brains.tensor(), brains.tensor(), Tensor{}, {.weight = weight}); },
          "rms_norm: residual is bf16 and must be fp32");
  refused([&] { rms_norm(stream, brains.tensor(), floats.tensor(), halves.tensor(), {.weight = weight}); },
          "rms_norm: delta is fp16 and must be bf16");
  refused([&] { gated_activation(stream, halves.tensor(), wide.tensor(), ops::Activation::silu); },
          "gated_activation: out is fp16 and must be bf16");
}

}  // namespace
}  // namespace charonia::cuda
