// GEMMs of 8-bit weights with 8-bit activations of a model's shapes, every tactic, with cuBLASLt's of FP8; and their
// inputs.
#include "base/text.h"
#include "cuda_bench.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using ops::Activations;
using ops::Code;

constexpr std::size_t kWorkspaceBytes = std::size_t{16} << 20;

struct Weight {
  std::string model, name;
  std::int64_t n, k;
};

ops::QuantFormat format_of(Code code, std::int64_t k) {
  return {.code = code, .group = k, .activations = code == Code::i8 ? Activations::i8_token : Activations::f8_token};
}

void measure_one(Bench& bench, cuda::Blas* blas, const Weight& weight, Code code, std::int64_t rows,
                 const DeviceMemory& workspace) {
  const auto bytes = static_cast<std::size_t>(weight.n * weight.k);
  const int copies = bench.copies(bytes);
  Case what{.kernel = "",
            .shape = {{"model", weight.model},
                      {"weight", weight.name},
                      {"rows", rows},
                      {"n", weight.n},
                      {"k", weight.k},
                      {"codes", ops::to_string(code)}},
            .variant = "",
            .bytes = static_cast<double>((weight.n + rows) * (weight.k + 4) + rows * weight.n * 2),
            // Tensor cores do twice as many in 8 bits: in operations of 16 bits.
            .operations = static_cast<double>(rows * weight.n) * static_cast<double>(weight.k)};
  const auto format = format_of(code, weight.k);
  if (!cuda::is_w8a8(format, DType::bf16, weight.k, bench.device)) {
    return bench.skip(what, cat("this device does not multiply ", ops::to_string(code)));
  }
  if (const auto needed = static_cast<std::size_t>(copies) * bytes; !bench.fits(2 * needed)) {
    return bench.skip(what, cat(needed, " bytes of weights do not fit"));
  }
  const auto codes = bench.random_values(DType::bf16, static_cast<std::int64_t>(copies) * weight.n * weight.k / 2);
  const auto in = bench.random_values(DType::bf16, rows * weight.k / 2);
  const auto scales = bench.random_values(DType::f32, weight.n, 0.01F),
             row_scales = bench.random_values(DType::f32, rows);
  const DeviceMemory out(static_cast<std::size_t>(rows * weight.n) * 2);
  cuda::Gemm gemm{.out = out.data(),
                  .out_type = DType::bf16,
                  .out_stride = weight.n,
                  .in = in.data(),
                  .in_stride = weight.k,
                  .weight = codes.data(),
                  .type = DType::bf16,
                  .weight_stride = weight.k,
                  .rows = rows,
                  .n = weight.n,
                  .k = weight.k,
                  .quant = cuda::QuantWeight{.format = format,
                                             .column_scales = scales.as<float>(),
                                             .row_scales = row_scales.as<float>(),
                                             .prepared = true}};
  const auto with_copy = [&](int index) {
    gemm.weight = codes.as<std::byte>() + static_cast<std::size_t>(index % copies) * bytes;
    return gemm;
  };
  for (const auto& tactic : cuda::gemm_tactics(bench.device, gemm, cuda::SumOrder::any)) {
    what.kernel = tactic.kernel == cuda::GemmTactic::Kernel::stream ? "w8a8_stream" : "w8a8_tile";
    what.variant = cuda::to_string(tactic);
    if (cuda::gemm_workspace_bytes(tactic, gemm) > workspace.bytes()) {
      bench.skip(what, cat(cuda::gemm_workspace_bytes(tactic, gemm), " bytes of workspace"));
      continue;
    }
    bench.measure(
        what, [&](int index) { cuda::gemm(bench.stream, bench.device, with_copy(index), tactic, workspace.data()); });
  }
  if (blas != nullptr && code == Code::f8_e4m3) measure_library(bench, *blas, what, with_copy);
}

void measure_inputs(Bench& bench, const std::string& model, Code code, std::int64_t rows, std::int64_t k) {
  const auto in = bench.random_values(DType::bf16, rows * k);
  const DeviceMemory codes(static_cast<std::size_t>(rows * k)), scales(static_cast<std::size_t>(rows) * sizeof(float));
  const cuda::Gemm gemm{
      .in = in.data(), .in_stride = k, .rows = rows, .k = k, .quant = cuda::QuantWeight{.format = format_of(code, k)}};
  bench.measure({.kernel = "w8a8_inputs",
                 .shape = {{"model", model}, {"rows", rows}, {"k", k}},
                 .variant = cat(ops::to_string(code), " by row"),
                 .bytes = static_cast<double>(rows * (3 * k + 4))},
                [&](int) { cuda::quantise_inputs(bench.stream, gemm, codes.data(), scales.as<float>()); });
}

}  // namespace

void measure_w8a8(Bench& bench) {
  std::vector<std::int64_t> rows{1, 8, 16, 32, 64, 128, 256, 2048};
  if (bench.size == Size::quick) rows = {1, 16, 64, 256, 2048};
  if (bench.size == Size::tiny) rows = {1, 12, 40};
  const DeviceMemory workspace(kWorkspaceBytes);
  std::string why;
  const auto blas = cuda::load_cublas(why);
  const auto m = model_shapes(bench.size).back();
  const Weight weights[] = {{m.name, "qkv", (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden},
                            {m.name, "o", m.hidden, m.heads * m.head_dim},
                            {m.name, "gate_up", 2 * m.inter, m.hidden},
                            {m.name, "down", m.hidden, m.inter}};
  for (const auto code : {Code::i8, Code::f8_e4m3}) {
    for (const auto& weight : weights) {
      for (const auto count : rows) measure_one(bench, blas.get(), weight, code, count, workspace);
    }
    if (!cuda::is_w8a8(format_of(code, m.hidden), DType::bf16, m.hidden, bench.device)) continue;
    for (const auto count : rows) measure_inputs(bench, m.name, code, count, m.hidden);
  }
}

}  // namespace charonia::bench
