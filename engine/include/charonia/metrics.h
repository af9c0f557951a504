// The engine's metrics: one catalogue, and one interface that each adapter implements with its own library (Triton's
// custom-metric API in the server).
#pragma once

#include <span>
#include <string_view>

namespace charonia {

// The maximum of the setting speculative_tokens.
inline constexpr int kMaxProposals = 16;

enum class MetricKind { counter, gauge, histogram };

enum class Metric {
  start_time_seconds,
  num_requests_running,
  num_requests_waiting,
  kv_cache_usage_perc,
  kv_blocks_active,
  kv_blocks_cached,
  kv_blocks_total,
  kv_blocks_committed,
  num_sessions,
  session_blocks_pinned,
  subscriptions,  // set by the server's backend, not by an engine
  weight_bytes,
  kv_cache_bytes,
  prompt_tokens,
  generation_tokens,
  prefix_cache_queries,
  prefix_cache_hits,
  external_prefix_cache_queries,
  external_prefix_cache_hits,
  kv_offload_bytes,
  num_preemptions,
  lora_slot_waits,
  engine_steps,
  gemms_rejected,
  jump_forward_tokens,
  spec_decode_num_drafts,
  spec_decode_num_draft_tokens,             // label source, see runtime/proposals.h
  spec_decode_num_accepted_tokens,          // the same
  spec_decode_num_accepted_tokens_per_pos,  // label position, from 0 to kMaxProposals - 1
  request_success,    // label finished_reason, in the order of FinishReason from `stop` on
  requests_rejected,  // label reason, see runtime/load_tracker.h
  time_to_first_token_seconds,
  inter_token_latency_seconds,
  e2e_request_latency_seconds,
  request_queue_time_seconds,
  request_prompt_tokens,
  request_generation_tokens,
  cancel_to_free_seconds,
  engine_step_seconds,
  engine_step_sequences,
  engine_step_tokens,
  guide_compile_seconds,
  token_mask_seconds,
};

struct MetricInfo {
  Metric metric;
  MetricKind kind;
  std::string_view name;  // full name: charonia_...
  std::string_view help;
  std::string_view label;  // name of its one label, or empty
  std::span<const std::string_view> label_values;
  std::span<const double> buckets;  // upper bounds of a histogram, ascending
};

// In the order of enum Metric.
std::span<const MetricInfo> metric_catalogue();

// Called on the engine's threads and on threads that submit. Implementations are thread-safe and do not block.
// label_value is an index into label_values (0 if there is no label).
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  // Adds 0 or more to a counter, or any value to a gauge.
  virtual void add(Metric metric, double value, int label_value) = 0;
  virtual void set(Metric gauge, double value) = 0;
  virtual void observe(Metric histogram, double value) = 0;
};

}  // namespace charonia
