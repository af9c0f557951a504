// Computes steps. It connects the engine loop, which works with sequences, to the devices, which work with tensors. One
// executor runs all ranks of a tensor-parallel model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "ops/step.h"
#include "runtime/rank_threads.h"

namespace charonia::runtime {

struct CacheMemory;

class Executor {
 public:
  // Chooses the devices, loads the weights, and creates the KV cache. Its size follows from cache_users, cache_size or
  // cache_max_entry_count. Resolves config.device, device_ids, threads and the sizes of steps. session_len must be
  // resolved. Throws Error: unsupported (no such device), resource_exhausted (weights or cache do not fit),
  // invalid_argument (the files do not match the model).
  Executor(const std::filesystem::path& weights_dir, const ModelConfig& model, EngineConfig& config);
  ~Executor();

  // Whether launch() returns before the step is computed. Then the next step may be launched before the previous step
  // is collected. At most ops::kMaxStepsInFlight steps may be in flight.
  bool asynchronous() const { return asynchronous_; }

  // Issues a step. The input's arrays must live until launch() returns, and if the executor is not asynchronous, until
  // the step is collected. After launch() or collect() has thrown, the executor can only be destroyed. The error is
  // from the first rank that fails, and names this rank if there are several.
  void launch(const ops::StepInput& input);
  // Waits for the oldest step that is not yet collected. Returns its samples in the order of its sample rows.
  std::vector<ops::Sampled> collect();

  const PerKind<int>& num_blocks() const { return num_blocks_; }
  int window() const;  // KvLayout::window: the widest window of the layers that have one; 0: none
  // The setting cache_chunk_size as a number of blocks (BlockManager's chunk).
  const PerKind<int>& chunk_blocks() const { return chunk_blocks_; }
  // Provides memory for the first `num_blocks` blocks of a kind on all ranks (cache::Commit). Throws
  // Error(resource_exhausted): then some ranks may have the memory, which does no harm. Call it between steps.
  void commit_blocks(CacheKind kind, int num_blocks);

  std::string device() const;           // "cpu" | "cuda" | "null"
  std::string instruction_set() const;  // "avx512", "sm_90", ...
  std::string warning() const;          // ops::Ops::warning(): why the device is slow; empty if it is not
  std::vector<std::string> kernel_report() const;  // ops::Ops::report() of all ranks. Call it between steps
  // Sums over all ranks.
  std::int64_t gemms_rejected() const;
  std::int64_t weight_bytes() const;
  std::int64_t weight_bytes_per_step() const;  // read from memory by a step of one token
  std::int64_t kv_cache_bytes() const;

 private:
  struct Rank;  // a device, its share of the model, its KV cache

  // Runs a task on every rank's thread. An error of one rank aborts the collectives of all.
  template <class Task>
  void on_ranks(const Task& task);
  template <class Function>
  std::int64_t sum(const Function& function) const;
  CacheMemory cache_memory(const Rank& rank) const;
  int blocks_of_all(const EngineConfig& config) const;

  std::vector<std::unique_ptr<Rank>> ranks_;
  bool asynchronous_ = false;
  PerKind<int> num_blocks_, chunk_blocks_, committed_;
  std::unique_ptr<RankThreads> threads_;
};

}  // namespace charonia::runtime
