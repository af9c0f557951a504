#include "schedule/scheduler.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

namespace {

constexpr std::int32_t kReservedTokens = 512;

}  // namespace

Seq* Scheduler::Impl::find(SeqId id) const {
  const auto found = seqs.find(id);
  return found == seqs.end() ? nullptr : found->second.get();
}

Seq& Scheduler::Impl::at(SeqId id) const {
  auto* seq = find(id);
  if (seq == nullptr) broken(cat("sequence ", id, " is unknown"));
  return *seq;
}

void Scheduler::Impl::enqueue(Seq& seq) {
  seq.state = State::waiting;
  waiting.insert(&seq);
}

void Scheduler::Impl::stop_running(Seq& seq) {
  running.erase(std::ranges::lower_bound(running, &seq, Before{}));
  adapters.release(seq.adapter);
  pool.release(seq.blocks);
  seq.blocks.clear();
  for (std::size_t k = 0; k < num_kinds(); ++k) pool.release_units(k, seq.units[k].units);
  seq.units.clear();
  seq.units_need.clear();
  seq.nodes.clear();
  seq.computed = seq.planned = seq.inserted_blocks = seq.need = 0;
  seq.prefill_end = seq.branch = seq.plans_without_slot = 0;
  seq.last_snapshot = {};
  seq.load.reset();
  seq.counts_loaded = false;
  seq.forced = false;
  seq.proposed.clear();
  seq.planned_proposals = 0;
  release_proposal_states(seq);
  if (std::exchange(seq.forked, false)) seq.num_cached_tokens = -1;
  waiting_tokens += seq.prompt_tokens;
  leave_children(seq);
}

// If an equal block is already indexed, the sequence uses that block from now on. This saves a block, and the parents
// of its later blocks stay Active.
void Scheduler::Impl::insert_blocks(Seq& seq) {
  const auto length = static_cast<std::size_t>(pool.block_len());
  const std::span<const TokenId> tokens(seq.tokens);
  for (; (seq.inserted_blocks + 1) * pool.block_len() <= seq.computed; ++seq.inserted_blocks) {
    const auto index = static_cast<std::size_t>(seq.inserted_blocks);
    auto& block = seq.blocks[index];
    const auto parent = seq.nodes.empty() ? cache::PrefixNode{} : seq.nodes.back();
    units_of_block.clear();
    for (std::size_t k = 0; k < num_kinds(); ++k) {
      const auto end = (seq.inserted_blocks + 1) * pool.block_len();
      const bool passed = !is_state(k) && seq.inserted_blocks < seq.units[k].first;  // it was loaded without the unit
      units_of_block.push_back(is_state(k) ? snapshot_at(seq, k, end)
                               : passed    ? cache::kNone
                                           : seq.units[k].at(seq.inserted_blocks));
    }
    const auto node = pool.insert(parent, block, tokens.subspan(index * length, length), seq.salt, units_of_block);
    for (std::size_t k = 0; k < num_kinds(); ++k) {
      if (!is_state(k) && units_of_block[k] != cache::kNone) {
        seq.units[k].at(seq.inserted_blocks) = units_of_block[k];
      }
    }
    if (node.unique_id == parent.unique_id) continue;  // there is no index, or the parent has left it
    for (std::size_t k = 0; k < num_kinds(); ++k) {
      if (is_state(k)) keep_snapshot(seq, k, units_of_block[k], node);
    }
    if (node.block != block) {
      pool.retain({&node.block, 1});
      pool.release({&block, 1});
      block = node.block;
    }
    seq.nodes.push_back(node);
    // Blocks of sampled tokens are not counted. A waiting sequence rarely begins with them, and a slightly later lookup
    // does no harm.
    if (seq.inserted_blocks * pool.block_len() < seq.prompt_tokens) ++activated_blocks;
  }
}

Scheduler::Scheduler(Limits limits, cache::BlockManager& blocks, StepTime* step_time)
    : impl_(std::make_unique<Impl>(limits, blocks, step_time)) {
  if (limits.max_batch_size < 1 || limits.token_budget < 1) {
    broken(cat("max_batch_size = ", limits.max_batch_size, " and token_budget = ", limits.token_budget,
               ": both must be at least 1"));
  }
  if (limits.max_logits_rows != 0 && limits.max_logits_rows < limits.max_batch_size) {
    broken(cat("max_logits_rows = ", limits.max_logits_rows, ": it must be 0 or at least max_batch_size, ",
               limits.max_batch_size));
  }
  for (const auto& kind : blocks.kinds()) {
    if (kind.num_units() < std::min(kind.most_for(1), blocks.num_blocks())) {
      broken(cat("a kind of cache has ", kind.num_units(), " units, but a sequence needs ", kind.most_for(1)));
    }
  }
}

Scheduler::~Scheduler() = default;

void Scheduler::add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, const SeqOptions& options) {
  if (prompt.empty()) broken(cat("sequence ", id, " has an empty prompt"));
  // Uses the size at construction, because the caller cannot know that the pool has shrunk.
  const auto capacity = std::int64_t{impl_->initial_blocks} * impl_->pool.block_len();
  if (max_total_tokens <= std::ssize(prompt) || max_total_tokens > capacity) {
    broken(cat("sequence ", id, " with ", prompt.size(), " tokens has max_total_tokens = ", max_total_tokens,
               "; it must be greater than the number of tokens, and at most ", capacity));
  }
  auto* parent = impl_->parent_of(id, prompt, options);
  const auto [place, is_new] = impl_->seqs.try_emplace(id);
  if (!is_new) broken(cat("sequence ", id, " already exists"));
  place->second = std::make_unique<Seq>();
  auto& seq = *place->second;
  seq.id = id;
  seq.priority = options.priority;
  seq.round = impl_->rounds.add(options.priority, options.owner);
  seq.arrival = impl_->arrivals++;
  seq.salt = options.salt;
  seq.scope = options.scope;
  seq.adapter = options.adapter;
  seq.all_rows = options.all_rows;
  seq.prompt_tokens = static_cast<std::int32_t>(prompt.size());
  seq.max_total_tokens = max_total_tokens;
  seq.tokens = std::move(prompt);
  // Reserves space, so that appending sampled tokens does not move the prompt for a while.
  seq.tokens.reserve(static_cast<std::size_t>(std::min(max_total_tokens, seq.prompt_tokens + kReservedTokens)));
  impl_->waiting_tokens += seq.prompt_tokens;
  if (parent != nullptr) {
    seq.parent = parent;
    parent->children.push_back(&seq);
  }
  if (parent == nullptr || parent->has_computed_prompt()) {
    impl_->enqueue(seq);
  } else {
    seq.state = State::waiting_for_parent;
  }
}

StepPlan Scheduler::plan() {
  auto& impl = *impl_;
  StepPlan plan;
  plan.seqs.reserve(std::min(impl.seqs.size(), static_cast<std::size_t>(impl.limits.max_batch_size)));
  impl.begin_plan();
  impl.plan_decodes(plan);
  impl.plan_proposals(plan);
  impl.plan_prefill(plan);
  impl.plan_starved(plan);
  for (const auto* seq : impl.impossible) plan.impossible.push_back(seq->id);
  return plan;
}

void Scheduler::advance(const StepPlan& plan) {
  // An element is null if its sequence was removed since plan(), and perhaps added again with the same id.
  auto& planned = impl_->collected;
  planned.clear();
  for (const auto& part : plan.seqs) {
    auto* seq = impl_->find(part.id);
    if (seq != nullptr && seq->planned == 0) seq = nullptr;
    planned.push_back(seq);
    if (seq == nullptr) continue;
    if (seq->planned != part.num_tokens || seq->planned_proposals != part.num_proposed ||
        seq->computed != part.first_position) {
      broken(cat("sequence ", part.id, " advances from position ", part.first_position, " by ", part.num_tokens,
                 " tokens, but the plan was from ", seq->computed, " by ", seq->planned));
    }
    if (seq->has_placeholder()) broken(cat("sequence ", part.id, " advances, but its last token is not sampled yet"));
  }
  std::int32_t rows = 0;  // rows of logits up to the last row of this part
  for (std::size_t i = 0; i < plan.seqs.size(); ++i) {
    const auto& part = plan.seqs[i];
    rows += part.num_logits_rows();
    if (planned[i] == nullptr) continue;
    auto& seq = *planned[i];
    seq.computed += std::exchange(seq.planned, 0) - std::exchange(seq.planned_proposals, 0);
    seq.proposed.resize(static_cast<std::size_t>(part.num_proposed));
    if (part.all_rows) seq.rows_given = seq.computed;
    if (std::exchange(seq.forked, false)) impl_->leave_parent(seq);
    impl_->insert_blocks(seq);
    impl_->release_units_before_windows(seq);
    if (part.samples) {
      seq.tokens.push_back(-(rows - part.num_proposed));  // the placeholder
      seq.forced = false;
    }
    if (seq.has_computed_prompt()) impl_->queue_children(seq);
  }
}

void Scheduler::resolve(const StepPlan& plan, std::span<const TokenId> sampled) {
  const auto samples = std::ranges::count_if(plan.seqs, [](const auto& part) { return part.samples; });
  if (samples != std::ssize(sampled)) {
    broken(cat("got ", sampled.size(), " sampled tokens, expected ", samples));
  }
  for (const auto token : sampled) {
    if (token < 0) broken(cat("the sampled token ", token, " is not a token id"));
  }
  std::int32_t rows = 0;
  auto token = sampled.begin();
  for (const auto& part : plan.seqs) {
    rows += part.num_logits_rows();
    if (!part.samples) continue;
    const auto result = *token++;
    auto* seq = impl_->find(part.id);
    if (seq == nullptr) continue;
    // It may have been removed and added again with the same id.
    const bool is_its_placeholder =
        seq->tokens.back() == -(rows - part.num_proposed) &&
        seq->num_tokens() - 1 == part.first_position + part.num_tokens - part.num_proposed;
    if (!is_its_placeholder) continue;
    seq->tokens.back() = result;
  }
}

void Scheduler::append(SeqId id, TokenId token) {
  auto& seq = impl_->at(id);
  if (token < 0) broken(cat("cannot append token ", token, " to sequence ", id));
  if (seq.has_placeholder()) broken(cat("cannot append to sequence ", id, ": its last token is not sampled yet"));
  if (seq.is_full())
    broken(cat("cannot append to sequence ", id, ": it already has all its ", seq.max_total_tokens, " tokens"));
  seq.forced |= seq.is_decode() && seq.state == State::running;
  seq.proposed.clear();
  seq.tokens.push_back(token);
}

void Scheduler::forget_prefix(SeqId id, std::size_t known_good) {
  // By its tokens, because a preempted sequence has no blocks.
  const auto& seq = impl_->at(id);
  impl_->pool.forget_prefix(seq.tokens, seq.salt, known_good);
}

void Scheduler::sample_again(SeqId id) {
  auto& seq = impl_->at(id);
  if (!seq.has_computed_prompt() || seq.has_placeholder() || seq.gap() != 1 || seq.num_tokens() <= seq.prompt_tokens) {
    broken(cat("sequence ", id, " has no sampled token that could be sampled again"));
  }
  seq.tokens.pop_back();
  impl_->stop_running(seq);
  impl_->enqueue(seq);
}

void Scheduler::set_offload(Offload* offload) { impl_->offload = offload; }

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
  impl_->rounds.removed(seq.priority);
  impl_->seqs.erase(found);
  return true;
}

std::span<const TokenId> Scheduler::tokens(SeqId id) const { return impl_->at(id).tokens; }
std::span<const TokenId> Scheduler::proposed(SeqId id) const { return impl_->at(id).proposed; }
std::span<const cache::BlockId> Scheduler::blocks(SeqId id) const { return impl_->at(id).blocks; }
std::span<const cache::UnitRange> Scheduler::units(SeqId id) const { return impl_->at(id).units; }
int Scheduler::adapter_slot(SeqId id) const {
  const auto& seq = impl_->at(id);
  return seq.state == State::running ? impl_->adapters.slot_of(seq.adapter) : -1;
}
std::span<const cache::UnitRange> Scheduler::proposal_units(SeqId id) const { return impl_->at(id).proposal_units; }
std::int32_t Scheduler::max_proposal_states() const { return impl_->max_proposal_states; }
std::int32_t Scheduler::num_computed(SeqId id) const { return impl_->at(id).computed; }
std::vector<cache::PrefixNode> Scheduler::inserted(SeqId id) const { return impl_->at(id).nodes; }
std::vector<std::int32_t> Scheduler::hit_ends(SeqId id) const {
  const auto& seq = impl_->at(id);
  const auto computed = static_cast<std::int32_t>(seq.nodes.size()), length = impl_->pool.block_len();
  std::vector<std::int32_t> out;
  for (const auto end : {(seq.prompt_tokens - 1) / length, seq.branch / length, computed}) {
    if (end > 0 && end <= computed) out.push_back(end);
  }
  return out;
}

std::int32_t Scheduler::num_cached_tokens(SeqId id) const { return impl_->at(id).num_cached_tokens; }
int Scheduler::num_running() const { return static_cast<int>(impl_->running.size()); }
int Scheduler::num_waiting() const { return static_cast<int>(impl_->seqs.size() - impl_->running.size()); }
std::int64_t Scheduler::waiting_tokens() const { return impl_->waiting_tokens; }
std::int64_t Scheduler::num_preemptions() const { return impl_->num_preemptions; }
std::int64_t Scheduler::prefix_query_tokens() const { return impl_->prefix_query_tokens; }
std::int64_t Scheduler::prefix_hit_tokens() const { return impl_->prefix_hit_tokens; }
std::int64_t Scheduler::loaded_tokens() const { return impl_->loaded_tokens; }

std::int64_t Scheduler::capacity_tokens() const {
  return std::int64_t{impl_->pool.num_blocks()} * impl_->pool.block_len();
}

}  // namespace charonia::schedule
