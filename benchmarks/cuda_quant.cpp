// GEMMs with quantised weights of a model's shapes, every tactic, in the formats that models have, with those that
// cuBLASLt computes with dequantised weights; and the inputs of int8 formats. Beside them, in the suite gemm, stand
// bf16's times of the same shapes.
#include <algorithm>
#include <functional>
#include <optional>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda_bench.h"
#include "ops/cuda/gemm/dequantised.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using ops::Code;

constexpr std::size_t kOwnWorkspaceBytes = std::size_t{16} << 20, kLibraryBytes = std::size_t{32} << 20;
constexpr std::int64_t kMinDequantisedRows = 33;  // up to 32 rows the engine does not try it

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

// Copies of a weight in a format, out of the L2 cache when their turn comes again.
class QuantWeights {
 public:
  QuantWeights(Bench& bench, const Weight& weight, const Format& of)
      : weight_(weight),
        type_(of.type),
        format_{.code = of.code,
                .group = of.group == 0 || weight.k % of.group != 0 ? weight.k : of.group,
                .scale_type = of.scale_type},
        code_bytes_(cuda::quant_code_bytes(format_, weight.n, weight.k)),
        scales_(cuda::round_up(weight.n, cuda::kQuantRows) * cuda::quant_groups(format_, weight.k)),
        copies_(bench.copies(code_bytes_)),
        needed_(static_cast<std::size_t>(copies_) * (code_bytes_ + scale_bytes())) {
    if (!bench.fits(2 * needed_)) return;
    // Numbers of all kinds: of fp8 some codes are NaN, which take no longer.
    codes_ = bench.random_values(DType::bf16, std::int64_t{copies_} * static_cast<std::int64_t>(code_bytes_ / 2));
    scale_values_ = bench.random_values(of.scale_type, copies_ * scales_, 0.01F);
  }

  bool there() const { return codes_.bytes() > 0; }
  std::string missing() const { return cat(needed_, " bytes of weights do not fit"); }

  cuda::Gemm gemm(int index) const {
    const auto at = static_cast<std::size_t>(index % copies_);
    return {.weight = codes_.as<std::byte>() + at * code_bytes_,
            .type = type_,
            .weight_stride = cuda::round_up(weight_.k, cuda::kQuantK),
            .n = weight_.n,
            .k = weight_.k,
            .quant = cuda::QuantWeight{.format = format_,
                                       .scales = scale_values_.as<std::byte>() + at * scale_bytes()}};
  }

  // Without kernel and variant. rows: none of the weight alone.
  Case described(std::optional<std::int64_t> rows) const {
    const auto elements = static_cast<double>(weight_.n * weight_.k), count = static_cast<double>(rows.value_or(0));
    Case out{.kernel = "",
             .shape = {{"model", weight_.model}, {"weight", weight_.name}},
             .variant = "",
             .bytes = elements * ops::bits_of(format_.code) / 8 +
                      elements / static_cast<double>(format_.group) * static_cast<double>(size_of(format_.scale_type)) +
                      count * static_cast<double>(weight_.k + weight_.n) * static_cast<double>(size_of(type_)),
             .operations = type_ == DType::f32 ? 0 : 2 * count * elements};
    if (rows) out.shape.emplace_back("rows", *rows);
    out.shape.insert(out.shape.end(), {{"n", weight_.n},
                                       {"k", weight_.k},
                                       {"codes", ops::to_string(format_.code)},
                                       {"group", format_.group},
                                       {"scale", to_string(format_.scale_type)},
                                       {"type", to_string(type_)}});
    return out;
  }

 private:
  std::size_t scale_bytes() const { return static_cast<std::size_t>(scales_) * size_of(format_.scale_type); }

  Weight weight_;
  DType type_;
  ops::QuantFormat format_;
  std::size_t code_bytes_;
  std::int64_t scales_;
  int copies_;
  std::size_t needed_;
  DeviceMemory codes_, scale_values_;
};

using Copies = std::function<cuda::Gemm(int index)>;

// Every algorithm, with parts of either size; the time is of all kernels.
void measure_dequantised(Bench& bench, cuda::Blas& blas, Case what, const Copies& with_copy,
                         const DeviceMemory& workspace) {
  what.kernel = "dequantised, cuBLASLt";
  what.launched_by_us = false;
  const auto gemm = with_copy(0);
  const DeviceMemory numbers(std::min(cuda::kDequantisedBytes, cuda::dequantised_bytes(gemm.n, gemm.k)));
  for (const auto rows : cuda::dequantised_parts(gemm.n, gemm.k, numbers.bytes(), bench.device.l2_bytes)) {
    const auto tactics = blas.tactics(cuda::dequantised_part(gemm, 0, std::min(rows, gemm.n), numbers.data()),
                                      workspace.bytes());
    for (std::size_t i = 0; i < tactics.size(); ++i) {
      what.variant = cat(rows, " rows at a time, algorithm ", i + 1, " of ", tactics.size());
      bench.measure(what, [&](int index) {
        if (!cuda::run_dequantised(bench.stream, blas, with_copy(index), rows, tactics[i], numbers.data(),
                                   workspace.data(), workspace.bytes())) {
          throw Error(ErrorCode::unsupported, "the library refuses an algorithm that it offers");
        }
      });
    }
  }
}

void measure_one(Bench& bench, cuda::Blas* blas, const QuantWeights& weights, std::int64_t rows,
                   const DeviceMemory& workspace) {
  auto what = weights.described(rows);
  if (!weights.there()) return bench.skip(what, weights.missing());
  const auto first = weights.gemm(0);
  const auto in = bench.random_values(first.type, rows * first.k);
  const DeviceMemory out(static_cast<std::size_t>(rows * first.n) * size_of(first.type));
  const Copies with_copy = [&](int index) {
    auto gemm = weights.gemm(index);
    gemm.out = out.data(), gemm.out_type = gemm.type, gemm.out_stride = gemm.n;
    gemm.in = in.data(), gemm.in_stride = gemm.k, gemm.rows = rows;
    return gemm;
  };
  const auto gemm = with_copy(0);
  constexpr const char* kKernels[] = {"quant_stream", "quant_tile", "quant_plain"};
  for (const auto& tactic : cuda::gemm_tactics(bench.device, gemm, cuda::SumOrder::any)) {
    what.kernel = kKernels[static_cast<std::size_t>(tactic.kernel)];
    what.variant = cuda::to_string(tactic);
    if (cuda::gemm_workspace_bytes(tactic, gemm) > kOwnWorkspaceBytes) {
      bench.skip(what, cat(cuda::gemm_workspace_bytes(tactic, gemm), " bytes of workspace"));
      continue;
    }
    bench.measure(
        what, [&](int index) { cuda::gemm(bench.stream, bench.device, with_copy(index), tactic, workspace.data()); });
  }
  if (blas != nullptr && rows >= kMinDequantisedRows && cuda::can_dequantise(gemm)) {
    const DeviceMemory of_library(kLibraryBytes);
    measure_dequantised(bench, *blas, what, with_copy, of_library);
  }
}

// The kernel that makes 16-bit numbers, of a whole weight. The engine has it make a part at a time.
void measure_dequantise(Bench& bench, const QuantWeights& weights) {
  auto what = weights.described({});
  what.kernel = "dequantise";
  if (!weights.there()) return bench.skip(what, weights.missing());
  const auto gemm = weights.gemm(0);
  what.bytes += static_cast<double>(gemm.n * gemm.k) * static_cast<double>(size_of(gemm.type));
  const DeviceMemory numbers(cuda::dequantised_bytes(gemm.n, gemm.k));
  bench.measure(what,
                [&](int index) { cuda::dequantise(bench.stream, weights.gemm(index), 0, gemm.n, numbers.data()); });
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
  std::vector<std::int64_t> rows{1, 8, 16, 32, 64, 128, 256, 2048};
  if (bench.size == Size::quick) rows = {1, 16, 64, 256, 2048};
  if (bench.size == Size::tiny) rows = {1, 12, 40};
  const DeviceMemory workspace(kOwnWorkspaceBytes);
  std::string why;
  const auto blas = cuda::load_cublas(why);
  const auto m = model_shapes(bench.size).back();
  const Weight weights[] = {{m.name, "qkv", (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden},
                            {m.name, "o", m.hidden, m.heads * m.head_dim},
                            {m.name, "gate_up", 2 * m.inter, m.hidden},
                            {m.name, "down", m.hidden, m.inter}};
  for (const auto& weight : weights) {
    for (const auto& format : kFormats) {
      const QuantWeights copies(bench, weight, format);
      for (const auto count : rows) measure_one(bench, blas.get(), copies, count, workspace);
      measure_dequantise(bench, copies);
    }
  }
  measure_one(bench, nullptr, QuantWeights(bench, weights[1], {Code::u4, 128, DType::bf16, DType::f32}), 1,
                workspace);
  for (const auto count : rows) measure_inputs(bench, m.name, count, m.hidden);
  measure_w8a8(bench);
}

}  // namespace charonia::bench
