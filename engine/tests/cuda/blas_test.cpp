// cuBLASLt, if available: on a machine with a GPU.
#include "ops/cuda/gemm/blas.h"

#include <gtest/gtest.h>

#include "base/text.h"
#include "cuda/gemm_problem.h"
#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

TEST(BlasTest, a_library_that_cannot_be_loaded_gives_a_reason) {
  std::string why = "as before";
  const auto blas = load_cublas(why);
  EXPECT_EQ(blas == nullptr, !why.empty()) << why;
}

TEST(BlasTest, every_algorithm_computes_the_gemm) {
  std::string why;
  const auto blas = load_cublas(why);
  if (!blas) GTEST_SKIP() << why;
  const Case cases[] = {
      {.rows = 1, .n = 256, .k = 512},
      {.rows = 7, .n = 96, .k = 200, .in_gap = 8, .out_gap = 8, .bias = true},
      {.type = DType::f16, .out_type = DType::f16, .rows = 33, .n = 64, .k = 136, .bias = true},
      {.out_type = DType::f32, .rows = 100, .n = 72, .k = 1024, .bias = true},
      {.type = DType::f32, .out_type = DType::f32, .rows = 9, .n = 128, .k = 264},
  };
  DeviceMemory workspace(kWorkspaceBytes);
  for (const auto& c : cases) {
    GemmProblem problem(c);
    const auto tactics = blas->tactics(problem.gemm(), kWorkspaceBytes);
    EXPECT_FALSE(tactics.empty());
    for (const auto& tactic : tactics) {
      SCOPED_TRACE(cat("rows ", c.rows, " n ", c.n, " k ", c.k, " algorithm ", tactic.algorithm[0]));
      EXPECT_TRUE(blas->serves(problem.gemm(), tactic, kWorkspaceBytes));
      problem.clear_out();
      ASSERT_TRUE(blas->run(problem.stream, problem.gemm(), tactic, workspace.data(), kWorkspaceBytes));
      add_bias(problem.stream, problem.gemm());
      problem.out.download(problem.stream);
      problem.check(true);
    }
  }
}

TEST(BlasTest, unaligned_operands_are_rejected) {
  std::string why;
  const auto blas = load_cublas(why);
  if (!blas) GTEST_SKIP() << why;
  GemmProblem problem({.rows = 4, .n = 64, .k = 64, .in_offset = 1});
  EXPECT_TRUE(blas->tactics(problem.gemm(), kWorkspaceBytes).empty());
  EXPECT_FALSE(blas->run(problem.stream, problem.gemm(), {}, nullptr, 0));
}

}  // namespace
}  // namespace charonia::cuda
