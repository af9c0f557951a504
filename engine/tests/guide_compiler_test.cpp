// Guides over a small vocabulary: which tokens follow, which guides are rejected, and that hostile ones cost little.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "grammar/guide_compiler.h"
#include "text/token_table.h"

namespace charonia::grammar {
namespace {

constexpr TokenId kEnd = 0;

// Every byte is a token, as with byte fallback. Some tokens have more bytes, and one of them has half a character.
std::vector<std::string> vocabulary() {
  std::vector<std::string> out{"</s>"};
  for (int byte = 0; byte < 256; ++byte) out.emplace_back(1, static_cast<char>(byte));
  for (const char* const more : {"{\"", "\":", "true", "abc", " 12", "\", \"", "\xe6\x97", "\xe6\x97\xa5", "}}"}) {
    out.emplace_back(more);
  }
  return out;
}

std::vector<TokenId> allowed(TokenMaskProvider& provider, const std::vector<TokenId>& output, int vocab_size) {
  std::vector<std::uint32_t> mask((static_cast<std::size_t>(vocab_size) + 31) / 32);
  provider.fill(output, mask);
  std::vector<TokenId> out;
  for (TokenId id = 0; id < vocab_size; ++id) {
    if ((mask[static_cast<std::size_t>(id) / 32] >> (id % 32) & 1) != 0) out.push_back(id);
  }
  return out;
}

// With its backslashes as JSON has them.
std::string pattern_as_json(const std::string& pattern) {
  std::string out;
  for (const char c : pattern) out += c == '\\' ? "\\\\" : std::string(1, c);
  return out;
}

std::string repeated(int count, const auto& part) {
  std::string out;
  for (int i = 0; i < count; ++i) out += part(i);
  return out;
}

class GuideCompilerTest : public ::testing::Test {
 protected:
  std::unique_ptr<const CompiledGuide> compile(GuideType type, const std::string& text,
                                               bool after_space = false) const {
    return compiler_.compile({type, text}, after_space);
  }
  std::string rejected(GuideType type, const std::string& text) const {
    try {
      compile(type, text);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    ADD_FAILURE() << "was not rejected: " << text;
    return {};
  }
  void expect_rejected(GuideType type, const std::string& text, const std::string& part) const {
    const auto error = rejected(type, text);
    EXPECT_NE(error.find(part), std::string::npos) << text << "\n  " << error;
  }
  // Whether the grammar accepts the text, in tokens of one byte.
  bool accepts(GuideType type, const std::string& text, const std::string& whole, bool after_space = false) const {
    const auto provider = compile(type, text, after_space)->provider({kEnd});
    std::vector<TokenId> output;
    for (std::size_t i = 0; i <= whole.size(); ++i) {
      const TokenId next = i < whole.size() ? 1 + static_cast<unsigned char>(whole[i]) : kEnd;
      const auto may = allowed(*provider, output, vocab_size_);
      if (std::ranges::find(may, next) == may.end()) return false;
      output.push_back(next);
    }
    return true;
  }
  bool valid(const std::string& schema, const std::string& value) const {
    return accepts(GuideType::json_schema, schema, value);
  }

  const std::vector<std::string> tokens_ = vocabulary();
  const int vocab_size_ = static_cast<int>(tokens_.size()) + 5;  // padded
  const text::TokenTable table_ = [this] {
    std::vector<std::uint8_t> special(tokens_.size(), 0);
    special[kEnd] = 1;
    return text::TokenTable(tokens_, special, true);
  }();
  // Finds the place of an error also on a slow machine.
  const GuideCompiler compiler_{table_, vocab_size_, {kEnd}, nullptr, 600};
};

TEST_F(GuideCompilerTest, EachTypeAllowsItsTextsAndNoOthers) {
  EXPECT_TRUE(accepts(GuideType::json, "", R"({"a": [1, {"b": null}]})"));
  EXPECT_FALSE(accepts(GuideType::json, "", "[1]"));
  EXPECT_TRUE(accepts(GuideType::regex, "[0-9]+-(a|b)", "12-b"));
  EXPECT_FALSE(accepts(GuideType::regex, "[0-9]+-(a|b)", "12-"));
  EXPECT_TRUE(accepts(GuideType::regex, "a/\n?b|", "a/\nb"));
  EXPECT_TRUE(accepts(GuideType::choice, R"(["yes", "no", "日\n\"\\"])", "日\n\"\\"));
  EXPECT_FALSE(accepts(GuideType::choice, R"(["yes", "no"])", "yesno"));
  EXPECT_TRUE(accepts(GuideType::choice, R"(["", "a"])", ""));
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "start: \"x\" y*\ny: /[a-c]/ | \"(\" y \")\"", "xa((b))"));
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "start: \"\"", ""));
  EXPECT_FALSE(accepts(GuideType::ebnf_grammar, "start: \"\"", "a"));
  const std::string list =
      R"({"grammars": [{"lark_grammar": "start: (h @g \"</f>\")* /(?s:.*)/\nh[lazy]: /(?s:.*)/ \"<f>\""},
      {"name": "g", "json_schema": {"type": "integer"}}]})";
  EXPECT_TRUE(accepts(GuideType::structural_tag, list, "text <f>12</f> and more"));
  EXPECT_FALSE(accepts(GuideType::structural_tag, list, "text <f>x</f>"));
}

// Each mask is compared with the mask of a new provider.
TEST_F(GuideCompilerTest, ProposalsChangeNoMask) {
  std::mt19937 random(5);
  const std::vector<std::pair<GuideType, std::string>> guides = {
      {GuideType::json_schema, R"({"type": "array", "items": {"enum": ["ab", "abc", 12, null]}, "maxItems": 6})"},
      {GuideType::regex, "(ab|a[bc]d?){2,20}"},
      {GuideType::ebnf_grammar, "start: \"x\" y*\ny: /[a-c]+/ | \"(\" y* \")\""}};
  for (const auto& [type, text] : guides) {
    const auto guide = compile(type, text);
    const auto reference = [&](const std::vector<TokenId>& output) {
      auto may = allowed(*guide->provider({kEnd}), output, vocab_size_);
      std::erase(may, kEnd);
      return may;
    };
    const auto provider = guide->provider({kEnd}, std::nullopt, true);
    std::vector<TokenId> output;
    int rejected = 0;
    for (auto may = reference(output); !may.empty() && output.size() < 60; may = reference(output)) {
      auto guess = output;  // tokens that may follow, and at the end perhaps one that may not
      for (auto next = may; !next.empty() && random() % 5 > 0; next = reference(guess)) {
        guess.push_back(next[random() % next.size()]);
      }
      if (random() % 2 == 0) guess.push_back(random() % 2 == 0 ? kEnd : 1 + '#');
      guess.erase(guess.begin(), guess.begin() + static_cast<std::ptrdiff_t>(output.size()));
      const auto got = provider->propose(output, guess, 4);
      ASSERT_LE(got.size(), std::min<std::size_t>(guess.size(), 4));
      rejected += got.size() < std::min<std::size_t>(guess.size(), 4);
      auto so_far = output;
      for (std::size_t i = 0; i <= got.size(); ++i) {
        auto mask = allowed(*provider, so_far, vocab_size_);
        std::erase(mask, kEnd);
        const auto expected = reference(so_far);
        ASSERT_EQ(mask, expected);
        const bool more = i < got.size();
        if (i < std::min<std::size_t>(guess.size(), 4)) {
          ASSERT_EQ(more, std::ranges::find(expected, guess[i]) != expected.end());
        }
        if (more) so_far.push_back(got[i]);
      }
      output.push_back(may[random() % may.size()]);
    }
    EXPECT_GT(output.size(), 5U);
    EXPECT_GT(rejected, 0);
  }
}

TEST_F(GuideCompilerTest, AProposalWithAnErrorChangesNoLaterMask) {
  const auto provider = compile(GuideType::regex, "ab+c")->provider({kEnd}, std::nullopt, true);
  const TokenId a = 1 + 'a', b = 1 + 'b', c = 1 + 'c';
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(allowed(*provider, {a, c}, vocab_size_), Error);
    EXPECT_THROW(allowed(*provider, {a, c}, vocab_size_), Error);
    EXPECT_EQ(allowed(*provider, {a}, vocab_size_), std::vector<TokenId>{b});
  }
  EXPECT_EQ(allowed(*provider, {a, b}, vocab_size_), (std::vector<TokenId>{b, c}));
}

TEST_F(GuideCompilerTest, SpecialTokensFollowWhereAGrammarNamesThem) {
  constexpr TokenId kCall = 1, kOther = 2, kA = 3;
  const text::TokenTable table({"</s>", "[CALL]", "[OTHER]", "a", ""}, {1, 1, 1, 0, 1}, true);
  const GuideCompiler compiler(table, 6, {kEnd}, nullptr);
  const auto after = [&](const std::string& lark, const std::vector<TokenId>& output) {
    return allowed(*compiler.compile({GuideType::ebnf_grammar, lark}, false)->provider({kEnd}), output, 6);
  };
  using Ids = std::vector<TokenId>;
  const std::string text = "start: /(?s:.*)/ <[1]>";
  EXPECT_EQ(after("start: /(?s:.*)/", {}), (Ids{kEnd, kA}));
  EXPECT_EQ(after(text, {kA}), (Ids{kCall, kA}));
  EXPECT_EQ(after(text, {kA, kCall}), Ids{kEnd});
  EXPECT_EQ(after("start: <[2]>", {}), Ids{kOther});
  EXPECT_THROW(after("start: <[6]>", {}), Error);
  // A token that ends responses is an empty text.
  EXPECT_EQ(after("start: \"a\" <[0]> // <[0]>", {kA}), Ids{kEnd});
}

TEST_F(GuideCompilerTest, EndIdsAreAllowedOnlyWhereTheTextMayEnd) {
  const TokenId a = 1 + 'a';
  EXPECT_EQ(allowed(*compile(GuideType::regex, "aab?")->provider({a}), {}, vocab_size_).size(), 0U);
}

TEST_F(GuideCompilerTest, ATextAfterASpaceBeginsWithOne) {
  EXPECT_TRUE(accepts(GuideType::choice, R"(["a"])", " a", true));
  EXPECT_FALSE(accepts(GuideType::choice, R"(["a"])", "a", true));
  EXPECT_TRUE(accepts(GuideType::json, "", " {}", true));
}

TEST_F(GuideCompilerTest, TokensWithHalfACharacterLeadToWholeOnes) {
  std::vector<std::string> first;
  for (const auto id : allowed(*compile(GuideType::choice, R"(["日"])")->provider({kEnd}), {}, vocab_size_)) {
    first.push_back(tokens_[static_cast<std::size_t>(id)]);
  }
  EXPECT_EQ(first, (std::vector<std::string>{"\xe6", "\xe6\x97", "\xe6\x97\xa5"}));
  for (const char* const all : {".", "[^a]", "[\\u0000-\\uffff]"}) {
    EXPECT_FALSE(accepts(GuideType::regex, all, "\xed\xa0\x80")) << all;
    EXPECT_FALSE(accepts(GuideType::regex, all, "\xf4\x90\x80\x80")) << all;
  }
}

TEST_F(GuideCompilerTest, SchemasAreEnforced) {
  const std::string object = R"({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 12},
      "b": {"type": "string", "minLength": 2, "maxLength": 3}}, "required": ["a"]})";
  EXPECT_TRUE(valid(object, R"({"a": 12, "b": "日é"})"));
  EXPECT_TRUE(valid(object, R"({"a": 3})"));
  for (const char* const wrong : {R"({"a": 2})", R"({"a": 13})", R"({"b": "ab"})", R"({"a": 3, "b": "x"})",
                                  R"({"a": 3, "b": "wxyz"})", R"({"a": 3, "c": 1})", "{\"a\": 3, \"b\": \"a\tb\"}"}) {
    EXPECT_FALSE(valid(object, wrong)) << wrong;
  }
  const std::string tree = R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
      "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}}})";
  EXPECT_TRUE(valid(tree, R"({"next": {"next": null}})"));
  EXPECT_FALSE(valid(tree, R"({"next": {}})"));
  EXPECT_FALSE(valid(tree, R"({"next": null, "b": 1})"));
  EXPECT_FALSE(valid(R"({"type": "array", "uniqueItems": true, "maxItems": 1})", "[1, 1]"));
  EXPECT_TRUE(valid(R"({"const": "a", "title": "t", "x-y": 1, "own": {}})", "\"a\""));
}

TEST_F(GuideCompilerTest, ObjectsHaveOnlyThePropertiesThatAreNamed) {
  const std::string open = R"({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true})";
  EXPECT_TRUE(valid(open, R"({"a": null})"));
  EXPECT_FALSE(valid(open, R"({"a": null, "b": 1})"));
  EXPECT_TRUE(valid(R"({"type": "object"})", R"({"any": {"thing": [1]}})"));
  // Objects of several schemas have the properties of all.
  const std::string both =
      R"({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"minimum": 3}}, "required": ["y"]}],
      "$defs": {"a": {"type": "object",
                      "properties": {"x": {"type": "boolean"}, "y": {"type": "integer", "maximum": 5}}}}})";
  EXPECT_TRUE(valid(both, R"({"x": true, "y": 4})"));
  EXPECT_FALSE(valid(both, R"({"y": 6})"));
  const std::string either = R"({"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
      {"type": "null"}]})";
  EXPECT_TRUE(valid(either, R"({"a": null})"));
  EXPECT_FALSE(valid(either, R"({"a": null, "b": 1})"));
  const std::string named =
      R"({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}})";
  EXPECT_TRUE(valid(named, R"({"ab": null})"));
  EXPECT_FALSE(valid(named, R"({"b": null})"));
}

TEST_F(GuideCompilerTest, DatesExistAndTimesAreThoseThatMostReadersTake) {
  const auto of = [](const char* format) { return cat(R"({"type": "string", "format": ")", format, "\"}"); };
  for (const char* const date : {"2024-02-29", "2000-02-29", "2023-02-28", "0001-12-31", "1990-11-30", "0010-01-01"}) {
    EXPECT_TRUE(valid(of("date"), cat("\"", date, "\""))) << date;
    EXPECT_TRUE(valid(of("date-time"), cat("\"", date, "T23:59:59.25+01:30\""))) << date;
  }
  for (const char* const date : {"2023-02-29", "1900-02-29", "2023-02-30", "2023-04-31", "0000-01-01", "2023-13-01",
                                 "2023-00-01", "2023-01-00", "2023-1-1", "x2023-01-01", "2023-01-01Z", "0000-02-29"}) {
    EXPECT_FALSE(valid(of("date"), cat("\"", date, "\""))) << date;
    EXPECT_FALSE(valid(of("date-time"), cat("\"", date, "T00:00:00Z\""))) << date;
  }
  EXPECT_TRUE(valid(of("time"), R"("10:00:00.123456Z")"));
  for (const char* const time : {"16:16:60Z", "24:00:00Z", "16:16:16", "16:16:16+24:00", "10:00:00.1234567Z"}) {
    EXPECT_FALSE(valid(of("time"), cat("\"", time, "\""))) << time;
  }
}

TEST_F(GuideCompilerTest, SchemasThatWouldNotBeEnforcedAreRejectedWithTheirPlace) {
  const auto property = [](const std::string& schema) {
    return R"({"type": "object", "properties": {"a/b": )" + schema + "}}";
  };
  const auto at = [&](const std::string& schema, const std::string& error) {
    expect_rejected(GuideType::json_schema, property(schema), "at /properties/a~1b" + error);
  };
  for (const char* const keyword : {"not", "if", "dependentSchemas", "contains", "$dynamicRef", "dependencies"}) {
    at(cat("{\"", keyword, "\": {}}"), cat(": Unimplemented keys: [\"", keyword, "\"]"));
  }
  for (const auto& [near, meant] :
       {std::pair{"item", "items"}, {"maxlength", "maxLength"}, {"pattern_properties", "patternProperties"}}) {
    at(cat("{\"", near, "\": 3}"), cat("/", near, ": there is no keyword ", near, ": is it ", meant, "?"));
  }
  at(R"({"disallow": "null"})", "/disallow: the keyword disallow is not supported");
  at(R"({"type": "array", "uniqueItems": true})", ": Unimplemented keys");
  at(R"({"type": "text"})", ": Invalid type: text");
  at(R"({"type": "string", "format": "regex"})", ": Unknown format: regex");
  at(R"({"type": "object", "required": [3]})", ": Expected string for 'required'");
  at(R"({"type": "object", "properties": 3})", ": properties must be an object");
  at(R"({"anyOf": 3})", ": anyOf must be an array");
  at(R"({"type": "string", "format": "datetime"})", "/format: the format datetime is unknown: is it date-time?");
  at(R"({"type": "string", "format": "date", "pattern": "^2"})", "/pattern: ");
  at(R"({"$ref": "other.json"})", "/$ref: ");
  at(R"({"$id": "x", "type": "null"})", "/$id: ");
  at(R"({"const": [1, 1e30]})", "/const: numbers beyond 2^53");
  at(R"({"type": "object", "additionalProperties": {}, "minProperties": 2})", "/minProperties: ");
  at(R"({"type": "object", "properties": {"x": {}}, "required": ["y"]})", "/required: \"y\" is not among properties");
  at(R"({"type": "array", "items": [{}]})", "/items: ");
  at("3", ": schema must be an object or boolean");
  at(R"({"anyOf": [3]})", "/anyOf/0: schema must be an object or boolean");
  // llguidance's own errors have their place, too.
  at(R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})", ": oneOf");
  at(R"({"$ref": "#/$defs/none"})", "/$ref: the reference leads nowhere");
  expect_rejected(GuideType::json_schema,
                  R"({"$defs": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "$ref": "#/$defs/a"})",
                  "at /$defs/a: Unsatisfiable schema");
  // References lead to schemas in other places, too.
  expect_rejected(GuideType::json_schema,
                  R"({"$ref": "#/own/a%20b", "own": {"a b": {"type": "string", "format": "regex"}}})",
                  ": Unknown format: regex");
  const std::string older = R"({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]})";
  expect_rejected(GuideType::json_schema, older, "at /prefixItems: ");
  expect_rejected(GuideType::json_schema, R"({"type": "string")", "is not JSON");
  expect_rejected(GuideType::json_schema, "false", "no value is valid");
  expect_rejected(GuideType::json_schema, std::string(30'000, '['), "nested more than 64 deep");
}

TEST_F(GuideCompilerTest, SchemasThatCostTooMuchAreRejectedWithTheirPlace) {
  const auto rejected_at = [&](const std::string& schema, const std::string& error) {
    expect_rejected(GuideType::json_schema, schema, "at " + error);
  };
  const std::string optional = repeated(701, [](int i) { return cat("\"p", i, "\": {},"); });
  rejected_at(cat(R"({"type": "object", "properties": {)", optional, R"("q": {}}})"),
              "/properties: more than 700 properties");
  // Its first mask takes more than the limit of a mask with sanitizers, so no text is read.
  EXPECT_NO_THROW(compile(GuideType::json_schema,
                          cat(R"({"type": "object", "properties": {)",
                              repeated(699, [](int i) { return cat("\"p", i, "\": {},"); }), R"("q": {}}})")));
  const auto patterns = [](int count, const std::string& key) {
    return repeated(count, [&](int i) {
      return cat(i > 0 ? "," : "", key, "\"[a-z].{", i, "}[0-9]\"", key.empty() ? ": {}" : "}");
    });
  };
  const auto many = patterns(40, R"({"pattern": )");
  const std::string error = "too many patterns and formats";
  rejected_at(cat(R"({"properties": {"x": {"allOf": [)", many, "]}}}"), "/properties/x: " + error);
  rejected_at(cat(R"({"properties": {"x": {"type": "string", "anyOf": [{"allOf": [)", many, "]}]}}}"),
              "/properties/x: " + error);
  rejected_at(cat(R"({"allOf": [{"properties": {"x": {}}}, {"patternProperties": {"x": {"allOf": [)", many, "]}}}]}"),
              "/allOf/1/patternProperties/x: " + error);
  rejected_at(cat(R"({"$defs": {"a": {"allOf": [)", many, R"(]}}, "items": {"$ref": "#/%24defs/a"}})"),
              "/$defs/a: " + error);
  const auto branches =
      repeated(100, [](int i) { return cat(i > 0 ? "|" : "", "[a-", static_cast<char>('b' + i % 20), "]", i); });
  const auto branched =
      repeated(4, [&](int i) { return cat(i > 0 ? "," : "", R"({"pattern": ")", branches, "q", i, "\"}"); });
  rejected_at(cat(R"({"items": {"allOf": [)", branched, "]}}"), "/items: " + error);
  rejected_at(cat(R"({"patternProperties": {)", patterns(17, ""), "}}"),
              "/patternProperties: the schema has more than 16 patterns");
  const std::string multiples = "the numbers of multipleOf are too large together";
  rejected_at(R"({"items": {"multipleOf": 999983}})", "/items/multipleOf: " + multiples);
  rejected_at(R"({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]})", "/allOf/1/multipleOf: " + multiples);
  rejected_at(R"({"multipleOf": 65521000})", "/multipleOf: " + multiples);
  rejected_at(R"({"properties": {"a": {"multipleOf": 65521}, "b": {"multipleOf": 65519}}})",
              "/properties/b/multipleOf: " + multiples);
  rejected_at(R"({"anyOf": [{"multipleOf": 997}, {"multipleOf": 991}]})", "/anyOf/1/multipleOf: " + multiples);
  rejected_at(R"({"multipleOf": 997, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 991}}})",
              "/$defs/a/multipleOf: " + multiples);
  rejected_at(R"({"properties": {"a": {"multipleOf": 997}}, "patternProperties": {"a": {"multipleOf": 991}}})",
              "/patternProperties/a/multipleOf: " + multiples);
  expect_rejected(GuideType::ebnf_grammar,
                  "start: %json {\"multipleOf\": 65521} | %json {\"multipleOf\": 65519}", multiples);
  expect_rejected(GuideType::structural_tag,
                  R"({"grammars": [{"json_schema": {"multipleOf": 65521}}, {"json_schema": {"multipleOf": 65519}}]})",
                  multiples);
  EXPECT_TRUE(valid(R"({"type": "integer", "multipleOf": 86400000})", "172800000"));
  EXPECT_TRUE(valid(R"({"anyOf": [{"type": "integer", "multipleOf": 7}, {"type": "null"}]})", "21"));
  // Rules for a password, and many patterns that apply to different texts.
  EXPECT_TRUE(valid(
      R"({"type": "string", "minLength": 3,
           "allOf": [{"pattern": "[a-z]"}, {"pattern": "[0-9]"}, {"pattern": "[A-Z]"}]})",
      R"("aB3")"));
  const auto apart =
      repeated(40, [](int i) { return cat("\"p", i, R"(": {"type": "string", "pattern": "^[a-z]+)", i, "$\"}, "); });
  EXPECT_TRUE(valid(
      cat(R"({"allOf": [{"required": ["q"]}, {"type": "object", "properties": {)", apart, R"("q": {"const": 1}}}]})"),
      R"({"p7": "a7", "q": 1})"));
  const auto half = [](char name) {
    return cat(R"({"properties": {)",
               repeated(400, [&](int i) { return cat("\"", std::string(1, name), i, "\": {},"); }), "\"q\": {}}}");
  };
  try {
    valid(cat(R"({"type": "object", "allOf": [)", half('a'), ",", half('b'), "]}"), "{}");
    ADD_FAILURE() << "the parser took all properties";
  } catch (const Error& thrown) {
    EXPECT_EQ(thrown.code(), ErrorCode::invalid_argument);
    EXPECT_TRUE(std::string(thrown.what()).starts_with("the grammar costs too much")) << thrown.what();
  }
}

TEST_F(GuideCompilerTest, JsonSchemasInLarkAreFoundOutsideOfLiterals) {
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "start: \"%json {\" /%json/ // %json x", "%json {%json"));
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "start: \"a\" %json {\"const\": \"&#//\"} \"b\"", "a\"&#//\"b"));
}

TEST_F(GuideCompilerTest, PatternsThatOtherEnginesReadInAnotherWayAreRejected) {
  for (const auto& [pattern, error] : std::vector<std::pair<std::string, std::string>>{
           {"a*+a", "what is repeated"},   {"(a){2}{3}", "what is repeated"}, {"a{1,2}?+", "what is repeated"},
           {"a{2, 3}", "a brace"},         {"a{,3}", "a brace"},              {"(?i)a", "this kind of group"},
           {"(?=a)b", "this kind of group"}, {"[[:alpha:]]", "a bracket in a class"}, {"[]a]", "an empty class"},
           {"\\Aa", "the escape"},         {"(a)\\1", "the escape"},          {"[a&&b]", "twice in a class"},
           {"[a", "a class without an end"}}) {
    expect_rejected(GuideType::regex, pattern, error);
    expect_rejected(GuideType::json_schema, R"({"type": "string", "pattern": ")" + pattern_as_json(pattern) + "\"}",
                    "at /pattern: ");
  }
  for (const char* const pattern : {"a(b", "a)b", "a^b", "\\bfoo", "\\x4g", "[b-a]", "\\ud83d"})
    rejected(GuideType::regex, pattern);
  expect_rejected(GuideType::regex, std::string(65, '(') + std::string(65, ')'), "nested more than 64 deep");
}

TEST_F(GuideCompilerTest, RegularExpressionsHaveTheirUsualMeaning) {
  for (const auto& [expression, right, wrong] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"\\x41b", "Ab", "\u041b"},     {"[\\x2d0-9]{2}", "-7", "+7"},  {"[\\u00e9a]", "a", "\u0e9a"},
           {"[\\^a]", "^", "b"},           {"[^\\^a]", "b", "^"},          {"[\\w\\-.]+", "a-.", "/"},
           {"[\\]\\-\\\\]{3}", "]-\\", "[-\\"}, {"0(-[0-9]+)?", "0-12", "012"}, {"v1(-[a-z]+)?", "v1", "v1ab"},
           {"(ab+|c){2,}", "cabb", "ccb"}, {"(ab){3,}", "ababab", "abab"}, {"^a|b$", "b", "ab"}}) {
    EXPECT_TRUE(accepts(GuideType::regex, expression, right)) << expression;
    EXPECT_FALSE(accepts(GuideType::regex, expression, wrong)) << expression;
  }
  EXPECT_TRUE(valid(R"({"type": "string", "pattern": "b"})", R"("abc")"));
  EXPECT_FALSE(valid(R"({"type": "string", "pattern": "^b"})", R"("abc")"));
  EXPECT_FALSE(valid(R"({"type": "string", "pattern": "^\\d$"})", "\"\u0663\""));
}

TEST_F(GuideCompilerTest, ErrorsNameThePartOfAGuide) {
  EXPECT_TRUE(rejected(GuideType::regex, "a(b").starts_with("guided_decoding_guide: "));
  const auto list = [](const std::string& called) {
    return cat(R"({"called": "tools", "grammars": [{"lark_grammar": "start: @g"}, {"name": "g", )", called,
               R"("json_schema": {"not": {}}}]})");
  };
  EXPECT_TRUE(
      rejected(GuideType::structural_tag, list(R"("called": "f", )")).starts_with("f: the JSON schema, at its root: "));
  EXPECT_TRUE(rejected(GuideType::structural_tag, list("")).starts_with("tools: the JSON schema, at its root: "));
  const std::string unsatisfiable = R"({"grammars": [{"lark_grammar": "start: @g"}, {"name": "g", "called": "f",
      "json_schema": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 0}}}]})";
  EXPECT_TRUE(rejected(GuideType::structural_tag, unsatisfiable).starts_with("f: the JSON schema, at "));
  expect_rejected(GuideType::structural_tag, "[]", "is expected");
  expect_rejected(GuideType::choice, "[]", "a JSON list");
  expect_rejected(GuideType::choice, "[\"a\", 1]", "a JSON list");
  expect_rejected(GuideType::ebnf_grammar, "root ::= \"a\"", "this is EBNF, and Lark is expected");
  expect_rejected(GuideType::ebnf_grammar, "start: other", "other");
  expect_rejected(GuideType::ebnf_grammar, "start: %json {\"not\": {}}", "Unimplemented keys: [\"not\"]");
}

TEST_F(GuideCompilerTest, HostileGuidesAreRejectedOrCostLittle) {
  const std::string ambiguous = "start: s\ns: s s | \"a\" | \"\"";
  std::vector<std::pair<GuideType, std::string>> hostile = {
      {GuideType::json_schema, R"({"type": "string", "maxLength": 100000})"},
      {GuideType::json_schema, R"({"type": "integer", "multipleOf": 999983})"},
      {GuideType::json_schema,
       R"({"type": "array", "minItems": 100000, "items": {"type": "array", "minItems": 100000}})"},
      {GuideType::json_schema, R"({"type": "string", "maxLength": 999999999999999999999999})"},
      {GuideType::json_schema, R"({"type": "string", "pattern": "^a{20000}$"})"},
      {GuideType::json_schema,
       R"({"type": "string", "pattern": "^)" + repeated(150, [](int) { return "a{49999,}"; }) + "$\"}"},
      {GuideType::regex, "(a|b)*a(a|b){200}"},
      {GuideType::regex, "((((a{9}){9}){9}){9}){9}"},
      {GuideType::regex, "(a?){1000}a{1000}"},
      {GuideType::regex, repeated(4'000, [](int) { return "a?"; })},
      {GuideType::ebnf_grammar, ambiguous},
      {GuideType::ebnf_grammar, ambiguous + repeated(2000, [](int) { return " | s s s"; })},
      {GuideType::ebnf_grammar, ambiguous + " | " + repeated(2000, [](int) { return "s? "; })},
      {GuideType::ebnf_grammar, "start: \"a\"{99999999999}"},
      {GuideType::ebnf_grammar,
       "start: T\nT: /(a{2})*b/ & /(a{3})*b/ & /(a{5})*b/ & /(a{7})*b/ & /(a{11})*b/ & /(a{13})*b/ & /(a{17})*b/ & "
       "/(a{19})*b/"},
      {GuideType::ebnf_grammar, "start: T\nT: ~(/(?s:.*)a(?s:.){18}/) & ~(/(?s:.*)b(?s:.){17}/)"},
      {GuideType::json_schema, R"({"type": "string", "pattern": "^(a{1000}){1000}$"})"},
      {GuideType::json_schema, R"({"type": "string", "pattern": "^((a|b){0,1000}c?){1000}$"})"},
      {GuideType::regex, "(\\w\\W\\pL){500}"},
      {GuideType::regex, repeated(3000, [](int) { return "\\pL\\pN\\p{Greek}"; })},
      {GuideType::ebnf_grammar,
       "start: A0\n" + repeated(60, [](int i) { return cat("A", i, ": A", i + 1, " A", i + 1, "\n"); }) + "A60: \"a\""},
      {GuideType::ebnf_grammar, "start: A0\n" +
                                    repeated(3000, [](int i) { return cat("A", i, ": A", i + 1, " A", i + 1, "\n"); }) +
                                    "A3000: \"a\""},
      {GuideType::ebnf_grammar, "start: A\nA: " + repeated(300, [](int) { return "B "; }) +
                                    "\nB[x=\"y\"]: " + repeated(300, [](int) { return "C "; }) +
                                    "\nC: " + repeated(300, [](int) { return "D "; }) + "\nD: \"a\" | \"bb\""},
      {GuideType::ebnf_grammar, "start: " + repeated(100'000, [](int) { return "\"a\" "; })},
      {GuideType::ebnf_grammar,
       "start: s*\ns: " + repeated(300, [](int i) { return cat("/[a-z]{0,", i, "}/ | "); }) + "\"a\""},
  };
  hostile.emplace_back(GuideType::json_schema,
                       R"({"$ref": "#/$defs/a0", "$defs": {)" + repeated(400, [](int i) {
                         return cat("\"a", i, R"(": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a)", i + 1,
                                    R"("}, "y": {"$ref": "#/$defs/a)", i + 1, "\"}}},");
                       }) + R"("a400": {"type": "null"}}})");
  hostile.emplace_back(GuideType::json_schema,
                       "{\"allOf\": [" + repeated(300, [](int) { return R"({"$ref": "#/$defs/a"}, )"; }) +
                           R"({}], "$defs": {"a": {"type": "object", "properties": {)" +
                           repeated(4800, [](int i) { return cat("\"p", i, "\": {}, "); }) + "\"q\": {}}}}}");
  hostile.emplace_back(GuideType::json_schema,
                       R"({"allOf": [)" + repeated(40, [](int i) {
                         return cat(i > 0 ? "," : "", R"({"type": "string", "pattern": "[a-z].{)", i, "}[0-9]\"}");
                       }) + "]}");
  hostile.emplace_back(GuideType::json_schema,
                       R"({"type": "object", "patternProperties": {)" + repeated(1000, [](int i) {
                         return cat(i > 0 ? "," : "", "\"^", i, "x[a-z]*$\": {}");
                       }) + "}}");
  const GuideCompiler compiler(table_, vocab_size_, {kEnd}, nullptr);
  for (const auto& [type, text] : hostile) {
    const auto begun = std::clock();
    try {
      const auto provider = compiler.compile({type, text}, false)->provider({kEnd});
      std::vector<TokenId> output;
      for (int i = 0; i < 50; ++i) {
        const TokenId a = 1 + 'a';
        const auto may = allowed(*provider, output, vocab_size_);
        if (std::ranges::find(may, a) == may.end()) break;
        output.push_back(a);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    }
    EXPECT_LT(static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC, 5.0) << text.substr(0, 100);
  }
}

}  // namespace
}  // namespace charonia::grammar
