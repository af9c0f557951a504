#include "schedule/scheduler.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::schedule {
namespace {

using cache::BlockId;

[[noreturn]] void broken(const std::string& what) { throw Error(ErrorCode::internal, cat("scheduler: ", what)); }

struct Seq {
  SeqId id = 0;
  int priority = 0;
  std::uint64_t arrival = 0;
  std::uint64_t salt = 0;
  std::int32_t prompt_tokens = 0;
  std::int32_t max_total_tokens = 0;
  std::vector<TokenId> tokens;  // prompt and sampled; the last may be a placeholder
  std::int32_t num_cached_tokens = -1;

  // While it runs; all zero and empty while it waits.
  bool running = false;
  std::vector<BlockId> blocks;
  std::int32_t computed = 0;          // tokens whose k/v is in the blocks
  std::int32_t planned = 0;           // tokens of the plan that has not advanced yet
  std::int32_t published_blocks = 0;  // full blocks that are in the prefix index
  cache::PrefixNode last_published;

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t gap() const { return num_tokens() - computed; }
  bool has_placeholder() const { return tokens.back() < 0; }
  bool is_full() const { return num_tokens() >= max_total_tokens; }
};

struct Before {
  bool operator()(const Seq* a, const Seq* b) const {
    return a->priority != b->priority ? a->priority > b->priority : a->arrival < b->arrival;
  }
};

}  // namespace

struct Scheduler::Impl {
  Impl(Limits limits_in, cache::BlockManager& pool_in) : limits(limits_in), pool(pool_in) {}

  Seq& at(SeqId id) const {
    const auto found = seqs.find(id);
    if (found == seqs.end()) broken(cat("sequence ", id, " is not known"));
    return *found->second;
  }

  std::int32_t blocks_for(std::int32_t tokens) const { return (tokens + pool.block_len() - 1) / pool.block_len(); }

  // Does not count the place of the last token it may sample: that one's k/v is never needed.
  bool will_need_more_blocks(const Seq& seq) const {
    return blocks_for(seq.max_total_tokens - 1) > static_cast<std::int32_t>(seq.blocks.size());
  }

  void stop_running(Seq& seq) {
    pool.release(seq.blocks);
    seq.blocks.clear();
    seq.computed = seq.planned = seq.published_blocks = 0;
    seq.last_published = {};
    seq.running = false;
    running.erase(std::find(running.begin(), running.end(), &seq));
  }

  void preempt(Seq& seq, StepPlan& plan) {
    stop_running(seq);
    waiting.insert(&seq);
    plan.preempted.push_back(seq.id);
    ++num_preemptions;
  }

  // Gives the sequence blocks for all its tokens, if need be those of sequences after it, the last one first. False
  // when there was none after it: it was preempted itself; or when blocks come free anyway as soon as a step is
  // resolved.
  bool make_room(Seq& seq, StepPlan& plan) {
    const auto missing = blocks_for(seq.num_tokens()) - static_cast<std::int32_t>(seq.blocks.size());
    while (missing > 0 && !pool.allocate(missing, seq.blocks)) {
      if (num_ending > 0) {
        ++num_held;
        return false;
      }
      auto& victim = *running.back();
      if (&victim == &seq && running.size() == 1) {
        broken(cat("sequence ", seq.id, " runs alone and needs ", missing, " more blocks, ", pool.num_available(),
                   " of ", pool.num_blocks(), " are available"));
      }
      preempt(victim, plan);
      if (&victim == &seq) return false;
    }
    return true;
  }

  bool admit(Seq& seq) {
    if (seq.has_placeholder()) return false;
    if (seq.is_full()) broken(cat("sequence ", seq.id, " waits and has all its ", seq.max_total_tokens, " tokens"));
    auto match = pool.match(seq.tokens, seq.num_tokens() - 1, seq.salt);
    const auto all = blocks_for(seq.num_tokens());
    const auto missing = all - static_cast<std::int32_t>(match.blocks.size());
    auto reserve = static_cast<std::int32_t>(blocks_for(seq.max_total_tokens - 1) > all);
    for (const auto* other : running) reserve += will_need_more_blocks(*other);
    if (pool.num_available() < missing + reserve) {
      pool.release(match.blocks);
      return false;
    }
    waiting.erase(&seq);
    seq.running = true;
    seq.blocks = std::move(match.blocks);
    pool.allocate(missing, seq.blocks);
    seq.computed = match.num_tokens;
    seq.published_blocks = all - missing;
    seq.last_published = match.last;
    running.insert(std::upper_bound(running.begin(), running.end(), &seq, Before{}), &seq);
    if (seq.num_cached_tokens < 0) {
      seq.num_cached_tokens = match.num_tokens;
      prefix_query_tokens += seq.prompt_tokens;
      prefix_hit_tokens += match.num_tokens;
    }
    return true;
  }

  // The running sequences of which `which` is true, in the order of Before.
  template <class Which>
  void collect(Which which) {
    collected.clear();
    std::ranges::copy_if(running, std::back_inserter(collected), [&](const Seq* seq) { return which(*seq); });
  }

  void schedule(Seq& seq, StepPlan& plan) {
    seq.planned = std::min(seq.gap(), limits.token_budget - num_held - plan.num_tokens);
    plan.seqs.push_back({seq.id, seq.computed, seq.planned, seq.planned == seq.gap()});
    plan.num_tokens += seq.planned;
  }

  void plan_decodes(StepPlan& plan) {
    collect([](const Seq& seq) { return seq.gap() == 1 && !seq.is_full(); });
    // In the order of Before, so that blocks are never taken from a sequence that is in the plan already.
    for (auto* seq : collected) {
      if (seq->running && make_room(*seq, plan)) schedule(*seq, plan);
    }
  }

  void plan_prefill(StepPlan& plan) {
    collect([](const Seq& seq) { return seq.gap() > 1; });
    bool may_admit = true;
    auto next = collected.begin();
    // Decodes that were held back keep their place in the budget, or there would be too many in the next step.
    while (plan.num_tokens + num_held < limits.token_budget) {
      may_admit = may_admit && !waiting.empty() && static_cast<int>(running.size()) < limits.max_batch_size;
      if (may_admit && (next == collected.end() || Before{}(*waiting.begin(), *next))) {
        auto* seq = *waiting.begin();
        may_admit = admit(*seq);
        if (may_admit) schedule(*seq, plan);
      } else if (next != collected.end()) {
        schedule(**next++, plan);
      } else {
        return;
      }
    }
  }

  // Puts the full blocks of what is computed into the prefix index. Where an equal block is there already, the sequence
  // goes over to it: that saves a block, and keeps Active what its later blocks hang behind.
  void publish(Seq& seq) {
    const auto length = static_cast<std::size_t>(pool.block_len());
    const std::span<const TokenId> tokens(seq.tokens);
    for (; (seq.published_blocks + 1) * pool.block_len() <= seq.computed; ++seq.published_blocks) {
      const auto index = static_cast<std::size_t>(seq.published_blocks);
      auto& block = seq.blocks[index];
      const auto node = pool.publish(seq.last_published, block, tokens.subspan(index * length, length), seq.salt);
      if (node.unique_id == seq.last_published.unique_id) continue;  // there is no index
      if (node.block != block) {
        pool.retain({&node.block, 1});
        pool.release({&block, 1});
        block = node.block;
      }
      seq.last_published = node;
    }
  }

  Limits limits;
  cache::BlockManager& pool;
  std::unordered_map<SeqId, std::unique_ptr<Seq>> seqs;
  std::vector<Seq*> running;  // in the order of Before
  std::set<Seq*, Before> waiting;
  std::vector<Seq*> collected;  // working memory of plan(), as are:
  int num_ending = 0;           // running sequences whose last token is a placeholder
  int num_held = 0;             // decodes that wait for the blocks of those
  std::uint64_t arrivals = 0;
  std::int64_t num_preemptions = 0, prefix_query_tokens = 0, prefix_hit_tokens = 0;
};

Scheduler::Scheduler(Limits limits, cache::BlockManager& blocks) : impl_(std::make_unique<Impl>(limits, blocks)) {
  if (limits.max_batch_size < 1 || limits.token_budget < 1) {
    throw Error(ErrorCode::invalid_argument, cat("max_batch_size = ", limits.max_batch_size, " and token_budget = ",
                                                 limits.token_budget, ": both must be at least 1"));
  }
}

Scheduler::~Scheduler() = default;

void Scheduler::add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, int priority,
                    std::uint64_t salt) {
  if (prompt.empty()) broken(cat("sequence ", id, " has no token"));
  if (max_total_tokens <= static_cast<std::int64_t>(prompt.size()) || max_total_tokens > capacity_tokens()) {
    broken(cat("sequence ", id, " with ", prompt.size(), " tokens may have ", max_total_tokens,
               " in all; that must be more than it has and at most ", capacity_tokens()));
  }
  auto [place, is_new] = impl_->seqs.try_emplace(id);
  if (!is_new) broken(cat("sequence ", id, " is there already"));
  place->second = std::make_unique<Seq>();
  auto& seq = *place->second;
  seq.id = id;
  seq.priority = priority;
  seq.arrival = impl_->arrivals++;
  seq.salt = salt;
  seq.prompt_tokens = static_cast<std::int32_t>(prompt.size());
  seq.max_total_tokens = max_total_tokens;
  seq.tokens = std::move(prompt);
  impl_->waiting.insert(&seq);
}

StepPlan Scheduler::plan() {
  auto& impl = *impl_;
  impl.num_ending = impl.num_held = 0;
  for (auto* seq : impl.running) {
    seq->planned = 0;
    if (!seq->is_full()) continue;
    if (!seq->has_placeholder()) {
      broken(cat("sequence ", seq->id, " has all its ", seq->max_total_tokens, " tokens and was not removed"));
    }
    ++impl.num_ending;
  }
  StepPlan plan;
  impl.plan_decodes(plan);
  impl.plan_prefill(plan);
  return plan;
}

void Scheduler::advance(const StepPlan& plan) {
  // A sequence may have been removed since, and perhaps added anew under its old id: then nothing of it is planned.
  const auto planned = [this](const ScheduledSeq& part) -> Seq* {
    const auto found = impl_->seqs.find(part.id);
    return found == impl_->seqs.end() || found->second->planned == 0 ? nullptr : found->second.get();
  };
  for (const auto& part : plan.seqs) {
    const auto* seq = planned(part);
    if (seq == nullptr) continue;
    if (seq->planned != part.num_tokens || seq->computed != part.first_position) {
      broken(cat("tokens ", part.first_position, " + ", part.num_tokens, " of sequence ", part.id,
                 " advance, planned were ", seq->computed, " + ", seq->planned));
    }
    if (seq->has_placeholder()) broken(cat("sequence ", part.id, " advances over a token that is not known"));
  }
  TokenId placeholder = 0;
  for (const auto& part : plan.seqs) {
    if (part.samples) --placeholder;
    auto* seq = planned(part);
    if (seq == nullptr) continue;
    seq->computed += std::exchange(seq->planned, 0);
    impl_->publish(*seq);
    if (part.samples) seq->tokens.push_back(placeholder);
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
  TokenId placeholder = 0;
  for (const auto& part : plan.seqs) {
    if (!part.samples) continue;
    --placeholder;
    const auto found = impl_->seqs.find(part.id);
    if (found == impl_->seqs.end()) continue;
    auto& seq = *found->second;
    if (seq.tokens.back() == placeholder && seq.num_tokens() - 1 == part.first_position + part.num_tokens) {
      seq.tokens.back() = sampled[static_cast<std::size_t>(-1 - placeholder)];
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
    impl_->waiting.insert(&seq);
  }
  impl_->pool.forget_prefixes();
}

bool Scheduler::remove(SeqId id) {
  const auto found = impl_->seqs.find(id);
  if (found == impl_->seqs.end()) return false;
  auto& seq = *found->second;
  if (seq.running) {
    impl_->stop_running(seq);
  } else {
    impl_->waiting.erase(&seq);
  }
  impl_->seqs.erase(found);
  return true;
}

std::span<const TokenId> Scheduler::tokens(SeqId id) const { return impl_->at(id).tokens; }
std::span<const cache::BlockId> Scheduler::blocks(SeqId id) const { return impl_->at(id).blocks; }
std::int32_t Scheduler::num_computed(SeqId id) const { return impl_->at(id).computed; }
std::int32_t Scheduler::num_cached_tokens(SeqId id) const { return impl_->at(id).num_cached_tokens; }
int Scheduler::num_running() const { return static_cast<int>(impl_->running.size()); }
int Scheduler::num_waiting() const { return static_cast<int>(impl_->waiting.size()); }
std::int64_t Scheduler::num_preemptions() const { return impl_->num_preemptions; }
std::int64_t Scheduler::prefix_query_tokens() const { return impl_->prefix_query_tokens; }
std::int64_t Scheduler::prefix_hit_tokens() const { return impl_->prefix_hit_tokens; }

std::int64_t Scheduler::capacity_tokens() const {
  return std::int64_t{impl_->pool.num_blocks()} * impl_->pool.block_len();
}

void Scheduler::check_integrity() const {
  const auto& impl = *impl_;
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) broken(cat(what...));
  };
  std::vector<std::int32_t> use(static_cast<std::size_t>(impl.pool.num_blocks()), 0);
  require(std::is_sorted(impl.running.begin(), impl.running.end(), Before{}), "running sequences are out of order");
  require(num_running() <= impl.limits.max_batch_size, num_running(), " sequences run, at most ",
          impl.limits.max_batch_size, " may");
  require(impl.running.size() + impl.waiting.size() == impl.seqs.size(), "there are ", impl.seqs.size(),
          " sequences, and ", impl.running.size(), " run and ", impl.waiting.size(), " wait");
  const auto decodes =
      std::ranges::count_if(impl.running, [](const Seq* seq) { return seq->gap() == 1 && !seq->is_full(); });
  require(decodes <= impl.limits.token_budget, decodes, " decodes, and the budget is ", impl.limits.token_budget);
  for (const auto& [id, owned] : impl.seqs) {
    const auto& seq = *owned;
    require(seq.id == id, "sequence ", id, " believes to be ", seq.id);
    require(std::ranges::all_of(std::span(seq.tokens).first(seq.tokens.size() - 1), [](auto t) { return t >= 0; }),
            "sequence ", id, " has a placeholder that is not its last token");
    require(seq.num_tokens() <= seq.max_total_tokens, "sequence ", id, " has ", seq.num_tokens(), " tokens, at most ",
            seq.max_total_tokens, " are allowed");
    if (!seq.running) {
      require(impl.waiting.contains(owned.get()), "sequence ", id, " neither runs nor waits");
      require(seq.blocks.empty() && seq.computed == 0 && seq.planned == 0 && seq.published_blocks == 0, "sequence ", id,
              " waits and holds blocks");
      continue;
    }
    require(std::ranges::count(impl.running, owned.get()) == 1, "sequence ", id, " is not in the list of running ones");
    const auto length = impl.pool.block_len();
    const auto capacity = static_cast<std::int32_t>(seq.blocks.size()) * length;
    require(seq.gap() >= 1, "sequence ", id, " has ", seq.computed, " computed of ", seq.num_tokens(), " tokens");
    require(seq.computed + seq.planned <= std::min(capacity, seq.num_tokens()), "sequence ", id, " has blocks for ",
            capacity, " tokens, computed and planned are ", seq.computed, " + ", seq.planned);
    require(seq.published_blocks == seq.computed / length, "sequence ", id, " has ", seq.published_blocks,
            " published blocks with ", seq.computed, " tokens computed");
    require(seq.num_cached_tokens >= 0, "sequence ", id, " runs and was never looked up");
    for (const auto block : seq.blocks) ++use.at(static_cast<std::size_t>(block));
  }
  impl.pool.check_integrity(use);
}

}  // namespace charonia::schedule
