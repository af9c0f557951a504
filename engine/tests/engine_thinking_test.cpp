// A budget for thinking: the engine ends the thinking of a response after a number of tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "engine_fixture.h"
#include "runtime/request_state.h"
#include "runtime/thinking.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::tokens_of;
using Tokens = std::vector<TokenId>;

const Tokens kEnd = {35, 36, 37};  // "jkl"

Request thinks(Request one, int budget, Tokens end = kEnd, Tokens begin = {}) {
  one.sampling.thinking_budget = budget;
  one.sampling.thinking_begin_ids = std::move(begin);
  one.sampling.thinking_end_ids = std::move(end);
  return one;
}

class EngineThinkingTest : public testing::EngineFixture {};
INSTANTIATE_TEST_SUITE_P(Device, EngineThinkingTest, testing::kDevices, testing::device_name);

// Returns the tokens of a prompt followed by others.
Tokens joined(Tokens first, const Tokens& then) {
  first.insert(first.end(), then.begin(), then.end());
  return first;
}

TEST_P(EngineThinkingTest, TheEndMarkFollowsTheBudgetAndTheResponseGoesOn) {
  const auto one = engine();
  const Tokens prompt = {1, 2, 3};
  const auto free = tokens_of(*one, request(prompt, 30));
  for (const int budget : {0, 1, 2, 9}) {
    const auto begun = joined({free.begin(), free.begin() + budget}, kEnd);
    const auto rest = tokens_of(*one, request(joined(prompt, begun), 10));
    const auto asked = thinks(request(prompt, budget + 13), budget);
    EXPECT_EQ(tokens_of(*one, asked), joined(begun, rest)) << "budget " << budget;
    auto scored = asked;
    scored.sampling.logprobs = 1;
    scored.sampling.bad_words = {{35}, {1, 36}};  // the mark is written all the same
    scored.sampling.repetition_penalty = 1.0001F;
    scored.sampling.n = 2;
    Collector out(*one, scored);
    for (const int i : {0, 1}) {
      EXPECT_EQ(out.logprobs(i).size(), out.tokens(i).size());
      const auto tokens = out.tokens(i);
      EXPECT_TRUE(std::ranges::equal(kEnd, std::span(tokens).subspan(static_cast<std::size_t>(budget), 3)));
    }
  }
  one->check_integrity();
}

TEST_P(EngineThinkingTest, ThinkingThatEndsByItselfIsLeftAlone) {
  const auto one = engine();
  const auto asked = request({1, 2, 3}, 30);
  const auto free = tokens_of(*one, asked);
  const Tokens end(free.begin() + 4, free.begin() + 6);
  EXPECT_EQ(tokens_of(*one, thinks(asked, 8, end)), free);
  // The mark is text: its letters may be in other tokens.
  auto spelled = end;
  for (auto& id : spelled) id = id >= 26 ? id - 26 : id + 26 < testing::kVocab ? id + 26 : id;
  EXPECT_EQ(tokens_of(*one, thinks(asked, 8, spelled)), free);
  // The mark of the beginning.
  EXPECT_EQ(tokens_of(*one, thinks(asked, 0, kEnd, {free[0] == 5 ? 6 : 5})), free);
  const Tokens begin(free.begin(), free.begin() + 2);
  const auto ended = tokens_of(*one, thinks(asked, 3, kEnd, begin));
  EXPECT_EQ(Tokens(ended.begin(), ended.begin() + 8), joined({free.begin(), free.begin() + 5}, kEnd));
}

TEST_P(EngineThinkingTest, AGuideDescribesTheTextAfterTheThinking) {
  const auto one = engine();
  for (const int budget : {0, 4}) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      auto asked = thinks(request({1, 2, 3}, 40), budget);
      asked.sampling.ignore_eos = false;
      asked.sampling.temperature = 1;
      asked.sampling.seed = seed;
      // As preprocessing makes it.
      asked.guide = Guide{GuideType::structural_tag, R"({"called": "x", "grammars": [{"lark_grammar":
        "start: h1 @g1\nX0: /(?s:.*)/ & ~(/(?s:.*)/ (\"jkl\") /(?s:.*)/)\nh1[lazy]: X0 \"jkl\""},
        {"name": "g1", "regex": "(ab|cd){3}z"}]})"};
      const auto text = Collector(*one, asked).text();
      const auto mark = text.find("jkl");
      EXPECT_LE(mark, static_cast<std::size_t>(budget)) << text;
      EXPECT_EQ(text.size(), mark + 10) << text;
      EXPECT_EQ(text.back(), 'z');
    }
  }
  auto refused = thinks(request({1, 2, 3}, 40), 2);
  refused.guide = Guide{GuideType::regex, "[a-f]{9}z"};
  refused.sampling.ignore_eos = false;
  EXPECT_EQ(Collector(*one, refused).last().finish_reason, FinishReason::error);
  one->check_integrity();
}

TEST_P(EngineThinkingTest, AResumedResponseHasTheSameBudget) {
  const auto one = engine();
  auto asked = thinks(request({1, 2, 3}, 20), 5);
  asked.stream = true;
  asked.sampling.seed = 1;
  const auto whole = tokens_of(*one, asked);
  for (const int received : {0, 3, 5, 6, 8, 12}) {
    asked.resumed = {Tokens(whole.begin(), whole.begin() + received)};
    EXPECT_EQ(tokens_of(*one, asked), Tokens(whole.begin() + received, whole.end())) << received;
  }
}

TEST_P(EngineThinkingTest, ABudgetWithoutAMarkIsRejected) {
  const auto one = engine();
  expect_error(ErrorCode::invalid_argument, {"thinking_budget = 5", "chat template"},
               [&] { one->submit(thinks(request({1}, 4), 5, {}), {}); });
  expect_error(ErrorCode::invalid_argument, {"thinking_budget = -1"},
               [&] { one->submit(thinks(request({1}, 4), -1), {}); });
  expect_error(ErrorCode::invalid_argument, {"thinking_end_ids"},
               [&] { one->submit(thinks(request({1}, 4), 1, {testing::kVocab}), {}); });
  using Calls = std::vector<std::vector<Tokens>>;
  for (const auto& calls : Calls{{{1}}, {{1}, {}}, {{1}, {2}, {3}}, {{1}, {testing::kVocab}}}) {
    auto asked = thinks(request({1}, 4), 1);
    asked.sampling.thinking_call_ids = calls;
    expect_error(ErrorCode::invalid_argument, {"thinking_call_ids"}, [&] { one->submit(asked, {}); });
  }
}

// The bias makes the model begin a new block whenever it may.
TEST_P(EngineThinkingTest, NoBlockFollowsImmediatelyAfterTheBudgetIsSpent) {
  const auto one = engine();
  auto asked = thinks(request({1, 2, 3}, 12), 3, {6}, {5});
  asked.sampling.thinking_begun = true;
  asked.sampling.logit_bias = {{5, 90.0F}};
  const auto tokens = tokens_of(*one, asked);
  EXPECT_EQ(Tokens(tokens.begin(), tokens.begin() + 4), (Tokens{5, 5, 5, 6}));
  EXPECT_NE(tokens[4], 5);
  EXPECT_EQ(Tokens(tokens.begin() + 5, tokens.end()), Tokens(7, 5));
  // Until then, blocks share the budget.
  asked.sampling.logit_bias = {{5, 90.0F}, {6, 80.0F}};
  asked.sampling.bad_words = {{5, 5}};
  EXPECT_EQ(tokens_of(*one, asked), (Tokens{5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6}));
}

// The bias makes the model write the word of the header, and 37, as long as it may.
TEST_P(EngineThinkingTest, NoMessageOfThinkingFollowsImmediatelyAfterTheBudgetIsSpent) {
  testing::TinyModel model;
  model.special = {36, 37, 38};
  testing::write_tiny_workspace(weights(), model);
  const auto one = engine();
  auto asked = thinks(request({1, 2, 3}, 12), 2, {38, 5}, {36, 9, 37});
  asked.sampling.thinking_begun = true;
  asked.sampling.logit_bias = {{36, 95.0F}, {9, 85.0F}, {35, 75.0F}, {37, 65.0F}};  // 35 has the text of 9
  asked.sampling.bad_words = {{36, 36}, {9, 36}, {37, 36}, {9, 9}, {9, 35}};
  EXPECT_EQ(tokens_of(*one, asked), (Tokens{36, 9, 37, 9, 37, 38, 5, 36, 37, 9, 37, 9}));
}

TEST_P(EngineThinkingTest, BestOfComparesOnlySampledTokens) {
  const auto one = engine();
  const int budget = 4, size = 9, count = 16;
  std::vector<std::pair<double, Tokens>> sampled, all;  // sums of log probabilities
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    auto asked = thinks(request({1, 2, 3}, size), budget);
    asked.sampling.temperature = 1;
    asked.sampling.logprobs = 0;
    asked.sampling.seed = seed;
    Collector out(*one, asked);
    sampled.emplace_back(0, out.tokens());
    all.emplace_back(0, out.tokens());
    for (int i = 0; i < size; ++i) {
      const double logprob = out.logprobs()[static_cast<std::size_t>(i)];
      all.back().first += logprob;
      if (i < budget || i >= budget + std::ssize(kEnd)) sampled.back().first += logprob;
    }
  }
  auto best = thinks(request({1, 2, 3}, size), budget);
  best.sampling.temperature = 1;
  best.sampling.seed = 0;
  best.sampling.best_of = count;
  best.stream = false;
  const auto expected = std::ranges::max_element(sampled)->second;
  EXPECT_EQ(tokens_of(*one, best), expected);
  EXPECT_NE(std::ranges::max_element(all)->second, expected) << "the mark makes no difference with these seeds";
}

TEST(Thinking, EndsBetweenCharactersAndTellsMarksFromTextThatSpellsThem) {
  // 0 to 2: bytes; 3: text; 4: a special token with the same bytes; 5: text that begins with white space
  const text::TokenTable table({"\xc3", "\xa9", "a", "<e>", "<e>", "\n<b"}, {0, 0, 0, 0, 1, 0}, false);
  const auto forced_after = [&](int budget, Tokens begin, Tokens end, const Tokens& tokens) {
    SamplingParams sampling;
    sampling.thinking_budget = budget;
    sampling.thinking_begin_ids = std::move(begin);
    sampling.thinking_end_ids = std::move(end);
    runtime::Thinking thinking(sampling, runtime::ThinkingRules(table).of(sampling));
    for (const auto token : tokens) thinking.push(token);
    return thinking.forced().value_or(-1);
  };
  EXPECT_EQ(forced_after(1, {}, {3}, {2}), 3);
  EXPECT_EQ(forced_after(1, {}, {3}, {0}), -1);
  EXPECT_EQ(forced_after(1, {}, {3}, {0, 1}), 3);
  EXPECT_EQ(forced_after(2, {}, {3}, {3, 2, 2}), -1);  // it has ended
  EXPECT_EQ(forced_after(2, {}, {4}, {3, 2}), 4);
  EXPECT_EQ(forced_after(2, {}, {4}, {4, 2, 2}), -1);
  EXPECT_EQ(forced_after(2, {}, {2, 4}, {0, 1}), 2);
  EXPECT_EQ(forced_after(2, {}, {2, 4}, {0, 1, 2}), 4);
  EXPECT_EQ(forced_after(2, {}, {2, 4}, {0, 1, 2, 4}), -1);
  EXPECT_EQ(forced_after(0, {5, 2}, {3}, {}), -1);
  EXPECT_EQ(forced_after(0, {5, 2}, {3}, {4, 5, 2}), 3);  // the special token is not part of the text
  EXPECT_EQ(forced_after(0, {5, 2}, {3}, {2, 5, 2}), -1);
  // A mark that the model has begun goes on, also in tokens of its own.
  EXPECT_EQ(forced_after(2, {}, {2, 4}, {2, 2}), 4);
  EXPECT_EQ(forced_after(1, {}, {2, 0, 1}, {2}), 0);
  EXPECT_EQ(forced_after(2, {}, {2, 0, 1}, {2, 0}), 1);
  EXPECT_EQ(forced_after(2, {}, {2, 0, 1}, {5, 2}), 0);
  EXPECT_EQ(forced_after(2, {}, {3, 2}, {2, 3}), 2);
}

// Follows tokens of a small vocabulary.
class ThinkingTest : public ::testing::Test {
 protected:
  // The forced token, -1 for none; the banned tokens; whether they may exist.
  using Decided = std::tuple<int, Tokens, bool>;

  static Decided forces(int token) { return {token, {}, true}; }
  static Decided bans(const Tokens& tokens) { return {-1, tokens, true}; }

  Decided after(int budget, Tokens begin, Tokens end, const Tokens& tokens, std::vector<Tokens> calls = {}) {
    SamplingParams sampling;
    sampling.thinking_call_ids = std::move(calls);
    sampling.thinking_budget = budget;
    sampling.thinking_begin_ids = std::move(begin);
    sampling.thinking_end_ids = std::move(end);
    runtime::Thinking thinking(sampling, rules.of(sampling));
    bool expected = true;  // before the first token, nothing is asked
    for (const auto token : tokens) {
      expected = thinking.may_decide_next();
      thinking.push(token);
    }
    const auto banned = thinking.banned();
    const Decided out{thinking.forced().value_or(-1), {banned.begin(), banned.end()}, thinking.may_decide_next()};
    EXPECT_TRUE(expected || (std::get<0>(out) < 0 && banned.empty()));
    return out;
  }

  // 0: text; 1 and 2: marks; 3: white space; 4: text that ends with the end mark; 5 to 8: special tokens; 9: a word
  // 10 and 11: pieces of the word; 12 to 14: the word in other tokens; 15: another word; 16: a space; 17: "to="
  // 18: a quote; 19 and 20: marks of calls; 21 to 23: the same in other tokens; 24: a backslash; 25 to 27: pieces of
  // marks
  const text::TokenTable table{{"a", "<b>", "<e>", "\n", "x<e>", "<|C|>", "<|M|>", "<|E|>", "<|S|>", "think", "thi",
                                "nk", " think", "\nt", "think x", "thinks", " ", "to=", "\"", "<c>", "</c>", "<", "c>x",
                                "</c>\n", "\\", "<t", "hink>", "ool>"},
                               {0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                               false};
  runtime::ThinkingRules rules{table};
  const Decided none{-1, {}, false}, soon{-1, {}, true};
};

TEST_F(ThinkingTest, BlocksShareTheBudget) {
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 2, 3, 1, 0}), soon);
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 2, 3, 1, 0, 0}), forces(2));
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 4, 1, 0}), soon);  // the token with the end mark does not count
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 0, 0, 2, 3}), bans({1}));
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 0, 0, 2, 0}), none);
  EXPECT_EQ(after(3, {1}, {2}, {1, 0, 0, 2, 0, 1, 0, 0}), none);  // the mark within the content is text
  // Tokens of a mark do not count, and a mark of several tokens is ended again.
  EXPECT_EQ(after(4, {1, 3}, {2, 3}, {1, 3, 0, 2, 3, 1, 3, 0, 0}), soon);
  EXPECT_EQ(after(2, {1, 0}, {2, 0}, {1, 0, 0, 0, 2, 0, 3}), soon);
  EXPECT_EQ(after(2, {1, 0}, {2, 0}, {1, 0, 0, 0, 2, 0, 1, 0}), forces(2));
  EXPECT_EQ(after(2, {1, 0}, {2, 0}, {1, 0, 0, 0, 2, 0, 1, 0, 2, 0, 0}), none);
  // Without a special token at its end, a mark is no header.
  EXPECT_EQ(after(1, {5, 9}, {7}, {5, 9, 0}), forces(7));
  EXPECT_EQ(after(1, {5, 9}, {7}, {5, 9, 0, 7}), bans({5}));
  EXPECT_EQ(after(1, {5, 9}, {7}, {5, 9, 0, 7, 0, 5, 9, 0}), none);
  EXPECT_EQ(after(1, {5, 9, 6}, {2}, {0, 5, 9, 6, 0}), none);
  // Tokens of the end mark do not count, if the engine writes the rest of it.
  EXPECT_EQ(after(3, {1}, {2, 0, 4}, {1, 0, 2, 0, 4, 1}), none);
  EXPECT_EQ(after(3, {1}, {2, 0, 4}, {1, 0, 2, 0, 4, 1, 15}), soon);
  EXPECT_EQ(after(3, {1}, {2, 0, 4}, {1, 0, 2, 0, 4, 1, 15, 15}), forces(2));
  // A mark needs text.
  for (const TokenId nothing : {3, 99}) {
    expect_error(ErrorCode::invalid_argument, {"thinking_end_ids", "such as " + std::to_string(nothing)},
                 [&] { after(1, {1}, {nothing, 16}, {}); });
    expect_error(ErrorCode::invalid_argument, {"thinking_begin_ids", "such as " + std::to_string(nothing)},
                 [&] { after(1, {nothing}, {2}, {}); });
  }
}

TEST_F(ThinkingTest, BlocksAfterCallsShareTheBudget) {
  const std::vector<Tokens> calls = {{19}, {20}, {18}, {18}};  // <c> ... </c>, with text between "
  const auto found = [&](const Tokens& tokens) { return after(2, {1}, {2}, tokens, calls); };
  EXPECT_EQ(found({1, 0, 2, 3, 19, 15, 20, 3, 1, 0}), forces(2));
  EXPECT_EQ(found({19, 15, 20, 16, 1, 0}), soon);
  EXPECT_EQ(found({19, 15, 20, 3, 19, 15, 20, 1, 0, 0}), forces(2));
  EXPECT_EQ(found({1, 0, 0, 2, 19, 15}), soon) << "the next token may end the call";
  EXPECT_EQ(found({1, 0, 0, 2, 19, 15, 20, 3}), bans({1}));
  EXPECT_EQ(after(0, {1}, {2}, {19, 15, 20, 1}, calls), forces(2)) << "without a block before it";
  // The marks may be in other tokens.
  EXPECT_EQ(found({21, 22, 15, 23, 1, 0, 0}), forces(2));
  // In a call, and after other text, the mark of the thinking is text.
  EXPECT_EQ(found({19, 1, 0, 0}), none);
  EXPECT_EQ(found({0, 19, 15, 20, 1, 0, 0}), none);
  EXPECT_EQ(found({19, 15, 20, 0, 1, 0, 0}), none);
  EXPECT_EQ(after(2, {1}, {2}, {19, 15, 20, 1, 0, 0}), none) << "calls are not known";
  // Quoted text may have the marks, and its own quotes after a backslash.
  EXPECT_EQ(found({19, 18, 20, 1, 0, 0}), none);
  EXPECT_EQ(found({19, 18, 20, 18, 20, 1, 0, 0}), forces(2));
  EXPECT_EQ(found({19, 18, 24, 18, 20, 1, 0, 0}), none);
  EXPECT_EQ(found({19, 18, 24, 24, 18, 20, 1, 0, 0}), forces(2));
  const std::vector<Tokens> values = {{19}, {20}, {1}, {2}};  // no backslash escapes a mark of several bytes
  EXPECT_EQ(after(0, {9}, {10}, {19, 1, 20, 24, 2, 20, 9}, values), forces(10));
  EXPECT_EQ(after(0, {9}, {10}, {19, 1, 20, 9}, values), soon);
  // Special tokens as marks; without quoted text, and with it, where a backslash escapes nothing.
  EXPECT_EQ(after(0, {1}, {2}, {5, 0, 18, 6, 1}, {{5}, {6}}), forces(2));
  EXPECT_EQ(after(1, {1}, {2}, {19, 8, 20, 24, 8, 20, 1, 0}, {{19}, {20}, {8}, {8}}), forces(2));
  // Both marks may begin alike.
  EXPECT_EQ(after(0, {25, 26}, {2}, {25, 26}, {{25, 27}, {20}}), forces(2));
  EXPECT_EQ(after(0, {25, 26}, {2}, {25, 27, 0, 20, 25, 26}, {{25, 27}, {20}}), forces(2));
  expect_error(ErrorCode::invalid_argument, {"thinking_call_ids", "such as 3"},
               [&] { after(1, {1}, {2}, {}, {{19}, {3}}); });
}

TEST_F(ThinkingTest, MessagesShareTheBudget) {
  // Messages: the first special token of the mark ends one, and another one may follow any text.
  const Tokens begin = {5, 9, 6}, end = {7, 8, 0};
  const auto spellings = bans({9, 10, 12, 13, 14});
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 7, 8, 0, 5, 9, 6}), soon);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 7, 8, 0, 5, 9, 6, 0}), forces(7));
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7}), forces(8));
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8}), forces(0));
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0}), soon);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0, 5}), spellings);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0, 5, 16, 3}), spellings);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0, 5, 0}), none);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0, 5, 0, 6, 0, 7, 8, 0, 5, 9}), soon);
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 0, 7, 8, 0, 5, 0, 6, 0, 7, 8, 0, 5, 9, 6}), forces(7));
  EXPECT_EQ(after(0, begin, end, {5, 9, 6}), forces(7));
  EXPECT_EQ(after(2, begin, end, {5, 9, 6, 0, 5, 0, 6, 0, 0, 0}), none);  // without an end mark
  // The word of a header may be in other tokens, and other text may follow it.
  for (const auto& word : std::vector<Tokens>{
           {9}, {10, 11}, {12}, {3, 16, 9, 3}, {14}, {9, 16, 0}, {14, 4}, {13, 16, 9}, {9, 1}, {9, 5}}) {
    Tokens tokens{5};
    tokens.insert(tokens.end(), word.begin(), word.end());
    tokens.insert(tokens.end(), {6, 0});
    const bool is_word = word != Tokens{13, 16, 9} && word != Tokens{9, 1};
    EXPECT_EQ(after(1, begin, end, tokens), is_word ? forces(7) : none);
  }
  EXPECT_EQ(after(1, begin, end, {5, 15, 6, 0, 0}), none);
  // The first of two channels counts.
  EXPECT_EQ(after(1, begin, end, {5, 9, 5, 15, 6, 0}), forces(7));
  EXPECT_EQ(after(1, begin, end, {5, 15, 5, 9, 6, 0}), none);
  // With a recipient it begins no block.
  EXPECT_EQ(after(1, begin, end, {5, 9, 16, 17, 0, 6, 0, 0}), none);
  EXPECT_EQ(after(1, begin, end, {17, 0, 5, 9, 6, 0, 0}), none);
  EXPECT_EQ(after(1, begin, end, {17, 0, 5, 9, 6, 0, 0, 7, 8, 5, 9, 6, 0}), forces(7));
  EXPECT_EQ(after(1, begin, end, {5, 15, 6, 17, 5, 9, 6, 0}), forces(7));
}

TEST(Thinking, ACompletionOfForcedTokensIsNotTheBest) {
  const text::TokenTable table({"a", "<e>"}, {0, 0}, false);
  runtime::RequestState state;
  state.request.stream = false;
  auto& sampling = state.request.sampling;
  sampling.best_of = 2;
  sampling.thinking_budget = 0;
  sampling.thinking_end_ids = {1};
  state.thinking.emplace(sampling, runtime::ThinkingRules(table).of(sampling));
  std::vector<Result> results;
  for (const int i : {0, 1}) {
    runtime::Completion one(state, i, 0, table, 9);
    ops::Sampled sampled;
    sampled.logprob = -7;
    for (const TokenId token : {1, 0}) {
      sampled.token = token;
      if (token == 1 || i == 1) one.accept(sampled, {});
    }
    results = state.ended(one.last(FinishReason::cancelled, {}), one.mean_logprob());
  }
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].token_ids, (Tokens{1, 0}));
}

}  // namespace
}  // namespace charonia
