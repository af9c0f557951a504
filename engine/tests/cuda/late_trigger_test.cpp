// CHARONIA_CUDA_PDL: when kernels let the next kernel start; and CHARONIA_CUDA_PREFETCH. The emulated device counts the
// calls. The test on_host.late_triggers runs this file with both settings, other tests with the defaults.
#if defined(CHARONIA_CUDA_ON_HOST)
#include <gtest/gtest.h>

#include "attention_kernel_world.h"
#include "base/text.h"
#include "cuda/gemm_problem.h"
#include "cuda/quant_formats.h"
#include "emulator/host_grid.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/prefetch.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {
namespace {

using host_grid::calls;

// Early: the trigger comes before the kernel has requested all of its data. Late: after its last request.
void expect_trigger(bool late, const std::function<void()>& run) {
  calls() = {};
  run();
  EXPECT_GT(calls().triggers, 0U);
  EXPECT_GT(calls().requests_before + calls().requests_after, 0U);
  if (late) {
    EXPECT_EQ(calls().requests_after, 0U);
  } else {
    EXPECT_GT(calls().requests_after, 0U);
  }
}
bool late() { return overlap_setting() == Overlap::late; }

// Every tactic of a GEMM triggers as the setting says.
void expect_triggers_of_tactics(Stream& stream, const Gemm& gemm) {
  for (const auto& tactic : gemm_tactics(device_info(0), gemm, SumOrder::any)) {
    SCOPED_TRACE(cat(to_string(tactic), ", ", gemm.rows, " rows"));
    expect_trigger(late(), [&] { run_gemm(stream, gemm, tactic); });
  }
}

TEST(LateTriggerTest, gemms_trigger_after_their_last_request_only_if_set) {
  for (const auto type : {DType::bf16, DType::f16}) {
    for (const std::int64_t rows : {1, 12, 70, 300}) {
      GemmProblem problem({.type = type, .out_type = type, .rows = rows, .n = 40, .k = 1000});
      for (const auto& tactic : gemm_tactics(device_info(0), problem.gemm(), SumOrder::any)) {
        SCOPED_TRACE(cat(to_string(tactic), ", ", rows, " rows"));
        expect_trigger(late() || tactic.kernel == GemmTactic::Kernel::bulk, [&] { problem.run(tactic); });
      }
    }
  }
}

TEST(LateTriggerTest, gemms_of_quantised_weights_trigger_after_their_last_request_only_if_set) {
  Random random(181);
  for (const auto code : {ops::Code::u4, ops::Code::i8, ops::Code::f8_e4m3, ops::Code::f4_e2m1}) {
    for (const std::int64_t rows : {1, 12, 40, 300}) {
      const bool few = rows <= 16;
      const std::int64_t n = few ? 1000 : 40, k = few ? 2048 : 1024;  // with few rows, a warp takes several tiles
      QuantProblem problem(random, {{code, 64, false, DType::f16}}, n, k, rows, DType::bf16, DType::bf16);
      SCOPED_TRACE(ops::to_string(code));
      expect_triggers_of_tactics(problem.stream, problem.gemm());
    }
  }
}

TEST(LateTriggerTest, gemms_of_8_bit_products_trigger_after_their_last_request_only_if_set) {
  using ops::Activations;
  Random random(183);
  Stream stream;
  MatrixUpload upload(stream);
  constexpr std::int64_t kN = 300, kK = 1040;
  for (const auto& [code, how] :
       {std::pair{ops::Code::i8, Activations::i8_token}, {ops::Code::f8_e4m3, Activations::f8_token}}) {
    for (const std::int64_t rows : {12, 40, 130}) {
      const auto source = ops::MemoryQuantSource::random(random, kN, kK, {code, kK, false, DType::f32, how});
      const auto linear = w8a8_linear(source, DType::bf16, false, upload);
      const MatrixOnDevice in(stream, Matrix::random(random, DType::bf16, rows, kK)),
          out(stream, all_nan(DType::bf16, rows, kN));
      PreparedGemm prepared(stream, linear, in.tensor());
      prepared.set_out(out.tensor());
      stream.wait("test");
      SCOPED_TRACE(ops::to_string(code));
      expect_triggers_of_tactics(stream, prepared.gemm);
    }
  }
}

TEST(LateTriggerTest, attention_of_decodes_triggers_after_its_last_request_only_if_set) {
  Random random(182);
  for (const int dim : kTiledDims) {
    for (const int bits : {0, 8, 4, ops::kKvFp8}) {
      World world(random, shape_of(1, 3, dim, 20), DType::bf16, {400, 300});
      if (bits != 0) world.quantise(bits);
      const bool no_register = dim == 96 && bits == 4;
      for (const bool outside : {false, true}) {
        SCOPED_TRACE(cat("head size ", dim, ", ", bits, " bits, k outside ", outside));
        world.shape.k_outside = outside;
        expect_trigger(late() && !no_register, [&] { world.run({{0, 399, 400}, {1, 299, 300}}, world.options()); });
      }
    }
  }
}

TEST(LateTriggerTest, a_prefetch_requests_each_line_once) {
  Stream stream;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{128}, std::size_t{129}, std::size_t{3} << 20}) {
    const DeviceMemory memory(bytes);
    calls() = {};
    prefetch(stream, memory.data(), bytes);
    stream.wait("test");
    EXPECT_EQ(calls().prefetches, (bytes + 127) / 128);
  }
}

}  // namespace
}  // namespace charonia::cuda
#endif
