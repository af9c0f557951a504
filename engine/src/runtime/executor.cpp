#include "runtime/executor.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/decoder.h"
#include "model/layers.h"
#include "model/rounding.h"
#include "model/weights.h"
#include "ops/cpu/free_memory.h"
#include "ops/ops.h"
#include "runtime/devices.h"
#include "runtime/memory_plan.h"

namespace charonia::runtime {

// Used by one thread at a time.
struct Executor::Rank {
  explicit Rank(std::unique_ptr<ops::Ops> device) : ops(std::move(device)) {}
  Rank(const Rank&) = delete;
  // Waits for steps in flight, because they use the members. There are none unless a step has failed.
  ~Rank() {
    while (in_flight > 0) {
      try {
        collect();
      } catch (const std::exception&) {  // the engine has already received the first error
      }
    }
  }

  std::size_t free_memory() const {
    const auto free = ops->free_memory();
    return free - std::min(free, reserved);
  }

  // Throws the error of check_model_fits(). All ranks check before any rank loads, because they may share the memory.
  void check_memory(const ModelConfig& model, const model::Manifest& manifest, const EngineConfig& config,
                    const ops::StepLimits& limits) {
    const model::Shard shard(model, manifest, ops->rank());
    auto needs = rank_memory(ops->device(), model::rules_of(*ops), model, manifest, shard, limits, config);
    count_adapter_slots(needs, model::rules_of(*ops), config, model, manifest, ops->rank());
    step_bytes = needs.steps;
    const auto free = free_memory();
    left = free - std::min(free, needs.all_but_cache());
    check_model_fits(config, ops->device(), needs, free, reserved);
    check_host_memory(needs, config.tensor_para_size, ops::cpu::free_memory());
  }

  void load(const ModelConfig& model, const model::WeightFiles& files, const ops::StepLimits& limits,
            const Executor* main) {
    const auto* const of_main = main == nullptr ? nullptr : main->ranks_.front()->decoder.get();
    decoder = std::make_unique<model::Decoder>(model, files, *ops, limits, of_main);
    layout = decoder->kv_layout();
  }

  void make_adapter_slots(const model::Modules& modules, const EngineConfig& config) {
    if (config.lora_device_adapters == 0) return;
    decoder->make_adapter_slots(modules, config.lora_device_adapters, config.lora_max_rank);
  }

  // Call it after load(). Memory that is planned but not yet written counts as used.
  std::size_t free_for_cache() const {
    const auto now = free_memory();
    return std::min(left, now - std::min(now, step_bytes));
  }

  // Creates the KV cache, with memory for the first `committed` blocks, and everything else that steps need.
  void make_cache(const PerKind<int>& num_blocks, const PerKind<int>& committed) {
    cache = ops->make_kv_cache(layout, num_blocks, committed);
    decoder->prepare(*cache);
  }

  void launch(const ops::StepInput& input, std::span<const std::shared_ptr<const Adapter>> of_sequences) {
    adapters.clear();
    for (const auto& one : of_sequences) {
      adapters.push_back(one ? one->ranks[static_cast<std::size_t>(ops->rank())].get() : nullptr);
    }
    decoder->launch(input, adapters);
    ++in_flight;
  }
  std::vector<ops::Sampled> collect() {
    --in_flight;
    return ops->collect();
  }

  int in_flight = 0;              // steps that are launched, but not collected
  std::size_t reserved = 0;       // memory that something else will take later
  std::size_t left = 0;           // free memory before loading, minus the memory of the model and its steps
  std::size_t step_bytes = 0;     // memory that steps allocate after the model is loaded
  std::unique_ptr<ops::Ops> ops;  // the following members use it
  std::unique_ptr<model::Decoder> decoder;
  ops::KvLayout layout;
  std::unique_ptr<ops::KvCache> cache;
  std::vector<const model::Adapter*> adapters;  // of the sequences of the last step
};

Executor::Executor(const std::filesystem::path& weights_dir, ModelConfig& model, EngineConfig& config,
                   std::size_t reserved_bytes, const Executor* main) {
  for (auto& device : make_devices(weights_dir, model, config)) {
    ranks_.push_back(std::make_unique<Rank>(std::move(device)));
    ranks_.back()->reserved =
        draft_share(reserved_bytes, config.device, static_cast<int>(ranks_.size()) - 1, config.tensor_para_size);
  }
  asynchronous_ = std::ranges::all_of(ranks_, [](const auto& rank) { return rank->ops->asynchronous(); });
  threads_ = std::make_unique<RankThreads>(static_cast<int>(ranks_.size()));
  auto manifest = manifest_of(weights_dir, config, model);
  if (main != nullptr && !model::is_head(model)) manifest = manifest.mtp().value();
  const auto limits = main == nullptr ? step_limits(config, model) : layer_limits(config, model);
  kept_hidden_ = limits.kept_hidden;
  most_proposals_ = most_proposals(config, model);
  modules_ = manifest.modules();
  warnings_.push_back(resolve_adapter_slots(config, modules_));
  model::round_weights(model, manifest, config.quantization);
  warnings_.push_back(dequantised_warning(device(), model, manifest));
  const model::WeightFiles files(std::move(manifest));
  on_ranks([&](Rank& rank) { rank.check_memory(model, files.manifest(), config, limits); });
  on_ranks([&](Rank& rank) { rank.load(model, files, limits, main); });
  if (std::ranges::all_of(ranks_, [](const auto& rank) { return rank->ops->has_adapter_slots(); })) {
    adapter_slots_ = config.lora_device_adapters;
    max_adapter_rank_ = config.lora_max_rank;
    on_ranks([&](Rank& rank) { rank.make_adapter_slots(modules_, config); });
  }
  num_blocks_ = blocks_by_kind(config, cache_memory(*ranks_.front()), blocks_of_all(config));
  for (const auto kind : kCacheKinds) {
    chunk_blocks_[kind] = committed_[kind] = blocks_per_chunk(config.cache_chunk_size, num_blocks_[kind]);
  }
  on_ranks([&](Rank& rank) { rank.make_cache(num_blocks_, committed_); });
}

Executor::~Executor() = default;

template <class Task>
void Executor::on_ranks(const Task& task) {
  threads_->run([&](int rank) { task(*ranks_[static_cast<std::size_t>(rank)]); },
                [&](int rank, std::string_view why) {
                  ranks_[static_cast<std::size_t>(rank)]->ops->abort_collectives(why);
                });
}

template <class Function>
std::int64_t Executor::sum(const Function& function) const {
  std::int64_t out = 0;
  for (const auto& rank : ranks_) out += static_cast<std::int64_t>(function(*rank));
  return out;
}

CacheMemory Executor::cache_memory(const Rank& rank) const {
  CacheMemory out{.window = window(),
                  .free_bytes = rank.free_for_cache(),
                  .ranks = static_cast<int>(ranks_.size()),
                  .proposals = most_proposals_};
  for (const auto kind : kCacheKinds) out.block_bytes[kind] = rank.layout.block_bytes(kind);
  return out;
}

int Executor::blocks_of_all(const EngineConfig& config) const {
  int out = std::numeric_limits<int>::max();
  for (const auto& rank : ranks_) {
    try {
      out = std::min(out, blocks_that_fit(config, cache_memory(*rank)));
    } catch (const Error&) {
      throw of_rank(std::current_exception(), rank->ops->rank(), static_cast<int>(ranks_.size()));
    }
  }
  return out;
}

// Not with on_ranks(): a rank without memory must not abort the collectives of the other ranks.
void Executor::commit_blocks(CacheKind kind, int num_blocks) {
  auto wanted = committed_;
  wanted[kind] = num_blocks;
  threads_->run([&](int rank) {
    auto& one = *ranks_[static_cast<std::size_t>(rank)];
    one.ops->commit_blocks(*one.cache, wanted);
  });
  committed_ = wanted;
}

int Executor::window() const { return ranks_.front()->layout.window; }

void Executor::launch(const ops::StepInput& input, std::span<const std::shared_ptr<const Adapter>> adapters) {
  on_ranks([&](Rank& rank) { rank.launch(input, adapters); });
}

std::vector<std::unique_ptr<model::Adapter>> Executor::make_adapter(const model::AdapterFiles& files,
                                                                   std::int64_t reserved_bytes) const {
  const bool in_host_memory = adapter_slots_ > 0;  // without the KV cache
  if (in_host_memory) check_rank(files, max_adapter_rank_);
  const auto bytes = sum([&](const Rank& rank) { return rank.decoder->adapter_bytes(files, modules_); });
  const auto reserved = reserved_bytes + (in_host_memory ? 0 : untouched_bytes());
  const auto free = in_host_memory ? static_cast<std::int64_t>(ops::cpu::free_memory())
                                   : sum([](const Rank& rank) { return rank.ops->free_memory(); });
  if (bytes + reserved > free) {
    const auto* const where = !in_host_memory ? "beside the KV cache: unload another adapter, or lower "
                                                "cache_max_entry_count"
                              : reserved_bytes > 0 ? "in host memory, beside kv_offload_memory: unload another adapter, "
                                                     "lower kv_offload_memory, or free memory"
                                                   : "in host memory: unload another adapter, or free memory";
    throw Error(ErrorCode::resource_exhausted,
                cat("adapter ", files.name(), " needs ", bytes, " bytes, and only ",
                    std::max<std::int64_t>(0, free - reserved), " are free ", where));
  }
  std::vector<std::unique_ptr<model::Adapter>> out;
  for (const auto& rank : ranks_) out.push_back(rank->decoder->make_adapter(files, modules_));
  return out;
}

std::vector<ops::Sampled> Executor::collect() {
  std::vector<std::vector<ops::Sampled>> samples(ranks_.size());
  // All ranks collect at the same time, so that an error of one rank aborts the other ranks, which may wait for it.
  on_ranks([&](Rank& rank) { samples[static_cast<std::size_t>(rank.ops->rank())] = rank.collect(); });
  for (std::size_t rank = 1; rank < samples.size(); ++rank) {
    if (!std::ranges::equal(samples[rank], samples[0], {}, &ops::Sampled::token, &ops::Sampled::token)) {
      throw Error(ErrorCode::internal, cat("rank ", rank, ": it has sampled other tokens than rank 0"));
    }
  }
  return std::move(samples[0]);
}

std::string Executor::device() const { return std::string(ranks_.front()->ops->device()); }

std::string Executor::instruction_set() const { return std::string(ranks_.front()->ops->instruction_set()); }

std::vector<std::string> Executor::warnings() const {
  std::vector<std::string> different;
  const auto add = [&different](std::string warning) {
    if (!warning.empty() && std::ranges::find(different, warning) == different.end()) {
      different.push_back(std::move(warning));
    }
  };
  for (const auto& rank : ranks_) add(rank->ops->warning());
  for (const auto& warning : warnings_) add(warning);
  return different;
}

std::vector<std::string> Executor::kernel_report() const {
  std::vector<std::string> lines;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (auto& line : ranks_[rank]->ops->report()) {
      lines.push_back(ranks_.size() > 1 ? cat("rank ", rank, ": ", line) : std::move(line));
    }
  }
  return lines;
}

std::int64_t Executor::gemms_rejected() const {
  return sum([](const Rank& rank) { return rank.ops->gemms_rejected(); });
}

std::int64_t Executor::weight_bytes() const {
  return sum([](const Rank& rank) { return rank.decoder->weight_bytes(); });
}

std::int64_t Executor::weight_bytes_per_step() const {
  return sum([](const Rank& rank) { return rank.decoder->weight_bytes_per_step(); });
}

PerKind<std::size_t> Executor::block_bytes() const {
  PerKind<std::size_t> out;
  for (const auto kind : kCacheKinds) {
    out[kind] = static_cast<std::size_t>(sum([&](const Rank& rank) { return rank.layout.block_bytes(kind); }));
  }
  return out;
}

std::vector<ops::DevicePart> Executor::layers_of(const Rank& rank, CacheKind kind, int block) {
  std::vector<ops::DevicePart> out;
  const auto& layers = rank.layout.layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].storage >= 0 || layers[i].kind != kind) continue;
    out.push_back({rank.cache->block(i, block), rank.layout.layer_bytes(layers[i])});
  }
  return out;
}

void Executor::read_block(CacheKind kind, int block, std::byte* to) const {
  for (const auto& rank : ranks_) {
    rank->ops->download_parts(to, layers_of(*rank, kind, block));
    to += rank->layout.block_bytes(kind);
  }
}

void Executor::write_block(CacheKind kind, int block, const std::byte* from) {
  for (const auto& rank : ranks_) {
    rank->ops->upload_parts(layers_of(*rank, kind, block), from);
    from += rank->layout.block_bytes(kind);
  }
}

std::int64_t Executor::untouched_bytes() const {
  return sum([](const Rank& rank) { return rank.cache->untouched_bytes(); });
}

std::int64_t Executor::kv_cache_bytes() const {
  return sum([this](const Rank& rank) { return rank.layout.bytes(num_blocks_); });
}

}  // namespace charonia::runtime
