// The engine's counts for stats(), and its metrics for the sink.
#include <algorithm>
#include <utility>

#include "cache/units.h"
#include "runtime/engine_impl.h"

namespace charonia {

// Counts requests. The scheduler counts sequences. A request runs if at least one sequence of it runs.
void Engine::Impl::count_requests(EngineStats& stats) const {
  stats.num_running = scheduler_->num_running();
  stats.num_waiting = scheduler_->num_waiting() + num_parked_ + static_cast<int>(compiling_.size());
  for (const auto* state : several_) {
    // A request that has not begun to compute waits with all its sequences, so they are not checked one by one.
    if (!state->first_scheduled && state->num_live == state->num_completions() &&
        scheduler_->blocks(state->completions.front()->id).empty()) {
      stats.num_waiting -= state->num_live - 1;
      continue;
    }
    int running = 0, waiting = 0;
    for (const auto& completion : state->completions) {
      if (!completions_.contains(completion->id)) continue;
      ++(scheduler_->blocks(completion->id).empty() ? waiting : running);
    }
    stats.num_running -= std::max(running - 1, 0);
    stats.num_waiting -= running > 0 ? waiting : std::max(waiting - 1, 0);
  }
}

void Engine::Impl::report_gauges() {
  EngineStats now;
  count_requests(now);
  now.blocks_total = blocks_->num_blocks();
  now.blocks_active = blocks_->num_active();
  now.blocks_cached = blocks_->num_cached();
  now.blocks_free = blocks_->num_free();
  now.blocks_pinned = blocks_->num_pinned();
  now.num_preemptions = scheduler_->num_preemptions();
  now.prefix_queries_tokens = scheduler_->prefix_query_tokens();
  now.prefix_hit_tokens = scheduler_->prefix_hit_tokens();
  if (offload_) {
    now.offload_queries_tokens = offload_->query_tokens();
    now.offload_hit_tokens = scheduler_->loaded_tokens();
    now.offload_bytes = offload_->bytes();
  }
  now.num_sessions = num_sessions_;
  now.gemms_rejected = executor_->gemms_rejected() + (draft_ ? draft_->gemms_rejected() : 0);
  {
    const std::lock_guard lock(mutex_);
    now.num_steps = stats_.num_steps;
    now.lora_slot_waits = stats_.lora_slot_waits;
    now.prompt_tokens = stats_.prompt_tokens;
    now.generation_tokens = stats_.generation_tokens;
    now.jump_forward_tokens = stats_.jump_forward_tokens;
    now.proposed_tokens = stats_.proposed_tokens;
    now.accepted_tokens = stats_.accepted_tokens;
    stats_ = now;
  }
  if (!sink_) return;
  // The first call sets all values, because the sink may have the values of a previous engine, for example after a
  // reload.
  const bool first = !std::exchange(reported_any_, true);
  const auto changed = [&](auto EngineStats::* member) { return first || now.*member != reported_.*member; };
  const auto gauge = [&](int EngineStats::* member, Metric metric) {
    if (changed(member)) sink_->set(metric, now.*member);
  };
  const auto counter = [&](std::int64_t EngineStats::* member, Metric metric) {
    if (changed(member)) sink_->add(metric, static_cast<double>(now.*member - reported_.*member), 0);
  };
  gauge(&EngineStats::num_running, Metric::num_requests_running);
  gauge(&EngineStats::num_waiting, Metric::num_requests_waiting);
  gauge(&EngineStats::blocks_active, Metric::kv_blocks_active);
  gauge(&EngineStats::blocks_cached, Metric::kv_blocks_cached);
  gauge(&EngineStats::blocks_total, Metric::kv_blocks_total);
  gauge(&EngineStats::num_sessions, Metric::num_sessions);
  gauge(&EngineStats::blocks_pinned, Metric::session_blocks_pinned);
  auto usage = static_cast<double>(now.blocks_active) / now.blocks_total;
  for (const auto& kind : blocks_->kinds()) {
    usage = std::max(usage, static_cast<double>(kind.num_active()) / kind.num_units());
  }
  if (first || usage != reported_usage_) sink_->set(Metric::kv_cache_usage_perc, reported_usage_ = usage);
  if (const int committed = blocks_->num_committed(); first || committed != reported_committed_) {
    sink_->set(Metric::kv_blocks_committed, reported_committed_ = committed);
  }
  counter(&EngineStats::num_preemptions, Metric::num_preemptions);
  counter(&EngineStats::prefix_queries_tokens, Metric::prefix_cache_queries);
  counter(&EngineStats::prefix_hit_tokens, Metric::prefix_cache_hits);
  counter(&EngineStats::offload_queries_tokens, Metric::external_prefix_cache_queries);
  counter(&EngineStats::offload_hit_tokens, Metric::external_prefix_cache_hits);
  if (changed(&EngineStats::offload_bytes)) {
    sink_->set(Metric::kv_offload_bytes, static_cast<double>(now.offload_bytes));
  }
  counter(&EngineStats::gemms_rejected, Metric::gemms_rejected);
  reported_ = now;
}

void Engine::Impl::count(Metric metric, double value, int label) {
  {
    const std::lock_guard lock(mutex_);
    const auto amount = static_cast<std::int64_t>(value);
    if (metric == Metric::engine_steps) stats_.num_steps += amount;
    if (metric == Metric::lora_slot_waits) stats_.lora_slot_waits += amount;
    if (metric == Metric::prompt_tokens) stats_.prompt_tokens += amount;
    if (metric == Metric::generation_tokens) stats_.generation_tokens += amount;
    if (metric == Metric::jump_forward_tokens) stats_.jump_forward_tokens += amount;
    if (metric == Metric::spec_decode_num_draft_tokens) stats_.proposed_tokens += amount;
    if (metric == Metric::spec_decode_num_accepted_tokens) stats_.accepted_tokens += amount;
  }
  if (sink_) sink_->add(metric, value, label);
}

void Engine::Impl::observe(Metric metric, double seconds_or_count) {
  if (sink_) sink_->observe(metric, seconds_or_count);
}

}  // namespace charonia
