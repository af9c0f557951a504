// GEMMs with the weights of the models: every tactic of our own, and every algorithm that cuBLASLt offers.
#include <algorithm>
#include <set>

#include "base/text.h"
#include "charonia/error.h"
#include "cuda_bench.h"
#include "ops/cuda/gemm/blas.h"
#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using cuda::Gemm;

constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20, kLibraryBytes = kWorkspaceBytes / 2;
constexpr std::int64_t kMaxHeadRows = 256;  // logits are computed for sampled rows alone

struct Weight {
  std::string model, name;
  std::int64_t n, k;
  DType type = DType::bf16, out_type = DType::bf16;
};

std::vector<Weight> weights_of(Size size) {
  std::vector<Weight> out;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;  // shapes that models share are measured once
  const auto add = [&](Weight weight) {
    if (seen.emplace(weight.n, weight.k).second) out.push_back(std::move(weight));
  };
  for (const auto& m : model_shapes(size)) {
    add({m.name, "qkv", (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden});
    add({m.name, "o", m.hidden, m.heads * m.head_dim});
    add({m.name, "gate_up", 2 * m.inter, m.hidden});
    add({m.name, "down", m.hidden, m.inter});
    add({m.name, "head", m.vocab, m.hidden, DType::bf16, DType::f32});
  }
  return out;
}

void measure_one(Bench& bench, cuda::Blas* blas, const Weight& weight, std::int64_t rows,
                 const DeviceMemory& workspace) {
  const auto stride = cuda::round_up(weight.k, 8), out_stride = cuda::round_up(weight.n, 8);
  const auto element = size_of(weight.type), out_element = size_of(weight.out_type);
  const auto weight_bytes = static_cast<std::size_t>(weight.n * stride) * element;
  const int copies = bench.copies(weight_bytes);
  Case what{.kernel = "",
            .shape = {{"model", weight.model},
                      {"weight", weight.name},
                      {"rows", rows},
                      {"n", weight.n},
                      {"k", weight.k},
                      {"type", to_string(weight.type)},
                      {"out", to_string(weight.out_type)}},
            .variant = "",
            .bytes = static_cast<double>(weight.n * weight.k + rows * weight.k) * static_cast<double>(element) +
                     static_cast<double>(rows * weight.n) * static_cast<double>(out_element),
            .operations = weight.type == DType::f32
                              ? 0
                              : 2.0 * static_cast<double>(rows * weight.n) * static_cast<double>(weight.k)};
  if (const auto needed = static_cast<std::size_t>(copies) * weight_bytes; !bench.fits(2 * needed)) {
    return bench.skip(what, cat(needed, " bytes of weights do not fit"));
  }
  const auto weights = bench.random_values(weight.type, static_cast<std::int64_t>(copies) * weight.n * stride, 0.02F);
  const auto in = bench.random_values(weight.type, rows * stride);
  const DeviceMemory out(static_cast<std::size_t>(rows * out_stride) * out_element);
  Gemm gemm{.out = out.data(),
            .out_type = weight.out_type,
            .out_stride = out_stride,
            .in = in.data(),
            .in_stride = stride,
            .weight = weights.data(),
            .type = weight.type,
            .weight_stride = stride,
            .rows = rows,
            .n = weight.n,
            .k = weight.k};
  const auto with_copy = [&](int index) {
    gemm.weight = weights.as<std::byte>() + static_cast<std::size_t>(index % copies) * weight_bytes;
    return gemm;
  };
  constexpr const char* kKernels[] = {"gemm_stream", "gemm_tile", "gemm_plain"};
  auto own = cuda::gemm_tactics(bench.device, gemm, cuda::SumOrder::any);
  for (const auto& tactic : cuda::gemm_tactics(bench.device, gemm, cuda::SumOrder::fixed)) {
    if (std::ranges::find(own, tactic) == own.end()) own.push_back(tactic);
  }
  for (const auto& tactic : own) {
    what.kernel = kKernels[static_cast<std::size_t>(tactic.kernel)];
    what.variant = cuda::to_string(tactic);
    if (cuda::gemm_workspace_bytes(tactic, gemm) > workspace.bytes()) {
      bench.skip(what, cat(cuda::gemm_workspace_bytes(tactic, gemm), " bytes of workspace"));
      continue;
    }
    const auto measure = [&] {
      bench.measure(
          what, [&](int index) { cuda::gemm(bench.stream, bench.device, with_copy(index), tactic, workspace.data()); });
    };
    measure();
    if (tactic.kernel == cuda::GemmTactic::Kernel::stream && weight.name == "gate_up") {
      auto gated = what;
      gated.kernel = "gemm_gated";
      gated.bytes -= static_cast<double>(rows * weight.n / 2) * static_cast<double>(out_element);
      gemm.gate = cuda::Gate::silu;
      std::swap(what, gated);
      measure();
      std::swap(what, gated);
      gemm.gate = cuda::Gate::none;
    }
    // The same numbers taken for a packed weight: what differs is the order in which they are read.
    const bool whole = weight.n % cuda::kPackedRows == 0 && weight.k % cuda::kPackedK == 0;
    if (tactic.kernel != cuda::GemmTactic::Kernel::stream || !whole) continue;
    what.variant += ", packed";
    gemm.packed = true;
    measure();
    gemm.packed = false;
  }
  if (blas != nullptr) measure_library(bench, *blas, what, with_copy);
}

}  // namespace

void measure_library(Bench& bench, cuda::Blas& blas, Case what, const std::function<Gemm(int index)>& with_copy) {
  what.kernel = "cuBLASLt";
  what.launched_by_us = false;
  const DeviceMemory workspace(kLibraryBytes);
  const auto gemm = with_copy(0);
  const auto tactics = blas.tactics(gemm, workspace.bytes());
  for (std::size_t i = 0; i < tactics.size(); ++i) {
    what.variant = cat("algorithm ", i + 1, " of ", tactics.size());
    if (!blas.serves(gemm, tactics[i], workspace.bytes())) {
      bench.skip(what, "the library offers it and then refuses it");
      continue;
    }
    bench.measure(what, [&](int index) {
      if (!blas.run(bench.stream, with_copy(index), tactics[i], workspace.data(), workspace.bytes())) {
        throw Error(ErrorCode::unsupported, "the library refuses an algorithm that it offers");
      }
    });
  }
}

void measure_gemms(Bench& bench) {
  std::vector<std::int64_t> rows{1, 8, 16, 64, 256, 2048};
  if (bench.size == Size::quick) rows = {1, 16, 64, 2048};
  if (bench.size == Size::tiny) rows = {1, 8, 40};
  std::string why;
  const auto blas = cuda::load_cublas(why);
  if (blas == nullptr) bench.skip({.kernel = "cuBLASLt", .shape = {}, .variant = ""}, why);
  const DeviceMemory workspace(bench.size == Size::tiny ? std::size_t{1} << 20 : kWorkspaceBytes);
  for (const auto& weight : weights_of(bench.size)) {
    for (const auto count : rows) {
      if (weight.name == "head" && count > kMaxHeadRows) continue;
      measure_one(bench, blas.get(), weight, count, workspace);
    }
  }
  const auto side = bench.size == Size::tiny ? 64 : 4096;
  for (const std::int64_t count : {1, 64}) {
    measure_one(bench, blas.get(), {"fp32", "o", side, side, DType::f32, DType::f32}, count, workspace);
  }
}

}  // namespace charonia::bench
