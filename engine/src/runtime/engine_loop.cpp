// The engine thread. On a device that computes asynchronously the next step is planned and launched while one runs, and
// the results of one are handled while the next runs:
//
//     launch N+1 | wait for N, hand out its tokens | launch N+2 | wait for N+1 ...
//
// A sequence that turns out to have ended with step N is part of step N+1 already: what that samples for it is dropped.
// Its blocks may be used again at once, since steps are computed in the order in which they are launched.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "runtime/engine_impl.h"

namespace charonia {

using schedule::StepPlan;

void Engine::Impl::run() {
  Inbox inbox;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !inbox_.empty() || !idle(); });
      if (stop_ && inbox_.empty() && idle()) return;
      std::swap(inbox, inbox_);
      // Submitted requests count as waiting from here on, until the scheduler's own count is reported.
      stats_.num_waiting += static_cast<int>(inbox.submitted.size());
    }
    try {
      take(inbox);
      if (!idle()) step();
    } catch (const std::exception& error) {
      fail_all(error.what());
    }
    report_gauges();
  }
}

void Engine::Impl::take(Inbox& inbox) {
  for (auto& [handle, sequence] : inbox.submitted) {
    const auto& request = sequence->request;
    count(Metric::prompt_tokens, sequence->num_input());
    observe(Metric::request_prompt_tokens, sequence->num_input());
    scheduler_->add(handle, request.input_ids, sequence->num_input() + sequence->max_tokens, request.priority);
    sequences_.emplace(handle, std::move(sequence));
  }
  for (const auto& cancel : inbox.cancels) {
    if (!sequences_.contains(cancel.handle)) continue;
    finish(cancel.handle, FinishReason::cancelled);
    observe(Metric::cancel_to_free_seconds, std::chrono::duration<double>(Clock::now() - cancel.asked).count());
  }
  for (const auto& task : inbox.tasks) task();
  inbox.submitted.clear();
  inbox.cancels.clear();
  inbox.tasks.clear();
}

void Engine::Impl::step() {
  auto* const next = in_flight_ == nullptr || may_overlap(*in_flight_) ? launch_next() : nullptr;
  const bool launched = next != nullptr && next->error.empty();
  if (auto* const running = std::exchange(in_flight_, nullptr); running != nullptr && !settle(*running)) {
    // What it should have left in the k/v cache is not there, and the step behind it has computed with that.
    if (launched) {
      try {
        collect();
      } catch (const std::exception&) {
      }
    }
    scheduler_->restart();
    if (launched) return;
  }
  if (next == nullptr) return;
  if (!launched) {
    fail(next->plan, next->error);
  } else if (executor_->asynchronous()) {
    scheduler_->advance(next->plan);
    in_flight_ = next;
  } else {
    settle(*next);
  }
}

// Whether the next step can be launched before the host knows what this one samples.
bool Engine::Impl::may_overlap(const Step& running) const {
  return std::ranges::none_of(running.plan.seqs, [this](const auto& part) {
    const auto found = sequences_.find(part.id);
    return part.samples && found != sequences_.end() && found->second->needs_last_token();
  });
}

// The step that was launched, or that failed to be (then it says why); null when there is nothing to compute before the
// step in flight is settled.
Engine::Impl::Step* Engine::Impl::launch_next() {
  if (sequences_.empty()) return nullptr;
  auto plan = scheduler_->plan();
  if (plan.empty()) {
    if (in_flight_ != nullptr) return nullptr;
    throw Error(ErrorCode::internal, "the scheduler planned nothing though sequences wait");
  }
  auto& step = in_flight_ == &steps_[0] ? steps_[1] : steps_[0];
  fill(step, std::move(plan));
  const auto stride = static_cast<std::int64_t>(step.block_tables.size() / step.plan.seqs.size());
  try {
    executor_->launch(
        {step.ids, {step.query_start, step.positions, step.block_tables, stride}, step.logits_rows, step.sample_rows});
    ++num_uncollected_;
  } catch (const std::exception& error) {
    step.error = error.what();
  }
  count(Metric::engine_steps, 1);
  return &step;
}

void Engine::Impl::fill(Step& step, StepPlan plan) {
  const auto now = Clock::now();
  step.plan = std::move(plan);
  step.error.clear();
  step.ids.clear();
  step.positions.clear();
  step.query_start.assign(1, 0);
  step.logits_rows.clear();
  step.sample_rows.clear();
  std::size_t table_stride = 0;
  for (const auto& part : step.plan.seqs) table_stride = std::max(table_stride, scheduler_->blocks(part.id).size());
  step.block_tables.assign(table_stride * step.plan.seqs.size(), 0);

  for (std::size_t s = 0; s < step.plan.seqs.size(); ++s) {
    const auto& part = step.plan.seqs[s];
    auto& sequence = *sequences_.at(part.id);
    if (!sequence.first_scheduled) {
      sequence.scheduled(now);
      sequence.num_cached = scheduler_->num_cached_tokens(part.id);
      observe(Metric::request_queue_time_seconds, std::chrono::duration<double>(now - sequence.submitted).count());
    }
    // The scheduler's placeholders are the numbers by which the device knows the samples of the step before.
    const auto tokens = scheduler_->tokens(part.id);
    const auto planned =
        tokens.subspan(static_cast<std::size_t>(part.first_position), static_cast<std::size_t>(part.num_tokens));
    step.ids.insert(step.ids.end(), planned.begin(), planned.end());
    for (std::int32_t i = 0; i < part.num_tokens; ++i) step.positions.push_back(part.first_position + i);
    step.query_start.push_back(static_cast<std::int32_t>(step.ids.size()));
    const auto blocks = scheduler_->blocks(part.id);
    std::ranges::copy(blocks, step.block_tables.begin() + static_cast<std::ptrdiff_t>(s * table_stride));
    if (!part.samples) continue;
    step.logits_rows.push_back(step.query_start.back() - 1);
    step.sample_rows.push_back(sequence.sample_row(tokens));
    step.sample_rows.back().sequence = part.id;
  }
}

// Waits for a launched step and hands out its tokens. False when it failed; then its sequences did, and those alone.
bool Engine::Impl::settle(Step& step) {
  std::vector<ops::Sampled> sampled;
  try {
    sampled = collect();
  } catch (const std::exception& error) {
    fail(step.plan, error.what());
    return false;
  }
  std::vector<TokenId> tokens;
  for (const auto& one : sampled) tokens.push_back(one.error.empty() ? one.token : 0);
  if (!executor_->asynchronous()) scheduler_->advance(step.plan);
  scheduler_->resolve(step.plan, tokens);
  deliver(step.plan, sampled);
  return true;
}

std::vector<ops::Sampled> Engine::Impl::collect() {
  --num_uncollected_;
  return executor_->collect();
}

void Engine::Impl::deliver(const StepPlan& plan, const std::vector<ops::Sampled>& sampled) {
  const auto now = Clock::now();
  const std::chrono::milliseconds interval(info.config.stream_interval_ms);
  auto next = sampled.begin();
  int accepted = 0;
  for (const auto& part : plan.seqs) {
    if (!part.samples) continue;
    const auto& token = *next++;
    const auto found = sequences_.find(part.id);
    if (found == sequences_.end()) continue;  // it ended while the step ran
    auto& sequence = *found->second;
    if (!token.error.empty()) {
      finish(part.id, FinishReason::error, token.error);
      continue;
    }
    ++accepted;
    if (!sequence.first_token) {
      observe(Metric::time_to_first_token_seconds, std::chrono::duration<double>(now - sequence.submitted).count());
    } else {
      observe(Metric::inter_token_latency_seconds, std::chrono::duration<double>(now - *sequence.last_token).count());
    }
    const auto reason = sequence.accept(token, now);
    if (reason != FinishReason::none) {
      finish(part.id, reason);
    } else if (auto result = sequence.due(now, interval)) {
      delivery_.push(sequence.callback, std::move(*result));
    }
  }
  count(Metric::generation_tokens, accepted);
}

void Engine::Impl::fail(const StepPlan& plan, const std::string& error) {
  for (const auto& part : plan.seqs) finish(part.id, FinishReason::error, error);
}

// After an error that nobody expected: everything ends, and the engine begins anew.
void Engine::Impl::fail_all(const std::string& error) {
  while (num_uncollected_ > 0) {
    try {
      collect();
    } catch (const std::exception&) {
    }
  }
  in_flight_ = nullptr;
  std::vector<Handle> handles;
  for (const auto& [handle, sequence] : sequences_) handles.push_back(handle);
  for (const auto handle : handles) finish(handle, FinishReason::error, error);
  scheduler_->restart();
}

void Engine::Impl::finish(Handle handle, FinishReason reason, std::string error) {
  const auto found = sequences_.find(handle);
  if (found == sequences_.end()) return;
  const auto now = Clock::now();
  auto& sequence = *found->second;
  scheduler_->remove(handle);
  count(Metric::request_success, 1, static_cast<int>(reason) - 1);
  observe(Metric::e2e_request_latency_seconds, std::chrono::duration<double>(now - sequence.submitted).count());
  observe(Metric::request_generation_tokens, sequence.num_output);
  auto callback = sequence.callback;
  auto result = sequence.last(reason, now, std::move(error));
  sequences_.erase(found);

  // A request whose last result is on its way is no longer live: cancel() has nothing to do for it.
  const std::lock_guard lock(mutex_);
  delivery_.push(std::move(callback), std::move(result));
  live_.erase(handle);
  if (last_finish_ != Clock::time_point{}) {
    const double seconds = std::chrono::duration<double>(now - last_finish_).count();
    constexpr double kWeight = 0.1;
    seconds_per_finish_ += kWeight * (seconds - seconds_per_finish_);
  }
  last_finish_ = now;
  if (live_.empty()) drained_.notify_all();
}

void Engine::Impl::report_gauges() {
  EngineStats now;
  now.num_running = scheduler_->num_running();
  now.num_waiting = scheduler_->num_waiting();
  now.blocks_total = blocks_->num_blocks();
  now.blocks_active = blocks_->num_active();
  now.blocks_cached = blocks_->num_cached();
  now.blocks_free = blocks_->num_free();
  now.num_preemptions = scheduler_->num_preemptions();
  now.prefix_queries_tokens = scheduler_->prefix_query_tokens();
  now.prefix_hit_tokens = scheduler_->prefix_hit_tokens();
  {
    const std::lock_guard lock(mutex_);
    now.num_steps = stats_.num_steps;
    now.prompt_tokens = stats_.prompt_tokens;
    now.generation_tokens = stats_.generation_tokens;
    stats_ = now;
  }
  if (!sink_) return;
  const auto changed = [&](auto EngineStats::* member) { return now.*member != reported_.*member; };
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
  if (changed(&EngineStats::blocks_active)) {
    sink_->set(Metric::kv_cache_usage_perc, static_cast<double>(now.blocks_active) / now.blocks_total);
  }
  counter(&EngineStats::num_preemptions, Metric::num_preemptions);
  counter(&EngineStats::prefix_queries_tokens, Metric::prefix_cache_queries);
  counter(&EngineStats::prefix_hit_tokens, Metric::prefix_cache_hits);
  reported_ = now;
}

void Engine::Impl::count(Metric metric, double value, int label) {
  {
    const std::lock_guard lock(mutex_);
    const auto amount = static_cast<std::int64_t>(value);
    if (metric == Metric::engine_steps) stats_.num_steps += amount;
    if (metric == Metric::prompt_tokens) stats_.prompt_tokens += amount;
    if (metric == Metric::generation_tokens) stats_.generation_tokens += amount;
  }
  if (sink_) sink_->add(metric, value, label);
}

void Engine::Impl::observe(Metric metric, double seconds_or_count) {
  if (sink_) sink_->observe(metric, seconds_or_count);
}

}  // namespace charonia
