// Plans the memory of a model: the sizes of weights, activations, steps and KV blocks, the largest step, and the number
// of KV blocks that fit. Everything is computed from config.ini and manifest.json before anything is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"
#include "charonia/error.h"
#include "model/activations.h"
#include "model/manifest.h"
#include "model/shard.h"
#include "ops/device.h"
#include "ops/step.h"
#include "runtime/devices.h"
#include "runtime/speculative_method.h"

namespace charonia::runtime {

// ---- the sizes of steps ----
//
// With token_budget = 0 or max_batch_size = 0, the device decides the size of steps.
//
// On the CPU: 512 tokens, 64 sequences. A larger step is not faster, because GEMMs of more than a few dozen rows are
// bound by arithmetic. It also makes decoding requests wait longer.
//
// On a GPU, S is its number of SMs, and F the free memory of a rank in bytes before the weights are loaded. With
// several ranks, S and F are the smallest of all ranks.
//
//     token_budget   = min(16 S, F / 8 MiB),   rounded down to a multiple of 256, within [512, 8192]
//     max_batch_size = min(2 S, F / 256 MiB),  rounded down to a multiple of 64, within [64, 512]
//
// 16 S: the GEMM of R rows with a weight of 4096 rows has R / 128 * 32 tiles of 128 x 128. With R = 16 S, each SM
// computes four tiles, so the last round costs little if it is not full. A weight with more rows has more tiles.
// F / 8 MiB: the activations of a row take at most about half a MiB in today's models (hidden_units 8192, inter_size
// 28672, 16 bits). So the activations of all rows take a sixteenth of the memory.
//
// 2 S: a decode step reads all weights once. More rows cost little until the arithmetic takes as long as these reads.
// The number of rows at this point is the number of 16-bit operations that the GPU does per byte that it reads: about
// 150 on an A100, 200 on an H200, 300 on an H100, 400 on an L4. 2 S is 216, 264, 264, 116. Beyond this point, every
// further sequence slows down the others.
// F / 256 MiB: the size of the keys and values of 2048 tokens of Llama-3-8B. If the cache had no room for the
// sequences, they would only preempt each other.
//
// Examples (token_budget and max_batch_size): 2048 and 256 on an H200 (S = 132, F = 139 GiB), 1536 and 192 on an A100
// of 80 GiB, 768 and 64 on an L4 of 22 GiB.

// For a GPU on another machine only the memory is known. The plan assumes the number of SMs of an H100 or H200.
inline constexpr int kUsualSms = 132;

struct StepDevice {
  std::string_view device;     // "cpu" | "cuda" | "null"
  int sms = 0;                 // ignored on the CPU
  std::size_t free_bytes = 0;  // ignored on the CPU
};

// Replaces token_budget = 0 and max_batch_size = 0 by the sizes for the device.
void resolve_step_sizes(EngineConfig& config, const StepDevice& device);

// The most proposals of a step. config.device must be resolved.
int most_proposals(const EngineConfig& config, const ModelConfig& model);

// Returns the limits of an engine's steps. Throws Error(internal) if the sizes are not resolved.
ops::StepLimits step_limits(const EngineConfig& config, const ModelConfig& model);
// The same for an MTP layer or an EAGLE-3 head.
ops::StepLimits layer_limits(const EngineConfig& config, const ModelConfig& model);

// ---- memory of one rank ----

// device: "cpu" | "cuda" | "null". The machine needs no GPU for "cuda".
model::DeviceRules rules_of(std::string_view device);

// All sizes in bytes. The real device may use less for steps.
struct RankMemory {
  std::size_t weights = 0;        // without the padding of the device's layout
  std::size_t tables = 0;         // of `weights`: for the positions of session_len
  std::size_t host = 0;           // weights that a GPU reads from host memory; not in `weights`
  std::size_t activations = 0;
  std::size_t loaded_steps = 0;   // for steps, allocated with the weights: scratch memory for dequantised weights
  std::size_t steps = 0;          // for steps, allocated later: arrays, workspace, captured CUDA graphs
  std::size_t adapters = 0;       // slots of LoRA adapters on a GPU, allocated with the weights
  PerKind<std::size_t> kv_block{};  // one block or state of each kind, in all its layers
  int window = 0;                   // KvLayout::window
  bool quantised = false;           // some weights are
  bool dequantised = false;         // some weights are quantised in the file, but not on the device

  std::size_t all_but_cache() const { return weights + activations + loaded_steps + steps + adapters; }
};
RankMemory rank_memory(std::string_view device, const model::DeviceRules& rules, const ModelConfig& model,
                       const model::Manifest& manifest, const model::Shard& shard, const ops::StepLimits& limits,
                       const EngineConfig& config);

// Warns of the memory of weights that the CUDA device dequantises. Empty if there are none.
std::string dequantised_warning(std::string_view device, const ModelConfig& model, const model::Manifest& manifest);

// Adds the memory of LoRA adapters on a GPU: their slots, and what steps with adapters need. The settings must be
// resolved.
void count_adapter_slots(RankMemory& memory, const model::DeviceRules& rules, const EngineConfig& config,
                         const ModelConfig& model, const model::Manifest& manifest, int rank);

// Throws Error(resource_exhausted), with the numbers and the remedy, if not even one KV block fits next to the model.
// reserved_bytes: of the draft model or MTP layer, not in free_bytes.
void check_model_fits(const EngineConfig& config, std::string_view device, const RankMemory& memory,
                      std::size_t free_bytes, std::size_t reserved_bytes = 0);

// Throws Error(resource_exhausted) if the weights that GPUs read from host memory exceed free_bytes. Each of the ranks
// has its own copy.
void check_host_memory(const RankMemory& memory, int ranks, std::size_t free_bytes);

// ---- the KV cache ----

//
// A model with windows has window blocks next to its full blocks: at most one for each full block, and enough for the
// windows of the sequences that the full blocks hold, and for one step. The assumed length of these sequences is
// cache_user_tokens. If this is not set, the length is session_len with cache_users, the length of a CPU's default, or
// four windows. With four windows, the cache holds more long sequences than with a window block for each full block,
// and fewer short ones.
//
// A model with recurrent layers has a state for each running sequence (max_batch_size), and further states for
// snapshots: one for every 512 tokens of the full blocks, but no more than take as much memory as the full blocks. With
// speculation it also has states after proposals (schedule::most_proposal_states()).

struct CacheMemory {
  PerKind<std::size_t> block_bytes{};  // one block or state of each kind, in all its layers
  int window = 0;                      // KvLayout::window; 0: no layers have a window
  std::size_t free_bytes = 0;          // available to the cache of one rank
  int ranks = 1;                       // cache_size is divided by this
  int proposals = 0;                   // most_proposals()
};
// Returns the number of full blocks that cache_users asks for, else cache_size, else cache_max_entry_count. Throws
// Error(resource_exhausted), with the numbers and the remedy, if they do not fit together with their window blocks.
// config.session_len and the sizes of steps must be resolved.
int blocks_that_fit(const EngineConfig& config, const CacheMemory& memory);

// Returns the numbers of blocks of a cache with this many full blocks. Kinds without layers have none.
PerKind<int> blocks_by_kind(const EngineConfig& config, const CacheMemory& memory, int full_blocks);

// Returns cache_chunk_size as a number of blocks: -1 means all blocks, 0 means the square root of their number.
int blocks_per_chunk(int cache_chunk_size, int num_blocks);

// ---- the draft model ----
//
// speculative_method = draft_model runs a second model as one rank, on the device of the model's first rank. Its KV cache
// holds one sequence of full length, or 16 sequences of 1024 tokens if that is more, but takes at most a quarter of the
// memory that is free beside both models and one block of each cache. speculative_method = mtp runs the MTP layer of the
// model in the same way, and eagle3 an EAGLE-3 head. Their cache holds max_batch_size sequences of 1024 tokens, because
// they must see all tokens.

// The number of hidden states of a sequence that such a layer computes at the latest, also without proposals. The model
// has memory for so many of each sequence, and for those of two steps, as part of its activations.
inline constexpr int kKeptHidden = 16;

struct DraftPlan {
  std::filesystem::path weights_dir;
  ModelConfig model;
  EngineConfig config;    // resolved; cache_max_entry_count is the number of its KV blocks
  std::size_t bytes = 0;  // weights, steps and KV cache
  const SpeculativeMethod* method = nullptr;
  std::string warning{};  // empty: none

  bool is_mtp() const { return method->reads_hidden && method->model.empty(); }  // then weights_dir is the model's
  // The error, with the name of the draft model or of the method.
  Error name(const Error& error) const;
};
// The manifest of the engine's model, as its settings need it: with the layers whose inputs an EAGLE-3 head reads, and
// without an MTP layer that is not used. Throws the errors of Manifest, and of the head's settings.
model::Manifest manifest_of(const std::filesystem::path& weights_dir, const EngineConfig& config,
                            const ModelConfig& model);
// Throws Error(unsupported) for an EAGLE-3 head, which cannot be served alone.
void check_is_model(const ModelConfig& model);
// The free memory of each rank's device, in bytes. memory_bytes: the memory of each GPU, or of the CPU; 0: ask the device.
std::vector<std::size_t> free_memory(const DeviceChoice& choice, int ranks, std::int64_t memory_bytes = 0);
// The memory for the draft model, of free_memory(): all memory of a CPU, or the memory of the first rank's GPU.
std::size_t free_for_draft(std::string_view device, std::span<const std::size_t> free_of_ranks);
// The share of the draft model's memory that a rank must leave free.
std::size_t draft_share(std::size_t bytes, std::string_view device, int rank, int ranks);
// Returns the plan of the method's draft model or layer; null if the method or the model has none. engine, model,
// manifest: of the engine's model, rounded; the device, the sizes of steps and the adapter slots must be
// resolved. free_bytes: free_for_draft(), before any weights are loaded.
// Throws Error with the name of the draft model: resource_exhausted if it does not fit, unsupported for a model that
// cannot draft, invalid_argument for its files. With a method that reads hidden states: Error(unsupported), with the
// remedy, if the device, the number of ranks or the model have no such proposals.
std::optional<DraftPlan> plan_draft(const EngineConfig& engine, const ModelConfig& model,
                                    const model::Manifest& manifest, std::size_t free_bytes);

}  // namespace charonia::runtime
