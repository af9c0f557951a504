// What a model takes and what fits, before anything is loaded.
#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "base/text.h"
#include "charonia/engine.h"
#include "charonia/error.h"
#include "model/memory_needs.h"
#include "model/weights.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/make_cuda_ops.h"
#include "runtime/cache_size.h"
#include "runtime/device_sizes.h"
#include "runtime/devices.h"
#include "runtime/executor.h"
#include "runtime/settings.h"
#include "runtime/step_sizes.h"

namespace charonia {
namespace {

using runtime::DeviceChoice;

DeviceChoice choose(const EngineConfig& config, std::int64_t memory_bytes) {
  if (memory_bytes > 0 && config.device == "cuda") return {.device = "cuda", .gpus = {}, .note = {}};
  try {
    return runtime::choose_devices(config);
  } catch (const Error& error) {
    throw Error(error.code(), cat(error.what(),
                                  ". To plan for GPUs that are elsewhere, name the memory of one "
                                  "(charonia plan --device cuda --memory 80GiB)"));
  }
}

// Bytes that each rank finds.
std::vector<std::size_t> free_memory(const DeviceChoice& choice, int ranks, std::int64_t memory_bytes) {
  const auto count = static_cast<std::size_t>(ranks);
  if (choice.device != "cuda") {
    const auto all = memory_bytes > 0 ? static_cast<std::size_t>(memory_bytes) : ops::make_cpu_ops(1)->free_memory();
    return std::vector<std::size_t>(count, all / count);
  }
  if (memory_bytes > 0) return std::vector<std::size_t>(count, static_cast<std::size_t>(memory_bytes));
  std::map<int, std::size_t> of_gpu;
  std::string why;
  for (const auto& gpu : ops::cuda_devices(why)) of_gpu[gpu.index] = gpu.free_bytes;
  std::vector<std::size_t> out;
  for (const int gpu : choice.gpus) {
    out.push_back(of_gpu[gpu] / static_cast<std::size_t>(std::ranges::count(choice.gpus, gpu)));
  }
  return out;
}

}  // namespace

MemoryPlan plan_memory(const std::filesystem::path& weights_dir, const Settings& overrides, std::int64_t memory_bytes) {
  auto settings = runtime::read_settings(weights_dir, overrides);
  MemoryPlan out;
  out.model = std::move(settings.model);
  out.config = std::move(settings.config);
  out.warnings = std::move(settings.warnings);
  const auto& config = out.config;
  const model::Manifest manifest(weights_dir, config.tensor_para_size);
  if (!manifest.files().empty()) {
    const model::WeightFiles checked(manifest);
  }
  const auto choice = choose(config, memory_bytes);
  out.device = out.config.device = choice.device;
  out.device_note = choice.note;

  const auto sizes = runtime::device_sizes(out.device);
  const int ranks = config.tensor_para_size;
  const auto free = free_memory(choice, ranks, memory_bytes);
  const int sms = memory_bytes > 0 ? runtime::kUsualSms : runtime::sms_of(choice.gpus);
  runtime::resolve_step_sizes(out.config, {out.device, sms, *std::ranges::min_element(free)});
  const auto limits = runtime::step_limits(config);
  int blocks = std::numeric_limits<int>::max();
  for (int rank = 0; rank < ranks; ++rank) {
    const model::Shard shard(out.model, manifest, rank);
    auto needs = model::memory_needs(out.model, manifest, shard, sizes, limits);
    if (out.device == "null") needs.weights = 0;  // which are not kept
    const auto activations = needs.activations + runtime::step_bytes(out.device, out.model, manifest, shard, limits);
    const auto free_bytes = free[static_cast<std::size_t>(rank)];
    out.weight_bytes += static_cast<std::int64_t>(needs.weights);
    out.activation_bytes += static_cast<std::int64_t>(activations);
    out.kv_block_bytes += static_cast<std::int64_t>(needs.kv_block);
    out.free_bytes += static_cast<std::int64_t>(free_bytes);
    if (blocks == 0) continue;  // one rank's warning is enough
    try {
      runtime::check_model_fits(config, {out.device, needs.weights, activations, needs.kv_block, free_bytes});
      const auto left = free_bytes - needs.weights - activations;
      blocks = std::min(blocks, runtime::blocks_that_fit(config, {needs.kv_block, left, ranks}));
    } catch (const Error& error) {
      out.warnings.push_back(ranks > 1 ? cat("rank ", rank, ": ", error.what()) : error.what());
      blocks = 0;
    }
  }
  out.num_blocks = blocks;
  out.kv_token_bytes = out.kv_block_bytes / config.cache_block_seq_len;
  return out;
}

}  // namespace charonia
