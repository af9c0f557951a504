// GEMMs with quantised weights of a model's shapes, every tactic, in the formats that models have; and the inputs of
// int8 formats. Beside them, in the suite gemm, stand bf16's times of the same shapes.
#include "base/text.h"
#include "cuda_bench.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using ops::Code;

constexpr std::size_t kWorkspaceBytes = std::size_t{16} << 20;

struct Weight {
  std::string model, name;
  std::int64_t n, k;
};

struct Format {
  Code code;
  std::int64_t group;  // 0: a row
  DType scale_type;
  DType type = DType::bf16;  // of inputs and outputs
};
constexpr Format kFormats[] = {{Code::u4, 128, DType::bf16},
                               {Code::i8, 0, DType::bf16},
                               {Code::f8_e4m3, 128, DType::f32},
                               {Code::f4_e2m1, 32, DType::bf16}};

void measure_one(Bench& bench, const Weight& weight, const Format& of, std::int64_t rows,
                 const DeviceMemory& workspace) {
  const auto group = of.group == 0 || weight.k % of.group != 0 ? weight.k : of.group;
  const ops::QuantFormat format{.code = of.code, .group = group, .scale_type = of.scale_type};
  const auto code_bytes = cuda::quant_code_bytes(format, weight.n, weight.k);
  const auto scale_bytes =
      static_cast<std::size_t>(cuda::round_up(weight.n, cuda::kQuantRows) * cuda::quant_groups(format, weight.k)) *
      size_of(of.scale_type);
  const int copies = bench.copies(code_bytes);
  const auto element = static_cast<double>(size_of(of.type)), elements = static_cast<double>(weight.n * weight.k);
  Case what{.kernel = "",
            .shape = {{"model", weight.model},
                      {"weight", weight.name},
                      {"rows", rows},
                      {"n", weight.n},
                      {"k", weight.k},
                      {"codes", ops::to_string(of.code)},
                      {"group", group},
                      {"scale", to_string(of.scale_type)},
                      {"type", to_string(of.type)}},
            .variant = "",
            .bytes = elements * ops::bits_of(of.code) / 8 +
                     elements / static_cast<double>(group) * static_cast<double>(size_of(of.scale_type)) +
                     static_cast<double>(rows * (weight.k + weight.n)) * element,
            .operations = of.type == DType::f32 ? 0 : 2.0 * static_cast<double>(rows) * elements};
  if (const auto needed = static_cast<std::size_t>(copies) * (code_bytes + scale_bytes); !bench.fits(2 * needed)) {
    return bench.skip(what, cat(needed, " bytes of weights do not fit"));
  }
  // Numbers of all kinds: of fp8 some codes are NaN, which take no longer.
  const auto all = static_cast<std::int64_t>(copies);
  const auto codes = bench.random_values(DType::bf16, all * static_cast<std::int64_t>(code_bytes / 2));
  const auto scales =
      bench.random_values(of.scale_type, all * static_cast<std::int64_t>(scale_bytes / size_of(of.scale_type)), 0.01F);
  const auto in = bench.random_values(of.type, rows * weight.k);
  const DeviceMemory out(static_cast<std::size_t>(rows * weight.n) * size_of(of.type));
  cuda::Gemm gemm{.out = out.data(),
                  .out_type = of.type,
                  .out_stride = weight.n,
                  .in = in.data(),
                  .in_stride = weight.k,
                  .weight = codes.data(),
                  .type = of.type,
                  .weight_stride = cuda::round_up(weight.k, cuda::kQuantK),
                  .rows = rows,
                  .n = weight.n,
                  .k = weight.k,
                  .quant = cuda::QuantWeight{.format = format, .scales = scales.data()}};
  constexpr const char* kKernels[] = {"quant_stream", "quant_tile", "quant_plain"};
  for (const auto& tactic : cuda::gemm_tactics(bench.device, gemm, cuda::SumOrder::any)) {
    what.kernel = kKernels[static_cast<std::size_t>(tactic.kernel)];
    what.variant = cuda::to_string(tactic);
    if (cuda::gemm_workspace_bytes(tactic, gemm) > workspace.bytes()) {
      bench.skip(what, cat(cuda::gemm_workspace_bytes(tactic, gemm), " bytes of workspace"));
      continue;
    }
    bench.measure(what, [&](int index) {
      const auto at = static_cast<std::size_t>(index % copies);
      gemm.weight = codes.as<std::byte>() + at * code_bytes;
      gemm.quant->scales = scales.as<std::byte>() + at * scale_bytes;
      cuda::gemm(bench.stream, bench.device, gemm, tactic, workspace.data());
    });
  }
}

void measure_inputs(Bench& bench, const std::string& model, std::int64_t rows, std::int64_t k) {
  const auto in = bench.random_values(DType::bf16, rows * k);
  const DeviceMemory out(static_cast<std::size_t>(rows * k) * 2),
      scales(static_cast<std::size_t>(rows) * sizeof(float));
  const cuda::Gemm gemm{
      .in = in.data(),
      .in_stride = k,
      .rows = rows,
      .k = k,
      .quant = cuda::QuantWeight{.format = {.code = Code::i8, .group = k, .activations = ops::Activations::i8_token}}};
  bench.measure({.kernel = "quant_inputs",
                 .shape = {{"model", model}, {"rows", rows}, {"k", k}},
                 .variant = "int8 by row",
                 .bytes = static_cast<double>(rows * (2 * k * 2 + 4))},
                [&](int) { cuda::prepare_quant_inputs(bench.stream, gemm, out.data(), k, scales.as<float>()); });
}

}  // namespace

void measure_quantised(Bench& bench) {
  std::vector<std::int64_t> rows{1, 8, 16, 32, 64, 128, 256};
  if (bench.size == Size::quick) rows = {1, 16, 64, 256};
  if (bench.size == Size::tiny) rows = {1, 12, 40};
  const DeviceMemory workspace(kWorkspaceBytes);
  const auto m = model_shapes(bench.size).back();
  const Weight weights[] = {{m.name, "qkv", (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden},
                            {m.name, "o", m.hidden, m.heads * m.head_dim},
                            {m.name, "gate_up", 2 * m.inter, m.hidden},
                            {m.name, "down", m.hidden, m.inter}};
  for (const auto& weight : weights) {
    for (const auto& format : kFormats) {
      for (const auto count : rows) measure_one(bench, weight, format, count, workspace);
    }
  }
  measure_one(bench, weights[1], {Code::u4, 128, DType::bf16, DType::f32}, 1, workspace);
  for (const auto count : rows) measure_inputs(bench, m.name, count, m.hidden);
  measure_w8a8(bench);
}

}  // namespace charonia::bench
