// The engine thread: proposals of a step, and the tokens that it accepts (runtime/proposals.h).
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <utility>

#include "base/thread_time.h"
#include "ops/broken_logits.h"
#include "runtime/engine_impl.h"
#include "runtime/ngram_source.h"

namespace charonia {

using schedule::ScheduledSeq;
using Candidate = runtime::SpeculationPolicy::Candidate;

namespace {

// Tokens that the sources of a step may read, in a fraction of a millisecond, and those of one sequence.
constexpr int kReadTokens = 8192;
constexpr int kLeastReadTokens = 32;

}  // namespace

// The provider of the mask checks or replaces the tokens of a source.
void Engine::Impl::check_guess(Completion& completion, runtime::Proposal& proposal, int most) {
  if (!completion.mask) return;
  const auto begun = thread_seconds();
  auto allowed = completion.mask->propose(proposal.tokens, most);
  const bool is_guess = std::ranges::mismatch(allowed, proposal.tokens).in1 == allowed.end();
  if (!is_guess) proposal.confidence = runtime::kCertain;
  proposal.tokens = std::move(allowed);
  search_s_ -= thread_seconds() - begun;
}

// Proposes tokens for the sequences that sampled in the last step.
void Engine::Impl::propose() {
  std::vector<Proposed> all;
  std::vector<Candidate> known, with_drafts;
  auto ids = std::exchange(decodes_, {});
  std::ranges::rotate(ids, std::ranges::find(ids, std::exchange(first_search_, 0)));
  search_s_ = speculation_->search_s(scheduler_->num_running());
  for (const auto id : ids) {
    auto one = propose_known(id);
    if (!one) continue;
    auto& proposal = one->proposal;
    const bool in_time = !one->completion->mask || search_s_ > 0;
    if (in_time) {
      check_guess(*one->completion, proposal, one->most);
    } else {
      proposal.tokens.clear();
      if (first_search_ == 0) first_search_ = id;
    }
    const auto missing = set_draft_tokens(*one);
    add_candidates(*one, in_time ? missing : std::nullopt, known, with_drafts);
    all.push_back(std::move(*one));
  }
  auto& chosen = speculation_->choose(scheduler_->num_running(), known, with_drafts) ? with_drafts : known;
  draft(all, chosen);
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& [completion, most, proposal] = all[i];
    proposal.tokens.resize(std::min(proposal.tokens.size(), static_cast<std::size_t>(chosen[i].chosen)));
    completion->confidence = proposal.confidence;
    scheduler_->propose(completion->id, std::move(proposal.tokens));
  }
}

// Whether the next step waits for the samples of the running step: these accept its proposals, or decide about new
// proposals that the tokens so far make likely.
bool Engine::Impl::may_propose(const Step& running) {
  if (!speculation_) return false;
  if (std::ranges::any_of(running.plan.seqs, [](const auto& part) { return part.num_proposed > 0; })) return true;
  std::vector<Candidate> known, with_drafts;
  for (const auto id : decodes_) {
    const auto found = completions_.find(id);
    if (found == completions_.end() || found->second->mask) continue;
    const auto one = propose_known(id);
    if (!one) continue;
    const auto size = static_cast<std::int32_t>(scheduler_->tokens(id).size());
    add_candidates(*one, draft_ ? draft_->missing(id, size) : std::nullopt, known, with_drafts);
  }
  return speculation_->would_choose(scheduler_->num_running(), known, with_drafts);
}

// The probability that a proposed token is accepted.
double Engine::Impl::rate_of(const Proposed& one) const {
  const auto confidence = one.proposal.confidence;
  return one.completion->acceptance.rate(confidence, speculation_->assumed_rate(confidence));
}

// The proposal that needs no model, before check_guess(); it may have no tokens. With jump_forward the provider of a
// mask forces tokens itself, and then there are no proposals.
std::optional<Engine::Impl::Proposed> Engine::Impl::propose_known(SeqId id) {
  const auto found = completions_.find(id);
  if (found == completions_.end()) return std::nullopt;
  auto& completion = *found->second;
  if (!completion.proposes) return std::nullopt;
  if (completion.mask && (info.config.jump_forward || completion.forces_next())) return std::nullopt;
  if (!completion.source) {
    auto& prompt = completion.state.prompt_index;
    if (!prompt) prompt = runtime::NgramSource::prompt_index(completion.num_input());
    completion.source = std::make_unique<runtime::NgramSource>(prompt, completion.num_input());
  }
  // The last token of a completion is sampled after a proposal, or without one.
  auto tokens = scheduler_->tokens(id);
  int most = std::min({info.config.speculative_tokens, scheduler_->max_proposal_states(),
                       completion.max_tokens - completion.num_output - 1});
  if (executor_->asynchronous()) {
    const auto [of_sequence, of_row] = completion.entries(tokens.size());
    most = std::min(most, runtime::most_with_entries(of_sequence, of_row, scheduler_->num_running()));
  }
  if (tokens.back() < 0) tokens = tokens.first(tokens.size() - 1);  // the running step samples it
  const int most_read = std::max(kReadTokens / std::max(scheduler_->num_running(), 1), kLeastReadTokens);
  return Proposed{&completion, most, completion.source->propose(tokens, most, most_read)};
}

std::optional<int> Engine::Impl::set_draft_tokens(const Proposed& one) {
  if (!draft_) return std::nullopt;
  const auto& completion = *one.completion;
  std::erase(computed_, completion.id);
  return draft_->set_tokens(completion.id, scheduler_->tokens(completion.id), completion.salt);
}

void Engine::Impl::add_candidates(const Proposed& one, std::optional<int> missing, std::vector<Candidate>& known,
                                  std::vector<Candidate>& with_drafts) const {
  const auto& completion = *one.completion;
  const auto confidence = one.proposal.confidence;
  known.push_back({.size = static_cast<int>(one.proposal.tokens.size()), .rate = rate_of(one)});
  with_drafts.push_back(known.back());
  if (!missing || one.most <= 0) return;
  const auto rate = completion.acceptance.rate(runtime::kDrafted, speculation_->assumed_rate(runtime::kDrafted));
  Candidate drafts{.size = one.most, .rate = rate, .drafted = true};
  // Known tokens cost nothing, so they are preferred to drafts that are not better. Certain tokens replace any guess.
  const auto& same = known.back();
  if (same.size > 0 && (confidence == runtime::kCertain || drafts.rate <= same.rate)) return;
  if (!draft_->reads_hidden()) {  // otherwise it computes these tokens anyway
    drafts.begin_s = speculation_->begin_s(*missing, completion.max_tokens - completion.num_output);
  }
  with_drafts.back() = drafts;
}

// Computes the drafts that were chosen. A layer that is far behind in a sequence computes its tokens. The drafts
// replace the known tokens of their sequences; where there are none, because a prompt is not computed yet or blocks are
// missing, the known tokens remain.
void Engine::Impl::draft(std::span<Proposed> all, std::span<Candidate> candidates) {
  std::vector<runtime::DraftModel::Wanted> wanted;
  std::vector<Proposed*> of;
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& completion = *all[i].completion;
    if (!candidates[i].drafted || candidates[i].chosen == 0) {
      if (draft_ && draft_->must_compute(completion.id)) {
        wanted.push_back({.id = completion.id});
        of.push_back(nullptr);
      }
      continue;
    }
    wanted.push_back({.id = completion.id,
                      .count = candidates[i].chosen,
                      .row = [&completion](auto tokens) { return completion.sample_row(tokens); }});
    of.push_back(&all[i]);
  }
  catch_up(wanted);
  if (wanted.empty()) return;
  compute_drafts(wanted);
  for (std::size_t i = 0; i < of.size(); ++i) {
    if (of[i] == nullptr) continue;
    auto& [completion, most, proposal] = *of[i];
    runtime::Proposal drafts{std::move(wanted[i].proposals), runtime::kDrafted};
    if (!drafts.tokens.empty()) check_guess(*completion, drafts, most);
    if (!drafts.tokens.empty()) {
      proposal = std::move(drafts);
    } else if (wanted[i].sampled) {  // otherwise a grammar that allows none of them would never end the drafts
      completion->acceptance.add(runtime::kDrafted, 1, 0);
    }
  }
}

// Adds the sequences of the last settled step in which a layer is far behind. Their tokens are not set yet.
void Engine::Impl::catch_up(std::vector<runtime::DraftModel::Wanted>& wanted) {
  for (const auto id : std::exchange(computed_, {})) {
    const auto found = completions_.find(id);
    if (found == completions_.end() || !draft_->must_compute(id)) continue;
    draft_->set_tokens(id, scheduler_->tokens(id), found->second->salt);
    wanted.push_back({.id = id});
  }
}

// The hidden states of a settled step belong to its sequences.
void Engine::Impl::keep_hidden(const Step& step) {
  if (!draft_ || !draft_->reads_hidden()) return;
  computed_.clear();
  for (std::size_t s = 0; s < step.plan.seqs.size(); ++s) {
    const auto& part = step.plan.seqs[s];
    const auto rows = std::span(step.hidden_rows)
                          .subspan(static_cast<std::size_t>(step.query_start[s]),
                                   static_cast<std::size_t>(part.num_tokens));
    if (!completions_.contains(part.id)) {
      draft_->drop(rows);
      continue;
    }
    draft_->computed(part.id, part.first_position, rows);
    computed_.push_back(part.id);
  }
}

void Engine::Impl::compute_drafts(std::span<runtime::DraftModel::Wanted> wanted) {
  const auto begun = Clock::now();
  draft_->propose(wanted, speculation_->draft_rows(scheduler_->num_running()), *speculation_);
  // While a step runs, its own time includes this.
  if (in_flight_ == nullptr) draft_s_ += std::chrono::duration<double>(Clock::now() - begun).count();
}

// A sequence ends. A layer that reads hidden states computes its last tokens if they fill a block of the prefix index,
// for the next turn.
void Engine::Impl::end_drafts(const Completion& completion, FinishReason reason) {
  if (!draft_) return;
  if (draft_->reads_hidden() && failure_.empty() && (reason == FinishReason::stop || reason == FinishReason::length)) {
    draft_->set_tokens(completion.id, scheduler_->tokens(completion.id), completion.salt);
    runtime::DraftModel::Wanted last{.id = completion.id};
    if (draft_->fills_block(completion.id)) compute_drafts({&last, 1});
  }
  draft_->forget(completion.id);
}

// Accepts the sampled token of a part, and the tokens after accepted proposals. rows: of the last known token, then of
// each proposal. Returns the number of tokens. The last one may end the sequence.
int Engine::Impl::accept_all(Step& step, const ScheduledSeq& part, std::span<const ops::Sampled> rows,
                             Completion& completion, Clock::time_point now) {
  const bool proposed = part.num_proposed > 0;
  const int source = runtime::source_of(completion.confidence);
  if (proposed) {
    completion.num_proposed += part.num_proposed;
    count(Metric::spec_decode_num_drafts, 1);
    count(Metric::spec_decode_num_draft_tokens, part.num_proposed, source);
  }
  const auto send_due = [&] {
    if (auto result = completion.due(now, interval_)) delivery_.push(completion.state.callback, std::move(*result));
  };
  int taken = 0, num_accepted = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i > 0) {
      if (!scheduler_->accept(part.id, rows[i].error.empty() ? rows[i].token : 0)) break;
      ++num_accepted;
      ++completion.num_accepted;
      ++step.num_accepted;
      count(Metric::spec_decode_num_accepted_tokens, 1, source);
      count(Metric::spec_decode_num_accepted_tokens_per_pos, 1, static_cast<int>(i) - 1);
    }
    if (!rows[i].error.empty()) {
      if (!proposed || !ops::has_broken_logit(rows[i].error)) {
        fail_row(part.id, rows[i].error);
        return taken;
      }
      // A row does not attend to the proposals after it, but a product of 0 with their infinite values is not 0. So the
      // sequence is computed again, without proposals. The rows before it were finite, and so is the KV that they read.
      // If it is not, the sequence fails again, and all of its KV is forgotten.
      completion.proposes = false;
      --step.num_accepted;  // the token of this row does not count
      forget_tokens(part.id, static_cast<std::size_t>(part.first_position) + i);
      scheduler_->sample_again(part.id);
      break;
    }
    taken += accept(completion, rows[i], now);
    if (!completions_.contains(part.id)) return taken;
    if (interval_ == interval_.zero()) send_due();  // a response per token
  }
  send_due();  // once, because no response is due again in the same step
  if (proposed) {
    completion.acceptance.add(completion.confidence, part.num_proposed, num_accepted);
    speculation_->accepted(completion.confidence, part.num_proposed, num_accepted);
  }
  if (speculation_) decodes_.push_back(part.id);
  return taken;
}

}  // namespace charonia
