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

class GuideCompilerTest : public ::testing::Test {
 protected:
  std::shared_ptr<const CompiledGuide> compile(GuideType type, const std::string& text,
                                               bool after_space = false) const {
    return compiler_.compile({type, text}, after_space);
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
  const GuideCompiler compiler_{table_, static_cast<int>(tokens_.size()) + 5, {kEnd}};
};

// Special tokens are in a text where a tag names them, by name or by id, and nowhere else.
TEST(GuideCompiler, SpecialTokensComeWhereATagNamesThem) {
  constexpr TokenId kCall = 1, kOther = 2, kA = 3, kNameless = 4;
  const text::TokenTable table({"</s>", "[CALL]", "[OTHER]", "a", ""}, {1, 1, 1, 0, 1}, true);
  const GuideCompiler compiler(table, 6, {kEnd});
  const auto allowed = [&](const std::string& format, const std::vector<TokenId>& output, const std::string& more = "",
                           bool after_space = false) {
    const auto guide = Guide{GuideType::structural_tag, R"({"format": )" + format + more + "}"};
    const auto provider = compiler.compile(guide, after_space)->provider({kEnd});
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
  const GuideCompiler compiler(table, 2, {kEnd});
  for (const char* const id : {"1099511627776", "4294967296", "-4294967296", "18446744073709551615", "2"}) {
    const Guide guide{GuideType::structural_tag, std::string(R"({"format": {"type": "token", "token": )") + id + "}}"};
    EXPECT_THROW(compiler.compile(guide, false), Error) << id;
  }
}

TEST(GuideCompiler, ErrorsSayWhatATagCallsItsParts) {
  const text::TokenTable table({"</s>", "a"}, {1, 0}, true);
  const GuideCompiler compiler(table, 2, {kEnd});
  const auto refused = [&](const std::string& tag) -> std::string {
    try {
      compiler.compile({GuideType::structural_tag, tag}, false);
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

TEST_F(GuideCompilerTest, WhatASchemaWouldNotKeepIsRefusedWithItsPlace) {
  const auto at = [this](const std::string& schema, const std::string& place) {
    const auto error = refused(GuideType::json_schema, schema);
    EXPECT_NE(error.find(place), std::string::npos) << schema << "\n  " << error;
  };
  const auto property = [](const std::string& schema) {
    return R"({"type": "object", "properties": {"a/b": )" + schema + "}}";
  };
  for (const char* const keyword :
       {"not", "if", "dependentSchemas", "contains", "item", "maxlength", "propertys", "$dynamicRef", "id"}) {
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
  at(property(R"({"type": "string", "pattern": "^(?=a)b$"})"), "/properties/a~1b/pattern");
  at(property(R"({"type": "string", "pattern": "a\"b"})"), "/properties/a~1b/pattern");
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
     "/properties/a~1b/allOf");
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
