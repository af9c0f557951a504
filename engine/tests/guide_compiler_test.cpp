// Grammars on a small vocabulary: which tokens follow, which guides are refused, and that hostile ones cost little.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "grammar/guide_compiler.h"
#include "runtime/guide_library.h"
#include "text/token_table.h"
#include "text/utf8.h"

namespace charonia::grammar {
namespace {

constexpr TokenId kEnd = 0;

// Every byte is a token, as with byte fallback; some tokens have more bytes, one of them half a character.
std::vector<std::string> vocabulary() {
  std::vector<std::string> out{"</s>"};
  for (int byte = 0; byte < 256; ++byte) out.emplace_back(1, static_cast<char>(byte));
  for (const char* const more : {"{\"", "\":", "true", "abc", " 12", "\", \"", "\xe6\x97", "\xe6\x97\xa5", "}}"}) {
    out.emplace_back(more);
  }
  return out;
}

// By the library, which is beside this program. What it throws is caught here.
std::unique_ptr<GuideCompiler> make_compiler(const text::TokenTable& table, int vocab_size) {
  return std::unique_ptr<GuideCompiler>(runtime::open_guide_library()(table, vocab_size, {kEnd}, nullptr));
}

class GuideCompilerTest : public ::testing::Test {
 protected:
  std::shared_ptr<const CompiledGuide> compile(GuideType type, const std::string& text,
                                               bool after_space = false) const {
    return compiler_->compile({type, text}, after_space);
  }
  std::string refused(GuideType type, const std::string& text) const {
    try {
      compile(type, text);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    ADD_FAILURE() << "was not refused: " << text;
    return {};
  }
  // Whether the text, in tokens of one byte, is one of the grammar.
  bool accepts(GuideType type, const std::string& text, const std::string& whole, bool after_space = false) const {
    const auto provider = compile(type, text, after_space)->provider({kEnd});
    std::vector<TokenId> output;
    for (std::size_t i = 0; i <= whole.size(); ++i) {
      const TokenId next = i < whole.size() ? 1 + static_cast<unsigned char>(whole[i]) : kEnd;
      std::vector<std::uint32_t> mask((table_.size() + 31) / 32);
      provider->fill(output, mask);
      if ((mask[next / 32] >> (next % 32) & 1) == 0) return false;
      output.push_back(next);
    }
    return true;
  }
  bool valid(const std::string& schema, const std::string& value) const {
    return accepts(GuideType::json_schema, schema, value);
  }

  const std::vector<std::string> tokens_ = vocabulary();
  const text::TokenTable table_ = [this] {
    std::vector<std::uint8_t> special(tokens_.size(), 0);
    special[kEnd] = 1;
    return text::TokenTable(tokens_, special, true);
  }();
  const std::unique_ptr<GuideCompiler> compiler_ = make_compiler(table_, static_cast<int>(tokens_.size()) + 5);
};

// Special tokens are in a text where a tag names them, by name or by id, and nowhere else.
TEST(GuideCompiler, SpecialTokensComeWhereATagNamesThem) {
  constexpr TokenId kCall = 1, kOther = 2, kA = 3, kNameless = 4;
  const text::TokenTable table({"</s>", "[CALL]", "[OTHER]", "a", ""}, {1, 1, 1, 0, 1}, true);
  const auto compiler = make_compiler(table, 6);
  const auto allowed = [&](const std::string& format, const std::vector<TokenId>& output, const std::string& more = "",
                           bool after_space = false) {
    const auto guide = Guide{GuideType::structural_tag, R"({"format": )" + format + more + "}"};
    const auto provider = compiler->compile(guide, after_space)->provider({kEnd});
    std::vector<std::uint32_t> mask(1);
    provider->fill(output, mask);
    std::vector<TokenId> out;
    for (TokenId id = 0; id < 6; ++id) {
      if ((mask[0] >> id & 1) != 0) out.push_back(id);
    }
    return out;
  };
  using Ids = std::vector<TokenId>;
  const std::string call = R"({"type": "token", "token": "[CALL]"})";
  for (const std::string text : {R"({"type": "any_text"})", R"({"type": "any_text", "excludes": ["x"]})",
                                 R"({"type": "any_tokens", "exclude_tokens": ["[OTHER]"]})"}) {
    EXPECT_EQ(allowed(text, {}), (Ids{kEnd, kA})) << text;
    const auto sequence = R"({"type": "sequence", "elements": [)" + text + ", " + call + "]}";
    EXPECT_EQ(allowed(sequence, {kA}), (Ids{kCall, kA})) << text;
    EXPECT_EQ(allowed(sequence, {kA, kCall}), Ids{kEnd}) << text;
  }
  EXPECT_EQ(allowed(R"({"type": "token", "token": 2})", {}), Ids{kOther});
  EXPECT_EQ(allowed(R"({"type": "token_triggered_tags", "trigger_tokens": ["[OTHER]"], "tags": [{"begin":
    {"type": "token", "token": "[OTHER]"}, "content": {"type": "const_string", "value": "a"}, "end": ""}]})",
                    {kA}),
            (Ids{kEnd, kOther, kA}));
  // The end of an answer is where a tag may end.
  EXPECT_EQ(allowed(R"({"type": "tag", "begin": "a", "content": {"type": "const_string", "value": ""}, "end":
    {"type": "token", "token": "</s>"}})",
                    {kA}),
            Ids{kEnd});
  EXPECT_EQ(allowed(call, {}, R"(, "space": "free")", true), Ids{kCall});
  EXPECT_THROW(allowed(R"({"type": "token", "token": "[NONE]"})", {}), Error);
  EXPECT_NE(allowed(R"({"type": "any_text"})", {}), Ids{kNameless});
}

TEST(GuideCompiler, ANumberThatIsNoTokenIdIsNoToken) {
  const text::TokenTable table({"</s>", "a"}, {1, 0}, true);
  const auto compiler = make_compiler(table, 2);
  for (const char* const id : {"1099511627776", "4294967296", "-4294967296", "18446744073709551615", "2"}) {
    const Guide guide{GuideType::structural_tag, std::string(R"({"format": {"type": "token", "token": )") + id + "}}"};
    EXPECT_THROW(compiler->compile(guide, false), Error) << id;
  }
}

TEST(GuideCompiler, ErrorsSayWhatATagCallsItsParts) {
  const text::TokenTable table({"</s>", "a"}, {1, 0}, true);
  const auto compiler = make_compiler(table, 2);
  const auto refused = [&](const std::string& tag) -> std::string {
    try {
      compiler->compile({GuideType::structural_tag, tag}, false);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  const std::string schema = R"("json_schema": {"not": {}}})";
  EXPECT_TRUE(refused(R"({"called": "tools", "format": {"type": "json_schema", )" + schema + "}")
                  .starts_with("tools: in the structural tag, at /format/json_schema: the JSON schema, at /not: "));
  EXPECT_TRUE(refused(R"({"called": "tools", "format": {"type": "json_schema", "name": "f", )" + schema + "}")
                  .starts_with("f: the JSON schema, at /not: "));
  EXPECT_TRUE(refused(R"({"called": "tools", "format": 1})").starts_with("tools: the structural tag: "));
  EXPECT_TRUE(refused(R"({"format": 1})").starts_with("guided_decoding_guide: the structural tag: "));
}

TEST_F(GuideCompilerTest, EveryTypeAllowsItsTextsAndNoOthers) {
  EXPECT_TRUE(accepts(GuideType::json, "", R"({"a": [1, {"b": null}]})"));
  EXPECT_FALSE(accepts(GuideType::json, "", "[1]"));
  EXPECT_TRUE(accepts(GuideType::regex, "[0-9]+-(a|b)", "12-b"));
  EXPECT_FALSE(accepts(GuideType::regex, "[0-9]+-(a|b)", "12-"));
  EXPECT_TRUE(accepts(GuideType::choice, R"(["yes", "no", "日\n\"\\"])", "日\n\"\\"));
  // Control characters before what could be more digits of an escape.
  EXPECT_TRUE(accepts(GuideType::choice, R"(["1\n2"])", "1\n2"));
  std::string escaped, plain;
  for (int control = 0; control <= 0x20; ++control) {
    const int code = control == 0x20 ? 0x7f : control;
    for (const char digit : std::string("0123456789abcdefABCDEF")) {
      escaped += cat("\\u00", "0123456789abcdef"[code / 16], "0123456789abcdef"[code % 16], digit);
      plain += {static_cast<char>(code), digit};
    }
  }
  EXPECT_TRUE(accepts(GuideType::choice, cat("[\"", escaped, "\"]"), plain));
  EXPECT_FALSE(accepts(GuideType::choice, R"(["yes", "no"])", "yesno"));
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "root ::= \"x\" y*\ny ::= [a-c] | \"(\" y \")\"", "xa((b))"));
  const std::string tag =
      R"({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
      {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}]}})";
  EXPECT_TRUE(accepts(GuideType::structural_tag, tag, "text <f=a>12</f> and more"));
  EXPECT_FALSE(accepts(GuideType::structural_tag, tag, "text <f=a>x</f>"));
  const std::string old =
      R"({"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]})";
  EXPECT_TRUE(accepts(GuideType::structural_tag, old, "text <f=a>12</f>"));
  EXPECT_FALSE(accepts(GuideType::structural_tag, old, "text <f=a>1x</f>"));
}

TEST_F(GuideCompilerTest, RegularExpressionsMeanWhatTheyMeanElsewhere) {
  for (const auto& [expression, right, wrong] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"\\x41b", "Ab", "\u041b"},
           {"[\\x2d0-9]{2}", "-7", "+7"},
           {"[\\x01a]", "a", "\x1a"},
           {"[\\u00e9a]", "a", "\u0e9a"},
           {"\\u0001a", "\x01" "a", "\x1a"},
           {"\\x2fcache", "/cache", "\u2fcache"},
           {"[\\^a]", "^", "b"},
           {"[^\\^a]", "b", "^"},
           {"[\\w-.]+", "a-.", "/"},
           {"[\\w-z]", "-", "`"},
           {"[+-\\d]", "-", "."},
           {"[\\]\\-\\\\]{3}", "]-\\", "[-\\"}}) {
    EXPECT_TRUE(accepts(GuideType::regex, expression, right)) << expression;
    EXPECT_FALSE(accepts(GuideType::regex, expression, wrong)) << expression;
  }
  // Of strings, too, whose patterns take another way.
  for (const auto& [expression, right, wrong] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"0(-[0-9]+)?", "0-12", "012"},
           {"[A-Z]([a-z]+)?x?", "Aabx", "Ax1"},
           {"v1(-[a-z]+)?", "v1", "v1ab"},
           {"([a-b]|([a-b]){0,2})", "ab", "aba"},
           {"(ab+|c){2,}", "cabb", "ccb"},
           {"(ab+|c){0,}", "", "cb"},
           {"(ab){3,}", "ababab", "abab"}}) {
    const auto schema = cat(R"({"type": "string", "pattern": "^)", expression, "$\"}");
    EXPECT_TRUE(valid(schema, cat("\"", right, "\""))) << expression;
    EXPECT_FALSE(valid(schema, cat("\"", wrong, "\""))) << expression;
  }
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, R"(root ::= "\x0ab" [\x0ac])", "\nbc"));
  EXPECT_NE(refused(GuideType::regex, "\\x4g"), "");
  // No halves of characters, whatever the class.
  for (const char* const all : {".", "[^a]", "[\\u0000-\\uffff]"}) {
    EXPECT_FALSE(accepts(GuideType::regex, all, "\xed\xa0\x80")) << all;
    EXPECT_FALSE(accepts(GuideType::regex, all, "\xf4\x90\x80\x80")) << all;
  }
  EXPECT_FALSE(valid(R"({"type": "string"})", "\"\xed\xa0\x80\""));
  EXPECT_FALSE(valid(R"({"type": "string", "maxLength": 3})", "\"\xed\xa0\x80\""));
}

TEST_F(GuideCompilerTest, ATextAfterASpaceBeginsWithOne) {
  EXPECT_TRUE(accepts(GuideType::choice, R"(["a"])", " a", true));
  EXPECT_FALSE(accepts(GuideType::choice, R"(["a"])", "a", true));
}

TEST_F(GuideCompilerTest, TokensOfHalfACharacterLeadToWholeOnes) {
  const auto provider = compile(GuideType::choice, R"(["日"])")->provider({kEnd});
  std::vector<std::uint32_t> mask((table_.size() + 31) / 32);
  std::vector<std::string> allowed;
  provider->fill({}, mask);
  for (std::size_t id = 0; id < tokens_.size(); ++id) {
    if (mask[id / 32] >> (id % 32) & 1) allowed.push_back(tokens_[id]);
  }
  EXPECT_EQ(allowed, (std::vector<std::string>{"\xe6", "\xe6\x97", "\xe6\x97\xa5"}));
}

TEST_F(GuideCompilerTest, AnEndIdThatIsAlsoATextEndsOnlyWhereTheTextMay) {
  const TokenId a = 1 + 'a';
  const auto provider = compile(GuideType::regex, "aab?")->provider({a});
  std::vector<std::uint32_t> mask((table_.size() + 31) / 32);
  provider->fill({}, mask);
  EXPECT_EQ(mask[a / 32] >> (a % 32) & 1, 0U);
}

TEST_F(GuideCompilerTest, SchemasAreKeptToTheLetter) {
  const std::string object = R"({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 12},
      "b": {"type": "string", "minLength": 2, "maxLength": 3}}, "required": ["a"]})";
  EXPECT_TRUE(valid(object, R"({"a": 12, "b": "日é"})"));
  EXPECT_TRUE(valid(object, R"({"a": 3})"));
  for (const char* const wrong : {R"({"a": 2})", R"({"a": 13})", R"({"b": "ab"})", R"({"a": 3, "b": "x"})",
                                  R"({"a": 3, "b": "wxyz"})", R"({"a": 3, "c": 1})", "{\"a\": 3, \"b\": \"a\tb\"}"}) {
    EXPECT_FALSE(valid(object, wrong)) << wrong;
  }
  const std::string open = R"({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true})";
  EXPECT_TRUE(valid(open, R"({"a": null})"));
  EXPECT_FALSE(valid(open, R"({"a": null, "b": 1})"));
  EXPECT_FALSE(valid(open, R"({"\u0061": 1})"));
  EXPECT_TRUE(valid(R"({"type": "object"})", R"({"any": {"thing": [1]}})"));
  EXPECT_TRUE(valid(R"({"type": "array"})", R"([1, "a"])"));
  EXPECT_FALSE(valid(R"({"type": "array", "prefixItems": [{"type": "null"}]})", "[null, 1]"));
  const std::string tree = R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
      "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}}})";
  EXPECT_TRUE(valid(tree, R"({"next": {"next": null}})"));
  EXPECT_FALSE(valid(tree, R"({"next": {}})"));
  // Numbers as people write them.
  for (const char* const number : {"0.1", "-12.34", "0.30000000000000004", "1e-07", "100"}) {
    EXPECT_TRUE(valid(cat("{\"const\": ", number, "}"), number));
  }
  EXPECT_FALSE(valid(R"({"enum": [0.1]})", "0.10000000000000001"));
}

TEST_F(GuideCompilerTest, AnObjectHasTheNamesThatItsSchemaAllows) {
  for (const char* const names : {"{}", R"({"title": "t", "description": "d"})", R"({"format": "own"})", "true"}) {
    const auto schema = cat(R"({"type": "object", "propertyNames": )", names, R"(, "additionalProperties": {"type": "integer"}})");
    EXPECT_TRUE(valid(schema, R"({"any": 3})")) << names;
    EXPECT_FALSE(valid(schema, "{3: 3}")) << names;
  }
  const auto limited = R"({"type": "object", "propertyNames": {"maxLength": 2, "description": "d"}})";
  EXPECT_TRUE(valid(limited, R"({"ab": 3})"));
  EXPECT_FALSE(valid(limited, R"({"abc": 3})"));
  for (const char* const closed :
       {R"("unevaluatedProperties": false)", R"("properties": {}, "unevaluatedProperties": false)",
        R"("additionalProperties": false, "propertyNames": {"type": "string"})", R"("maxProperties": 0)",
        R"("unevaluatedProperties": false, "propertyNames": {"pattern": "^[a-z]+$"})"}) {
    const auto schema = cat(R"({"type": "object", )", closed, "}");
    EXPECT_TRUE(valid(schema, "{}")) << schema;
    EXPECT_FALSE(valid(schema, R"({"a": true})")) << schema;
  }
  const std::string pattern = R"({"type": "object", "patternProperties": {"^a$": {"type": "null"}}, "unevaluatedProperties": false})";
  EXPECT_TRUE(valid(pattern, R"({"a": null})"));
  EXPECT_FALSE(valid(pattern, R"({"b": null})"));
}

TEST_F(GuideCompilerTest, TimesAreThoseThatOthersRead) {
  const auto of = [](const char* format) { return cat(R"({"type": "string", "format": ")", format, "\"}"); };
  for (const char* const date : {"2024-02-29", "2000-02-29", "2023-02-28", "0001-12-31", "1990-11-30", "0010-01-01"}) {
    EXPECT_TRUE(valid(of("date"), cat("\"", date, "\""))) << date;
    EXPECT_TRUE(valid(of("date-time"), cat("\"", date, "T23:59:59.25+01:30\""))) << date;
  }
  for (const char* const date : {"2023-02-29", "1900-02-29", "2023-02-30", "2023-04-31", "0000-01-01", "2023-13-01", "2023-00-01",
                                 "2023-01-00", "2023-1-1", "x2023-01-01", "2023-01-01Z", "0000-02-29"}) {
    EXPECT_FALSE(valid(of("date"), cat("\"", date, "\""))) << date;
    EXPECT_FALSE(valid(of("date-time"), cat("\"", date, "T00:00:00Z\""))) << date;
  }
  EXPECT_TRUE(valid(of("time"), R"("00:00:00Z")"));
  for (const char* const time : {"16:16:60Z", "23:59:60Z", "24:00:00Z", "16:16:16", "16:16:16+24:00"}) {
    EXPECT_FALSE(valid(of("time"), cat("\"", time, "\""))) << time;
    EXPECT_FALSE(valid(of("date-time"), cat("\"2023-01-01T", time, "\""))) << time;
  }
  EXPECT_TRUE(valid(R"({"type": "string", "format": "time"})", R"("10:00:00.123456Z")"));
  EXPECT_FALSE(valid(R"({"type": "string", "format": "time"})", R"("10:00:00.1234567Z")"));
}

TEST_F(GuideCompilerTest, SchemasWithoutAValueThatEndsAreRefusedWithTheirPlace) {
  const auto at = [this](const std::string& schema, const std::string& place) {
    const auto error = refused(GuideType::json_schema, schema);
    EXPECT_NE(error.find(cat("at ", place, ": no value comes to an end")), std::string::npos) << schema << "\n  " << error;
  };
  at(R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})", "/properties/a");
  at(R"({"type": "array", "items": {"$ref": "#"}, "minItems": 1})", "/items");
  at(R"({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2})", "/prefixItems/1");
  at(R"({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1})", "/additionalProperties");
  at(R"({"type": "object", "patternProperties": {"^a": {"$ref": "#"}}, "minProperties": 1})", "/patternProperties/^a");
  at(R"({"type": ["object", "array"], "properties": {"a": {"$ref": "#"}}, "required": ["a"], "items": {"$ref": "#"},
      "minItems": 1})", "/items");
  // Whatever leads there. A part of which there may be none counts, too: what begins it would not end.
  const std::string loop = R"("$defs": {"x": {"type": "object", "properties": {"y": {"anyOf": [{"$ref": "#/$defs/x"}]}},
      "required": ["y"]}})";
  for (const char* const begin : {R"("$ref": "#/$defs/x")", R"("type": "array", "items": {"$ref": "#/$defs/x"})",
                                  R"("anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}])"}) {
    at(cat("{", begin, ", ", loop, "}"), "/$defs/x/properties/y/anyOf/0");
  }
  at(R"({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}, "c": {"type": "null"}}, "minProperties": 2})",
     "/properties/a");
  for (const char* const schema :
       {R"({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "null"}}, "minProperties": 1})",
        R"({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]})",
        R"({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]})",
        R"({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1})"}) {
    EXPECT_NO_THROW(compile(GuideType::json_schema, schema)) << schema;
  }
}

TEST_F(GuideCompilerTest, WhatASchemaWouldNotKeepIsRefusedWithItsPlace) {
  const auto at = [this](const std::string& schema, const std::string& place) {
    const auto error = refused(GuideType::json_schema, schema);
    EXPECT_NE(error.find(place), std::string::npos) << schema << "\n  " << error;
  };
  const auto property = [](const std::string& schema) {
    return R"({"type": "object", "properties": {"a/b": )" + schema + "}}";
  };
  for (const char* const keyword :
       {"not", "if", "dependentSchemas", "contains", "item", "maxlength", "propertys", "$dynamicRef", "id", "tpye", "itmes",
        "enmu"}) {
    at(property("{\"" + std::string(keyword) + "\": {\"a\": true}}"), std::string("at /properties/a~1b/") + keyword);
  }
  at(property(R"({"type": "array", "uniqueItems": true})"), "/properties/a~1b/uniqueItems: ");
  // What to do instead. Of several keywords that are near, the nearest one.
  for (const char* const keyword : {"minLength", "maxLength", "minItems", "maxItems", "maxProperties"}) {
    std::string small = keyword;
    std::ranges::transform(small, small.begin(), [](unsigned char c) { return std::tolower(c); });
    at(property("{\"" + small + "\": 3}"), small + " is unknown, and would be ignored: is it " + keyword + "?");
  }
  at(property(R"({"type": "array", "uniqueItems": true, "maxItems": 2})"), "leave it out, and look for equal items");
  at(property(R"({"type": "object", "properties": {"x": true}, "if": {"required": ["x"]}, "else": false})"),
     "/properties/a~1b/if: the keyword if is not supported, and would be ignored: write anyOf with a whole schema for each");
  at(property(R"({"oneOf": [{"type": "integer"}, {"minimum": 3, "type": "number"}]})"),
     "at /properties/a~1b/oneOf/1: a value may be valid here and under /properties/a~1b/oneOf/0, which oneOf forbids: make "
     "them differ in type, or in a required property with const or enum; or write anyOf");
  at(property(R"({"type": "integer", "multipleOf": 3, "minimum": 0})"), "at /properties/a~1b/multipleOf: ");
  at(property(R"({"type": "integer", "minimum": 3, "maximum": 2})"), "at /properties/a~1b/minimum: no number is left by");
  at(property(R"({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4})"), "/properties/a~1b/exclusiveMinimum");
  at(property(R"({"type": "number", "minimum": 0.5, "exclusiveMaximum": 0.5})"), "/properties/a~1b/minimum: no number");
  at(property(R"({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001})"),
     "/properties/a~1b/exclusiveMinimum: no number with at most 6 decimals is left");
  at(property(R"({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5})"), "/multipleOf: no multiple of 5");
  at(property(R"({"type": "integer", "minimum": 0, "maximum": 10000, "multipleOf": 5})"), "/multipleOf: multipleOf beside bounds");
  at(property(R"({"type": "number", "minimum": 1e-20, "maximum": 2e-20})"), "/properties/a~1b/minimum: bounds with more than 6 decimals");
}

TEST_F(GuideCompilerTest, WhatASchemaWouldNotKeepOfStringsAndObjectsIsRefusedWithItsPlace) {
  const auto at = [this](const std::string& schema, const std::string& place) {
    const auto error = refused(GuideType::json_schema, schema);
    EXPECT_NE(error.find(place), std::string::npos) << schema << "\n  " << error;
  };
  const auto property = [](const std::string& schema) {
    return R"({"type": "object", "properties": {"a/b": )" + schema + "}}";
  };
  const auto pattern = [&](const std::string& text, const std::string& problem) {
    at(property(cat(R"({"type": "string", "pattern": ")", text, "\"}")), cat("/properties/a~1b/pattern", problem));
  };
  pattern("^(?=a)b$", ": the pattern is not supported in a JSON string: Lookahead");
  pattern("a\\\"b", ": the pattern is not supported in a JSON string: it needs a quote, a backslash");
  pattern("é", ": the pattern is not supported in a JSON string: the character at byte 0 is not printable ASCII");
  pattern("(a)\\\\1", ": the pattern is not supported in a JSON string: Regex parsing error at position 4: Back");
  // ECMA 262 does not have them, and other readers differ on what they mean.
  for (const char* const twice : {"a*+a", "[ab]**", "(a){2}{3}", "a{1,2}?+", "\\\\u{4e}+*"}) pattern(twice, ": the pattern is not supported in a JSON string: what is repeated");
  pattern("a{2, 3}", ": the pattern is not supported in a JSON string: the repetition at byte 1 has a space");
  EXPECT_TRUE(valid(R"({"type": "string", "pattern": "^\\u{41}+$"})", R"("AA")"));
  at(R"({"type": "object", "properties": {"a": {"$ref": "#/x"}, "b": {"$ref": "#/x/const/f"}}, "required": ["a", "b"],
        "x": {"const": {"f": {"type": "object", "properties": {"q": {"type": "null"}}}}}})",
     "at /x/const/f: a reference leads into const");
  at(R"({"type": "object", "properties": {"a": {"$ref": "#/components/A"}, "b": {"$ref": "#/components/A/propertyNames"}}, "components": {
        "A": {"type": "object", "additionalProperties": false, "propertyNames": {"type": "string", "pattern": "^a"}}}})",
     "at /components/A/propertyNames: a reference leads into it");
  for (const char* const group : {"(?i)A", "(?P<x>a)"}) pattern(group, ": the pattern is not supported in a JSON string: the group");
  pattern("^\\\\ud83d$", " has \\ud83d, which is half a character, at byte 1");
  at(property(R"({"type": "string", "format": "regex"})"), "/properties/a~1b/format");
  at(property(R"({"type": "string", "pattern": "a", "maxLength": 3})"), "/properties/a~1b/pattern");
  at(property(R"({"type": "number", "multipleOf": 0.1})"), "/properties/a~1b/multipleOf");
  at(property(R"({"minimum": 3})"), "minimum needs a type");
  at(property(R"({"type": "text"})"), "/properties/a~1b/type");
  at(property(R"({"anyOf": [false]})"), "/properties/a~1b/anyOf/0: false allows no value");
  at(R"({"type": "object", "properties": {"a": false}, "required": ["a"]})", "/properties/a: false allows no value");
  at(property(R"({"type": "string", "format": "datetime"})"), "/properties/a~1b/format");
  at(property(R"({"enum": ["a", 1], "type": "string"})"), "/properties/a~1b/enum/1");
  at(property(R"({"$ref": "other.json"})"), "/properties/a~1b/$ref");
  at(property(R"({"$ref": "#/$defs/none"})"), "there is nothing at #/$defs/none");
  at(property(R"({"allOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]})"),
     "/properties/a~1b/allOf: allOf with more than one schema is supported where they can be merged into one: write them as "
     "one (they were not merged: pattern cannot be merged)");
  at(property(R"({"type": "string", "anyOf": [{"pattern": "a"}, {"pattern": "b"}], "pattern": "c"})"),
     "beside anyOf is not supported: put both into one schema (they were not merged: pattern cannot be merged)");
  at(property(R"({"type": "string", "enum": ["a"], "anyOf": [{"maxLength": 3}]})"), "const or enum is beside other keywords");
  at(property(R"({"type": "object", "dependentRequired": {"a": ["b"]}})"), "what depends on a is not beside properties");
  at(property(R"({"allOf": [{"type": "string"}, {"type": "null"}]})"), "no value is valid under all of them");
  for (const char* const names : {R"({"patern": "a"})", R"({"maxlength": 1})"}) {
    at(property(cat(R"({"type": "object", "propertyNames": )", names, "}")), "would be ignored: is it");
  }
  at(property(R"({"const": [1, {"b/c": [9007199254740993]}]})"), "/properties/a~1b/const/1/b~1c/0: numbers beyond 9e15");
  at(property(R"({"enum": [1, [1e30]]})"), "/properties/a~1b/enum/1/0: numbers beyond 9e15");
  for (const char* const keyword : {"const", "default", "examples"}) {
    at(cat(R"({"type": "object", "properties": {"v": {")", keyword, R"(": {"type": "array"}}, "w": {"$ref": "#/properties/v/)",
           keyword, "\"}}}"),
       cat("/properties/w/$ref: the reference #/properties/v/", keyword, " leads into ", keyword));
  }
  EXPECT_TRUE(valid(R"({"$ref": "#/$defs/const", "$defs": {"const": {"type": "null"}}})", "null"));
  for (const char* const draft : {"http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"}) {
    const auto older = cat(R"({"$schema": ")", draft, R"(", "type": "array", "prefixItems": [{"type": "null"}], "items": true})");
    at(older, "at /prefixItems: the draft that $schema names does not have prefixItems");
  }
  EXPECT_TRUE(valid(R"({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "array",
      "prefixItems": [{"type": "null"}]})", "[null]"));
  at(property(R"({"allOf": [{"type": "object", "properties": {"x": true}}, {"required": ["y"]}]})"),
     "were merged");
  at(property(R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})"), "/properties/a~1b/oneOf/1");
  at(R"({"type": "object", "properties": {"a": true}, "required": ["b"]})", "/required/0");
  at(R"({"type": "object", "patternProperties": {"a": true}, "additionalProperties": true})", "/additionalProperties");
  at(property(R"({"type": "array", "prefixItems": [{}, {}], "maxItems": 1})"),
     "/properties/a~1b/maxItems: maxItems is less than the 2 schemas of prefixItems");
  at(R"({"type": "object", "properties": {"a": true, "b": true}, "required": ["a", "b", "a"], "maxProperties": 1})",
     "/maxProperties: maxProperties is less than the 2 properties that are required");
  at(R"({"$ref": "#"})", "refers to itself");
  at(R"({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}})", "refers to itself");
  at(R"({"type": "string")", "is no JSON");
  at("3", "its root");
}

TEST_F(GuideCompilerTest, BoundsOfIntegersReachAsFarAsThoseOfJavaScript) {
  const std::string schema = R"({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991})";
  for (const char* const text : {"0", "7", "-1", "9007199254740991", "-9007199254740991", "9007199254740990"}) {
    EXPECT_TRUE(valid(schema, text)) << text;
  }
  for (const char* const text : {"9007199254740992", "-9007199254740992", "10000000000000000", "1.5"}) {
    EXPECT_FALSE(valid(schema, text)) << text;
  }
  EXPECT_NE(refused(GuideType::json_schema, R"({"type": "integer", "maximum": 9007199254740992})").find("2^53 - 1"),
            std::string::npos);
}

TEST_F(GuideCompilerTest, OneOfIsTakenWhereItsSchemasExcludeOneAnother) {
  const std::string schema = R"({"oneOf": [
      {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
      {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
      {"type": ["integer", "null"]}]})";
  EXPECT_TRUE(valid(schema, R"({"kind": "a", "x": 1})"));
  EXPECT_TRUE(valid(schema, "null"));
  EXPECT_FALSE(valid(schema, R"({"kind": "c", "x": 1})"));
  // Without a type, what is no object is valid as well.
  const std::string implied = R"({"properties": {"a": {"type": "null"}}, "required": ["a"]})";
  for (const char* const other : {R"({"type": "string"})", R"({"const": "x"})", R"({"type": ["object", "null"]})"}) {
    const auto error = refused(GuideType::json_schema, cat(R"({"oneOf": [)", implied, ", ", other, "]}"));
    EXPECT_NE(error.find("at /oneOf/1: a value may be valid here and under"), std::string::npos) << error;
  }
  const auto of_objects = cat(R"({"oneOf": [)", implied, R"(, {"type": "object", "properties": {"b": {"type": "null"}},
      "required": ["b"], "additionalProperties": false}]})");
  EXPECT_TRUE(valid(of_objects, R"({"a": null})"));
  EXPECT_TRUE(valid(of_objects, R"({"b": null})"));
}

TEST_F(GuideCompilerTest, OneOfWithinOthersStaysExclusive) {
  const std::string numbers = R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})";
  const std::string names = R"({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})";
  const std::string object = R"("type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}})";
  for (const auto& schema : {cat(R"({"type": ["number", "string"], "anyOf": [)", numbers, R"(, {"type": "string"}]})"),
                             cat(R"({"type": ["number", "string"], "oneOf": [)", numbers, "]}"),
                             cat(R"({"type": ["number", "string"], "anyOf": [)", numbers, "]}"),
                             cat("{", object, R"(, "anyOf": [)", names, R"(, {"maxProperties": 0}]})")}) {
    EXPECT_NE(refused(GuideType::json_schema, schema), "") << schema;
  }
  const std::string distinct = R"({"type": ["integer", "string"], "oneOf": [{"oneOf": [{"type": "integer"}, {"type": "string"}]}]})";
  EXPECT_TRUE(valid(distinct, "5"));
  EXPECT_TRUE(valid(distinct, R"("a")"));
}

TEST_F(GuideCompilerTest, OneOfWithinOthersIsTakenWhereItsSchemasExcludeOneAnother) {
  // What stands beside tells them apart, too: the type, and which values there are.
  const std::string kinds = R"({"oneOf": [{"properties": {"k": {"const": 1}}, "required": ["k"]},
      {"properties": {"k": {"enum": [2, 3]}, "x": {"type": "null"}}, "required": ["k", "x"]}]})";
  const std::string object = R"("type": "object", "properties": {"k": {"type": "integer"}})";
  const std::string within = cat("{", object, R"(, "anyOf": [)", kinds, R"(, {"maxProperties": 0}]})");
  const std::string twice = cat("{", object, R"(, "allOf": [)", kinds, R"(, {"oneOf": [{"properties": {"y": {"const": 1}},
      "required": ["y"]}, {"properties": {"y": {"const": 2}}, "required": ["y"]}]}]})");
  const std::string nested = cat("{", object, R"(, "oneOf": [{"anyOf": [{"properties": {"k": {"const": 1}}, "required": ["k"]},
      {"properties": {"k": {"const": 2}}, "required": ["k"]}]}, {"properties": {"k": {"const": 3}}, "required": ["k"]}]})");
  using Texts = std::vector<std::string>;
  for (const auto& [schema, right, wrong] : std::vector<std::tuple<std::string, Texts, Texts>>{
           {within, {R"({"k": 1})", R"({"k": 3, "x": null})", "{}"}, {R"({"k": 2})", R"({"k": 4})", R"({"k": 1, "x": null})"}},
           {twice, {R"({"k": 1, "y": 2})", R"({"k": 2, "x": null, "y": 1})"}, {R"({"k": 1})", R"({"k": 1, "y": 3})"}},
           {nested, {R"({"k": 1})", R"({"k": 2})", R"({"k": 3})"}, {R"({"k": 4})", "{}"}},
           {R"({"type": ["integer", "string"], "anyOf": [{"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"minimum": 5}]})",
            {"5", R"("a")"},
            {"null"}}}) {
    for (const auto& value : right) EXPECT_TRUE(valid(schema, value)) << schema << value;
    for (const auto& value : wrong) EXPECT_FALSE(valid(schema, value)) << schema << value;
  }
  // Of branches without a type, a string is valid under both.
  const auto open = cat(R"({"type": ["object", "string"], "anyOf": [)", kinds, R"(, {"type": "null"}]})");
  EXPECT_NE(refused(GuideType::json_schema, open), "");
  // The second one takes every string, though no object.
  const std::string no_object = R"({"properties": {"y": {"type": "null"}}, "additionalProperties": false})";
  for (const auto& second : {no_object, cat(R"({"anyOf": [)", no_object, R"(, {"type": "null"}]})")}) {
    EXPECT_NE(refused(GuideType::json_schema, cat(R"({"properties": {"x": {"type": "null"}}, "required": ["x"], "oneOf": [
        {"type": "string"}, )", second, "]}")), "");
  }
}

TEST_F(GuideCompilerTest, SchemasThatCombineOthersAreMerged) {
  const std::string both = R"({"title": "t", "type": "object", "allOf": [{"$ref": "#/$defs/a"}, {"properties": {
      "y": {"minimum": 3}, "z": {"type": "null"}}, "required": ["y"]}], "$defs": {"a": {"type": ["object", "null"],
      "properties": {"x": {"type": "boolean"}, "y": {"type": "integer", "maximum": 5}}}}})";
  EXPECT_TRUE(valid(both, R"({"x": true, "y": 4, "z": null})"));
  EXPECT_TRUE(valid(both, R"({"y": 4})"));
  for (const char* const value : {R"({"y": 2})", R"({"y": 6})", R"({"x": true})", "null"}) {
    EXPECT_FALSE(valid(both, value)) << value;
  }
  const std::string one_needed = R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
      "additionalProperties": false, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})";
  for (const char* const value : {R"({"a": null})", R"({"b": null})", R"({"a": null, "b": null})"}) {
    EXPECT_TRUE(valid(one_needed, value)) << value;
  }
  EXPECT_FALSE(valid(one_needed, "{}"));
  auto exactly_one = one_needed;
  exactly_one.replace(exactly_one.find("anyOf"), 5, "oneOf");
  EXPECT_TRUE(valid(exactly_one, R"({"b": null})"));
  EXPECT_FALSE(valid(exactly_one, R"({"a": null, "b": null})"));
  EXPECT_FALSE(valid(exactly_one, "{}"));
  const std::string closed = R"({"allOf": [{"type": "object", "properties": {"a": true}, "additionalProperties": false},
      {"properties": {"b": true}}]})";
  EXPECT_TRUE(valid(closed, R"({"a": 1})"));
  EXPECT_FALSE(valid(closed, R"({"b": 1})"));
}

TEST_F(GuideCompilerTest, AnObjectHasSoManyOptionalPropertiesAtMost) {
  std::string schema = R"({"type": "object", "properties": {)";
  for (int i = 0; i < 1001; ++i) schema += (i > 0 ? ", \"p" : "\"p") + std::to_string(i) + "\": true";
  const auto error = refused(GuideType::json_schema, schema + "}}");
  EXPECT_NE(error.find("at /properties: an object has at most 1000"), std::string::npos) << error;
}

TEST_F(GuideCompilerTest, WhichPropertiesGoTogetherIsKept) {
  const std::string needs = R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
      "dependentRequired": {"a": ["b"]}})";
  EXPECT_TRUE(valid(needs, R"({"a": null, "b": null})"));
  EXPECT_TRUE(valid(needs, R"({"b": null})"));
  EXPECT_TRUE(valid(needs, "{}"));
  EXPECT_FALSE(valid(needs, R"({"a": null})"));
  const std::string never = R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
      "not": {"required": ["a"]}})";
  EXPECT_TRUE(valid(never, R"({"b": null})"));
  EXPECT_FALSE(valid(never, R"({"a": null, "b": null})"));
  const std::string only = R"({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true, )";
  for (const char* const condition :
       {R"("not": {"required": ["a"]}})", R"("dependentSchemas": {"a": {"required": ["a"]}}})"}) {
    const auto schema = only + condition;
    EXPECT_FALSE(valid(schema, R"({"a": "a"})")) << schema;
  }
  EXPECT_TRUE(valid(cat(only, R"("not": {"required": ["a"]}})"), "{}"));
  const std::string apart = R"({"allOf": [{"type": "object", "properties": {"b": {"type": "null"}},
      "not": {"required": ["a"]}}, {"properties": {"a": {"type": "null"}}}]})";
  EXPECT_TRUE(valid(apart, R"({"b": null})"));
  EXPECT_FALSE(valid(apart, R"({"b": null, "a": null})"));
  EXPECT_FALSE(valid(apart, R"({"a": null})"));
  const auto refusal = refused(GuideType::json_schema, R"({"type": ["object", "null"], "properties": {"a": true},
      "not": {"required": ["a"]}})");  // null is an object without a, and does not keep to it
  EXPECT_NE(refusal.find("/not"), std::string::npos) << refusal;
}

TEST_F(GuideCompilerTest, ASchemaMayHaveTheNameOfAKeyword) {
  for (const std::string name : {"default", "const", "enum", "example"}) {
    for (const std::string place : {"#/components/schemas/", "#/definitions/"}) {
      const auto groups = place == "#/definitions/" ? cat(R"("definitions": {")", name, R"(": {"type": "integer"}})")
                                                    : cat(R"("components": {"schemas": {")", name, R"(": {"type": "integer"}}})");
      const auto schema = cat(R"({"type": "object", "properties": {"a": {"$ref": ")", place, name, R"("}}, "required": ["a"], )",
                              groups, "}");
      EXPECT_TRUE(valid(schema, R"({"a": 3})")) << schema;
    }
  }
}

TEST_F(GuideCompilerTest, NamesThatJsonSchemaDoesNotDefineAreAnnotations) {
  EXPECT_TRUE(valid(R"({"$default": 3, "cli": "x", "type": "string", "format": "html-selector", "maxLength": 2})", "\"a\""));
  EXPECT_TRUE(valid(R"({"type": "object", "properties": {"a": false, "b": {"type": "null"}}})", R"({"b": null})"));
  EXPECT_FALSE(valid(R"({"type": "object", "properties": {"a": false, "b": true}})", R"({"a": null})"));
  EXPECT_TRUE(valid(R"({"type": "array", "items": {"type": "null"}, "uniqueItems": true, "maxItems": 1})", "[null]"));
}

TEST_F(GuideCompilerTest, WhatIsWrongWithOtherGuidesIsSaid) {
  EXPECT_NE(refused(GuideType::regex, "a(b").find("regex"), std::string::npos);
  EXPECT_NE(refused(GuideType::regex, "a(?=b)c").find("regex"), std::string::npos);
  EXPECT_NE(refused(GuideType::regex, "(a{1000}){101}").find("100000"), std::string::npos);
  for (const auto& [type, text, problem] : std::vector<std::tuple<GuideType, std::string, std::string>>{
           {GuideType::regex, "a\\ud83d", "expression has \\ud83d, which is half a character, at byte 1"},
           {GuideType::regex, "[b\\udfff]", "has \\udfff, which is half a character, at byte 2"},
           {GuideType::regex, "\\u{110000}", "has \\u{110000}, which is beyond the last character, U+10FFFF, at byte 0"},
           {GuideType::ebnf_grammar, "root ::= \"\\U00110000\"", "has \\U00110000, which is beyond the last character"},
           {GuideType::ebnf_grammar, "root ::= [\\ud800-\\udfff]", "has \\ud800, which is half a character, at byte 10"}}) {
    const auto error = refused(type, text);
    EXPECT_NE(error.find(problem), std::string::npos) << error;
  }
  EXPECT_LT(refused(GuideType::regex, "\\u{" + std::string(50'000, '1') + "}").size(), 300U);
  EXPECT_EQ(refused(GuideType::regex, "^a$|^b$").find("ignored"), std::string::npos);
  // In a comment nothing is an escape, and in a text # begins none.
  EXPECT_TRUE(accepts(GuideType::ebnf_grammar, "# \\ud83d {100001}\nroot ::= \"#\" [#\"] # \\ud83d", "#\""));
  EXPECT_NE(refused(GuideType::ebnf_grammar, "root ::= \"# \\ud83d\"").find("half a character"), std::string::npos);
  EXPECT_TRUE(accepts(GuideType::regex, "\\u{1f600}[\\u{10ffff}]", "\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf"));
  const auto reversed = refused(GuideType::regex, "[b-a]+");
  EXPECT_NE(reversed.find("the guide (regex) cannot be compiled: Invalid character class"), std::string::npos) << reversed;
  EXPECT_EQ(reversed.find("column"), std::string::npos) << reversed;
  EXPECT_NE(refused(GuideType::ebnf_grammar, "root ::= [b-a]+").find("line 1, column "), std::string::npos);
  EXPECT_NE(refused(GuideType::structural_tag, R"({"format": {"type": "regex", "pattern": "[b-a]"}})")
                .find("the structural tag's /format/pattern cannot be compiled: Invalid"),
            std::string::npos);
  EXPECT_NE(refused(GuideType::regex, std::string(65, '(') + std::string(65, ')')).find("64 deep"), std::string::npos);
  EXPECT_TRUE(accepts(GuideType::regex, "[" + std::string(70, '(') + "[]x", "(x"));
  const auto broken = refused(GuideType::ebnf_grammar, "root ::= \u00e9");
  EXPECT_EQ(broken, text::to_valid_utf8(broken));
  EXPECT_NE(refused(GuideType::ebnf_grammar, "start ::= \"a\"").find("ebnf_grammar"), std::string::npos);
  EXPECT_NE(refused(GuideType::ebnf_grammar, "root ::= other").find("other"), std::string::npos);
  EXPECT_NE(refused(GuideType::choice, "[]").find("JSON list"), std::string::npos);
  EXPECT_NE(refused(GuideType::choice, "[\"a\", 1]").find("JSON list"), std::string::npos);
  EXPECT_NE(refused(GuideType::structural_tag, "[]").find("JSON object"), std::string::npos);
  EXPECT_NE(refused(GuideType::structural_tag, R"({"format": {"type": "unknown"}})").find("structural tag"),
            std::string::npos);
  const auto inner =
      refused(GuideType::structural_tag, R"({"format": {"type": "json_schema", "json_schema": {"not": {}}}})");
  EXPECT_NE(inner.find("at /format/json_schema"), std::string::npos) << inner;
  EXPECT_NE(inner.find("at /not"), std::string::npos) << inner;
}

TEST_F(GuideCompilerTest, TheLargestPartHasItsPlace) {
  for (const auto& [type, text, part] : std::vector<std::tuple<GuideType, std::string, std::string>>{
           {GuideType::json_schema, R"({"properties": {"a/b": {"type": "array", "maxItems": 900, "items": {"maxLength": 60}},
                "b": {"type": "array", "minItems": 3000}}})", "maxLength = 60 at /properties/a~1b/items/maxLength"},
           {GuideType::json_schema, R"({"type": "string", "pattern": "^a{1,70}[b]{9}$"})", "70 repetitions at byte 2 of /pattern"},
           {GuideType::regex, "a{30}(b{20,800}){2}", "800 repetitions at byte 7"},
           {GuideType::ebnf_grammar, "root ::= \"a\"{99}", "99 repetitions at byte 12"},
           {GuideType::structural_tag, R"({"format": {"json_schema": {"type": "array", "minItems": 3000}}})",
            "minItems = 3000 at /format/json_schema/minItems"},
           {GuideType::structural_tag, R"({"called": "tools", "format": {"json_schema": {"type": "array", "minItems": 3000}}})",
            "minItems = 3000"},  // its text is not the user's
           {GuideType::json_schema, R"({"default": {"minItems": 9000}, "properties": {"default": {"minItems": 80}}})",
            "minItems = 80 at /properties/default/minItems"},
           {GuideType::regex, "a{3}", ""},
           {GuideType::json_schema, "{", ""}}) {
    EXPECT_EQ(compiler_->largest_part({type, text}), part.empty() ? "" : "; its largest part is probably " + part);
  }
  std::string many = R"({"properties": {"a": true)";
  for (int i = 0; i < 19; ++i) many += cat(", \"", i, "\": true");
  EXPECT_EQ(compiler_->largest_part({GuideType::json_schema, many + R"(}, "required": ["a"]})"}),
            "; its largest part is probably 19 properties that are not required, at /properties");
}

TEST_F(GuideCompilerTest, HostileGuidesAreRefusedOrCostLittle) {
  std::vector<std::pair<GuideType, std::string>> hostile = {
      {GuideType::json_schema, std::string(30'000, '[')},
      {GuideType::json_schema, R"({"type": "string", "maxLength": 100000})"},
      {GuideType::json_schema,
       R"({"type": "array", "minItems": 100000, "items": {"type": "array", "minItems": 100000}})"},
      {GuideType::json_schema, R"({"type": "string", "maxLength": 999999999999999999999999})"},
      {GuideType::regex, "(a|b)*a(a|b){200}"},
      {GuideType::regex, "((((a{9}){9}){9}){9}){9}"},
      {GuideType::regex, "(a*)*(a*)*(a*)*b"},
      {GuideType::regex, "(a?){1000}a{1000}"},
      {GuideType::ebnf_grammar, "root ::= root root | \"a\" | \"\""},
      {GuideType::ebnf_grammar, "root ::= \"a\"{99999999999}"},
  };
  std::string chain = R"({"$ref": "#/$defs/a0", "$defs": {)";
  for (int i = 0; i < 400; ++i) {
    const auto next = std::to_string(i + 1);
    chain += "\"a" + std::to_string(i) + R"(": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a)" + next +
             R"("}, "y": {"$ref": "#/$defs/a)" + next + "\"}}},";
  }
  hostile.emplace_back(GuideType::json_schema, chain + R"("a400": {"type": "null"}}})");
  std::string all = R"({"allOf": [{})";
  for (int i = 0; i < 300; ++i) all += R"(, {"$ref": "#/$defs/a"})";
  all += R"(], "$defs": {"a": {"type": "object", "properties": {"p": true)";
  for (int i = 0; i < 4800; ++i) all += ", \"p" + std::to_string(i) + "\": {}";
  hostile.emplace_back(GuideType::json_schema, all + "}}}}");
  std::string values = R"({"allOf": [{}], "$defs": {"e": {"enum": [0)";
  for (int i = 1; i < 9000; ++i) values += cat(",", i);
  for (int i = 0; i < 300; ++i) values.insert(11, R"({"$ref": "#/$defs/e"}, )");
  hostile.emplace_back(GuideType::json_schema, values + "]}}}");
  std::string rules, root = "root ::=";
  for (int i = 0; i < 500; ++i) {
    const auto at = std::to_string(i);
    rules += "a" + at + " ::= [a-z ]+ [a-z ]* b" + at + "?\nb" + at + " ::= [a-z]* a" + at + "\n";
    root += " (a" + at + ")?";
  }
  hostile.emplace_back(GuideType::ebnf_grammar, rules + root);
  std::string left_out;  // gigabytes of what may follow each
  for (int i = 0; i < 31'000; ++i) left_out += "a?";
  const auto error = refused(GuideType::regex, left_out);
  EXPECT_NE(error.find("too large"), std::string::npos) << error;
  const auto repeated = refused(GuideType::regex, "[a-z]{77}" + left_out);
  EXPECT_NE(repeated.find("may be left out; its largest part is probably 77 repetitions at byte 5"), std::string::npos) << repeated;
  for (const auto& [type, text] : hostile) {
    const auto begun = std::clock();
    try {
      const auto provider = compile(type, text)->provider({kEnd});
      std::vector<TokenId> output;
      for (int i = 0; i < 50; ++i) {
        std::vector<std::uint32_t> mask((table_.size() + 31) / 32);
        provider->fill(output, mask);
        const TokenId a = 1 + 'a';
        if ((mask[a / 32] >> (a % 32) & 1) == 0) break;
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
