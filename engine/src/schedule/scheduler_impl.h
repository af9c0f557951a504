// What a Scheduler is inside: the sequences and the single changes of their state. scheduler.cpp has the calls,
// scheduler_plan.cpp the planning of a step, scheduler_check.cpp the integrity check.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "schedule/scheduler.h"

namespace charonia::schedule {

[[noreturn]] inline void broken(const std::string& what) { throw Error(ErrorCode::internal, cat("scheduler: ", what)); }

enum class State {
  waiting,     // in the queue
  held,        // waits for its parent's prompt to be computed, beside the queue
  running,     // holds blocks
  impossible,  // needs more blocks than there are
};

struct Seq {
  SeqId id = 0;
  int priority = 0;
  std::uint64_t arrival = 0;
  std::uint64_t salt = 0;
  bool all_rows = false;
  std::int32_t prompt_tokens = 0;
  std::int32_t max_total_tokens = 0;
  std::vector<TokenId> tokens;  // prompt and sampled; the last may be a placeholder
  std::int32_t num_cached_tokens = -1;
  std::int32_t rows_given = 0;  // with all_rows: the prompt's first rows that steps which advanced have computed

  State state = State::waiting;
  Seq* parent = nullptr;       // whose blocks it is to begin with; null once a step with it has advanced
  std::vector<Seq*> children;  // whose parent this is
  // When it was looked up last it needed `need` of the available blocks. The index had brought `gains_then` blocks into
  // use by then; each one since may have made that one less.
  std::int32_t need = 0;
  std::int64_t gains_then = 0;

  // While it runs; all zero and empty otherwise.
  std::vector<cache::BlockId> blocks;
  std::int32_t computed = 0;             // tokens whose KV is in the blocks
  std::int32_t planned = 0;              // tokens of the plan that has not advanced yet
  std::int32_t inserted_blocks = 0;      // full blocks that are in the prefix index
  std::vector<cache::PrefixNode> nodes;  // of those, where there is an index
  bool forked = false;                   // began with its parent's blocks in the plan that has not advanced yet

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t gap() const { return num_tokens() - computed; }
  bool has_placeholder() const { return tokens.back() < 0; }
  bool is_full() const { return num_tokens() >= max_total_tokens; }
  bool has_computed_prompt() const { return state == State::running && computed >= prompt_tokens; }
};

struct Before {
  bool operator()(const Seq* a, const Seq* b) const {
    return a->priority != b->priority ? a->priority > b->priority : a->arrival < b->arrival;
  }
};

struct Scheduler::Impl {
  Impl(Limits limits_in, cache::BlockManager& pool_in)
      : limits(limits_in), pool(pool_in), max_blocks(pool_in.num_blocks()), num_blocks(max_blocks) {}

  Seq& at(SeqId id) const {
    const auto found = seqs.find(id);
    if (found == seqs.end()) broken(cat("sequence ", id, " is not known"));
    return *found->second;
  }

  std::int32_t blocks_for(std::int32_t tokens) const { return (tokens + pool.block_len() - 1) / pool.block_len(); }
  bool cannot_fit(const Seq& seq) const { return blocks_for(seq.num_tokens()) > pool.num_blocks(); }

  // Whether it will need another block than those for its tokens so far; what there is not it cannot wait for. Does not
  // count the place of the last token it may sample: that one's KV is never needed.
  bool will_need_more_blocks(const Seq& seq) const {
    const auto most = std::min(blocks_for(seq.max_total_tokens - 1), pool.num_blocks());
    return most > (seq.state == State::running ? std::ssize(seq.blocks) : blocks_for(seq.num_tokens()));
  }

  // ---- changes of state ----

  void enqueue(Seq& seq) {
    seq.state = State::waiting;
    waiting.insert(&seq);
  }

  void leave_parent(Seq& seq) {
    if (seq.parent == nullptr) return;
    std::erase(seq.parent->children, &seq);
    seq.parent = nullptr;
  }

  // Once its prompt is computed.
  void let_children_in(const Seq& seq) {
    for (auto* child : seq.children) {
      if (child->state == State::held) enqueue(*child);
    }
  }

  // From now on they are sequences like any other.
  void leave_children(Seq& seq) {
    for (auto* child : seq.children) {
      child->parent = nullptr;
      if (child->state == State::held) enqueue(*child);
    }
    seq.children.clear();
  }

  // The caller gives it its next state.
  void stop_running(Seq& seq) {
    running.erase(std::ranges::lower_bound(running, &seq, Before{}));
    pool.release(seq.blocks);
    seq.blocks.clear();
    seq.nodes.clear();
    seq.computed = seq.planned = seq.inserted_blocks = seq.need = 0;
    if (seq.forked) {
      seq.forked = false;
      seq.num_cached_tokens = -1;
    }
    waiting_tokens += seq.prompt_tokens;
    leave_children(seq);
  }

  void give_up(Seq& seq) {
    if (seq.state == State::running) stop_running(seq);
    if (seq.state == State::waiting) waiting.erase(&seq);
    leave_parent(seq);
    leave_children(seq);
    seq.state = State::impossible;
    impossible.push_back(&seq);
  }

  // Puts the full blocks of what is computed into the prefix index. Where an equal block is there already, the sequence
  // goes over to it: that saves a block, and keeps Active what its later blocks hang behind.
  void insert(Seq& seq) {
    const auto length = static_cast<std::size_t>(pool.block_len());
    const std::span<const TokenId> tokens(seq.tokens);
    for (; (seq.inserted_blocks + 1) * pool.block_len() <= seq.computed; ++seq.inserted_blocks) {
      const auto index = static_cast<std::size_t>(seq.inserted_blocks);
      auto& block = seq.blocks[index];
      const auto parent = seq.nodes.empty() ? cache::PrefixNode{} : seq.nodes.back();
      const auto node = pool.insert(parent, block, tokens.subspan(index * length, length), seq.salt);
      if (node.unique_id == parent.unique_id) continue;  // there is no index
      if (node.block != block) {
        pool.retain({&node.block, 1});
        pool.release({&block, 1});
        block = node.block;
      }
      seq.nodes.push_back(node);
      // Nobody who waits begins with what others sample, or if so they may wait until something is released.
      if (seq.inserted_blocks * pool.block_len() < seq.prompt_tokens) ++gains;
    }
  }

  // ---- of plan(), in scheduler_plan.cpp ----

  void begin_plan();
  void plan_decodes(StepPlan& plan);
  void plan_prefill(StepPlan& plan);
  bool schedule(Seq& seq, StepPlan& plan);
  bool reserve_blocks(Seq& seq, StepPlan& plan);
  void preempt(Seq& seq, StepPlan& plan);
  bool admit(Seq& seq, StepPlan& plan);
  bool begin_anew(Seq& seq, std::int32_t slack);
  bool begin_with_parent(Seq& seq, std::int32_t slack, StepPlan& plan);
  bool notice_fewer_blocks();
  void count_reserve();

  Limits limits;
  cache::BlockManager& pool;
  int max_blocks;   // of the pool at construction
  int num_blocks;   // of the pool when last looked at
  std::unordered_map<SeqId, std::unique_ptr<Seq>> seqs;
  std::vector<Seq*> running;  // in the order of Before
  std::set<Seq*, Before> waiting;
  std::vector<Seq*> impossible;
  std::int64_t waiting_tokens = 0;  // prompt tokens of all that do not run
  std::int64_t gains = 0;           // blocks that came into use and that a waiting sequence may begin with
  std::vector<Seq*> collected;      // working memory of plan() and advance(), as are of plan():
  int num_ending = 0;               // running sequences whose last token is a placeholder
  int num_held = 0;                 // decodes that wait for the blocks of those
  int rows_left = 0;                // of logits, in this step
  int reserve = 0;                  // running sequences that will need another block
  std::uint64_t arrivals = 0;
  std::int64_t num_preemptions = 0, prefix_query_tokens = 0, prefix_hit_tokens = 0;
};

}  // namespace charonia::schedule
