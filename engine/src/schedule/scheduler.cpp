#include "schedule/scheduler.h"

#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

namespace {

constexpr std::int32_t kReservedTokens = 512;

}  // namespace

Scheduler::Scheduler(Limits limits, cache::BlockManager& blocks) : impl_(std::make_unique<Impl>(limits, blocks)) {
  if (limits.max_batch_size < 1 || limits.token_budget < 1) {
    broken(cat("max_batch_size = ", limits.max_batch_size, " and token_budget = ", limits.token_budget,
               ": both must be at least 1"));
  }
  if (limits.max_logits_rows != 0 && limits.max_logits_rows < limits.max_batch_size) {
    broken(cat("max_logits_rows = ", limits.max_logits_rows, ": it must be 0 or at least max_batch_size, ",
               limits.max_batch_size));
  }
}

Scheduler::~Scheduler() = default;

void Scheduler::add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, const SeqOptions& options) {
  if (prompt.empty()) broken(cat("sequence ", id, " has no token"));
  // Of the pool as it was at first: that it has become smaller meanwhile is nothing that the caller can know.
  const auto capacity = std::int64_t{impl_->max_blocks} * impl_->pool.block_len();
  if (max_total_tokens <= std::ssize(prompt) || max_total_tokens > capacity) {
    broken(cat("sequence ", id, " with ", prompt.size(), " tokens may have ", max_total_tokens,
               ", it must be more than that and at most ", capacity));
  }
  Seq* parent = nullptr;
  if (options.parent != 0 && !options.all_rows) {
    parent = &impl_->at(options.parent);
    if (parent->salt != options.salt || parent->prompt_tokens != std::ssize(prompt) ||
        !std::equal(prompt.begin(), prompt.end(), parent->tokens.begin())) {
      broken(cat("sequence ", id, " has another prompt or salt than its parent ", options.parent));
    }
    if (parent->state == State::impossible) parent = nullptr;
  }
  const auto [place, is_new] = impl_->seqs.try_emplace(id);
  if (!is_new) broken(cat("sequence ", id, " is already there"));
  place->second = std::make_unique<Seq>();
  auto& seq = *place->second;
  seq.id = id;
  seq.priority = options.priority;
  seq.arrival = impl_->arrivals++;
  seq.salt = options.salt;
  seq.all_rows = options.all_rows;
  seq.prompt_tokens = static_cast<std::int32_t>(prompt.size());
  seq.max_total_tokens = max_total_tokens;
  seq.tokens = std::move(prompt);
  // So that no step has to move the prompt to make room for what it samples, at least for a while.
  seq.tokens.reserve(static_cast<std::size_t>(std::min(max_total_tokens, seq.prompt_tokens + kReservedTokens)));
  impl_->waiting_tokens += seq.prompt_tokens;
  if (parent != nullptr) {
    seq.parent = parent;
    parent->children.push_back(&seq);
  }
  if (parent == nullptr || parent->has_computed_prompt()) {
    impl_->enqueue(seq);
  } else {
    seq.state = State::held;
  }
}

StepPlan Scheduler::plan() {
  auto& impl = *impl_;
  impl.begin_plan();
  StepPlan plan;
  plan.seqs.reserve(std::min(impl.seqs.size(), static_cast<std::size_t>(impl.limits.max_batch_size)));
  impl.plan_decodes(plan);
  impl.plan_prefill(plan);
  for (const auto* seq : impl.impossible) plan.impossible.push_back(seq->id);
  return plan;
}

void Scheduler::advance(const StepPlan& plan) {
  // A sequence may have been removed since, and perhaps added anew under its old id: then nothing of it is planned.
  auto& planned = impl_->collected;
  planned.clear();
  for (const auto& part : plan.seqs) {
    const auto found = impl_->seqs.find(part.id);
    auto* seq = found == impl_->seqs.end() || found->second->planned == 0 ? nullptr : found->second.get();
    planned.push_back(seq);
    if (seq == nullptr) continue;
    if (seq->planned != part.num_tokens || seq->computed != part.first_position) {
      broken(cat("tokens ", part.first_position, " + ", part.num_tokens, " of sequence ", part.id,
                 " advance, planned were ", seq->computed, " + ", seq->planned));
    }
    if (seq->has_placeholder()) broken(cat("sequence ", part.id, " advances over a token that is not known"));
  }
  std::int32_t rows = 0;
  for (std::size_t i = 0; i < plan.seqs.size(); ++i) {
    const auto& part = plan.seqs[i];
    rows += part.num_logits_rows();
    if (planned[i] == nullptr) continue;
    auto& seq = *planned[i];
    seq.computed += std::exchange(seq.planned, 0);
    if (part.all_rows) seq.rows_given = seq.computed;
    if (std::exchange(seq.forked, false)) impl_->leave_parent(seq);
    impl_->insert(seq);
    if (part.samples) seq.tokens.push_back(-rows);
    if (seq.has_computed_prompt()) impl_->let_children_in(seq);
  }
}

void Scheduler::resolve(const StepPlan& plan, std::span<const TokenId> sampled) {
  const auto samples = std::ranges::count_if(plan.seqs, [](const auto& part) { return part.samples; });
  if (samples != std::ssize(sampled)) {
    broken(cat(sampled.size(), " sampled tokens, planned were ", samples));
  }
  for (const auto token : sampled) {
    if (token < 0) broken(cat("the sampled token ", token, " is none"));
  }
  std::int32_t rows = 0;
  auto token = sampled.begin();
  for (const auto& part : plan.seqs) {
    rows += part.num_logits_rows();
    if (!part.samples) continue;
    const auto result = *token++;
    const auto found = impl_->seqs.find(part.id);
    if (found == impl_->seqs.end()) continue;
    auto& seq = *found->second;
    if (seq.tokens.back() == -rows && seq.num_tokens() - 1 == part.first_position + part.num_tokens) {
      seq.tokens.back() = result;
    }
  }
}

void Scheduler::restart() {
  for (const auto& [id, seq] : impl_->seqs) {
    if (seq->has_placeholder()) broken(cat("restart, and the last token of sequence ", id, " is not known"));
  }
  while (!impl_->running.empty()) {
    auto& seq = *impl_->running.back();
    impl_->stop_running(seq);
    impl_->enqueue(seq);
  }
  impl_->pool.forget_prefixes();
}

bool Scheduler::remove(SeqId id) {
  const auto found = impl_->seqs.find(id);
  if (found == impl_->seqs.end()) return false;
  auto& seq = *found->second;
  if (seq.state == State::running) impl_->stop_running(seq);
  if (seq.state == State::waiting) impl_->waiting.erase(&seq);
  if (seq.state == State::impossible) std::erase(impl_->impossible, &seq);
  impl_->leave_parent(seq);
  impl_->leave_children(seq);
  impl_->waiting_tokens -= seq.prompt_tokens;
  impl_->seqs.erase(found);
  return true;
}

std::span<const TokenId> Scheduler::tokens(SeqId id) const { return impl_->at(id).tokens; }
std::span<const cache::BlockId> Scheduler::blocks(SeqId id) const { return impl_->at(id).blocks; }
std::int32_t Scheduler::num_computed(SeqId id) const { return impl_->at(id).computed; }
std::vector<cache::PrefixNode> Scheduler::inserted(SeqId id) const { return impl_->at(id).nodes; }
std::int32_t Scheduler::num_cached_tokens(SeqId id) const { return impl_->at(id).num_cached_tokens; }
int Scheduler::num_running() const { return static_cast<int>(impl_->running.size()); }
int Scheduler::num_waiting() const { return static_cast<int>(impl_->seqs.size() - impl_->running.size()); }
std::int64_t Scheduler::waiting_tokens() const { return impl_->waiting_tokens; }
std::int64_t Scheduler::num_preemptions() const { return impl_->num_preemptions; }
std::int64_t Scheduler::prefix_query_tokens() const { return impl_->prefix_query_tokens; }
std::int64_t Scheduler::prefix_hit_tokens() const { return impl_->prefix_hit_tokens; }

std::int64_t Scheduler::capacity_tokens() const {
  return std::int64_t{impl_->pool.num_blocks()} * impl_->pool.block_len();
}

}  // namespace charonia::schedule
