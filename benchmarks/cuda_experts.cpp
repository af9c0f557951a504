// A layer of Mixtral-8x7B: 8 experts of which a row takes 2.
#include <algorithm>
#include <set>

#include "base/text.h"
#include "cuda_bench.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/kernels/experts.h"

namespace charonia::bench {
namespace {

using cuda::DeviceMemory;
using cuda::ExpertTile;

constexpr auto kType = DType::bf16;

struct Layer {
  int experts, top_k;
  std::int64_t hidden, inter;
  const DeviceMemory &gate_up, &down;
};

// Row r takes the experts r * top_k, r * top_k + 1, ... modulo their number: an even load.
std::vector<float> even_logits(const Layer& layer, std::int64_t rows) {
  std::vector<float> logits(static_cast<std::size_t>(rows * layer.experts), -4);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < layer.top_k; ++i) {
      logits[static_cast<std::size_t>(r * layer.experts + (r * layer.top_k + i) % layer.experts)] = 1;
    }
  }
  return logits;
}

cuda::RouteParams route_params(const Layer& layer, const cuda::ExpertsWorkspace& workspace, const DeviceMemory& logits,
                               std::byte* memory, std::int64_t rows) {
  const int tile_rows = cuda::expert_tile_rows(kType, workspace.assignments, layer.experts);
  const auto ints = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(memory + offset); };
  return {.logits = logits.as<float>(),
          .stride = layer.experts,
          .rows = static_cast<int>(rows),
          .experts = layer.experts,
          .how = {.top_k = layer.top_k},
          .tile_rows = tile_rows,
          .num_tiles = static_cast<int>(cuda::max_expert_tiles(workspace.assignments, layer.experts, tile_rows)),
          .chosen = ints(workspace.chosen),
          .weights = reinterpret_cast<float*>(memory + workspace.weights),
          .places = ints(workspace.places),
          .rows_of = ints(workspace.rows_of),
          .tiles = reinterpret_cast<ExpertTile*>(memory + workspace.tiles)};
}

void measure_one(Bench& bench, const Layer& layer, std::int64_t rows) {
  const ops::ExpertsShape shape{layer.experts, layer.top_k, layer.hidden, layer.inter, kType};
  const cuda::ExpertsWorkspace workspace(shape, rows);
  const DeviceMemory scratch(workspace.bytes);
  auto* const memory = scratch.as<std::byte>();
  const auto in = bench.random_values(kType, rows * layer.hidden);
  const DeviceMemory out(static_cast<std::size_t>(rows * layer.hidden) * size_of(kType));
  const auto logits_there = bench.uploaded(even_logits(layer, rows));
  const auto route = route_params(layer, workspace, logits_there, memory, rows);
  const int tile_rows = route.tile_rows;

  const auto assignments = static_cast<double>(workspace.assignments), hidden = static_cast<double>(layer.hidden),
             inter = static_cast<double>(layer.inter);
  const auto hit = static_cast<double>(std::min<std::int64_t>(layer.experts, workspace.assignments));
  const auto what = [&](std::string kernel, double bytes, double operations = 0) -> Case {
    return {.kernel = std::move(kernel),
            .shape = {{"model", bench.size == Size::tiny ? "tiny-experts" : "mixtral-8x7b"},
                      {"rows", rows},
                      {"experts", layer.experts},
                      {"top_k", layer.top_k},
                      {"hidden", layer.hidden},
                      {"inter", layer.inter}},
            .variant = cat("tiles of ", tile_rows, " rows"),
            .bytes = bytes,
            .operations = operations};
  };
  bench.measure(what("experts_route", static_cast<double>(rows) * layer.experts * 4.0 + assignments * (4 + 4 + 4 + 4)),
                [&](int) { cuda::route_rows(bench.stream, route); });
  const auto multiply = [&](cuda::ExpertGemm gemm) {
    gemm.type = kType;
    gemm.tiles = route.tiles;
    gemm.num_tiles = route.num_tiles;
    gemm.tile_rows = tile_rows;
    cuda::multiply_experts(bench.stream, bench.device, gemm);
  };
  bench.measure(what("experts_gated",
                     (hit * 2 * hidden * inter + assignments * inter) * 2 + static_cast<double>(rows) * hidden * 2,
                     4 * assignments * hidden * inter),
                [&](int) {
                  multiply({.in = in.data(),
                            .in_stride = layer.hidden,
                            .rows_of = route.rows_of,
                            .weight = layer.gate_up.data(),
                            .out = memory + workspace.gated,
                            .n = 2 * workspace.inter,
                            .k = workspace.hidden,
                            .gated = true});
                });
  bench.measure(what("experts_down", (hit * hidden * inter + assignments * (inter + hidden)) * 2,
                     2 * assignments * hidden * inter),
                [&](int) {
                  multiply({.in = memory + workspace.gated,
                            .in_stride = workspace.inter,
                            .weight = layer.down.data(),
                            .out = memory + workspace.down,
                            .n = workspace.hidden,
                            .k = workspace.inter});
                });
  bench.measure(what("experts_add", (assignments + static_cast<double>(rows)) * hidden * 2 + assignments * 8),
                [&](int) {
                  cuda::add_experts(bench.stream, {.out = {out.data(), kType, rows, layer.hidden, layer.hidden},
                                                   .type = kType,
                                                   .down = memory + workspace.down,
                                                   .padded = workspace.hidden,
                                                   .places = route.places,
                                                   .weights = route.weights,
                                                   .top_k = layer.top_k});
                });
  bench.measure(what("experts_pad", static_cast<double>(rows) * hidden * 2 * 2), [&](int) {
    cuda::pad_rows(bench.stream, {in.data(), kType, rows, layer.hidden, layer.hidden}, memory + workspace.in,
                   workspace.hidden);
  });
}

}  // namespace

void measure_experts(Bench& bench) {
  const bool tiny = bench.size == Size::tiny;
  const std::int64_t hidden = tiny ? 64 : 4096, inter = tiny ? 48 : 14336;
  constexpr int kExperts = 8, kTopK = 2;
  std::vector<std::int64_t> rows{1, 16, 64, 256, 2048};
  if (bench.size == Size::quick) rows = {1, 64, 2048};
  if (tiny) rows = {1, 20};
  const auto matrices = kExperts * hidden * inter;
  if (!bench.fits(static_cast<std::size_t>(3 * matrices) * 2)) {
    return bench.skip({.kernel = "experts", .shape = {}, .variant = ""}, "the weights do not fit");
  }
  const auto gate_up = bench.random_values(kType, 2 * matrices, 0.02F);
  const auto down = bench.random_values(kType, matrices, 0.02F);
  for (const auto count : rows) measure_one(bench, {kExperts, kTopK, hidden, inter, gate_up, down}, count);
}

}  // namespace charonia::bench
