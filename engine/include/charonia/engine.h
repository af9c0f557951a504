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

// What is in a loaded engine, for start-up messages and tests.
struct EngineInfo {
  ModelConfig model;
  EngineConfig config;          // resolved: session_len, threads, device, device_ids, token_budget, max_batch_size
  SamplingParams default_sampling;  // for callers: submit() takes every parameter as it is in the request
  std::string device;           // "cpu" | "cuda" | "null"
  std::string device_note;      // why device = auto is the CPU; empty otherwise
  std::string instruction_set;  // "amx", "avx512_bf16", "avx512", "avx2", "portable"; "sm_90", ...
  std::int64_t weight_bytes = 0;
  std::int64_t weight_bytes_per_step = 0;  // read from memory by a step of one token
  std::int64_t kv_cache_bytes = 0;
  int num_blocks = 0;
  std::vector<std::string> warnings;
  // Which kernels the device's operations go to, a line each, as chosen at start; empty on the CPU, which has no
  // choice. Engine::kernel_report() says it anew.
  std::vector<std::string> kernel_report;
};

// What a model takes and what fits, by its config.ini and manifest, before anything is loaded.
struct MemoryPlan {
  ModelConfig model;
  // Resolved as by Engine. session_len may be more than the blocks hold. Sizes of steps of a GPU that is elsewhere are
  // those of one with 132 SMs, as an H100 has.
  EngineConfig config;
  std::string device;  // "cpu" | "cuda" | "null"
  std::string device_note;
  std::int64_t weight_bytes = 0;      // of all ranks
  std::int64_t activation_bytes = 0;  // and other memory that steps need
  std::int64_t kv_token_bytes = 0;    // of one token in all layers
  std::int64_t kv_block_bytes = 0;
  std::int64_t free_bytes = 0;  // memory that is free now
  int num_blocks = 0;           // by the cache settings
  std::vector<std::string> warnings;
};

// A session as the engine keeps it.
struct SessionInfo {
  std::string id;
  int num_tokens = 0;  // of its history
  int num_turns = 0;
  int num_pinned_blocks = 0;
  double idle_s = 0;  // since its last turn ended
  bool busy = false;  // a request of it runs or waits
};

struct EngineStats {
  int num_running = 0;
  int num_waiting = 0;
  int blocks_total = 0, blocks_active = 0, blocks_cached = 0, blocks_free = 0;
  std::int64_t num_steps = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t prompt_tokens = 0, generation_tokens = 0;
  std::int64_t jump_forward_tokens = 0;  // of those generated: taken without a step of their own
  std::int64_t prefix_queries_tokens = 0, prefix_hit_tokens = 0;
  std::int64_t gemms_rejected = 0;           // GEMMs with weights that cuBLASLt rejected and own kernels took
  int num_sessions = 0, blocks_pinned = 0;  // pinned: kept for sessions, among cached and active ones
};

class Engine {
 public:
  using Handle = std::uint64_t;
  // Called on the delivery thread, in the order of the tokens; never concurrently for one engine. The last call for a
  // request has a finish_reason. It must not throw. It may call submit() and cancel().
  using Callback = std::function<void(Result&&)>;

  // Loads the model of a `weights` folder (config.ini, manifest.json, token_table.safetensors; see docs/workspace.md)
  // and starts. `overrides` win over config.ini. Throws Error.
  explicit Engine(const std::filesystem::path& weights_dir, const Settings& overrides = {},
                  std::shared_ptr<MetricsSink> sink = nullptr);
  // Cancels what still runs (each request gets its last result) and joins all threads.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request. Throws Error: invalid_argument (bad parameter; prompt and max_tokens do not fit, with the
  // numbers), resource_exhausted (queue full), unavailable (shutting down, or a step has failed). After a throw
  // no callback follows.
  Handle submit(Request request, Callback callback);

  // Ends a request; its last result has FinishReason::cancelled. Unknown or finished ones are no error: returns false
  // when nothing was known by that name. A request that is cancelled by id before it is submitted is not remembered.
  // Of a session, the turn is dropped: its history is what it was before.
  bool cancel(Handle handle);
  bool cancel(std::string_view id);  // every request with this id; "" names none
  // The same, but the turn stays in the session's history with what was generated of it.
  bool stop(Handle handle);
  bool stop(std::string_view id);

  // Forgets a session; a request of it that runs goes on without one. False when there is none by that name.
  bool end_session(std::string_view session_id);
  std::vector<SessionInfo> sessions() const;

  // The bytes that a token stands for; empty for special ones. Valid as long as the engine.
  std::string_view token_bytes(TokenId id) const;

  // Takes no new request, lets running ones finish for at most timeout_ms, cancels the rest. Idempotent.
  void shutdown(int timeout_ms = 0);
  // shutdown(0), and waits until every callback has returned and its copies are destroyed. Not from a callback.
  void close();

  // Called on the engine's thread when a step has failed, for example because of a CUDA error. The function may end the
  // process. If it returns, all requests end with ErrorCode::unavailable, and submit() throws it from then on. After
  // most CUDA errors only a new process can use the device again. Set it before the first submit().
  void on_failure(std::function<void()> function);

  // Called on the delivery thread whenever the callbacks of the results that were there together, as those of a step are,
  // have returned: for who sends them on together. It must not throw. To be set before the first submit().
  void on_delivered(std::function<void()> function);

  const EngineInfo& info() const;
  EngineStats stats() const;
  // EngineInfo::kernel_report as it is now, with the GEMMs that a library has refused since; waits for the engine
  // thread. Not from a callback.
  std::vector<std::string> kernel_report();
  // Runs the integrity checks of scheduler and cache on the engine thread; throws Error(internal) on a violation.
  void check_integrity();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws Error as Engine's constructor does for files and settings that are wrong; that something does not fit is no
// error, but a warning, and num_blocks is 0. Of the folder it reads config.ini and manifest.json; a manifest without files
// describes weights that are not here. memory_bytes > 0: of each GPU, or of the machine for the CPU, in place of what is
// free here; device = cuda then needs no GPU.
MemoryPlan plan_memory(const std::filesystem::path& weights_dir, const Settings& overrides = {},
                       std::int64_t memory_bytes = 0);

}  // namespace charonia
