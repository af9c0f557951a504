// The inference engine. One engine thread owns all state; every public method may be called from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"
#include "charonia/error.h"
#include "charonia/metrics.h"
#include "charonia/types.h"

namespace charonia {

// Facts about a loaded engine, for start-up messages and tests.
struct EngineInfo {
  ModelConfig model;
  EngineConfig config;          // resolved: session_len, threads, device, device_ids, token_budget, max_batch_size
  SamplingParams default_sampling;  // for callers only: submit() does not apply it to requests
  std::string device;           // "cpu" | "cuda" | "null"
  std::string device_note;      // why device = auto chose the CPU; empty otherwise
  std::string instruction_set;  // "amx", "avx512_bf16", "avx512", "avx2", "portable"; "sm_90", ...
  // The kernels, the GPUs and the C library's mathematics, and session_len. Engines with the same text, build, weights
  // and settings give a request the same tokens, if deterministic().
  std::string arithmetic;
  std::int64_t weight_bytes = 0;
  std::int64_t weight_bytes_per_step = 0;  // bytes that a step of one token reads from memory
  std::int64_t kv_cache_bytes = 0;
  int num_blocks = 0;
  int num_window_blocks = 0;  // as in MemoryPlan
  int num_states = 0;         // as in MemoryPlan
  std::string draft_model;    // the name of the draft model; empty: there is none
  std::vector<std::string> warnings;
  // The kernels that the device chose at start, one line each, then those for the draft model; empty on the CPU, which
  // has no choice.
  // Engine::kernel_report() returns the current state.
  std::vector<std::string> kernel_report;

  // Whether the tokens of a request depend on the request alone, and not on its batch.
  bool deterministic() const { return device != "cuda" || config.reproducible; }
};

// The memory that a model needs and how much of it fits, computed from config.ini and manifest before anything is
// loaded.
struct MemoryPlan {
  ModelConfig model;
  // Resolved as in Engine, but session_len may exceed the capacity of the blocks. Without a GPU on this machine, step
  // sizes assume a GPU with 132 SMs (an H100).
  EngineConfig config;
  std::string device;  // "cpu" | "cuda" | "null"
  std::string device_note;
  std::int64_t weight_bytes = 0;      // of all ranks
  std::int64_t host_bytes = 0;        // of weights that GPUs read from host memory, and of adapters on a GPU
  std::int64_t activation_bytes = 0;  // and other memory that steps need
  std::int64_t speculative_bytes = 0;  // of the draft model: weights, steps and KV cache; 0: there is none
  std::int64_t offload_bytes = 0;     // kv_offload_memory; on a CPU of the same memory
  std::int64_t kv_token_bytes = 0;    // of one token in all layers
  std::int64_t kv_block_bytes = 0;    // of one block in the layers without a window
  std::int64_t kv_window_block_bytes = 0;  // in the layers with a window
  std::int64_t state_bytes = 0;            // a sequence's state of the recurrent layers
  std::int64_t adapter_bytes = 0;          // of config.lora_adapters, at most; on a GPU of its slots
  std::int64_t free_bytes = 0;  // memory that is free now
  int num_blocks = 0;           // according to the cache settings
  int num_window_blocks = 0;    // blocks of the layers with a window; 0 if there are none
  int num_states = 0;           // states of running sequences and of snapshots; 0 without recurrent layers
  int window = 0;               // tokens that these layers read; 0 if there are none
  std::vector<std::string> warnings;
};

// The state of a session.
struct SessionInfo {
  std::string id;
  int num_tokens = 0;  // length of its history
  int num_turns = 0;
  int num_pinned_blocks = 0;
  double idle_s = 0;  // since its last turn ended
  bool busy = false;  // a request of this session runs or waits
};

// A loaded LoRA adapter.
struct AdapterInfo {
  std::string name, folder;
  std::string fingerprint;  // 16 hexadecimal digits: a hash of its files
  int max_rank = 0;
  std::int64_t bytes = 0;  // of all ranks
};

struct EngineStats {
  int num_running = 0;
  int num_waiting = 0;
  int blocks_total = 0, blocks_active = 0, blocks_cached = 0, blocks_free = 0;
  std::int64_t num_steps = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t lora_slot_waits = 0;  // steps with a place for a request whose LoRA adapter had no slot
  std::int64_t prompt_tokens = 0, generation_tokens = 0;
  std::int64_t jump_forward_tokens = 0;  // part of generation_tokens: accepted without a step of their own
  std::int64_t proposed_tokens = 0, accepted_tokens = 0;  // of speculation; the second is part of generation_tokens
  std::int64_t prefix_queries_tokens = 0, prefix_hit_tokens = 0;
  // Tokens that were looked up in kv_offload_path, those that were loaded, and the bytes of its files.
  std::int64_t offload_queries_tokens = 0, offload_hit_tokens = 0, offload_bytes = 0;
  std::int64_t gemms_rejected = 0;          // GEMMs that built-in kernels computed although cuBLASLt was chosen
  int num_sessions = 0, blocks_pinned = 0;  // pinned: cached and active blocks that are kept for sessions
};

class Engine {
 public:
  using Handle = std::uint64_t;
  // Called on the delivery thread, in the order of the tokens; never concurrently for one engine. The last call for a
  // request has a finish_reason. It must not throw. It may call submit() and cancel().
  using Callback = std::function<void(Result&&)>;

  // Loads the model from a `weights` folder (config.ini, manifest.json, token_table.safetensors) and starts the engine.
  // `overrides` take precedence over config.ini. Throws Error.
  explicit Engine(const std::filesystem::path& weights_dir, const Settings& overrides = {},
                  std::shared_ptr<MetricsSink> sink = nullptr);
  // Cancels all requests (each receives its last result) and joins all threads.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request. Throws Error: invalid_argument (bad parameter, or prompt and max_tokens do not fit; the text has
  // the numbers), resource_exhausted (the queue is full), unavailable (the engine shuts down or has failed). If it
  // throws, the callback is never called.
  Handle submit(Request request, Callback callback);

  // Cancels a request; its last result has FinishReason::cancelled. Returns false if the request is unknown or
  // finished. A cancel by id does not affect requests that are submitted later. If the request belongs to a session,
  // its turn is dropped and the session's history is unchanged.
  bool cancel(Handle handle);
  bool cancel(std::string_view id);  // every request with this id; "" matches none
  // Like cancel(), but the turn stays in the session's history, with the tokens generated so far.
  bool stop(Handle handle);
  bool stop(std::string_view id);

  // Removes a session. A running request of the session continues without it. Returns false if there is no
  // session.
  bool end_session(std::string_view session_id);
  std::vector<SessionInfo> sessions() const;

  // Loads a LoRA adapter from a folder of PEFT, for Request::lora_name. Requests run meanwhile. Does nothing if an
  // adapter with this name and equal files is loaded. Throws Error: invalid_argument (the name is in use or not valid;
  // the files are not valid or do not fit the model), unsupported (a feature of PEFT, a module or a device that the
  // engine does not support), resource_exhausted (no memory).
  void load_adapter(const std::string& name, const std::filesystem::path& folder);
  // Requests that were submitted before end with the adapter. Later ones are rejected with ErrorCode::not_found.
  // Returns false for an unknown name.
  bool unload_adapter(std::string_view name);
  std::vector<AdapterInfo> adapters() const;  // by name
  Error no_adapter(std::string_view name) const;  // says which names there are

  // The bytes of a token; empty for special tokens. Valid as long as the engine.
  std::string_view token_bytes(TokenId id) const;
  std::string_view raw_token_bytes(TokenId id) const;  // with the bytes of special tokens

  // Rejects new requests, lets running requests finish for at most timeout_ms, then cancels the rest. Idempotent.
  void shutdown(int timeout_ms = 0);
  // Calls shutdown(0) and waits until every callback has returned and all its copies are destroyed. Must not be called
  // from a callback.
  void close();

  // Called on the engine's thread when a step has failed, for example because of a CUDA error. The function may end the
  // process. If it returns, all requests end with ErrorCode::unavailable, and submit() throws it from then on. After
  // most CUDA errors only a new process can use the device again. Set it before the first submit().
  void on_failure(std::function<void()> function);

  // Sets a function that is called on the delivery thread after the callbacks of each group of results (such as the
  // results of one step) have returned, so that a caller can send the results together. It must not throw. Must be set
  // before the first submit().
  void on_delivered(std::function<void()> function);

  const EngineInfo& info() const;
  EngineStats stats() const;
  // The current EngineInfo::kernel_report, with the GEMMs that a library has rejected since the start. Waits for the
  // engine thread. Must not be called from a callback.
  std::vector<std::string> kernel_report();
  // Runs the integrity checks of scheduler and cache on the engine thread. Throws Error(internal) on a violation.
  void check_integrity();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws Error like Engine's constructor for invalid files and settings. If the model does not fit, it adds a warning
// and sets num_blocks to 0. Reads config.ini and manifest.json of the folder; a manifest without files describes
// weights that are not on this machine. With a draft model, compares the vocabularies if both folders have a token
// table. memory_bytes > 0: the memory of each GPU, or of the machine for the CPU, instead of the free memory here;
// device = cuda then needs no GPU.
MemoryPlan plan_memory(const std::filesystem::path& weights_dir, const Settings& overrides = {},
                       std::int64_t memory_bytes = 0);

}  // namespace charonia
