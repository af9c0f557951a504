// Computes steps. It connects the engine loop, which works with sequences, to the devices, which work with tensors. One
// executor runs all ranks of a tensor-parallel model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "ops/step.h"
#include "model/adapter.h"
#include "model/manifest.h"
#include "runtime/adapter.h"
#include "runtime/rank_threads.h"

namespace charonia::runtime {

struct CacheMemory;

class Executor {
 public:
  // Chooses the devices, loads the weights, and creates the KV cache. Its size follows from cache_users, cache_size or
  // cache_max_entry_count. Resolves config.device, device_ids, threads and the sizes of steps. session_len must be
  // resolved. Throws Error: unsupported (no such device), resource_exhausted (weights or cache do not fit),
  // invalid_argument (the files do not match the model).
  // reserved_bytes: memory that the draft model will take later. main: the executor of the whole model, for its MTP
  // layer or EAGLE-3 head (plan_draft()); it must outlive this one.
  Executor(const std::filesystem::path& weights_dir, ModelConfig& model, EngineConfig& config,
           std::size_t reserved_bytes = 0, const Executor* main = nullptr);
  ~Executor();

  // Whether launch() returns before the step is computed. Then the next step may be launched before the previous step
  // is collected. At most ops::kMaxStepsInFlight steps may be in flight.
  bool asynchronous() const { return asynchronous_; }

  // Issues a step. The input's arrays must live until launch() returns, and if the executor is not asynchronous, until
  // the step is collected. After launch() or collect() has thrown, the executor can only be destroyed. The error is
  // from the first rank that fails, and names this rank if there are several.
  // adapters: of each sequence; null: none. They must live until the step is collected. With adapter_slots(),
  // input.adapters has their slots.
  void launch(const ops::StepInput& input, std::span<const std::shared_ptr<const Adapter>> adapters);
  // Waits for the oldest step that is not yet collected. Returns its samples in the order of its sample rows.
  std::vector<ops::Sampled> collect();

  int kept_hidden() const { return kept_hidden_; }  // StepLimits::kept_hidden

  const PerKind<int>& num_blocks() const { return num_blocks_; }
  int window() const;  // KvLayout::window: the widest window of the layers that have one; 0: none
  // The setting cache_chunk_size as a number of blocks (BlockManager's chunk).
  const PerKind<int>& chunk_blocks() const { return chunk_blocks_; }
  // Provides memory for the first `num_blocks` blocks of a kind on all ranks (cache::Commit). Throws
  // Error(resource_exhausted): then some ranks may have the memory, which does no harm. Call it between steps.
  void commit_blocks(CacheKind kind, int num_blocks);

  // False: the device has no memory for adapters. If the model has no adapters, make_adapter() throws.
  bool takes_adapters() const { return !asynchronous_ || adapter_slots_ > 0 || modules_.places.empty(); }
  // The most adapters of a step; 0: no limit.
  int adapter_slots() const { return adapter_slots_; }
  // Makes a LoRA adapter for each rank. May be called from any thread, while steps run. Throws the errors of
  // model::Adapter and check_rank(), and Error(resource_exhausted) if there is not enough memory beside the KV cache
  // and reserved_bytes.
  std::vector<std::unique_ptr<model::Adapter>> make_adapter(const model::AdapterFiles& files,
                                                            std::int64_t reserved_bytes) const;

  // The bytes of a block of each kind on all ranks: its memory in one layer after another. Call the copies between
  // steps. They wait for the steps in flight.
  PerKind<std::size_t> block_bytes() const;
  void read_block(CacheKind kind, int block, std::byte* to) const;
  void write_block(CacheKind kind, int block, const std::byte* from);

  std::string device() const;           // "cpu" | "cuda" | "null"
  std::string instruction_set() const;  // "avx512", "sm_90", ...
  std::vector<std::string> warnings() const;  // the different ones of all ranks' Ops::warning(), and of the settings
  std::vector<std::string> kernel_report() const;  // ops::Ops::report() of all ranks. Call it between steps
  // Sums over all ranks.
  std::int64_t gemms_rejected() const;
  std::int64_t weight_bytes() const;
  std::int64_t weight_bytes_per_step() const;  // read from memory by a step of one token
  std::int64_t kv_cache_bytes() const;
  std::int64_t untouched_bytes() const;  // of the KV cache: memory that it takes when it is written

 private:
  struct Rank;  // a device, its share of the model, its KV cache

  // Runs a task on every rank's thread. An error of one rank aborts the collectives of all.
  template <class Task>
  void on_ranks(const Task& task);
  template <class Function>
  std::int64_t sum(const Function& function) const;
  CacheMemory cache_memory(const Rank& rank) const;
  int blocks_of_all(const EngineConfig& config) const;
  // The memory of a block of a rank, in one layer after another.
  static std::vector<ops::DevicePart> layers_of(const Rank& rank, CacheKind kind, int block);

  std::vector<std::unique_ptr<Rank>> ranks_;
  bool asynchronous_ = false;
  int adapter_slots_ = 0, max_adapter_rank_ = 0, kept_hidden_ = 0;
  std::vector<std::string> warnings_;  // of settings and weights; may be empty
  int most_proposals_ = 0;
  model::Modules modules_;
  PerKind<int> num_blocks_, chunk_blocks_, committed_;
  std::unique_ptr<RankThreads> threads_;
};

}  // namespace charonia::runtime
