// Structured output in the engine: a request waits for its grammar, others do not, and the text has the requested form.
#include <regex>
#include <string>
#include <vector>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;

// A schema with many schemas inside one another, which llguidance compiles by recursion.
std::string deep(int levels) {
  std::string out = R"({"$ref": "#/$defs/a0", "$defs": {)";
  for (int i = 0; i < levels; ++i) {
    out += "\"a" + std::to_string(i) + R"(": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a)" +
           std::to_string(i + 1) + "\"}}},";
  }
  return out + "\"a" + std::to_string(levels) + R"(": {"type": "null"}}})";
}

class EngineGuideTest : public testing::EngineFixture {
 protected:
  // The vocabulary is letters.
  static Request guided(GuideType type, std::string text, int max_tokens = 100) {
    auto out = request({1, 2, 3}, max_tokens);
    out.sampling.ignore_eos = false;
    out.sampling.temperature = 1.0F;
    out.sampling.seed = 7;
    out.guide = Guide{type, std::move(text)};
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineGuideTest, testing::kDevices, testing::device_name);

TEST_P(EngineGuideTest, TheTextIsOneOfTheGuideAndEndsWithStop) {
  const auto one = engine();
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    auto asked = guided(GuideType::regex, "(ab|c){3,5}z");
    asked.sampling.seed = seed;
    Collector out(*one, asked);
    EXPECT_TRUE(std::regex_match(out.text(), std::regex("(ab|c){3,5}z"))) << out.text();
    EXPECT_EQ(out.last().finish_reason, FinishReason::stop);
    EXPECT_EQ(out.tokens().back(), 0);
  }
  one->check_integrity();
}

TEST_P(EngineGuideTest, ItWorksWithSeveralSequencesLogprobsStopWordsAndSessions) {
  const auto one = engine();
  auto several = guided(GuideType::regex, "[a-d]{10,20}z");
  several.sampling.n = 3;
  several.sampling.best_of = 4;
  several.sampling.logprobs = 2;
  several.stream = false;
  Collector all(*one, several);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::regex_match(all.text(i), std::regex("[a-d]{10,20}z"))) << all.text(i);
    EXPECT_EQ(all.logprobs(i).size(), all.tokens(i).size());
  }
  auto stopped = guided(GuideType::regex, "abcdefg");
  stopped.sampling.stop_words = {"de"};
  Collector before(*one, stopped);
  EXPECT_EQ(before.text(), "abc");
  for (const char* const text : {"xyz", "klm"}) {
    auto turn = guided(GuideType::choice, "[\"" + std::string(text) + "\"]");
    turn.session_id = "s";
    turn.continuation_ids = {4, 5};
    Collector out(*one, turn);
    EXPECT_EQ(out.text(), text);
  }
  one->check_integrity();
}

TEST_P(EngineGuideTest, APreemptedSequenceGoesOnInItsGrammar) {
  const auto one = engine({{"cache_max_entry_count", "16"}, {"session_len", "60"}});
  Collector before(*one, request({9, 9, 9}, 50)), out(*one, guided(GuideType::regex, "(abc){16}", 50));
  std::string expected;
  for (int i = 0; i < 16; ++i) expected += "abc";
  EXPECT_EQ(out.text(), expected);
  EXPECT_EQ(before.tokens().size(), 50U);
}

TEST_P(EngineGuideTest, AGuideThatIsWrongEndsItsRequestAndNoOther) {
  const auto one = engine();
  Collector wrong(*one, guided(GuideType::regex, "a(b")), right(*one, guided(GuideType::regex, "ab"));
  EXPECT_EQ(wrong.last().finish_reason, FinishReason::error);
  EXPECT_EQ(wrong.last().error_code, ErrorCode::invalid_argument);
  EXPECT_NE(wrong.last().error.find("regex"), std::string::npos) << wrong.last().error;
  EXPECT_EQ(right.text(), "ab");
  EXPECT_EQ(Collector(*one, guided(GuideType::regex, "a(b")).last().error, wrong.last().error);
  // Nothing of it is a text of this vocabulary.
  Collector none(*one, guided(GuideType::regex, "[0-9]+"));
  EXPECT_EQ(none.last().error_code, ErrorCode::invalid_argument);
  EXPECT_NE(none.last().error.find("allows no token"), std::string::npos) << none.last().error;
  one->check_integrity();
}

TEST_P(EngineGuideTest, ContradictionsOfAGuideAreRejectedImmediately) {
  const auto one = engine({{"guide_max_bytes", "20"}});
  const auto rejected = [&](const Request& asked, std::string_view named) {
    expect_error(ErrorCode::invalid_argument, {named}, [&] { one->submit(asked, {}); });
  };
  auto ignoring = guided(GuideType::regex, "a"), least = ignoring, both = ignoring;
  ignoring.sampling.ignore_eos = true;
  rejected(ignoring, "ignore_eos");
  least.sampling.min_tokens = 2;
  rejected(least, "min_tokens");
  both.mask = std::make_shared<testing::MaskOf>(40, [](TokenId, auto) { return true; });
  rejected(both, "mask");
  rejected(guided(GuideType::regex, std::string(21, 'a')), "guide_max_bytes");
  rejected(guided(GuideType::regex, ""), "empty");
  rejected(guided(GuideType::json, "{}"), "json_schema");
  rejected(guided(GuideType::regex, "\xff"), "UTF-8");
  expect_error(ErrorCode::invalid_argument,
               {"guided_decoding_guide_type = 'xml' is unknown: it is one of json, json_schema, regex, ebnf_grammar, "
                "structural_tag, choice"},
               [] { guide_type("xml"); });
}

TEST_P(EngineGuideTest, ADeepSchemaIsCompiledOnALargeStack) {
  const auto one = engine({{"guide_max_bytes", "1000000"}});
  Collector out(*one, guided(GuideType::json_schema, deep(5000)));
  EXPECT_NE(out.last().finish_reason, FinishReason::stop);  // the vocabulary has no brackets
  EXPECT_EQ(Collector(*one, guided(GuideType::regex, "abc")).text(), "abc");
}

TEST_P(EngineGuideTest, ARequestThatWaitsForItsGrammarCanBeCancelled) {
  const auto one = engine({{"guide_max_bytes", "1000000"}});
  std::vector<Collector> waiting(8);
  for (auto& out : waiting) {
    const auto handle = one->submit(guided(GuideType::json_schema, deep(2000)), out.callback());
    one->cancel(handle);
  }
  for (auto& out : waiting) EXPECT_NE(out.last().finish_reason, FinishReason::stop);
  EXPECT_EQ(testing::tokens_of(*one, request({1, 2}, 50)).size(), 50U);
  Collector last(*one, guided(GuideType::json_schema, deep(2000)));
  one->close();
  EXPECT_NE(last.last().finish_reason, FinishReason::none);
}

}  // namespace
}  // namespace charonia
