// cuBLASLt, if available: on a machine with a GPU.
#include "ops/cuda/gemm/blas.h"

#include <gtest/gtest.h>

#include "base/text.h"
#include "cuda/gemm_problem.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

TEST(BlasTest, every_algorithm_computes_the_gemm_and_unaligned_operands_are_rejected) {
  std::string why = "as before";
  const auto blas = load_cublas(why);
  EXPECT_EQ(blas == nullptr, !why.empty()) << why;
  if (!blas) GTEST_SKIP() << why;
  const Case cases[] = {
      {.rows = 1, .n = 256, .k = 512},
      {.rows = 7, .n = 96, .k = 200, .in_gap = 8, .out_gap = 8, .bias = true},
      {.type = DType::f16, .out_type = DType::f16, .rows = 33, .n = 64, .k = 136, .bias = true},
      {.out_type = DType::f32, .rows = 100, .n = 72, .k = 1024, .bias = true},
      {.type = DType::f32, .out_type = DType::f32, .rows = 9, .n = 128, .k = 264},
  };
  const DeviceMemory workspace(kWorkspaceBytes);
  for (const auto& c : cases) {
    GemmProblem problem(c);
    const auto tactics = blas->tactics(problem.gemm(), kWorkspaceBytes);
    EXPECT_FALSE(tactics.empty());
    for (const auto& tactic : tactics) {
      SCOPED_TRACE(cat("rows ", c.rows, " n ", c.n, " k ", c.k, " algorithm ", tactic.algorithm[0]));
      EXPECT_TRUE(blas->serves(problem.gemm(), tactic, kWorkspaceBytes));
      problem.clear();
      ASSERT_TRUE(blas->run(problem.stream, problem.gemm(), tactic, workspace.data(), kWorkspaceBytes));
      add_bias(problem.stream, problem.gemm());
      problem.download();
      problem.check(true);
    }
  }
  GemmProblem unaligned({.rows = 4, .n = 64, .k = 64, .in_offset = 1});
  EXPECT_TRUE(blas->tactics(unaligned.gemm(), kWorkspaceBytes).empty());
  EXPECT_FALSE(blas->run(unaligned.stream, unaligned.gemm(), {}, nullptr, 0));
}

}  // namespace
}  // namespace charonia::cuda
