#include "charonia/metrics.h"

#include <array>

namespace charonia {
namespace {

constexpr std::array<std::string_view, 4> kFinishedReasons = {"stop", "length", "cancelled", "error"};
constexpr std::array<std::string_view, 5> kRejectedReasons = {"queue_full", "queue_tokens", "queue_time", "deadline",
                                                             "never_fits"};
constexpr std::array<std::string_view, kMaxProposals> kPositions = {"0", "1", "2",  "3",  "4",  "5",  "6",  "7",
                                                                    "8", "9", "10", "11", "12", "13", "14", "15"};
constexpr std::array<std::string_view, 3> kSources = {"ngram", "grammar", "draft"};
constexpr std::array kLatencyBuckets = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25, 0.5,
                                        0.75,  1.0,   2.5,  5.0,  7.5,  10.0, 20.0, 40.0, 80.0};
constexpr std::array kRequestBuckets = {0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0,  2.5,  5.0,
                                        10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0};
constexpr std::array kTokenBuckets = {1.0,   2.0,   5.0,    10.0,   20.0,   50.0,   100.0,   200.0,
                                      500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0};
constexpr std::array kSequenceBuckets = {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0};
constexpr std::array kStepBuckets = {0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04,
                                     0.06,  0.08,  0.1,   0.15,  0.25,  0.5,  1.0,   2.5,  5.0,  10.0};
constexpr std::array kMaskBuckets = {0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001,
                                     0.0025,  0.005,    0.01,    0.025,  0.1,     0.5};
constexpr std::array kCancelBuckets = {0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0};

MetricInfo simple(Metric metric, MetricKind kind, std::string_view name, std::string_view help) {
  return {metric, kind, name, help, {}, {}, {}};
}

// A counter for each value of a label.
MetricInfo counters(Metric metric, std::string_view name, std::string_view help, std::string_view label,
                    std::span<const std::string_view> values) {
  return {metric, MetricKind::counter, name, help, label, values, {}};
}

MetricInfo histogram(Metric metric, std::string_view name, std::string_view help, std::span<const double> buckets) {
  return {metric, MetricKind::histogram, name, help, {}, {}, buckets};
}

}  // namespace

std::span<const MetricInfo> metric_catalogue() {
  using enum Metric;
  constexpr auto kCounter = MetricKind::counter, kGauge = MetricKind::gauge;
  static const std::array catalogue = {
      simple(start_time_seconds, kGauge, "charonia_start_time_seconds",
             "When the engine was loaded, in seconds since 1970; it changes at each restart"),
      simple(num_requests_running, kGauge, "charonia_num_requests_running", "Requests that hold KV blocks"),
      simple(num_requests_waiting, kGauge, "charonia_num_requests_waiting", "Requests that wait to be scheduled"),
      simple(kv_cache_usage_perc, kGauge, "charonia_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
      simple(kv_blocks_active, kGauge, "charonia_kv_blocks_active", "KV blocks used by sequences in flight"),
      simple(kv_blocks_cached, kGauge, "charonia_kv_blocks_cached",
             "KV blocks of the prefix cache that no sequence uses"),
      simple(kv_blocks_total, kGauge, "charonia_kv_blocks_total", "KV blocks in all"),
      simple(kv_blocks_committed, kGauge, "charonia_kv_blocks_committed", "KV blocks that have memory"),
      simple(num_sessions, kGauge, "charonia_num_sessions", "Sessions whose history is kept"),
      simple(session_blocks_pinned, kGauge, "charonia_session_blocks_pinned", "KV blocks pinned by sessions"),
      simple(subscriptions, kGauge, "charonia_subscriptions",
             "Open subscriptions: client streams that carry the responses of many requests"),
      simple(weight_bytes, kGauge, "charonia_weight_bytes", "Memory that the weights take"),
      simple(kv_cache_bytes, kGauge, "charonia_kv_cache_bytes", "Memory that the KV blocks take"),
      simple(prompt_tokens, kCounter, "charonia_prompt_tokens_total", "Prompt tokens of admitted requests"),
      simple(generation_tokens, kCounter, "charonia_generation_tokens_total", "Tokens of completions"),
      simple(prefix_cache_queries, kCounter, "charonia_prefix_cache_queries_total",
             "Prompt tokens looked up in the prefix index"),
      simple(prefix_cache_hits, kCounter, "charonia_prefix_cache_hits_total",
             "Prompt tokens found in the prefix index"),
      simple(external_prefix_cache_queries, kCounter, "charonia_external_prefix_cache_queries_total",
             "Tokens that were not in the prefix index and were looked up in kv_offload_path"),
      simple(external_prefix_cache_hits, kCounter, "charonia_external_prefix_cache_hits_total",
             "Tokens whose KV was loaded from kv_offload_path"),
      simple(kv_offload_bytes, kGauge, "charonia_kv_offload_bytes", "Size of the files in kv_offload_path"),
      simple(num_preemptions, kCounter, "charonia_num_preemptions_total",
             "Preemptions: a sequence's KV blocks were freed, to be recomputed later"),
      simple(lora_slot_waits, kCounter, "charonia_lora_slot_waits_total",
             "Steps with a place in the batch for a request whose LoRA adapter had no slot on the GPU"),
      simple(engine_steps, kCounter, "charonia_engine_steps_total", "Forward passes"),
      simple(gemms_rejected, kCounter, "charonia_gemms_rejected_total",
             "GEMMs that built-in kernels computed although cuBLASLt was chosen"),
      simple(jump_forward_tokens, kCounter, "charonia_jump_forward_tokens_total",
             "Tokens of structured output that the grammar determined, without a step for each"),
      simple(spec_decode_num_drafts, kCounter, "charonia_spec_decode_num_drafts_total",
             "Steps of a sequence with proposals (speculation)"),
      counters(spec_decode_num_draft_tokens, "charonia_spec_decode_num_draft_tokens_total",
               "Proposed tokens that were computed, by their source", "source", kSources),
      counters(spec_decode_num_accepted_tokens, "charonia_spec_decode_num_accepted_tokens_total",
               "Proposed tokens that were accepted, by their source", "source", kSources),
      counters(spec_decode_num_accepted_tokens_per_pos, "charonia_spec_decode_num_accepted_tokens_per_pos_total",
               "Accepted tokens by their position among the proposals", "position", kPositions),
      counters(request_success, "charonia_request_success_total", "Finished requests by reason", "finished_reason",
               kFinishedReasons),
      counters(requests_rejected, "charonia_requests_rejected_total",
               "Requests rejected, or ended by a deadline, by reason", "reason", kRejectedReasons),
      histogram(time_to_first_token_seconds, "charonia_time_to_first_token_seconds",
                "From submission to the first token", kLatencyBuckets),
      histogram(inter_token_latency_seconds, "charonia_inter_token_latency_seconds", "Between two tokens of a request",
                kLatencyBuckets),
      histogram(e2e_request_latency_seconds, "charonia_e2e_request_latency_seconds", "From submission to the end",
                kRequestBuckets),
      histogram(request_queue_time_seconds, "charonia_request_queue_time_seconds",
                "From submission to the first scheduled token", kRequestBuckets),
      histogram(request_prompt_tokens, "charonia_request_prompt_tokens", "Prompt tokens per request", kTokenBuckets),
      histogram(request_generation_tokens, "charonia_request_generation_tokens", "Sampled tokens per request",
                kTokenBuckets),
      histogram(cancel_to_free_seconds, "charonia_cancel_to_free_seconds",
                "From a cancel until the request's blocks are free", kCancelBuckets),
      histogram(engine_step_seconds, "charonia_engine_step_seconds",
                "Time from step to step: a forward pass, sampling, and what the host does while the device waits",
                kStepBuckets),
      histogram(engine_step_sequences, "charonia_engine_step_sequences", "Sequences in a forward pass: the batch size",
                kSequenceBuckets),
      histogram(engine_step_tokens, "charonia_engine_step_tokens",
                "Tokens computed in a forward pass, of prompts and of completions", kTokenBuckets),
      histogram(guide_compile_seconds, "charonia_guide_compile_seconds",
                "To compile the grammar of a structured output", kStepBuckets),
      histogram(token_mask_seconds, "charonia_token_mask_seconds", "Time to compute a token mask for one sequence",
                kMaskBuckets),
  };
  return catalogue;
}

}  // namespace charonia
