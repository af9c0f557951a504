#include "model/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "charonia/error.h"

namespace charonia::model {
namespace {

ModelConfig rotary(int dim, float theta = 10000.0F, const std::string& kind = "default") {
  ModelConfig config;
  config.rotary_embedding = config.size_per_head = dim;
  config.rope_theta = theta;
  config.rope_scaling_type = kind;
  config.max_position_embeddings = 100;
  return config;
}

ModelConfig longrope() {
  auto config = rotary(4, 10000.0F, "longrope");
  config.rope_original_max_position_embeddings = 10;
  config.max_position_embeddings = 40;
  config.rope_short_factors = {1.0F, 1.5F};
  config.rope_long_factors = {2.0F, 8.0F};
  return config;
}

// theta^(-2i/d) in double precision.
double plain(double theta, int i, int dim) { return std::pow(theta, -2.0 * i / dim); }

void expect_near(const std::vector<float>& got, const std::vector<double>& expected, double relative = 1e-5) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], relative * std::abs(expected[i])) << "dimension " << i;
  }
}

// Checks that row `row` of a table is for position `position` with these frequencies.
void expect_row(const std::vector<float>& table, std::int64_t row, int position, const std::vector<float>& frequencies,
                float factor = 1) {
  const std::size_t half = frequencies.size();
  const float* got = table.data() + static_cast<std::size_t>(row) * 2 * half;
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = double{frequencies[i]} * position;
    EXPECT_NEAR(got[i], factor * std::cos(angle), 1e-5) << "row " << row << ", dimension " << i;
    EXPECT_NEAR(got[half + i], factor * std::sin(angle), 1e-5) << "row " << row << ", dimension " << i;
  }
}

TEST(Rotary, DefaultFrequenciesAreGeometric) {
  const auto frequencies = inverse_frequencies(rotary(8));
  ASSERT_EQ(frequencies.size(), 4U);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(frequencies[i], std::pow(10.0, -i), 1e-6 * std::pow(10.0, -i));
}

TEST(Rotary, LinearDividesByTheFactor) {
  auto config = rotary(8, 10000.0F, "linear");
  config.rope_factor = 4;
  expect_near(inverse_frequencies(config), {0.25, 0.025, 0.0025, 0.00025});
}

TEST(Rotary, Llama3KeepsShortWavesScalesLongOnesAndInterpolatesBetween) {
  auto config = rotary(128, 500000.0F);
  const auto unscaled = inverse_frequencies(config);
  config.rope_scaling_type = "llama3";
  config.rope_factor = 8;
  config.rope_low_freq_factor = 1;
  config.rope_high_freq_factor = 4;
  config.rope_original_max_position_embeddings = 8192;
  const auto scaled = inverse_frequencies(config);
  int kept = 0, stretched = 0, blended = 0;
  for (std::size_t i = 0; i < unscaled.size(); ++i) {
    const double wavelength = 2 * M_PI / unscaled[i];
    const double ratio = unscaled[i] / scaled[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_FLOAT_EQ(ratio, 1.0);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_FLOAT_EQ(ratio, 8.0);
      ++stretched;
    } else {
      EXPECT_GT(ratio, 1.0);
      EXPECT_LT(ratio, 8.0);
      ++blended;
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(stretched, 0);
  EXPECT_GT(blended, 0);
}

TEST(Rotary, DynamicUsesTheBaseForTheLength) {
  auto config = rotary(16, 10000.0F, "dynamic");
  config.rope_factor = 2;
  for (const int length : {0, 40, 100, 101, 250}) {
    const double over = 2.0 * std::max(length, 100) / 100 - 1, base = 10000 * std::pow(over, 16.0 / 14);
    std::vector<double> expected;
    for (int i = 0; i < 8; ++i) expected.push_back(plain(base, i, 16));
    expect_near(inverse_frequencies(config, length), expected);
  }
}

TEST(Rotary, QwensBaseDoublesWithTheLength) {
  auto config = rotary(16, 10000.0F, "qwen");
  config.rope_original_max_position_embeddings = 50;
  for (const auto& [length, alpha] : std::vector<std::pair<int, double>>{
           {0, 1}, {50, 1}, {51, 3}, {100, 3}, {101, 7}, {200, 7}, {201, 15}, {400, 15}, {401, 31}}) {
    const double base = 10000 * std::pow(alpha, 16.0 / 14);
    std::vector<double> expected;
    for (int i = 0; i < 8; ++i) expected.push_back(plain(base, i, 16));
    expect_near(inverse_frequencies(config, length), expected);
  }
}

TEST(Rotary, YarnScalesLowFrequenciesAndKeepsHighOnes) {
  auto config = rotary(64, 1e6F, "yarn");
  config.rope_factor = 4;
  config.rope_original_max_position_embeddings = 32768;
  for (const bool truncate : {true, false}) {
    config.rope_truncate = truncate;
    const auto dimension = [](double turns) {
      return 64 * std::log(32768 / (turns * 2 * std::numbers::pi)) / (2 * std::log(1e6));
    };
    double low = dimension(32), high = dimension(1);
    if (truncate) low = std::floor(low), high = std::ceil(high);
    std::vector<double> expected;
    for (int i = 0; i < 32; ++i) {
      const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0), one = plain(1e6, i, 64);
      expected.push_back(one / 4 * ramp + one * (1 - ramp));
    }
    const auto got = inverse_frequencies(config);
    expect_near(got, expected);
    EXPECT_FLOAT_EQ(got.front(), 1.0F);
    EXPECT_NEAR(got.back() * 4, plain(1e6, 31, 64), 1e-10);
  }
}

TEST(Rotary, LongropeHasFactorsForShortAndLong) {
  const auto config = longrope();
  expect_near(inverse_frequencies(config, 10), {1, 0.01 / 1.5});
  expect_near(inverse_frequencies(config, 11), {0.5, 0.01 / 8});
}

TEST(Rotary, AttentionFactorsFollowTheirFormulas) {
  auto config = rotary(64, 10000.0F, "yarn");
  config.rope_factor = 40;
  config.rope_original_max_position_embeddings = 4096;
  EXPECT_NEAR(rotary_attention_factor(config), 0.1 * std::log(40.0) + 1, 1e-6);
  config.rope_mscale = 0.7F;
  EXPECT_NEAR(rotary_attention_factor(config), 0.1 * std::log(40.0) + 1, 1e-6);
  config.rope_mscale_all_dim = 0.5F;
  EXPECT_NEAR(rotary_attention_factor(config), (0.07 * std::log(40.0) + 1) / (0.05 * std::log(40.0) + 1), 1e-6);
  config.rope_attention_factor = 1.25F;
  EXPECT_EQ(rotary_attention_factor(config), 1.25F);
  auto phi = longrope();
  EXPECT_NEAR(rotary_attention_factor(phi), std::sqrt(1 + std::log(4.0) / std::log(10.0)), 1e-6);
  phi.rope_factor = 2;
  EXPECT_NEAR(rotary_attention_factor(phi), std::sqrt(1 + std::log(2.0) / std::log(10.0)), 1e-6);
  EXPECT_EQ(rotary_attention_factor(rotary(8)), 1.0F);
}

TEST(Rotary, PromptsOfDifferentLengthsSharePrefixesIfTheRotationIsEqual) {
  auto config = rotary(8);
  EXPECT_EQ(rotary_class(config, 1000), 0U);
  config.rope_scaling_type = "dynamic";
  EXPECT_EQ(rotary_class(config, 100), 0U);
  EXPECT_NE(rotary_class(config, 101), 0U);
  EXPECT_NE(rotary_class(config, 101), rotary_class(config, 102));
  config.rope_scaling_type = "qwen";
  EXPECT_EQ(rotary_class(config, 100), 0U);
  EXPECT_NE(rotary_class(config, 101), 0U);
  EXPECT_EQ(rotary_class(config, 101), rotary_class(config, 200));
  EXPECT_NE(rotary_class(config, 200), rotary_class(config, 201));
  config.rope_scaling_type = "longrope";
  config.rope_original_max_position_embeddings = 50;
  EXPECT_EQ(rotary_class(config, 50), 0U);
  EXPECT_NE(rotary_class(config, 51), 0U);
  EXPECT_EQ(rotary_class(config, 51), rotary_class(config, 99));
}

TEST(RotaryTables, ARowHoldsCosinesThenSines) {
  const RotaryTables tables(rotary(4), 3, 8);
  EXPECT_EQ(tables.rows(), 3);
  EXPECT_FALSE(tables.by_prompt());
  const auto table = tables.global_table();
  ASSERT_EQ(table.size(), 12U);
  EXPECT_EQ(tables.bytes(), 48U);
  EXPECT_FLOAT_EQ(table[0], 1.0F);
  EXPECT_FLOAT_EQ(table[2], 0.0F);
  EXPECT_FLOAT_EQ(table[8], std::cos(2.0F));
  EXPECT_FLOAT_EQ(table[10], std::sin(2.0F));
  EXPECT_FLOAT_EQ(table[11], std::sin(0.02F));
}

TEST(RotaryTables, WithoutARotationThereIsNoTable) {
  const RotaryTables tables(rotary(0), 3, 8);
  EXPECT_EQ(tables.rows(), 0);
  EXPECT_EQ(tables.bytes(), 0U);
  EXPECT_FALSE(tables.by_prompt());
}

// A step of two sequences: positions 8, 9, 10 of the first, and position `second` of the second.
struct TwoSequences {
  explicit TwoSequences(int second) : positions{8, 9, 10, second} {}
  ops::AttentionBatch batch() const { return {query_start, positions, {}, 0}; }
  std::vector<std::int32_t> query_start{0, 3, 4}, positions;
};

TEST(RotaryTables, DynamicScalesALongPromptByItsLengthAndLaterTokensByPosition) {
  auto config = rotary(8, 10000.0F, "dynamic");
  config.max_position_embeddings = 6;
  config.rope_local_theta = 100.0F;  // layers with another base have the same rows
  const RotaryTables tables(config, 20, 5);
  EXPECT_TRUE(tables.by_prompt());
  EXPECT_EQ(tables.rows(), 25);
  const auto table = tables.global_table(), local = tables.local_table();
  for (int p = 0; p < 20; ++p) {
    expect_row(table, p, p, inverse_frequencies(config, p + 1));
    expect_row(local, p, p, local_inverse_frequencies(config));
  }
  const TwoSequences step(3);
  std::vector<std::int32_t> rows;
  RotaryTables::Spare spare;
  // The first prompt has 10 tokens: positions 8 and 9 belong to it, 10 was generated. The second prompt is short.
  const std::vector<std::int32_t> prompts{10, 2};
  tables.place(step.batch(), prompts, rows, spare);
  EXPECT_EQ(rows, (std::vector<std::int32_t>{20, 21, 10, 3}));
  EXPECT_EQ(spare.first_row, 20);
  ASSERT_EQ(spare.global.size(), 16U);
  ASSERT_EQ(spare.local.size(), 16U);
  for (const int row : {0, 1}) {
    expect_row(spare.global, row, 8 + row, inverse_frequencies(config, 10));
    expect_row(spare.local, row, 8 + row, local_inverse_frequencies(config));
  }
  tables.place(step.batch(), {}, rows, spare);
  EXPECT_EQ(rows, step.positions);
  EXPECT_TRUE(spare.global.empty());
}

TEST(RotaryTables, DynamicWithinTheTrainedLengthNeedsNoRows) {
  const RotaryTables tables(rotary(8, 10000.0F, "dynamic"), 100, 5);
  EXPECT_FALSE(tables.by_prompt());
  EXPECT_EQ(tables.rows(), 100);
}

TEST(RotaryTables, LongropeHasALongPartForLongPrompts) {
  const auto config = longrope();
  const float factor = rotary_attention_factor(config);
  const RotaryTables tables(config, 20, 5);
  EXPECT_EQ(tables.rows(), 40);
  const auto table = tables.global_table();
  for (int p = 0; p < 20; ++p) {
    expect_row(table, p, p, inverse_frequencies(config, p < 10 ? 1 : 11), factor);
    expect_row(table, 20 + p, p, inverse_frequencies(config, 11), factor);
  }
  const TwoSequences step(7);
  std::vector<std::int32_t> rows;
  RotaryTables::Spare spare;
  tables.place(step.batch(), std::vector<std::int32_t>{10, 11}, rows, spare);
  EXPECT_EQ(rows, (std::vector<std::int32_t>{8, 9, 10, 27}));
  EXPECT_TRUE(spare.global.empty());
}

TEST(RotaryTables, QwenHasAPartForEachBase) {
  auto config = rotary(8, 10000.0F, "qwen");
  config.max_position_embeddings = 4;
  const RotaryTables tables(config, 17, 5);  // alpha 1, 3, 7 and 15
  EXPECT_EQ(tables.rows(), 4 * 17);
  const auto table = tables.global_table();
  int part = 0;
  for (const int length : {4, 8, 16}) {
    for (int p = 0; p < 17; ++p) expect_row(table, part * 17 + p, p, inverse_frequencies(config, length));
    ++part;
  }
  const TwoSequences step(2);
  std::vector<std::int32_t> rows;
  RotaryTables::Spare spare;
  tables.place(step.batch(), std::vector<std::int32_t>{8, 17}, rows, spare);
  EXPECT_EQ(rows, (std::vector<std::int32_t>{17 + 8, 17 + 9, 17 + 10, 3 * 17 + 2}));
}

TEST(Logn, ScalesBeginBeyondTheLength) {
  ModelConfig model;
  EXPECT_FALSE(has_q_scales(model));
  model.logn_length = 4;
  EXPECT_TRUE(has_q_scales(model));
  const auto table = q_scales(model, 8);
  ASSERT_EQ(table.size(), 8U);
  for (int p = 0; p < 4; ++p) EXPECT_EQ(table[static_cast<std::size_t>(p)], 1.0F);
  for (int p = 4; p < 8; ++p) EXPECT_NEAR(table[static_cast<std::size_t>(p)], std::log(p + 1) / std::log(4), 1e-6);
}

TEST(QScales, ScalesGrowWithTheLogarithmOfThePosition) {
  ModelConfig model;
  model.q_scale_beta = 0.1F;
  model.q_scale_length = 4;
  EXPECT_TRUE(has_q_scales(model));
  const auto table = q_scales(model, 13);
  ASSERT_EQ(table.size(), 13U);
  for (int p = 0; p < 13; ++p) {
    const double expected = 1 + 0.1 * std::log(1 + std::floor(p / 4.0));
    EXPECT_NEAR(table[static_cast<std::size_t>(p)], expected, 1e-7) << p;
  }
  model.logn_length = 8;
  EXPECT_NEAR(q_scales(model, 13)[12], (1 + 0.1 * std::log(4)) * std::log(13) / std::log(8), 1e-6)
      << "both factors must apply";
}

TEST(Alibi, SlopesAreThoseOfThePaperForAnyNumberOfHeads) {
  expect_near(alibi_slopes(8), {1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 1.0 / 32, 1.0 / 64, 1.0 / 128, 1.0 / 256});
  expect_near(alibi_slopes(1), {1.0 / 256});
  // 8 of 8, then the first, third, fifth and seventh of 16.
  const auto twelve = alibi_slopes(12);
  ASSERT_EQ(twelve.size(), 12U);
  EXPECT_NEAR(twelve[7], 1.0 / 256, 1e-9);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(twelve[static_cast<std::size_t>(8 + i)], std::exp2(-0.5 * (2 * i + 1)), 1e-6);
  EXPECT_EQ(alibi_slopes(40).size(), 40U);
}

std::string refusal(ModelConfig model, double factor, int logn) {
  EngineConfig engine;
  engine.rope_scaling_factor = factor;
  engine.use_logn_attn = logn;
  try {
    apply_engine_settings(model, engine);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(EngineSettings, AFactorTurnsOnDynamicScalingAndLognItsTable) {
  EngineConfig engine;
  auto model = rotary(8);
  apply_engine_settings(model, engine);
  EXPECT_EQ(model.rope_scaling_type, "default");
  EXPECT_EQ(model.logn_length, 0);
  engine.rope_scaling_factor = 0.5;
  engine.use_logn_attn = 1;
  apply_engine_settings(model, engine);
  EXPECT_EQ(model.rope_scaling_type, "dynamic");
  EXPECT_EQ(model.rope_factor, 1.0F);
  EXPECT_EQ(model.logn_length, 100);
  engine.rope_scaling_factor = 2;
  apply_engine_settings(model, engine);  // a dynamic model uses the user's factor
  EXPECT_EQ(model.rope_factor, 2.0F);
}

TEST(EngineSettings, InapplicableSettingsAreRejectedWithTheRemedy) {
  auto alibi = rotary(0);
  alibi.alibi = true;
  EXPECT_NE(refusal(alibi, 1, 0).find("ALiBi"), std::string::npos);
  EXPECT_NE(refusal(alibi, 0, 1).find("use_logn_attn = 1"), std::string::npos);
  for (const auto* kind : {"linear", "llama3", "yarn", "longrope"}) {
    const auto message = refusal(rotary(8, 10000.0F, kind), 1.5, 0);
    EXPECT_NE(message.find("rope_scaling_factor = 1.5"), std::string::npos) << message;
    EXPECT_NE(message.find(kind), std::string::npos) << message;
    EXPECT_NE(message.find("Set it to 0"), std::string::npos) << message;
  }
  EXPECT_EQ(refusal(rotary(8, 10000.0F, "qwen"), 1, 1), "");
  EXPECT_NE(refusal(rotary(8, 10000.0F, "qwen"), 2, 0), "");
}

}  // namespace
}  // namespace charonia::model
