#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

void Scheduler::check_integrity() const {
  const auto& impl = *impl_;
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) broken(cat(what...));
  };
  std::vector<std::int32_t> use(static_cast<std::size_t>(impl.pool.num_blocks()), 0);
  std::size_t states[4] = {};
  std::int64_t waiting_tokens = 0;
  for (const auto& [id, owned] : impl.seqs) {
    const auto& seq = *owned;
    ++states[static_cast<std::size_t>(seq.state)];
    require(seq.id == id, "sequence ", id, " believes to be ", seq.id);
    require(std::ranges::all_of(std::span(seq.tokens).first(seq.tokens.size() - 1), [](auto t) { return t >= 0; }),
            "sequence ", id, " has a placeholder that is not its last token");
    require(seq.num_tokens() <= seq.max_total_tokens, "sequence ", id, " has ", seq.num_tokens(), " tokens, at most ",
            seq.max_total_tokens, " are allowed");
    require(seq.rows_given >= 0 && seq.rows_given <= (seq.all_rows ? seq.prompt_tokens : 0), "sequence ", id, " has ",
            seq.rows_given, " rows of logits, its prompt has ", seq.prompt_tokens, " tokens");
    for (const auto* child : seq.children) {
      require(child->parent == &seq, "sequence ", id, " has ", child->id, " for a child, which has another parent");
      require((child->state == State::held) == !seq.has_computed_prompt(), "sequence ", child->id,
              seq.has_computed_prompt() ? " waits for the prompt of its parent " : " does not wait for its parent ",
              id);
    }
    require(seq.parent != nullptr || seq.state != State::held, "sequence ", id, " waits for no parent");
    require(seq.parent == nullptr || std::ranges::count(seq.parent->children, &seq) == 1, "sequence ", id,
            " is no child of its parent");
    if (seq.state != State::running) {
      waiting_tokens += seq.prompt_tokens;
      require(impl.waiting.contains(owned.get()) == (seq.state == State::waiting), "sequence ", id,
              " is in the queue, or not, against its state");
      require(seq.blocks.empty() && seq.nodes.empty() && seq.computed == 0 && seq.planned == 0 &&
                  seq.inserted_blocks == 0 && !seq.forked,
              "sequence ", id, " does not run and holds blocks");
      continue;
    }
    const auto length = impl.pool.block_len();
    const auto capacity = static_cast<std::int32_t>(seq.blocks.size()) * length;
    require(seq.gap() >= 1, "sequence ", id, " has ", seq.computed, " computed of ", seq.num_tokens(), " tokens");
    require(seq.computed + seq.planned <= std::min(capacity, seq.num_tokens()), "sequence ", id, " has blocks for ",
            capacity, " tokens, computed and planned are ", seq.computed, " + ", seq.planned);
    require(seq.inserted_blocks == seq.computed / length, "sequence ", id, " has ", seq.inserted_blocks,
            " inserted blocks with ", seq.computed, " tokens computed");
    require(seq.nodes.empty() || std::ssize(seq.nodes) == seq.inserted_blocks, "sequence ", id, " has ",
            seq.nodes.size(), " nodes of ", seq.inserted_blocks, " inserted blocks");
    for (std::size_t i = 0; i < seq.nodes.size(); ++i) {
      require(seq.nodes[i].block == seq.blocks[i], "sequence ", id, " inserted block ", seq.nodes[i].block,
              " and uses block ", seq.blocks[i], " for it");
    }
    require(!seq.forked || (seq.computed == seq.prompt_tokens - 1 && seq.num_tokens() == seq.prompt_tokens),
            "sequence ", id, " began with its parent's blocks and has ", seq.computed, " of ", seq.prompt_tokens,
            " tokens computed");
    require(seq.num_cached_tokens >= 0, "sequence ", id, " runs and was never looked up");
    for (const auto block : seq.blocks) ++use.at(static_cast<std::size_t>(block));
  }
  const auto count = [&](State state) { return states[static_cast<std::size_t>(state)]; };
  require(
      std::ranges::adjacent_find(impl.running, [](auto* a, auto* b) { return !Before{}(a, b); }) == impl.running.end(),
      "running sequences are out of order");
  require(std::ranges::all_of(impl.running, [](const Seq* seq) { return seq->state == State::running; }) &&
              impl.running.size() == count(State::running),
          impl.running.size(), " sequences are listed as running, ", count(State::running), " run");
  require(impl.waiting.size() == count(State::waiting), impl.waiting.size(), " sequences are queued, ",
          count(State::waiting), " wait");
  require(impl.impossible.size() == count(State::impossible), impl.impossible.size(),
          " sequences are listed as impossible, ", count(State::impossible), " are");
  require(waiting_tokens == impl.waiting_tokens, waiting_tokens, " tokens wait, counted as ", impl.waiting_tokens);
  require(num_running() <= impl.limits.max_batch_size, num_running(), " sequences run, at most ",
          impl.limits.max_batch_size, " may");
  const auto decodes =
      std::ranges::count_if(impl.running, [](const Seq* seq) { return seq->gap() == 1 && !seq->is_full(); });
  require(decodes <= impl.limits.token_budget, decodes, " decodes, and the budget is ", impl.limits.token_budget);
  impl.pool.check_integrity(use);
}

}  // namespace charonia::schedule
