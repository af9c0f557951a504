// Random loads: requests of all kinds arrive, end and are cancelled, on pools of all sizes, with true and wrong
// proposals. After every call the state must be consistent, and every sequence must find its own KV and no other, and
// get the same tokens as alone.
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <random>

#include "charonia/error.h"
#include "scheduler_support.h"

namespace charonia::schedule {
namespace {

struct Load {
  const char* name;
  int num_blocks, block_len;
  Limits limits;
  int max_total;
  bool prefix_caching;
  bool preempts;          // whether preemptions are expected
  int chunk = 0;          // the pool grows by this number of blocks; 0: it does not grow
  int memory_blocks = 0;  // number of blocks with memory, for a pool that grows
  std::vector<cache::UnitKind> kinds = {};
  bool stores = false;  // KV is stored outside the pool, and loaded again
};

void PrintTo(const Load& load, std::ostream* out) { *out << load.name; }

cache::UnitKind states(int num_units, int chunk = 0) {
  return {.num_units = num_units, .chunk = chunk, .kind = CacheKind::state};
}

struct Client {
  std::vector<TokenId> prompt, expected;
  Voice voice;
  std::uint64_t adapter = 0;
  int slot = -1;  // of its adapter, since it runs
  bool all_rows = false;
  std::vector<TokenId> expected_rows, rows;  // of the prompt, if all are requested
  std::int32_t cached_tokens = -1;
};

struct Session {
  std::vector<TokenId> tokens;
  std::uint64_t salt = 0;
  std::vector<cache::PrefixNode> pinned;
};

struct InFlight {
  StepPlan plan;
  StepResult result;
};

// The last parameter: number of steps that run while the next one is planned.
class RandomLoad : public testing::TestWithParam<std::tuple<Load, std::uint64_t, int>> {
 protected:
  static constexpr int kSteps = 1500;

  RandomLoad() : pool_(make_pool()), scheduler_(load_.limits, *pool_, &step_time_), device_(*pool_, windows()) {
    if (load_.stores) scheduler_.set_offload(&offload_);
  }

  std::vector<std::int32_t> windows() const {
    std::vector<std::int32_t> out;
    for (const auto& kind : load_.kinds) out.push_back(kind.window);
    return out;
  }

  int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  bool one_in(int n) { return below(n) == 0; }
  int blocks_for(std::size_t tokens) const {
    return (static_cast<int>(tokens) + load_.block_len - 1) / load_.block_len;
  }

  std::unique_ptr<BlockManager> make_pool() {
    const auto hash = BlockManager::default_hash;
    if (load_.chunk == 0) {
      return std::make_unique<BlockManager>(load_.num_blocks, load_.block_len, load_.prefix_caching, load_.num_blocks,
                                            nullptr, hash, load_.kinds);
    }
    const auto commit = [this](int n) {
      if (one_in(20)) throw Error(ErrorCode::internal, "memory cannot be had just now");
      if (n > load_.memory_blocks) throw Error(ErrorCode::resource_exhausted, "no memory is left");
    };
    for (auto& kind : load_.kinds) kind.commit = commit;
    return std::make_unique<BlockManager>(load_.num_blocks, load_.block_len, load_.prefix_caching, load_.chunk, commit,
                                          hash, load_.kinds);
  }

  // Requests.

  std::vector<TokenId> some_prompt(std::uint64_t& salt) {
    std::vector<TokenId> prompt;
    if (!sessions_.empty() && one_in(3)) {
      const auto& session = sessions_[static_cast<std::size_t>(below(static_cast<int>(sessions_.size())))];
      prompt = session.tokens;
      salt = session.salt;
      if (one_in(3)) prompt.resize(static_cast<std::size_t>(1 + below(static_cast<int>(prompt.size()))));
    }
    // Half of them are short, so that they grow while they decode.
    const auto room = most_ - 1 - std::min(most_ - 2, static_cast<int>(prompt.size()));
    const int more = one_in(2) ? below(3) : below(room);
    for (int i = 0; i < more; ++i) prompt.push_back(one_in(10) ? below(kVocab) : 0);
    if (prompt.empty()) prompt.push_back(below(kVocab));
    prompt.resize(std::min(prompt.size(), static_cast<std::size_t>(most_ - 1)));
    return prompt;
  }

  SeqId submit(const std::vector<TokenId>& prompt, std::uint64_t salt, bool all_rows, SeqId parent) {
    const auto id = next_id_++;
    const auto size = static_cast<int>(prompt.size());
    const int total = size + 1 + below(most_ - size);
    auto& client = clients_[id];
    client.prompt = prompt;
    client.voice = {.salt = salt, .seed = static_cast<std::uint64_t>(below(3))};
    client.all_rows = all_rows;
    if (parent != 0) {
      client.adapter = clients_.at(parent).adapter;
    } else if (load_.limits.adapter_slots > 0) {
      client.adapter = static_cast<std::uint64_t>(below(6));
    }
    client.expected = generate_alone(prompt, static_cast<std::size_t>(total), client.voice,
                                     all_rows ? &client.expected_rows : nullptr);
    voices_[id] = client.voice;
    scheduler_.add(id, prompt, total,
                   {.priority = below(3) - 1,
                    .owner = id % 3,
                    .salt = salt,
                    .adapter = client.adapter,
                    .all_rows = all_rows,
                    .parent = parent,
                    .scope = std::to_string(salt)});
    ++submitted_;
    return id;
  }

  void arrive() {
    auto salt = static_cast<std::uint64_t>(one_in(4));
    auto prompt = some_prompt(salt);
    SeqId parent = 0;
    if (one_in(12) && !clients_.empty()) {  // child of a sequence in any state
      const auto& [id, client] = *std::next(clients_.begin(), below(static_cast<int>(clients_.size())));
      parent = id;
      prompt = client.prompt;
      salt = client.voice.salt;
    }
    const auto first = submit(prompt, salt, one_in(7), parent);
    if (!one_in(6)) return;
    for (int children = 1 + below(3); children > 0; --children) {
      submit(prompt, salt, one_in(20), one_in(8) ? next_id_ - 1 : first);
    }
  }

  void leave(SeqId id) {
    const auto known = static_cast<std::size_t>(scheduler_.num_computed(id));
    // A step in flight may fail.
    if (load_.stores && !in_flight_) {
      offload_.store(std::to_string(clients_.at(id).voice.salt), scheduler_.tokens(id).first(known),
                     scheduler_.inserted(id), scheduler_.hit_ends(id));
    }
    ASSERT_TRUE(scheduler_.remove(id));
    clients_.erase(id);
    steps_since_end_ = 0;
  }

  // A session keeps the blocks of a turn that ends, within a quota.
  void remember(SeqId id) {
    const auto& client = clients_.at(id);
    auto nodes = scheduler_.inserted(id);
    if (nodes.size() > 6 && one_in(2)) nodes.resize(6);
    Session* session = nullptr;
    if (sessions_.size() < 12) {
      session = &sessions_.emplace_back();
    } else {
      session = &sessions_[static_cast<std::size_t>(below(static_cast<int>(sessions_.size())))];
    }
    const auto tokens = scheduler_.tokens(id);
    pool_->pin(nodes);
    pool_->unpin(session->pinned);
    session->pinned = std::move(nodes);
    session->salt = client.voice.salt;
    session->tokens.assign(tokens.begin(), tokens.end() - (tokens.back() < 0 ? 1 : 0));
  }

  void maybe_one_leaves() {
    if (!clients_.empty() && one_in(80)) {
      const auto id = std::next(clients_.begin(), below(static_cast<int>(clients_.size())))->first;
      if (one_in(2)) {
        remember(id);
      } else if (one_in(3)) {  // its logits were not finite
        scheduler_.forget_prefix(id);
        offload_.forget(std::to_string(clients_.at(id).voice.salt), scheduler_.tokens(id));
        ASSERT_NO_THROW(scheduler_.check_integrity());
      }
      ++cancelled_;
      leave(id);
    }
    if (!sessions_.empty() && one_in(60)) {
      const auto index = below(static_cast<int>(sessions_.size()));
      pool_->unpin(sessions_[static_cast<std::size_t>(index)].pinned);
      sessions_.erase(sessions_.begin() + index);
    }
  }

  // Appends some of the next tokens, as in structured output; perhaps all of them.
  void append_known(SeqId id) {
    if (appends_() % 4 != 0) return;
    const auto& expected = clients_.at(id).expected;
    const auto begin = scheduler_.tokens(id).size();
    const auto end = std::min(expected.size(), begin + 1 + appends_() % 8);
    for (auto i = begin; i < end; ++i) scheduler_.append(id, expected[i]);
    appended_ += static_cast<int>(end - begin);
    ASSERT_NO_THROW(scheduler_.check_integrity());
  }

  // Whether proposals may have states while max_batch_size sequences run.
  bool spare_states() const {
    return std::ranges::none_of(load_.kinds, [&](const auto& kind) {
      return kind.kind == CacheKind::state && kind.num_units < load_.limits.max_batch_size;
    });
  }

  // Proposes the next tokens of some sequences. Some of them are wrong.
  void propose_tokens() {
    for (const auto& [id, client] : clients_) {
      if (drafts_() % 3 != 0) continue;
      const auto begin = scheduler_.tokens(id).size();
      const auto count = 1 + drafts_() % 9;
      std::vector<TokenId> tokens;
      for (auto i = begin; i < begin + count; ++i) {
        const bool wrong = i >= client.expected.size() || drafts_() % 6 == 0;
        tokens.push_back(wrong ? static_cast<TokenId>(drafts_() % kVocab) : client.expected[i]);
      }
      scheduler_.propose(id, std::move(tokens));
    }
    ASSERT_NO_THROW(scheduler_.check_integrity());
  }

  // rows: the tokens that were sampled after the proposals of a part.
  void accept_proposals(const ScheduledSeq& part, std::span<const TokenId> rows) {
    for (const auto token : rows) {
      if (one_in(40)) {
        scheduler_.sample_again(part.id);
        ASSERT_NO_THROW(scheduler_.check_integrity());
        clients_.at(part.id).slot = -1;
        return;
      }
      const auto proposed = scheduler_.proposed(part.id);
      const bool is_true = !proposed.empty() && proposed.front() == scheduler_.tokens(part.id).back();
      ASSERT_EQ(scheduler_.accept(part.id, token), is_true);
      ASSERT_NO_THROW(scheduler_.check_integrity());
      if (!is_true) return;
      ++accepted_;
    }
  }

  // Steps.

  // planned: the next step is already planned.
  void settle(bool planned) {
    const auto settled = std::exchange(in_flight_, std::nullopt);
    scheduler_.resolve(settled->plan, settled->result.sampled);
    ASSERT_NO_THROW(scheduler_.check_integrity());
    auto row = settled->result.rows.begin();
    for (const auto& part : settled->plan.seqs) {
      const auto first_row = std::exchange(row, row + part.num_logits_rows());
      const auto found = clients_.find(part.id);
      if (found == clients_.end()) continue;
      auto& client = found->second;
      if (part.all_rows) {
        ASSERT_TRUE(client.all_rows);
        ASSERT_EQ(std::ssize(client.rows), part.first_position) << "a row is missing or came twice";
        client.rows.insert(client.rows.end(), first_row, row);
        ASSERT_LE(client.rows.size(), client.prompt.size());
        ASSERT_TRUE(std::equal(client.rows.begin(), client.rows.end(), client.expected_rows.begin()));
      }
      ASSERT_TRUE(!part.samples || client.rows.size() == client.expected_rows.size())
          << "a token was sampled before all rows came";
      const auto proposed_rows = std::span(first_row, row).last(static_cast<std::size_t>(part.num_proposed));
      if (part.num_proposed > 0) accept_proposals(part, proposed_rows);
      if (HasFailure()) return;
      if (!planned && part.samples) append_known(part.id);
      const auto tokens = scheduler_.tokens(part.id);
      ASSERT_LE(tokens.size(), client.expected.size());
      ASSERT_TRUE(std::equal(tokens.begin(), tokens.end(), client.expected.begin())) << "sequence " << part.id;
      const auto cached = scheduler_.num_cached_tokens(part.id);
      ASSERT_TRUE(cached >= 0 && cached < std::ssize(client.prompt));
      ASSERT_TRUE(client.cached_tokens == -1 || client.cached_tokens == cached);
      ASSERT_TRUE(cached == 0 || !client.all_rows);
      client.cached_tokens = cached;
      if (tokens.size() < client.expected.size()) continue;
      remember(part.id);
      ++finished_;
      leave(part.id);
    }
  }

  void check_waiting() const {
    std::int64_t tokens = 0;
    int waiting = 0;
    for (const auto& [id, client] : clients_) {
      if (!scheduler_.blocks(id).empty()) continue;
      ++waiting;
      tokens += std::ssize(client.prompt);
    }
    ASSERT_EQ(scheduler_.num_waiting(), waiting);
    ASSERT_EQ(scheduler_.waiting_tokens(), tokens);
  }

  // The adapters of running sequences have different slots, which do not change while a sequence runs.
  void check_adapters() {
    std::map<int, std::uint64_t> in_slots;
    for (auto& [id, client] : clients_) {
      const int slot = scheduler_.adapter_slot(id), before = std::exchange(client.slot, slot);
      const bool runs = !scheduler_.blocks(id).empty();
      ASSERT_EQ(slot >= 0, runs && client.adapter != 0 && load_.limits.adapter_slots > 0);
      ASSERT_LT(slot, std::max(1, load_.limits.adapter_slots));
      if (slot < 0) continue;
      ASSERT_EQ(in_slots.try_emplace(slot, client.adapter).first->second, client.adapter);
      ASSERT_TRUE(before == slot || before < 0);
    }
  }

  // Makes a plan and checks it. Empty if the pool's memory failed during it.
  std::optional<StepPlan> next_plan() {
    std::vector<SeqId> decodes;
    bool may_hold = false;
    for (const auto& [id, client] : clients_) {
      const auto computed = scheduler_.num_computed(id);
      const auto tokens = scheduler_.tokens(id);
      may_hold |= tokens.size() == client.expected.size();
      may_hold |= tokens.back() < 0 && blocks_for(tokens.size()) > pool_->num_blocks();
      const bool forked = computed < std::ssize(client.prompt);  // perhaps in a discarded plan
      if (computed > 0 && !forked && computed + 1 == std::ssize(tokens) && tokens.size() < client.expected.size()) {
        decodes.push_back(id);
      }
    }
    std::optional<StepPlan> plan;
    const auto before = pool_->num_blocks();
    try {
      plan = scheduler_.plan();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "memory cannot be had just now");
    }
    EXPECT_NO_THROW(scheduler_.check_integrity());
    check_waiting();
    if (!plan) return plan;
    may_hold |= pool_->num_blocks() < before;
    const auto planned = ids_of(*plan);
    for (const auto id : decodes) {
      const auto times = std::ranges::count(planned, id) + std::ranges::count(plan->preempted, id) +
                         std::ranges::count(plan->impossible, id);
      EXPECT_TRUE(times == 1 || (may_hold && times == 0)) << "a decode is not in the plan";
    }
    check_plan(scheduler_, *plan, load_.limits);
    check_adapters();
    for (const auto id : plan->impossible) {
      EXPECT_GT(blocks_for(scheduler_.tokens(id).size()), pool_->num_blocks());
      ++impossible_;
      leave(id);
    }
    EXPECT_TRUE(!plan->empty() || clients_.empty() || in_flight_ || plan->waits_for_load);
    return plan;
  }

  void run_step(int depth) {
    // Sometimes waits for the result before it plans the next step.
    const auto proposes = [](const ScheduledSeq& part) { return part.num_proposed > 0; };
    if (in_flight_ && (one_in(10) || std::ranges::any_of(in_flight_->plan.seqs, proposes))) settle(false);
    if (HasFailure()) return;
    if (!in_flight_) propose_tokens();
    auto plan = next_plan();
    if (HasFailure() || !plan) return;
    const bool fails = one_in(50);
    StepResult result;
    if (fails) {
      device_.fail(scheduler_, *plan);
    } else {
      result = device_.step(scheduler_, *plan, voices_);
    }
    if (HasFailure()) return;
    maybe_one_leaves();
    if (in_flight_) settle(true);
    if (fails || HasFailure()) return;  // the step is planned again
    // Random step times: they affect only how much is computed together.
    std::uniform_int_distribution<int> any(0, 40);
    step_time_.measured({any(times_), any(times_), any(times_)}, any(times_));
    scheduler_.advance(*plan);
    ASSERT_NO_THROW(scheduler_.check_integrity());
    in_flight_ = InFlight{std::move(*plan), std::move(result)};
    if (depth == 0) settle(false);
  }

  Load load_ = std::get<0>(GetParam());
  std::mt19937_64 random_{std::get<1>(GetParam())};
  std::mt19937_64 times_{random_}, appends_{random_}, drafts_{random_};
  std::unique_ptr<BlockManager> pool_;
  // Every second seed has no limit.
  StepTime step_time_{std::get<1>(GetParam()) % 2 == 0 ? 0 : -1, 0, load_.limits.token_budget};
  Scheduler scheduler_;
  FakeDevice device_;
  FakeOffload offload_{device_, *pool_};
  const int most_ = std::min(load_.max_total, load_.num_blocks* load_.block_len);
  std::map<SeqId, Client> clients_;
  std::map<SeqId, Voice> voices_;
  std::vector<Session> sessions_;
  std::optional<InFlight> in_flight_;
  SeqId next_id_ = 1;
  int steps_since_end_ = 0;
  int accepted_ = 0, appended_ = 0, submitted_ = 0, finished_ = 0, cancelled_ = 0, impossible_ = 0;
};

TEST_P(RandomLoad, EverySequenceGetsTheSameTokensAsAlone) {
  SCOPED_TRACE(testing::Message() << "load " << load_.name << ", seed " << std::get<1>(GetParam()) << ", depth "
                                  << std::get<2>(GetParam()));
  for (int i = 0; i < kSteps || !clients_.empty(); ++i) {
    if (i < kSteps) {
      const bool burst = i % 200 < 10;
      while (clients_.size() < 40 && one_in(burst ? 2 : 8)) arrive();
      maybe_one_leaves();
    }
    run_step(std::get<2>(GetParam()));
    ASSERT_FALSE(HasFailure()) << "in step " << i;
    // In the worst case every running sequence reaches its second last token before the first of them ends.
    const int bound = 2 * most_ * (load_.limits.max_batch_size + 1) + 50;
    ASSERT_LT(++steps_since_end_, bound) << "no sequence ends";
  }
  EXPECT_EQ(finished_ + cancelled_ + impossible_, submitted_);
  EXPECT_EQ(scheduler_.num_running() + scheduler_.num_waiting(), 0);
  EXPECT_EQ(scheduler_.waiting_tokens(), 0);
  EXPECT_EQ(pool_->num_active(), 0);
  EXPECT_EQ(pool_->num_available(), pool_->num_blocks());
  for (const auto& kind : pool_->kinds()) EXPECT_EQ(kind.num_available(), kind.num_units());
  EXPECT_EQ(pool_->num_blocks(), load_.memory_blocks > 0 ? load_.memory_blocks : load_.num_blocks);
  for (const auto& session : sessions_) pool_->unpin(session.pinned);
  EXPECT_EQ(pool_->num_pinned(), 0);
  EXPECT_NO_THROW(scheduler_.check_integrity());
  EXPECT_GT(finished_, 25);
  EXPECT_GT(appended_, 25);
  if (load_.limits.token_budget == 1) {
    EXPECT_EQ(accepted_, 0);
  } else if (load_.limits.max_logits_rows == 0 && spare_states()) {
    EXPECT_GT(accepted_, 0);
  }
  RecordProperty("finished", finished_);
  RecordProperty("impossible", impossible_);
  RecordProperty("preemptions", static_cast<int>(scheduler_.num_preemptions()));
  RecordProperty("prefix_hit_tokens", static_cast<int>(scheduler_.prefix_hit_tokens()));
  EXPECT_EQ(scheduler_.num_preemptions() > 0, load_.preempts);
  EXPECT_EQ(scheduler_.prefix_hit_tokens() > 0, load_.prefix_caching);
  EXPECT_EQ(offload_.num_done() > 0, load_.stores);
  EXPECT_EQ(scheduler_.loaded_tokens() > 0, load_.stores);
}

// 40 loads, 4 seeds, 2 depths, at least 1500 steps: more than 480,000 in all.
INSTANTIATE_TEST_SUITE_P(
    Loads, RandomLoad,
    testing::Combine(
        testing::Values(Load{"roomy", 700, 4, {16, 64}, 40, true, false}, Load{"tight", 16, 2, {8, 16}, 24, true, true},
                        Load{"tiny", 6, 2, {8, 8}, 12, true, true}, Load{"long", 40, 2, {20, 30, 24}, 70, true, true},
                        Load{"blocks_of_one", 18, 1, {6, 10}, 18, true, true},
                        Load{"budget_of_one", 10, 2, {5, 1}, 16, true, true},
                        Load{"budget_below_batch", 12, 3, {12, 4}, 24, true, true},
                        Load{"one_at_a_time", 30, 4, {1, 16, 1}, 30, true, false},
                        Load{"one_adapter", 700, 4, {16, 64, 0, 2048, 1, 1}, 40, true, false},
                        Load{"few_adapters", 16, 2, {8, 16, 0, 2048, 1, 2}, 24, true, true},
                        Load{"enough_adapters", 16, 2, {8, 16, 0, 2048, 1, 8}, 24, true, true},
                        Load{"no_prefixes", 16, 2, {8, 16}, 24, false, true},
                        Load{"few_rows", 26, 4, {6, 40, 6}, 40, true, true},
                        Load{"stores", 16, 2, {8, 16}, 24, true, true, 0, 0, {}, true},
                        Load{"stores_few_rows", 40, 2, {6, 30, 6}, 70, true, true, 0, 0, {}, true},
                        Load{"stores_budget_of_one", 12, 2, {5, 1}, 16, true, true, 0, 0, {}, true},
                        Load{"stores_grows", 64, 2, {16, 30, 20}, 60, true, true, 5, 30, {}, true},
                        Load{"grows", 64, 2, {16, 30, 20}, 60, true, true, 5, 30},
                        Load{"hardly_grows", 20, 2, {8, 16}, 40, true, true, 3, 6},
                        Load{"grows_without_prefixes", 40, 3, {8, 20, 9}, 60, false, true, 4, 16},
                        Load{"window", 700, 4, {16, 64}, 60, true, false, 0, 0, {{9, 500}}},
                        Load{"window_tight", 16, 2, {8, 16}, 24, true, true, 0, 0, {{5, 12}}},
                        Load{"few_units", 60, 2, {8, 16}, 60, true, true, 0, 0, {{7, 9}}},
                        Load{"units_of_one", 18, 1, {6, 10}, 18, true, true, 0, 0, {{1, 4}}},
                        Load{"window_without_prefixes", 30, 2, {8, 16}, 40, false, true, 0, 0, {{6, 14}}},
                        Load{"window_budget_of_one", 14, 2, {5, 1}, 24, true, true, 0, 0, {{3, 7}}},
                        Load{"window_grows", 40, 2, {8, 16}, 50, true, true, 5, 20, {{6, 30, 3}}},
                        Load{"stores_window", 40, 2, {8, 16}, 40, true, true, 0, 0, {{5, 20}}, true},
                        Load{"stores_few_units", 60, 2, {8, 16}, 60, true, true, 0, 0, {{7, 9}}, true},
                        Load{"stores_window_of_one", 18, 1, {6, 10}, 18, true, true, 0, 0, {{1, 4}}, true},
                        Load{"stores_window_grows", 40, 2, {8, 16}, 50, true, true, 5, 20, {{6, 30, 3}}, true},
                        Load{"stores_states", 40, 2, {8, 16, 0, 6}, 50, true, true, 0, 0, {states(12)}, true},
                        Load{"stores_few_states", 60, 2, {8, 16, 0, 6}, 60, true, true, 0, 0, {states(4)}, true},
                        Load{"stores_both", 40, 3, {8, 12, 9, 9}, 50, true, true, 0, 0, {{4, 12}, states(10)}, true},
                        Load{"states", 700, 4, {16, 64, 0, 16}, 60, true, false, 0, 0, {states(60)}},
                        Load{"states_tight", 16, 2, {8, 16, 0, 8}, 24, true, true, 0, 0, {states(12)}},
                        Load{"few_states", 60, 2, {8, 16, 0, 6}, 60, true, true, 0, 0, {states(3)}},
                        Load{"states_and_window", 40, 3, {8, 12, 9, 9}, 50, true, true, 0, 0, {{4, 12}, states(10)}},
                        Load{"states_without_prefixes", 30, 2, {8, 16}, 40, false, true, 0, 0, {states(8)}},
                        Load{"states_grow", 40, 2, {8, 16, 0, 4}, 50, true, true, 5, 20, {states(30, 3)}}),
        testing::Range<std::uint64_t>(1, 5), testing::Values(0, 1)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param)) + "_depth_" +
             std::to_string(std::get<2>(info.param));
    });

}  // namespace
}  // namespace charonia::schedule
