#include "model/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "errors.h"

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
void expect_row(std::span<const float> table, std::int64_t row, int position, const std::vector<float>& frequencies,
                float factor = 1) {
  const std::size_t half = frequencies.size();
  const auto got = table.subspan(static_cast<std::size_t>(row) * 2 * half, 2 * half);
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = double{frequencies[i]} * position;
    EXPECT_NEAR(got[i], factor * std::cos(angle), 1e-5) << "row " << row << ", dimension " << i;
    EXPECT_NEAR(got[half + i], factor * std::sin(angle), 1e-5) << "row " << row << ", dimension " << i;
  }
}

TEST(Rotary, DefaultFrequenciesAreGeometricAndLinearDividesByTheFactor) {
  expect_near(inverse_frequencies(rotary(8)), {1, 0.1, 0.01, 0.001});
  auto config = rotary(8, 10000.0F, "linear");
  config.rope_factor = 4;
  expect_near(inverse_frequencies(config), {0.25, 0.025, 0.0025, 0.00025});
}

TEST(Rotary, Llama3KeepsShortWavesScalesLongOnesAndInterpolatesBetween) {
  auto config = rotary(128, 500000.0F, "llama3");
  config.rope_factor = 8;
  config.rope_low_freq_factor = 1;
  config.rope_high_freq_factor = 4;
  config.rope_original_max_position_embeddings = 8192;
  std::vector<double> expected;
  for (int i = 0; i < 64; ++i) {
    const double one = plain(500000, i, 128), turns = 8192 * one / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - 1) / (4 - 1), 0.0, 1.0);
    expected.push_back(kept * one + (1 - kept) * one / 8);
  }
  expect_near(inverse_frequencies(config), expected);
}

TEST(Rotary, DynamicAndQwenHaveABaseForTheLength) {
  auto dynamic = rotary(16, 10000.0F, "dynamic"), qwen = rotary(16, 10000.0F, "qwen");
  dynamic.rope_factor = 2;
  qwen.rope_original_max_position_embeddings = 50;
  const auto expect_base = [](const ModelConfig& config, int length, double alpha) {
    std::vector<double> expected;
    for (int i = 0; i < 8; ++i) expected.push_back(plain(10000 * std::pow(alpha, 16.0 / 14), i, 16));
    expect_near(inverse_frequencies(config, length), expected);
  };
  for (const int length : {0, 40, 100, 101, 250}) expect_base(dynamic, length, 2.0 * std::max(length, 100) / 100 - 1);
  for (const auto& [length, alpha] : std::vector<std::pair<int, double>>{
           {0, 1}, {50, 1}, {51, 3}, {100, 3}, {101, 7}, {200, 7}, {201, 15}, {400, 15}, {401, 31}}) {
    expect_base(qwen, length, alpha);
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
  const RotaryTables tables(rotary(4), 3, 8), none(rotary(0), 3, 8), within(rotary(8, 10000.0F, "dynamic"), 100, 5);
  EXPECT_EQ(tables.rows(), 3);
  EXPECT_FALSE(tables.by_prompt());
  const auto table = tables.global_table();
  ASSERT_EQ(table.size(), 12U);
  EXPECT_EQ(tables.bytes(), 48U);
  for (int p = 0; p < 3; ++p) expect_row(table, p, p, inverse_frequencies(rotary(4)));
  EXPECT_EQ(none.rows(), 0) << "without a rotation there is no table";
  EXPECT_EQ(none.bytes(), 0U);
  EXPECT_EQ(within.rows(), 100) << "within the trained length";
  EXPECT_FALSE(within.by_prompt());
}

// Steps of two sequences: positions 8, 9, 10 of the first, and 7 of the second, with prompts of many lengths. A token
// after its prompt is rotated by its position, but with Qwen by its prompt.
TEST(RotaryTables, EveryTokenIsRotatedByTheLengthOfItsPrompt) {
  auto dynamic = rotary(8, 10000.0F, "dynamic"), qwen = rotary(8, 10000.0F, "qwen");
  dynamic.max_position_embeddings = 6;
  dynamic.rope_local_theta = 100.0F;  // layers with another base have the same rows
  qwen.max_position_embeddings = 4;   // alpha 1, 3, 7 and 15
  for (const auto& [config, num_rows] : {std::pair{dynamic, 17 + 5}, {longrope(), 2 * 17}, {qwen, 4 * 17}}) {
    SCOPED_TRACE(config.rope_scaling_type);
    const bool is_qwen = config.rope_scaling_type == "qwen";
    const RotaryTables tables(config, 17, 5);
    EXPECT_TRUE(tables.by_prompt());
    EXPECT_EQ(tables.rows(), num_rows);
    const auto global = tables.global_table(), local = tables.local_table();
    const std::vector<std::int32_t> starts{0, 3, 4}, positions{8, 9, 10, 7};
    for (const auto& prompts : std::vector<std::vector<std::int32_t>>{{10, 2}, {10, 11}, {8, 17}, {4, 12}, {}}) {
      if (is_qwen && prompts.empty()) continue;
      std::vector<std::int32_t> rows;
      RotaryTables::Spare spare;
      tables.place({starts, positions, {}, 0}, prompts, rows, spare);
      ASSERT_EQ(rows.size(), 4U);
      for (std::size_t i = 0; i < 4; ++i) {
        const int position = positions[i], prompt = prompts.empty() ? 0 : prompts[i / 3];
        const auto frequencies = inverse_frequencies(config, is_qwen || position < prompt ? prompt : position + 1);
        const bool spared = !spare.global.empty() && rows[i] >= spare.first_row;
        const auto row = rows[i] - (spared ? spare.first_row : 0);
        expect_row(spared ? spare.global : global, row, position, frequencies, rotary_attention_factor(config));
        if (config.rope_local_theta > 0) {
          expect_row(spared ? spare.local : local, row, position, local_inverse_frequencies(config));
        }
      }
    }
  }
}

TEST(QScales, ScalesGrowWithTheLogarithmOfThePosition) {
  ModelConfig logn, beta;
  EXPECT_FALSE(has_q_scales(logn));
  logn.logn_length = 4;
  beta.q_scale_beta = 0.1F;
  beta.q_scale_length = 4;
  EXPECT_TRUE(has_q_scales(logn) && has_q_scales(beta));
  ASSERT_EQ(q_scales(logn, 13).size(), 13U);
  for (std::size_t i = 0; i < 13; ++i) {
    const auto p = static_cast<double>(i);
    EXPECT_NEAR(q_scales(logn, 13)[i], p < 4 ? 1 : std::log(p + 1) / std::log(4), 1e-6) << p;
    EXPECT_NEAR(q_scales(beta, 13)[i], 1 + 0.1 * std::log(1 + std::floor(p / 4)), 1e-7) << p;
  }
  beta.logn_length = 8;
  EXPECT_NEAR(q_scales(beta, 13)[12], (1 + 0.1 * std::log(4)) * std::log(13) / std::log(8), 1e-6)
      << "both factors must apply";
}

TEST(Alibi, SlopesEqualThePaperForAnyNumberOfHeads) {
  expect_near(alibi_slopes(8), {1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 1.0 / 32, 1.0 / 64, 1.0 / 128, 1.0 / 256});
  expect_near(alibi_slopes(1), {1.0 / 256});
  // 8 of 8, then the first, third, fifth and seventh of 16.
  const auto twelve = alibi_slopes(12);
  ASSERT_EQ(twelve.size(), 12U);
  EXPECT_NEAR(twelve[7], 1.0 / 256, 1e-9);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(twelve[static_cast<std::size_t>(8 + i)], std::exp2(-0.5 * (2 * i + 1)), 1e-6);
  EXPECT_EQ(alibi_slopes(40).size(), 40U);
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
  const auto refused = [](ModelConfig model, double factor, int logn, std::initializer_list<std::string_view> parts) {
    EngineConfig engine;
    engine.rope_scaling_factor = factor;
    engine.use_logn_attn = logn;
    expect_error(ErrorCode::invalid_argument, parts, [&] { apply_engine_settings(model, engine); });
  };
  auto alibi = rotary(0);
  alibi.alibi = true;
  refused(alibi, 1, 0, {"ALiBi"});
  refused(alibi, 0, 1, {"use_logn_attn = 1"});
  for (const auto* kind : {"linear", "llama3", "yarn", "longrope"}) {
    refused(rotary(8, 10000.0F, kind), 1.5, 0, {"rope_scaling_factor = 1.5", kind, "Set it to 0"});
  }
  EngineConfig engine;
  engine.rope_scaling_factor = engine.use_logn_attn = 1;
  auto qwen = rotary(8, 10000.0F, "qwen");
  EXPECT_NO_THROW(apply_engine_settings(qwen, engine));
  refused(qwen, 2, 0, {});
}

}  // namespace
}  // namespace charonia::model
