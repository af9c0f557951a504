// The integrity check of the scheduler, for tests.
#include <algorithm>
#include <array>
#include <iterator>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {
namespace {

template <class... What>
void require(bool holds, const What&... what) {
  if (!holds) broken(cat(what...));
}

void check_tokens(const Seq& seq) {
  require(std::ranges::all_of(std::span(seq.tokens).first(seq.tokens.size() - 1), [](auto t) { return t >= 0; }),
          "sequence ", seq.id, " has a placeholder that is not its last token");
  require(seq.num_tokens() <= seq.max_total_tokens, "sequence ", seq.id, " has ", seq.num_tokens(),
          " tokens, more than its maximum of ", seq.max_total_tokens);
  require(seq.rows_given >= 0 && seq.rows_given <= (seq.all_rows ? seq.prompt_tokens : 0), "sequence ", seq.id, " has ",
          seq.rows_given, " rows of logits, but its prompt has ", seq.prompt_tokens, " tokens");
}

void check_family(const Seq& seq) {
  for (const auto* child : seq.children) {
    require(child->parent == &seq, "sequence ", child->id, " is listed as a child of sequence ", seq.id,
            ", but has another parent");
    const bool waits = child->state == State::waiting_for_parent;
    require(waits == !seq.has_computed_prompt(), "sequence ", child->id,
            waits ? " waits for the prompt of its parent " : " does not wait for its parent ", seq.id);
  }
  require(seq.parent != nullptr || seq.state != State::waiting_for_parent, "sequence ", seq.id,
          " waits for its parent, but has none");
  require(seq.parent == nullptr || std::ranges::count(seq.parent->children, &seq) == 1, "sequence ", seq.id,
          " is not listed once as a child of its parent");
  require(!seq.forked || (seq.computed == seq.prompt_tokens - 1 && seq.num_tokens() == seq.prompt_tokens), "sequence ",
          seq.id, " started with its parent's blocks, but has ", seq.computed, " of ", seq.prompt_tokens,
          " tokens computed");
}

void check_units(const Seq& seq, const cache::BlockManager& pool, int token_budget) {
  const auto kinds = pool.kinds();
  require(seq.units.size() == kinds.size(), "sequence ", seq.id, " has units of ", seq.units.size(), " kinds");
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    const auto& range = seq.units[k];
    if (kinds[k].kind() == CacheKind::state) {
      const auto count = std::ssize(range.units);
      require(count == 1 || (count == 2 && seq.computed > 0), "sequence ", seq.id, " has ", count, " states with ",
              seq.computed, " tokens computed");
      require(seq.planned == 0 || kinds[k].is_private(range.units.back()), "sequence ", seq.id,
              " would change a snapshot");
      const auto of_proposals = seq.proposal_units.empty() ? 0 : std::ssize(seq.proposal_units[k].units);
      require(of_proposals >= seq.planned_proposals, "sequence ", seq.id, " has ", of_proposals, " states for ",
              seq.planned_proposals, " proposals");
      continue;
    }
    // A sequence with children may still have the units for the last token of its prompt.
    const bool begins = range.first == kinds[k].first_needed(seq.computed) ||
                        (seq.computed == seq.prompt_tokens && range.first == kinds[k].first_needed(seq.computed - 1));
    require(begins && range.end() * pool.block_len() >= seq.computed + seq.planned,
            "sequence ", seq.id, " has units for the blocks ", range.first, " to ", range.end(), " with ", seq.computed,
            " tokens computed and ", seq.planned, " planned");
    // While it loads, also the units of the window after the load.
    const auto most = kinds[k].most_for(token_budget + 1) + (seq.load ? kinds[k].most_for(1) : 0);
    require(std::ssize(range.units) <= most, "sequence ", seq.id, " has ", range.units.size(), " units, more than ",
            most);
  }
}

void check_running(const Seq& seq, int block_len) {
  const auto id = seq.id;
  const auto capacity = static_cast<std::int32_t>(seq.blocks.size()) * block_len;
  require(seq.gap() >= 1, "sequence ", id, " has ", seq.computed, " computed of ", seq.num_tokens(), " tokens");
  require(seq.computed + seq.planned <= std::min(capacity, seq.num_tokens() + seq.planned_proposals), "sequence ", id,
          " has blocks for ", capacity, " tokens, but ", seq.computed, " are computed and ", seq.planned, " planned");
  require(seq.planned_proposals <= std::ssize(seq.proposed), "sequence ", id, " has planned ", seq.planned_proposals,
          " of ", seq.proposed.size(), " proposals");
  require(seq.inserted_blocks == seq.computed / block_len, "sequence ", id, " has ", seq.inserted_blocks,
          " inserted blocks with ", seq.computed, " tokens computed");
  // Fewer after forget_prefix().
  require(std::ssize(seq.nodes) <= seq.inserted_blocks, "sequence ", id, " has ", seq.nodes.size(), " nodes of ",
          seq.inserted_blocks, " inserted blocks");
  for (std::size_t i = 0; i < seq.nodes.size(); ++i) {
    require(seq.nodes[i].block == seq.blocks[i], "sequence ", id, " inserted block ", seq.nodes[i].block,
            ", but uses block ", seq.blocks[i], " instead");
  }
  require(!seq.load || (seq.computed % block_len == 0 && seq.planned == 0 && seq.gap() > 1 &&
                        seq.inserted_blocks < seq.load->end),
          "sequence ", id, " loads blocks, but ", seq.computed, " tokens are computed and ", seq.planned, " planned");
  require(seq.num_cached_tokens >= 0, "sequence ", id, " runs, but its prefix was never looked up");
}

}  // namespace

// Every sequence is in the list of its state, and in no other list.
void Scheduler::Impl::check_lists() const {
  std::array<std::size_t, 5> states{};
  std::int64_t tokens = 0;
  for (const auto& [id, seq] : seqs) {
    ++states[static_cast<std::size_t>(seq->state)];
    require(waiting.contains(seq.get()) == (seq->state == State::waiting), "sequence ", id,
            seq->state == State::waiting ? " waits, but is not in the queue" : " is in the queue, but does not wait");
    if (seq->state != State::running) tokens += seq->prompt_tokens;
  }
  const auto count = [&](State state) { return states[static_cast<std::size_t>(state)]; };
  require(std::ranges::adjacent_find(running, [](auto* a, auto* b) { return !Before{}(a, b); }) == running.end(),
          "running sequences are out of order");
  require(std::ranges::all_of(running, [](const Seq* seq) { return seq->state == State::running; }) &&
              running.size() == count(State::running),
          running.size(), " sequences are listed as running, but ", count(State::running), " run");
  require(waiting.size() == count(State::waiting), waiting.size(), " sequences are queued, but ", count(State::waiting),
          " wait");
  require(impossible.size() == count(State::impossible), impossible.size(), " sequences are listed as impossible, but ",
          count(State::impossible), " are");
  require(tokens == waiting_tokens, tokens, " tokens wait, but the counter is ", waiting_tokens);
  require(std::ssize(running) <= limits.max_batch_size, running.size(),
          " sequences run, more than max_batch_size = ", limits.max_batch_size);
  for (const auto* seq : running) {
    const auto users = std::ranges::count(running, seq->adapter, &Seq::adapter);
    require(seq->adapter == 0 || !adapters.any() || adapters.users(seq->adapter) == users, "adapter ", seq->adapter,
            " of ", users, " running sequences has ", adapters.users(seq->adapter), " users");
  }
  const auto with_adapter = std::ranges::count_if(running, [](const Seq* seq) { return seq->adapter != 0; });
  require(!adapters.any() || adapters.users() == with_adapter, with_adapter,
          " running sequences have an adapter, but the slots have ", adapters.users(), " users");
  const auto decodes = std::ranges::count_if(
      running, [](const Seq* seq) { return seq->is_decode() || (seq->forced && !seq->is_full()); });
  require(decodes <= limits.token_budget, decodes, " decodes exceed token_budget = ", limits.token_budget);
}

void Scheduler::check_integrity() const {
  const auto& impl = *impl_;
  std::vector<std::int32_t> use(static_cast<std::size_t>(impl.pool.num_blocks()), 0);
  std::vector<std::vector<std::int32_t>> unit_use;
  for (const auto& kind : impl.pool.kinds()) unit_use.emplace_back(static_cast<std::size_t>(kind.num_units()), 0);
  for (const auto& [id, owned] : impl.seqs) {
    const auto& seq = *owned;
    require(seq.id == id, "sequence ", id, " has the id ", seq.id);
    check_tokens(seq);
    check_family(seq);
    if (seq.state == State::running) {
      check_running(seq, impl.pool.block_len());
      check_units(seq, impl.pool, impl.limits.token_budget);
      for (const auto block : seq.blocks) ++use.at(static_cast<std::size_t>(block));
      for (std::size_t k = 0; k < unit_use.size(); ++k) {
        for (const auto unit : seq.units[k].units) ++unit_use[k].at(static_cast<std::size_t>(unit));
        if (seq.proposal_units.empty()) continue;
        for (const auto unit : seq.proposal_units[k].units) ++unit_use[k].at(static_cast<std::size_t>(unit));
      }
    } else {
      require(seq.blocks.empty() && seq.units.empty() && seq.nodes.empty() && seq.computed == 0 && seq.planned == 0 &&
                  seq.inserted_blocks == 0 && !seq.forked && seq.proposed.empty() && seq.proposal_units.empty(),
              "sequence ", id, " does not run, but has blocks");
    }
  }
  impl.check_lists();
  impl.pool.check_integrity(use, unit_use);
}

}  // namespace charonia::schedule
