#include "charonia/config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <tuple>
#include <vector>

#include "base/bytes.h"
#include "charonia/error.h"
#include "errors.h"
#include "test_folder.h"

namespace charonia {
namespace {

void expect_refused(const Settings& settings, std::initializer_list<std::string_view> parts) {
  EngineConfig engine;
  ModelConfig model;
  expect_error(ErrorCode::invalid_argument, parts, [&] { apply_settings(settings, engine, &model); });
}

TEST(Config, DefaultsOfTheTableEqualTheStruct) {
  const auto fields = [](EngineConfig& c) {
    return std::tie(c.max_batch_size, c.cache_max_entry_count, c.session_len, c.enable_prefix_caching, c.device,
                    c.threads, c.token_budget, c.max_queue_size, c.stream_interval_ms, c.cache_block_seq_len);
  };
  EngineConfig engine, fresh;
  fields(engine) = std::tuple(1, 0.1, 7, false, "cuda", 9, 3, 2, 1, 1);
  EXPECT_NE(fields(engine), fields(fresh));
  Settings defaults;
  for (const auto& field : config_fields()) {
    if (!field.model_attribute && !field.ignored) defaults.emplace(field.key, std::string(field.default_value));
  }
  apply_settings(defaults, engine);
  EXPECT_EQ(fields(engine), fields(fresh));
}

TEST(Config, WrongValuesAndKeysAreNamed) {
  expect_refused({{"cache_max_entry_count", "1.5"}}, {"cache_max_entry_count = '1.5'", "(0, 1)"});
  expect_refused({{"session_len", "3000000000"}}, {"it takes >= 0, at most 2147483647 ("});
  expect_refused({{"max_batch_sise", "1"}}, {"did you mean 'max_batch_size'"});
  for (const auto& [key, value] : Settings{{"max_batch_size", "-1"},
                                           {"device", "tpu"},
                                           {"token_budget", "12x"},
                                           {"enable_prefix_caching", "maybe"},
                                           {"weight_type", "int3"},
                                           {"end_id", "1,x"},
                                           {"quant_policy", "3"},
                                           {"cache_size", "8 gigs"},
                                           {"cache_users", "-1"},
                                           {"rope_scaling_factor", "-0.5"},
                                           {"use_logn_attn", "2"},
                                           {"rope_long_factors", "1,,2"},
                                           {"rope_short_factors", "1,0"},
                                           {"cache_chunk_size", "-2"}}) {
    expect_refused({{key, value}}, {key});
  }
}

TEST(Config, OldSwitchesAreAcceptedWithAWarning) {
  EngineConfig engine;
  const auto warnings = apply_settings({{"step_length", "1"}}, engine);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("step_length"), std::string::npos);
}

TEST(Config, ListsOfAModelAreRead) {
  EngineConfig engine;
  ModelConfig model;
  apply_settings({{"rope_short_factors", "1, 1.5,2"},
                  {"activation", "gelu_tanh"},
                  {"embedding_scale", "45.25"},
                  {"end_id", "2, 7,32000"}},
                 engine, &model);
  EXPECT_EQ(model.rope_short_factors, (std::vector<float>{1, 1.5F, 2}));
  EXPECT_EQ(model.activation, "gelu_tanh");
  EXPECT_EQ(model.embedding_scale, 45.25F);
  EXPECT_EQ(model.end_ids, (std::vector<int>{2, 7, 32000}));
  apply_settings({{"end_id", "-1"}}, engine, &model);
  EXPECT_TRUE(model.end_ids.empty());
}

TEST(Bytes, AreReadWithAndWithoutAUnit) {
  EXPECT_EQ(parse_bytes("1000000"), 1000000);
  EXPECT_EQ(parse_bytes("8GiB"), std::int64_t{8} << 30);
  EXPECT_EQ(parse_bytes(" 500 MB "), 500'000'000);
  EXPECT_EQ(parse_bytes("1.5kib"), 1536);
  EXPECT_EQ(parse_bytes("2TB"), 2'000'000'000'000);
  EXPECT_EQ(parse_bytes("7 b"), 7);
  for (const auto* wrong : {"", "GiB", "8 gigs", "-1GB", "0", "1.2.3MB", "8G", "1e400GB", "8 MiBB", "nan"}) {
    EXPECT_FALSE(parse_bytes(wrong)) << wrong;
  }
}

TEST(Bytes, AreWrittenWithThreeDigits) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1536), "1.50 KiB");
  EXPECT_EQ(bytes_text(std::int64_t{13} << 30), "13.0 GiB");
  EXPECT_EQ(bytes_text(std::int64_t{300} << 20), "300 MiB");
}

TEST(Config, OnlyItsSectionOfTheIniFileIsRead) {
  const auto file = testing::test_folder();
  std::ofstream(file) << "[other]\nhead_num = 1\n[llama]\n# a comment\n; another\nhead_num = 8\n session_len=  99 \n";
  const auto settings = read_config_ini(file);
  EXPECT_EQ(settings, (Settings{{"head_num", "8"}, {"session_len", "99"}}));
  std::ofstream(file) << "[llama]\nnonsense\n";
  EXPECT_THROW(read_config_ini(file), Error);
  std::ofstream(file) << "[llm]\na = 1\n";
  EXPECT_THROW(read_config_ini(file), Error);
  std::filesystem::remove(file);
  EXPECT_THROW(read_config_ini(file), Error);
}

TEST(Config, EnvironmentSetsInferenceParametersOnly) {
  ::setenv("CHARONIA_TOKEN_BUDGET", "77", 1);
  ::setenv("CHARONIA_HEAD_NUM", "3", 1);
  const auto settings = settings_from_environment();
  ::unsetenv("CHARONIA_TOKEN_BUDGET");
  ::unsetenv("CHARONIA_HEAD_NUM");
  EXPECT_EQ(settings.at("token_budget"), "77");
  EXPECT_FALSE(settings.contains("head_num"));
}

}  // namespace
}  // namespace charonia
