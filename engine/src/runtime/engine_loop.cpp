// The engine thread. On an asynchronous device, it plans and launches the next step while a step runs. It handles the
// results of a step while the next step runs:
//
//     launch N+1 | wait for N, deliver its tokens | launch N+2 | wait for N+1 ...
//
// If step N ends a sequence, the sequence is already part of step N+1. The token that step N+1 samples for it is
// dropped. Its blocks can be reused immediately, because the device computes steps in the order of their launches.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "cache/units.h"
#include "ops/broken_logits.h"
#include "runtime/engine_impl.h"
#include "runtime/pooling.h"
#include "runtime/stream_interval.h"

namespace charonia {

using schedule::ScheduledSeq;
using schedule::StepPlan;

void Engine::Impl::run() {
  Inbox inbox;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto ready = [&] { return stop_ || !inbox_.empty() || !inbox.empty() || has_work(); };
      // An idle engine wakes for deadlines and for sessions that expire.
      if (const auto timer = next_timer(); timer) {
        wake_.wait_until(lock, *timer, ready);
      } else {
        wake_.wait(lock, ready);
      }
      if (stop_ && inbox_.empty() && inbox.empty() && completions_.empty() && idle()) return;
      if (inbox.empty()) {  // otherwise an exception interrupted take(), and the rest comes first
        std::swap(inbox, inbox_);
        // From here on, submitted requests count as waiting, until report_gauges() sets the count.
        stats_.num_waiting += static_cast<int>(inbox.submitted.size());
      }
    }
    try {
      const bool began_idle = idle();
      if (began_idle || waits_for_load_) {
        period_begun_ = Clock::now();
        draft_s_ = 0;
        waited_ = false;
      }
      take(inbox);
      if (began_idle && !idle()) report_gauges();  // the first step may take seconds; the engine must not look idle
      if (!failure_.empty()) end_all(failure_);  // ends requests that were submitted before the failure
      end_overdue(Clock::now());
      delivery_.wake();
      waits_for_load_ = false;
      if (!idle()) step();
      if (offload_) {
        offload_->settled(in_flight_ != nullptr);
        offload_->work(idle());
      }
    } catch (const std::exception& error) {
      fail(error);
    }
    delivery_.wake();
    report_gauges();
  }
}

void Engine::Impl::step() {
  bool may_launch = in_flight_ == nullptr || may_overlap(*in_flight_);
  if (may_launch && in_flight_ != nullptr) {
    waited_ = may_propose(*in_flight_);
    may_launch = !waited_;
  }
  auto* const next = may_launch ? launch_next() : nullptr;
  auto* const running = std::exchange(in_flight_, executor_->asynchronous() ? next : nullptr);
  if (running != nullptr) settle(*running);
  if (next == nullptr) return;
  if (!executor_->asynchronous()) return settle(*next);
  if (std::vector<runtime::DraftModel::Wanted> behind; draft_) {  // otherwise propose() does this
    catch_up(behind);
    next->beside = !behind.empty();
    if (next->beside) compute_drafts(behind);
  }
  scheduler_->advance(next->plan);
}

// Whether the next step can be launched before the host knows the samples of the running step.
bool Engine::Impl::may_overlap(const Step& running) const {
  return std::ranges::none_of(running.plan.seqs, [this](const auto& part) {
    const auto found = completions_.find(part.id);
    if (found == completions_.end()) return false;
    // A mask is requested when the previous token is known. A part that does not sample counts too, because the next
    // part of its sequence may sample.
    return found->second->mask != nullptr || (part.samples && found->second->needs_last_token());
  });
}

bool Engine::Impl::wants_mask(const StepPlan& plan) const {
  return std::ranges::any_of(plan.seqs,
                             [this](const auto& part) { return part.samples && completions_.at(part.id)->mask; });
}

// Returns the step that was launched; null if there is nothing to compute before the step in flight is settled.
Engine::Impl::Step* Engine::Impl::launch_next() {
  if (completions_.empty()) return nullptr;
  if (speculation_ && in_flight_ == nullptr) propose();
  auto plan = scheduler_->plan();
  // A sequence with a mask begins. This step is planned again after the step in flight is settled.
  if (in_flight_ != nullptr && wants_mask(plan)) return nullptr;
  for (const auto id : plan.impossible) {
    finish(
        id, FinishReason::error,
        cat("the KV cache cannot grow, and its ", blocks_->num_blocks(), " blocks do not hold this request: the ",
            "machine has no more memory. Lower cache_max_entry_count or cache_size, or send a shorter request; retry ",
            "after ", load_->retry_after_s(), " s"),
        ErrorCode::resource_exhausted);
  }
  if (plan.empty()) {
    waits_for_load_ = plan.waits_for_load && in_flight_ == nullptr;
    if (waits_for_load_) return nullptr;
    if (in_flight_ != nullptr || !plan.impossible.empty() || idle()) return nullptr;
    throw Error(ErrorCode::internal, "the scheduler planned nothing though sequences wait");
  }
  auto& step = in_flight_ == &steps_[0] ? steps_[1] : steps_[0];
  fill(step, std::move(plan));
  masks_.hand_over();
  const auto stride = static_cast<std::int64_t>(step.block_tables.full.size() / step.plan.seqs.size());
  executor_->launch({.ids = step.ids,
                     .attention = {.query_start = step.query_start,
                                   .positions = step.positions,
                                   .block_tables = {step.block_tables.full, step.block_tables.window, {}},
                                   .table_stride = stride,
                                   .state_in = step.state_in,
                                   .state_out = step.state_out,
                                   .row_states = step.row_states},
                     .logits_rows = step.logits_rows,
                     .sample = step.sample_rows,
                     .prompt_tokens = step.prompt_tokens,
                     .adapters = step.adapter_slots,
                     .hidden_rows = step.hidden_rows,
                     .block_copies = step.plan.block_copies},
                    step.adapters);
  count(Metric::engine_steps, 1);
  if (step.plan.waits_for_slot) count(Metric::lora_slot_waits, 1);
  return &step;
}

void Engine::Impl::fill(Step& step, StepPlan plan) {
  step.begun = Clock::now();
  step.waited = std::exchange(waited_, false);
  step.plan = std::move(plan);
  step.ids.clear();
  step.positions.clear();
  step.query_start.assign(1, 0);
  step.logits_rows.clear();
  step.prompt_tokens.clear();
  step.sample_rows.clear();
  step.masks.clear();
  step.adapters.clear();
  step.adapter_slots.clear();
  step.num_accepted = 0;
  step.beside = false;
  step.streams = 0;
  std::size_t table_stride = 0;
  for (const auto& part : step.plan.seqs) table_stride = std::max(table_stride, scheduler_->blocks(part.id).size());
  step.block_tables.full.assign(table_stride * step.plan.seqs.size(), 0);
  step.state_in.clear();
  step.state_out.clear();
  step.row_states.clear();
  step.hidden_rows.clear();
  const auto kinds = blocks_->kinds();
  for (const auto& kind : kinds) {
    // Units before the window stay 0: no row attends to them, and no kernel uses the values of block 0 for them.
    if (kind.kind() == CacheKind::window) step.block_tables.window.assign(step.block_tables.full.size(), 0);
  }

  for (std::size_t s = 0; s < step.plan.seqs.size(); ++s) {
    const auto& part = step.plan.seqs[s];
    auto& completion = *completions_.at(part.id);
    if (!completion.first_scheduled) schedule_first(completion, step.begun);
    // A placeholder of the scheduler is also the device's number for a sample of the previous step.
    const auto num_known = static_cast<std::size_t>(part.num_tokens - part.num_proposed);
    const auto known = scheduler_->tokens(part.id).subspan(static_cast<std::size_t>(part.first_position), num_known);
    step.ids.insert(step.ids.end(), known.begin(), known.end());
    const auto proposed = scheduler_->proposed(part.id);
    step.ids.insert(step.ids.end(), proposed.begin(), proposed.begin() + part.num_proposed);
    for (std::int32_t i = 0; i < part.num_tokens; ++i) step.positions.push_back(part.first_position + i);
    step.query_start.push_back(static_cast<std::int32_t>(step.ids.size()));
    step.prompt_tokens.push_back(completion.num_input());
    step.adapters.push_back(completion.state.adapter);
    if (executor_->adapter_slots() > 0) step.adapter_slots.push_back(scheduler_->adapter_slot(part.id));
    const auto blocks = scheduler_->blocks(part.id);
    const auto row = static_cast<std::ptrdiff_t>(s * table_stride);
    std::ranges::copy(blocks, step.block_tables.full.begin() + row);
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      const auto& units = scheduler_->units(part.id)[k];
      if (kinds[k].kind() == CacheKind::window) {
        std::ranges::copy(units.units, step.block_tables.window.begin() + row + units.first);
      } else {
        step.state_in.push_back(part.first_position == 0 ? -1 : units.units.front());
        step.state_out.push_back(units.units.back());
        fill_row_states(step, part, k);
      }
    }
    fill_rows(step, part, completion);
    if (draft_ && draft_->reads_hidden()) {
      draft_->place(part.id, part.first_position, part.num_tokens, step.hidden_rows);
    }
    if (!step.row_states.empty()) step.row_states.resize(step.ids.size(), -1);
    if (part.samples) step.streams += runtime::stream_weight(completion.state.request);
  }
}

// The states after the known token and after each proposal of a part, whose rows were added to the step last.
void Engine::Impl::fill_row_states(Step& step, const ScheduledSeq& part, std::size_t kind) {
  if (part.num_proposed == 0) return;
  const auto after = std::span(scheduler_->proposal_units(part.id)[kind].units)
                         .first(static_cast<std::size_t>(part.num_proposed));
  step.row_states.resize(step.ids.size() - after.size() - 1, -1);
  step.row_states.push_back(std::exchange(step.state_out.back(), after.back()));
  step.row_states.insert(step.row_states.end(), after.begin(), after.end());
}

// Adds the rows of logits of a part, whose tokens were added to the step last. A row of the prompt reports the next
// token of the prompt. The row of the last known token, and the rows of proposals, are sampled from.
void Engine::Impl::fill_rows(Step& step, const ScheduledSeq& part, Completion& completion) {
  auto tokens = scheduler_->tokens(part.id);
  if (part.num_proposed > 0) {
    const auto proposed = scheduler_->proposed(part.id).first(static_cast<std::size_t>(part.num_proposed));
    tokens = completion.with_proposals(tokens, proposed);
  }
  if (part.samples && completion.mask && !completion.forces_next()) {
    masks_.begin(completion.mask, tokens.last(static_cast<std::size_t>(part.num_proposed)));
    step.masks.push_back(completion.mask);
  }
  const auto end = static_cast<std::int32_t>(step.ids.size());
  const auto rows = part.num_logits_rows();
  const auto first_sampled = part.num_tokens - 1 - part.num_proposed;
  for (std::int32_t i = part.num_tokens - rows; i < part.num_tokens; ++i) {
    step.logits_rows.push_back(end - part.num_tokens + i);
    const bool samples = part.samples && i >= first_sampled;
    const auto so_far = tokens.first(static_cast<std::size_t>(part.first_position + i + 1));
    const auto proposal = static_cast<std::size_t>(std::max(i - first_sampled, 0));
    step.sample_rows.push_back(
        samples || completion.mean
            ? completion.sample_row(so_far, proposal)
            : runtime::PromptLogprobs::row(part.first_position + i, tokens, completion.state.request));
    step.sample_rows.back().sequence = part.id;
  }
}

void Engine::Impl::schedule_first(Completion& completion, Clock::time_point now) {
  auto& state = completion.state;
  completion.first_scheduled = now;
  completion.num_cached = scheduler_->num_cached_tokens(completion.id);
  if (completion.is_first()) load_->computed(state.work, completion.num_cached);
  if (std::exchange(state.first_scheduled, true)) return;
  load_->begun(state.work);
  if (state.queue_deadline) {
    timers_.erase({*std::exchange(state.queue_deadline, std::nullopt), state.handle, Timer::Kind::queue_deadline});
  }
  observe(Metric::request_queue_time_seconds, std::chrono::duration<double>(now - state.submitted).count());
}

// Waits for a launched step and delivers its tokens.
void Engine::Impl::settle(Step& step) {
  auto sampled = executor_->collect();
  step.adapters.clear();  // an adapter may have been unloaded meanwhile
  std::vector<TokenId> tokens;  // after the known tokens of each part
  std::size_t rows = 0;
  for (const auto& part : step.plan.seqs) {
    rows += static_cast<std::size_t>(part.num_logits_rows());
    if (!part.samples) continue;
    const auto& first = sampled[rows - 1 - static_cast<std::size_t>(part.num_proposed)];
    tokens.push_back(first.error.empty() ? first.token : 0);
  }
  if (!executor_->asynchronous()) scheduler_->advance(step.plan);
  scheduler_->resolve(step.plan, tokens);
  const auto now = Clock::now();
  const auto draft_s = std::exchange(draft_s_, 0);  // since then; what deliver() adds is part of the next period
  interval_ = runtime::stream_interval(info.config, step.streams);
  deliver(step, std::move(sampled));
  measure(step, now, draft_s);
}

// Measures the time until `now`, when the step was settled. The time starts when the previous step was settled, or when
// there was work again. So it includes what the host does while the device waits.
void Engine::Impl::measure(const Step& step, Clock::time_point now, double draft_s) {
  schedule::StepWork work;
  std::int64_t positions = 0;
  std::int32_t output_tokens = step.num_accepted;  // including forced tokens
  for (const auto& part : step.plan.seqs) {
    if (part.forced || (part.samples && part.num_tokens - part.num_proposed == 1)) {
      work.decodes += 1 + part.num_proposed;
      output_tokens += part.num_tokens - part.num_proposed;
    } else {  // tokens of prompts, and tokens that are computed again
      work.prefill_tokens += part.num_tokens;
      positions += std::int64_t{part.num_tokens} * part.first_position;
    }
  }
  if (work.prefill_tokens > 0) work.prefill_position = positions / work.prefill_tokens;
  const auto period_s = std::chrono::duration<double>(now - std::exchange(period_begun_, now)).count();
  const auto step_s = period_s - draft_s;
  if (!step.beside) step_time_->measured(work, step_s);
  if (speculation_ && work.prefill_tokens == 0 && !step.beside) {
    const bool proposed = std::ranges::any_of(step.plan.seqs, [](const auto& part) { return part.num_proposed > 0; });
    if (proposed || step.waited) {
      speculation_->speculated(work.decodes, step_s);
    } else {
      speculation_->measured(work.decodes, step_s);
    }
  }
  load_->step(work.prefill_tokens, output_tokens, period_s);
  observe(Metric::engine_step_seconds, period_s);
  observe(Metric::engine_step_sequences, static_cast<double>(step.plan.seqs.size()));
  observe(Metric::engine_step_tokens, static_cast<double>(work.prefill_tokens + output_tokens));
}

void Engine::Impl::deliver(Step& step, std::vector<ops::Sampled> sampled) {
  const auto now = Clock::now();
  std::span<ops::Sampled> rest(sampled);
  int accepted = 0;
  decodes_.clear();
  keep_hidden(step);
  for (const auto& part : step.plan.seqs) {
    const auto rows = rest.first(static_cast<std::size_t>(part.num_logits_rows()));
    rest = rest.subspan(rows.size());
    const auto found = completions_.find(part.id);
    if (found == completions_.end()) continue;  // it ended while the step ran
    auto& completion = *found->second;
    if (completion.is_first()) load_->computed(completion.state.work, part.num_tokens);
    if (!take_prompt_rows(part, rows, completion)) continue;
    if (!part.samples) {
      report_progress(part, completion, now);
      continue;
    }
    accepted += accept_all(step, part, rows.last(static_cast<std::size_t>(1 + part.num_proposed)), completion, now);
  }
  masks_.hand_over();  // now, so that they are computed while the next forward pass runs
  count(Metric::generation_tokens, accepted);
}

void Engine::Impl::report_progress(const ScheduledSeq& part, const Completion& completion, Clock::time_point now) {
  const auto& request = completion.state.request;
  if (!request.prompt_progress || !request.stream || completion.index > 0 || completion.num_output > 0) return;
  delivery_.push(completion.state.callback, completion.progress(part.first_position + part.num_tokens, now));
}

// Ends a sequence whose row failed.
void Engine::Impl::fail_row(SeqId id, const std::string& error) {
  if (!ops::has_broken_logit(error)) {
    // With a grammar, the request has caused the error: the grammar allows no token here, or takes too long.
    const bool guided = completions_.at(id)->state.grammar != nullptr;
    return finish(id, FinishReason::error, error, guided ? ErrorCode::invalid_argument : ErrorCode::internal);
  }
  forget_tokens(id);
  finish(id, FinishReason::error, error);
}

// The logits of a sequence are not finite. Its KV after the first `known_good` tokens may not be finite either, so no
// later request may reuse it.
void Engine::Impl::forget_tokens(SeqId id, std::size_t known_good) {
  scheduler_->forget_prefix(id, known_good);
  if (offload_) offload_->forget(completions_.at(id)->state.kv_scope, scheduler_->tokens(id), known_good);
}

// Returns false if a row has an error. Then the sequence has ended.
bool Engine::Impl::take_prompt_rows(const ScheduledSeq& part, std::span<ops::Sampled> rows, Completion& completion) {
  if (!part.all_rows) return true;
  const auto reports = rows.first(rows.size() - (part.samples ? 1 : 0));
  Result logits;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (!reports[i].error.empty()) {
      fail_row(part.id, reports[i].error);
      return false;
    }
    const auto position = part.first_position + static_cast<std::int32_t>(i);
    if (completion.mean) completion.mean->add(position, reports[i].logits);
    if (!completion.prompt_logprobs) continue;  // already sent; this row was computed again
    if (!completion.prompt_logprobs->take(position, reports[i]) || reports[i].logits.empty()) continue;
    if (logits.prompt_logits.empty()) logits.first_logits = position;
    logits.prompt_logits.push_back(std::move(reports[i].logits));
  }
  return logits.prompt_logits.empty() || deliver_rows(std::move(logits), completion);
}

// Returns false if too many bytes of rows are unread. Then the sequence has ended.
bool Engine::Impl::deliver_rows(Result result, const Completion& completion) {
  auto& state = completion.state;
  std::size_t bytes = 0;
  for (const auto& row : result.prompt_logits) bytes += row.size() * sizeof(float);
  result.unread_logits = state.unread_logits.add(static_cast<std::int64_t>(bytes));
  const auto unread = state.unread_logits.bytes();
  if (unread <= state.request.max_unread_logits_bytes) {
    delivery_.push(state.callback, std::move(result));
    return true;
  }
  finish(completion.id, FinishReason::error,
         cat("unread rows of prompt_logits take ", unread, " bytes, more than ",
             state.request.max_unread_logits_bytes,
             " (max_unread_logits_bytes): read them as they come, or send a shorter prompt"),
         ErrorCode::resource_exhausted);
  return false;
}

// Adds a sampled token and the forced tokens after it. Returns the number of tokens. The last one may end the sequence.
int Engine::Impl::accept(Completion& completion, const ops::Sampled& sampled, Clock::time_point now) {
  const auto seconds_since = [&](Clock::time_point then) { return std::chrono::duration<double>(now - then).count(); };
  auto& state = completion.state;
  if (!state.request.pooling.empty()) {
    completion.first_token = now;
    if (completion.mean) completion.mean->add(completion.num_input() - 1, sampled.logits);
    const auto row = completion.mean ? completion.mean->mean() : sampled.logits;
    completion.pooled = runtime::pool(row, info.model, state.request.dimensions);
    finish(completion.id, FinishReason::stop);
    return 0;
  }
  const auto take = [&](const ops::Sampled& token) {
    if (completion.first_token) {
      observe(Metric::inter_token_latency_seconds, seconds_since(*completion.last_token));
    } else if (completion.index == 0) {
      observe(Metric::time_to_first_token_seconds, seconds_since(state.submitted));
    }
    load_->sampled(state.work);
    return completion.accept(token, now);
  };
  auto reason = take(sampled);
  int taken = 1;
  std::vector<TokenId> tokens;  // filled only if there is a mask
  if (completion.mask && reason == FinishReason::none) {
    tokens.push_back(sampled.token);
    if (!state.steered() && !completion.scores()) completion.mask->add_forced(tokens);
    for (; taken < std::ssize(tokens) && reason == FinishReason::none && !completion.forces_next(); ++taken) {
      ops::Sampled forced;
      forced.token = tokens[static_cast<std::size_t>(taken)];
      scheduler_->append(completion.id, forced.token);
      reason = take(forced);
    }
    if (taken > 1) count(Metric::jump_forward_tokens, taken - 1);
  }
  if (reason != FinishReason::none) {
    finish(completion.id, reason);
    return taken;
  }
  if (completion.mask) {  // with speculation, fill_rows() requests it, after the proposals
    const bool wanted = !speculation_ && !completion.forces_next();
    masks_.next(completion.mask, std::span(tokens).first(static_cast<std::size_t>(taken)), wanted);
  }
  return taken;
}

// An error in a step comes from a device that has stopped working, or from a bug. Both leave the KV cache in an unknown
// state, so the engine ends all requests and rejects new ones.
void Engine::Impl::fail(const std::exception& error) {
  const auto text = cat("the engine has failed, and its process must be started again: ", error.what());
  log({LogLevel::error, text, "", {}});
  if (on_failure_) on_failure_();
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
  }
  in_flight_ = nullptr;
  if (offload_) offload_->drop();
  end_all(failure_);
}

void Engine::Impl::end_all(const std::string& error) {
  std::vector<Handle> handles;
  for (const auto& [handle, state] : requests_) handles.push_back(handle);
  for (const auto handle : handles) {
    if (const auto found = requests_.find(handle); found != requests_.end()) {
      end_request(*found->second, FinishReason::error, error, ErrorCode::unavailable);
    }
  }
}

}  // namespace charonia
