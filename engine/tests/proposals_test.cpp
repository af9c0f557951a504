// Sources of proposals, and the choice of their number.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "charonia/config.h"
#include "charonia/error.h"
#include "charonia/metrics.h"
#include "runtime/ngram_source.h"
#include "runtime/proposals.h"

namespace charonia::runtime {
namespace {

using Tokens = std::vector<TokenId>;
using Candidates = std::vector<SpeculationPolicy::Candidate>;

TEST(NgramSource, ProposesWhatFollowedTheLongestMatch) {
  NgramSource source;
  EXPECT_EQ(source.propose(Tokens{1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}, 2).tokens, (Tokens{4, 9}));
  EXPECT_TRUE(NgramSource().propose(Tokens{1, 2, 3, 4}, 4).tokens.empty());
  EXPECT_TRUE(NgramSource().propose(Tokens{1}, 4).tokens.empty());
  EXPECT_TRUE(NgramSource().propose(Tokens{1, 2, 1, 2}, 0).tokens.empty());
}

TEST(NgramSource, PrefersTheLatestOfEqualMatchesAndRepeatsAPeriod) {
  EXPECT_EQ(NgramSource().propose(Tokens{1, 2, 3, 1, 2, 4, 1, 2}, 1).tokens, Tokens{4});
  EXPECT_EQ(NgramSource().propose(Tokens{5, 1, 2, 1, 2}, 5).tokens, (Tokens{1, 2, 1, 2, 1}));
}

// The slow reference compares every place.
TEST(NgramSource, EqualsASearchOverAllPlaces) {
  for (const std::int32_t prompt : {0, 3, 200}) {
    std::mt19937 random(3);
    NgramSource source(prompt == 0 ? nullptr : NgramSource::prompt_index(prompt), prompt);
    Tokens tokens;
    for (int i = 0; i < 600; ++i) {
      tokens.push_back(static_cast<TokenId>(random() % 9));
      if (std::ssize(tokens) < prompt || random() % 3 == 0) continue;  // several tokens come between two calls
      int longest = 1;
      std::size_t best = 0;
      for (auto place = tokens.size() - 1; place >= 2; --place) {
        int length = 0;
        while (length < static_cast<int>(place) &&
               tokens[place - 1 - static_cast<std::size_t>(length)] ==
                   tokens[tokens.size() - 1 - static_cast<std::size_t>(length)]) {
          ++length;
        }
        if (length > longest) longest = length, best = place;
      }
      const auto got = source.propose(tokens, 1).tokens;
      ASSERT_EQ(got, best == 0 ? Tokens{} : Tokens{tokens[best]}) << "with " << tokens.size() << " tokens";
    }
  }
}

TEST(NgramSource, ACallReadsABoundedNumberOfTokensTheLastOnesFirst) {
  Tokens prompt = {1, 2, 50, 3, 4, 60};  // 1 2 is far from the end
  for (TokenId id = 100; id < 400; ++id) prompt.push_back(id);
  prompt.insert(prompt.end(), {3, 4, 70, 1, 2});
  const auto size = static_cast<std::int32_t>(prompt.size());
  const auto index = NgramSource::prompt_index(size);
  NgramSource one(index, size), other(index, size);
  EXPECT_TRUE(one.propose(prompt, 1, 100).tokens.empty());
  EXPECT_EQ(index->next(), size - 1 - 100);
  auto longer = prompt;
  longer.insert(longer.end(), {3, 4});
  EXPECT_EQ(other.propose(longer, 1, 2 + 100).tokens, Tokens{70});
  EXPECT_EQ(index->next(), size - 1 - 200) << "both sources extend one index";
  EXPECT_TRUE(one.propose(prompt, 1, 50).tokens.empty());
  EXPECT_EQ(one.propose(prompt, 1, 1000).tokens, Tokens{50});
  EXPECT_EQ(index->next(), 1);
  EXPECT_EQ(other.propose(longer, 1, 0).tokens, Tokens{70});
}

// Pairs whose numbers are all multiples of the number of buckets.
TEST(NgramSource, NoPromptPutsItsPairsIntoOneBucket) {
  constexpr std::uint64_t kPairs = 30000;
  std::unordered_map<std::uint64_t, int, PairHash> map(kPairs);
  std::vector<std::size_t> sizes(map.bucket_count());
  std::size_t largest = 0;
  for (std::uint64_t i = 0; i < kPairs; ++i) {
    largest = std::max(largest, ++sizes[map.bucket(i * map.bucket_count())]);
  }
  EXPECT_LT(largest, 50U);
}

TEST(SpeculationMetrics, HaveALabelForEachProposal) {
  EngineConfig config;
  apply_settings({{"speculative_tokens", std::to_string(kMaxProposals)}}, config);
  EXPECT_THROW(apply_settings({{"speculative_tokens", std::to_string(kMaxProposals + 1)}}, config), Error);
}

TEST(Acceptance, FollowsTheShareOfAcceptedProposals) {
  Acceptance acceptance;
  const double first = acceptance.rate(2);
  for (int i = 0; i < 50; ++i) acceptance.add(2, 4, 0);
  EXPECT_LT(acceptance.rate(2), 0.1);
  for (int i = 0; i < 50; ++i) acceptance.add(2, 4, 4);
  EXPECT_GT(acceptance.rate(2), 0.9);
  Acceptance fresh;
  EXPECT_EQ(fresh.rate(2), first);
}

TEST(RowTimes, ExpectTheLeastOfRowsThatAreNotMeasured) {
  RowTimes times;
  EXPECT_EQ(times.at(4), 0);
  times.add(4, 4.0);
  EXPECT_DOUBLE_EQ(times.at(2), 2.0);
  EXPECT_DOUBLE_EQ(times.at(100), 4.0);
  times.add(8, 6.0);
  EXPECT_DOUBLE_EQ(times.at(6), 4.0);
  for (int i = 0; i < 100; ++i) times.add(8, 8.0);
  EXPECT_NEAR(times.at(8), 8.0, 1e-6);
  for (int rows = 1; rows < 5000; ++rows) ASSERT_LE(times.at(rows), times.at(rows + 1) + 1e-9);
}

// A server with more requests than the batch takes, in which each step takes the given time for its rows. wait_s: what
// an asynchronous device loses if a step waits for samples; 0: the device is synchronous.
struct Simulation {
  int decodes;
  std::function<double(int rows)> seconds;
  double wait_s = 0;
  double matches = 0.5;                    // the share of sequences with a match in a step
  std::array<double, 3> accepted{};        // the rates of proposals with confidence 0, 1 and 2
  int max_tokens = 64;
  int requests = 2;                        // of each place in the batch: the policy has little time to learn
  double noise = 0.05;                     // of the measured times

  // Tokens per second, in times of a server without speculation.
  double speed() const {
    constexpr int kSize = 8, kPrompt = 100;
    struct Sequence {
      Acceptance acceptance;
      int left = 0, confidence = -1;
    };
    std::mt19937 random(1);
    std::uniform_real_distribution<double> share;
    SpeculationPolicy policy;
    std::vector<Sequence> all(static_cast<std::size_t>(decodes));
    for (auto& one : all) one.left = 1 + static_cast<int>(share(random) * max_tokens);
    bool proposed = false;
    int prompts = 0;
    double took_s = 0, plain_s = 0;
    for (int tokens = 0; tokens < requests * decodes * max_tokens;) {
      const auto candidates = [&] {
        Candidates out;
        for (const auto& one : all) {
          const auto confidence = std::max(one.confidence, 0);
          out.push_back({.size = one.confidence < 0 ? 0 : std::min(kSize, one.left - 1),
                         .rate = one.acceptance.rate(confidence, policy.assumed_rate(confidence))});
        }
        return out;
      };
      auto chosen = candidates();
      const bool waits = wait_s == 0 || proposed || policy.would_choose(decodes, chosen, {});
      for (auto& one : all) one.confidence = share(random) < matches ? static_cast<int>(share(random) * 3) : -1;
      chosen = candidates();
      if (waits) policy.choose(decodes, chosen);
      int rows = decodes;
      for (const auto& one : chosen) rows += one.chosen;
      proposed = rows > decodes;
      const double step_s = seconds(rows + kPrompt * prompts) + (waits ? wait_s : 0);
      took_s += step_s;
      if (prompts == 0) {
        const double measured = step_s * (1 + noise * (2 * share(random) - 1));
        proposed || (waits && wait_s > 0) ? policy.speculated(rows, measured) : policy.measured(rows, measured);
      }
      prompts = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto& one = all[i];
        const auto confidence = std::max(one.confidence, 0);
        int taken = 0;
        while (taken < chosen[i].chosen && share(random) < accepted.at(static_cast<std::size_t>(confidence))) ++taken;
        if (chosen[i].chosen > 0) {
          one.acceptance.add(confidence, chosen[i].chosen, taken);
          policy.accepted(confidence, chosen[i].chosen, taken);
        }
        tokens += 1 + taken;
        plain_s += (1 + taken) * seconds(decodes) / decodes;
        if ((one.left -= 1 + taken) > 0) continue;
        one = {{}, max_tokens, -1};
        ++prompts;
        plain_s += seconds(decodes + kPrompt) - seconds(decodes);
      }
    }
    return plain_s / took_s;
  }
};

// Milliseconds of a step of 4-bit weights on a CPU with two cores.
double small_cpu(int rows) { return rows < 8 ? 4.4 + 2.2 * rows : rows < 32 ? 12 + 1.25 * rows : 12.8 + 1.225 * rows; }
double gpu(int rows) { return 8 + 0.012 * rows; }

TEST(SpeculationPolicy, CostsLittleWhereProposalsAreRejected) {
  for (const int decodes : {1, 8, 16, 32, 64, 256}) {
    for (const auto& accepted : {std::array{0.02, 0.05, 0.1}, std::array{0.15, 0.3, 0.4}}) {
      SCOPED_TRACE(std::to_string(decodes) + " decodes, rate " + std::to_string(accepted[0]));
      EXPECT_GT((Simulation{.decodes = decodes, .seconds = small_cpu, .accepted = accepted}.speed()), 0.96);
      EXPECT_GT((Simulation{.decodes = decodes, .seconds = small_cpu, .accepted = accepted, .requests = 20}.speed()), 0.98);
      EXPECT_GT((Simulation{.decodes = decodes, .seconds = gpu, .wait_s = 1, .accepted = accepted}.speed()), 0.96);
    }
  }
}

TEST(SpeculationPolicy, GainsWhereProposalsAreAccepted) {
  const std::array accepted = {0.8, 0.9, 0.95};
  EXPECT_GT((Simulation{.decodes = 1, .seconds = small_cpu, .accepted = accepted}.speed()), 1.2);
  EXPECT_GT((Simulation{.decodes = 8, .seconds = small_cpu, .accepted = accepted}.speed()), 1.1);
  EXPECT_GT((Simulation{.decodes = 1, .seconds = gpu, .wait_s = 1, .accepted = accepted}.speed()), 1.5);
  EXPECT_GT((Simulation{.decodes = 8, .seconds = gpu, .wait_s = 1, .accepted = accepted}.speed()), 1.5);
}

// The host limits a pipelined step, and a step that waits for samples takes much longer. Both are measured.
TEST(SpeculationPolicy, DoesNotWaitForSamplesWhereThatCostsMoreThanProposalsGain) {
  EXPECT_GT((Simulation{.decodes = 64, .seconds = [](int) { return 12; }, .wait_s = 8, .matches = 0.06,
                        .accepted = {0.7, 0.7, 0.7}, .requests = 20}.speed()),
            0.98);
}

TEST(SpeculationPolicy, StepsWithProposalsAreMeasuredApart) {
  SpeculationPolicy policy;
  for (int i = 0; i < 20; ++i) policy.measured(256, 15);
  int chosen = 0;
  for (int i = 0; i < 40; ++i) {  // 16 rows more are not in a slot of their own
    Candidates two(2, {.size = 8, .rate = 0.95});
    policy.choose(256, two);
    chosen += two[0].chosen > 0;
    two[0].chosen > 0 ? policy.speculated(272, 17.5) : policy.measured(256, 15);
  }
  EXPECT_LE(chosen, 2);
}

// Without this, a time that was measured while the machine was slow would make proposals look good for ever.
TEST(SpeculationPolicy, MeasuresPlainStepsAgain) {
  SpeculationPolicy policy;
  policy.measured(8, 30);
  int plain = 0, late = 0;
  for (int i = 0; i < 2000; ++i) {
    Candidates all(8, {.size = 1, .rate = 0.1});
    policy.choose(8, all);
    const bool proposed = all[0].chosen > 0;
    proposed ? policy.speculated(12, 28) : policy.measured(8, 20);
    plain += !proposed;
    late += proposed && i >= 1000;
  }
  EXPECT_GT(plain, 1000);
  EXPECT_LT(late, 20) << "a few are tried again";
}

// Each plain step has prefill.
TEST(SpeculationPolicy, DoesNotWaitForEverForThePlainStep) {
  SpeculationPolicy policy;
  policy.measured(1, 1);
  for (int i = 0; i < 64; ++i) policy.speculated(5, 1);
  int plain = 0;
  for (int i = 0; i < 50; ++i) {
    Candidates one = {{.size = 4, .rate = 0.9}};
    policy.choose(1, one);
    plain += one[0].chosen == 0;
  }
  EXPECT_EQ(plain, 32);
}

TEST(SpeculationPolicy, TheSearchForProposalsTakesATenthOfAStep) {
  SpeculationPolicy policy;
  EXPECT_DOUBLE_EQ(policy.search_s(4), 0.005);
  policy.measured(4, 0.02);
  EXPECT_DOUBLE_EQ(policy.search_s(4), 0.002);
  for (int i = 0; i < 100; ++i) policy.measured(4, 1);
  EXPECT_DOUBLE_EQ(policy.search_s(4), 0.005);
}

// A GPU has memory for 2 million entries of lists and counts.
TEST(SpeculationPolicy, RowsWithLongListsLimitTheProposals) {
  EXPECT_GE(most_with_entries(0, 0, 256), kMaxProposals);
  EXPECT_GE(most_with_entries(0, 1000, 16), kMaxProposals);
  EXPECT_EQ(most_with_entries(0, 32'768, 1), 16);
  EXPECT_EQ(most_with_entries(0, 32'768, 16), 1);
  EXPECT_EQ(most_with_entries(0, 32'768, 64), 0);
  EXPECT_GE(most_with_entries(32'767, 0, 16), 1) << "counts are sent once";
  EXPECT_EQ(most_with_entries(32'768, 0, 16), 0);
  EXPECT_EQ(most_with_entries(2'768, 10'000, 16), 3);
}

TEST(SpeculationPolicy, TriesManyRowsOnlyAfterFewer) {
  SpeculationPolicy policy;
  policy.measured(8, 20);
  Candidates all(8, {.size = 8, .rate = 0.9});
  std::vector<int> rows;
  for (int i = 0; i < 3; ++i) {
    policy.choose(8, all);
    rows.push_back(8);
    for (const auto& one : all) rows.back() += one.chosen;
    policy.speculated(rows.back(), 20);
  }
  EXPECT_EQ(rows, (std::vector{12, 16, 20}));
}

// A step of one row takes 1, and each further row `cost`.
int chosen(double cost, double rate) {
  SpeculationPolicy policy;
  for (int rows = 1; rows <= 9; ++rows) policy.measured(rows, 1 + cost * (rows - 1));
  Candidates one = {{.size = 8, .rate = rate}};
  policy.choose(1, one);
  return one[0].chosen;
}

TEST(SpeculationPolicy, ProposesMoreWhereRowsAreCheapAndProposalsAreAccepted) {
  EXPECT_EQ(chosen(0, 0.5), 8);
  EXPECT_EQ(chosen(0.01, 0.9), 8);
  EXPECT_EQ(chosen(1, 0.9), 0);
  EXPECT_EQ(chosen(0.3, 0.1), 0);
  const int some = chosen(0.2, 0.6);
  EXPECT_TRUE(some > 0 && some < 8) << some;
}

// The times of 4-bit weights on a CPU: the second and third row cost little, and each further one a part of the first.
TEST(SpeculationPolicy, FindsTheBestNumberOfProposalsAlsoAfterItTriedMore) {
  const std::vector<double> seconds = {4, 4.2, 4.7, 6.5, 8.5, 10.5, 12.5, 14.5, 17};
  SpeculationPolicy policy;
  policy.measured(1, seconds[0]);
  Candidates one = {{.size = 8, .rate = 0.98}};
  for (int step = 0; step < 12; ++step) {
    policy.choose(1, one);
    const auto proposals = static_cast<std::size_t>(one[0].chosen);
    proposals > 0 ? policy.speculated(one[0].chosen + 1, seconds[proposals]) : policy.measured(1, seconds[proposals]);
  }
  policy.choose(1, one);
  EXPECT_EQ(one[0].chosen, 2);
}

TEST(SpeculationPolicy, ChoosesNoMoreThanThereAreStates) {
  SpeculationPolicy policy(100, 3);
  Candidates two = {{.size = 8, .rate = 0.9}, {.size = 8, .rate = 0.9}};
  policy.choose(2, two);
  EXPECT_EQ(two[0].chosen + two[1].chosen, 3);
}

TEST(SpeculationPolicy, ASlowFirstStepDoesNotMakeProposalsLookGood) {
  SpeculationPolicy policy;
  policy.measured(1, 10);
  policy.speculated(9, 1.5);
  Candidates one = {{.size = 8, .rate = 0.01}};
  policy.choose(1, one);
  EXPECT_EQ(one[0].chosen, 0);
}

TEST(SpeculationPolicy, PrefersTheSequencesWhoseProposalsAreAccepted) {
  SpeculationPolicy policy;
  for (int rows = 2; rows <= 20; ++rows) policy.measured(rows, 1 + 0.15 * (rows - 2));
  Candidates two = {{.size = 8, .rate = 0.2}, {.size = 8, .rate = 0.95}};
  policy.choose(2, two);
  EXPECT_EQ(two[0].chosen, 0);
  EXPECT_GT(two[1].chosen, 2);
}

TEST(SpeculationPolicy, TriesAgainAfterManyStepsWithoutProposals) {
  SpeculationPolicy policy;
  for (int rows = 1; rows <= 9; ++rows) policy.measured(rows, rows);
  int tried = 0;
  for (int i = 0; i < 640; ++i) {
    Candidates one = {{.size = 8, .rate = 0.5}};
    policy.choose(1, one);
    tried += one[0].chosen > 0;
  }
  EXPECT_EQ(tried, 10);
}

// An asynchronous device: choose() is called only if proposals are likely.
TEST(SpeculationPolicy, WaitsForTokensOnlyIfProposalsAreLikelyOrTriedAgain) {
  SpeculationPolicy cheap, expensive;
  for (int rows = 1; rows <= 9; ++rows) cheap.measured(rows, 1), expensive.measured(rows, rows);
  int waited = 0, tried = 0;
  for (int i = 0; i < 640; ++i) {
    Candidates one = {{.size = 8, .rate = 0.5}}, none(1);
    EXPECT_TRUE(cheap.would_choose(1, one, {}));
    EXPECT_FALSE(cheap.would_choose(1, none, {}));
    if (!expensive.would_choose(1, one, {})) continue;
    ++waited;
    expensive.choose(1, one);
    tried += one[0].chosen > 0;
  }
  EXPECT_EQ(waited, 10);
  EXPECT_EQ(tried, 10);
}

// A step takes 1 with any rows, and a step of the draft model `cost` for each row.
SpeculationPolicy with_draft_cost(double cost) {
  SpeculationPolicy policy;
  for (int rows = 1; rows <= 20; ++rows) policy.measured(rows, 1);
  for (int rows = 1; rows <= 20; ++rows) policy.drafted(rows, cost * rows);
  return policy;
}

TEST(SpeculationPolicy, DraftsOnlyWhereTheDraftModelCostsLessThanItGains) {
  const auto drafted = [](double cost, double rate, double begin_s = 0) {
    Candidates known(1), drafts = {{.size = 8, .rate = rate, .drafted = true, .begin_s = begin_s}};
    const bool chosen = with_draft_cost(cost).choose(1, known, drafts);
    EXPECT_EQ(chosen, drafts[0].chosen > 0);
    EXPECT_EQ(known[0].chosen, 0);
    return drafts[0].chosen;
  };
  EXPECT_EQ(drafted(0.01, 0.9), 8);
  EXPECT_EQ(drafted(1, 0.9), 0);
  EXPECT_EQ(drafted(0.2, 0.1), 0);
  const int some = drafted(0.2, 0.8);
  EXPECT_TRUE(some > 0 && some < 8) << some;
  EXPECT_EQ(drafted(0.01, 0.9, 10), 0) << "the prompt costs more than the drafts gain";
}

TEST(SpeculationPolicy, KnownTokensReplaceDraftsThatCostTooMuch) {
  for (const bool cheap : {true, false}) {
    auto policy = with_draft_cost(cheap ? 0.01 : 1);
    Candidates known = {{.size = 4, .rate = 0.5}, {.size = 4, .rate = 0.9}};
    Candidates mixed = {{.size = 8, .rate = 0.8, .drafted = true}, known[1]};
    EXPECT_EQ(policy.choose(2, known, mixed), cheap);
    EXPECT_EQ(mixed[0].chosen > 0, cheap);
    EXPECT_EQ(mixed[1].chosen > 0, cheap);
    EXPECT_EQ(known[0].chosen > 0, !cheap);
    EXPECT_EQ(known[1].chosen > 0, !cheap);
  }
}

TEST(SpeculationPolicy, TriesDraftsAgainInTurnButBeginsNoLongPrompt) {
  int drafts_tried = 0, known_tried = 0;
  for (const double begin_s : {0.0, 1.0}) {
    SpeculationPolicy policy;
    for (int rows = 1; rows <= 9; ++rows) policy.measured(rows, rows);
    for (int rows = 1; rows <= 9; ++rows) policy.drafted(rows, rows);
    for (int i = 0; i < 640; ++i) {
      Candidates known = {{.size = 2, .rate = 0.5}};
      Candidates drafts = {{.size = 8, .rate = 0.6, .drafted = true, .begin_s = begin_s}};
      drafts_tried += policy.choose(1, known, drafts);
      known_tried += known[0].chosen > 0;
    }
  }
  EXPECT_EQ(drafts_tried, 5);
  EXPECT_EQ(known_tried, 5 + 10);
}

TEST(SpeculationPolicy, ChoosesNoMoreThanAStepTakes) {
  SpeculationPolicy policy(12);
  Candidates known(4), drafts(4, {.size = 8, .rate = 0.9, .drafted = true});
  EXPECT_TRUE(policy.choose(4, known, drafts));
  EXPECT_TRUE(std::ranges::all_of(drafts, [](const auto& one) { return one.chosen == 1; }));
  EXPECT_FALSE(policy.choose(12, known, drafts));
  EXPECT_TRUE(std::ranges::all_of(drafts, [](const auto& one) { return one.chosen == 0; }));
}

TEST(SpeculationPolicy, ASequenceWhoseDraftsCostTooMuchKeepsItsKnownTokens) {
  for (const double rate : {0.6, 0.97}) {
    auto policy = with_draft_cost(0.01);
    Candidates known(2, {.size = 4, .rate = 0.5}), mixed(2, {.size = 8, .rate = 0.9, .drafted = true});
    mixed[1].rate = rate;
    mixed[1].begin_s = 10;
    EXPECT_TRUE(policy.choose(2, known, mixed));
    EXPECT_TRUE(mixed[0].drafted && mixed[0].chosen > 0);
    EXPECT_TRUE(!mixed[1].drafted && mixed[1].chosen > 0);
  }
}

TEST(SpeculationPolicy, ForgetsRejectedAndSlowDraftsAfterManyStepsWithoutThem) {
  auto policy = with_draft_cost(1);
  for (int i = 0; i < 100; ++i) policy.accepted(kDrafted, 4, 0);
  const auto drafts = [&] {
    Candidates known(1);
    const double rate = policy.assumed_rate(kDrafted), begin_s = policy.begin_s(2000, 100);
    Candidates one = {{.size = 8, .rate = rate, .drafted = true, .begin_s = begin_s}};
    return policy.choose(1, known, one);
  };
  for (int i = 0; i < 1024; ++i) ASSERT_FALSE(drafts());
  EXPECT_TRUE(drafts());
}

// An asynchronous device, as above, with drafts.
TEST(SpeculationPolicy, WaitsForTokensIfDraftsAreLikelyOrTriedAgain) {
  auto cheap = with_draft_cost(0.02), expensive = with_draft_cost(2);
  int waited = 0, drafted = 0;
  for (int i = 0; i < 640; ++i) {
    Candidates none(1), drafts = {{.size = 8, .rate = 0.75, .drafted = true}};
    EXPECT_TRUE(cheap.would_choose(1, none, drafts));
    if (!expensive.would_choose(1, none, drafts)) continue;
    ++waited;
    drafted += expensive.choose(1, none, drafts);
  }
  EXPECT_EQ(waited, 10);
  EXPECT_EQ(drafted, 10);
}

TEST(SpeculationPolicy, APromptOfTheDraftModelIsPaidByTheTokensThatMayFollow) {
  SpeculationPolicy policy;
  EXPECT_EQ(policy.begin_s(1000, 100), 0) << "no time is measured";
  policy.drafted(64, 2);
  EXPECT_EQ(policy.begin_s(64, 100), 0) << "one step computes it";
  EXPECT_DOUBLE_EQ(policy.begin_s(640, 10), 2);
  EXPECT_DOUBLE_EQ(policy.begin_s(640, 0), 20);
  EXPECT_DOUBLE_EQ(policy.begin_s(640, 100'000), 20.0 / 128);
  SpeculationPolicy between;
  between.drafted(1, 1);
  between.drafted(127, 3);
  EXPECT_DOUBLE_EQ(between.begin_s(640, 10), 2) << "64 rows are half way between the measured ones";
}

TEST(SpeculationPolicy, TheDraftModelComputesAsMuchAsFitsIntoTheTimeOfAStep) {
  SpeculationPolicy policy;
  EXPECT_EQ(policy.draft_rows(1), kMostDraftRows) << "no time is measured";
  policy.measured(1, 1);
  for (const int rows : {64, 128, 256}) policy.drafted(rows, rows / 128.0);
  EXPECT_EQ(policy.draft_rows(1), 128);
  for (int i = 0; i < 100; ++i) policy.drafted(64, 5);
  EXPECT_EQ(policy.draft_rows(1), 128);
  for (int i = 0; i < 100; ++i) policy.drafted(128, 10);
  EXPECT_EQ(policy.draft_rows(1), 64);
}

TEST(SpeculationPolicy, ANewSequenceExpectsHalfOfWhatOtherProposalsGot) {
  SpeculationPolicy policy;
  const auto first = policy.assumed_rate(kDrafted);
  for (int i = 0; i < 100; ++i) policy.accepted(kDrafted, 4, 0);
  EXPECT_LT(policy.assumed_rate(kDrafted), 0.6 * first);
  EXPECT_GT(policy.assumed_rate(kDrafted), 0.4 * first);
}

}  // namespace
}  // namespace charonia::runtime
