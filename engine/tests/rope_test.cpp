#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace charonia::model {
namespace {

TEST(Rotary, DefaultFrequenciesAreGeometric) {
  ModelConfig config;
  config.rotary_embedding = 8;
  config.rope_theta = 10000.0F;
  const auto frequencies = inverse_frequencies(config);
  ASSERT_EQ(frequencies.size(), 4U);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(frequencies[i], std::pow(10.0, -i), 1e-6 * std::pow(10.0, -i));
}

TEST(Rotary, Llama3KeepsShortWavesStretchesLongOnesAndBlendsBetween) {
  ModelConfig config;
  config.rotary_embedding = 128;
  config.rope_theta = 500000.0F;
  const auto plain = inverse_frequencies(config);
  config.rope_scaling_type = "llama3";
  config.rope_factor = 8;
  config.rope_low_freq_factor = 1;
  config.rope_high_freq_factor = 4;
  config.rope_original_max_position_embeddings = 8192;
  const auto scaled = inverse_frequencies(config);
  int kept = 0, stretched = 0, blended = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    const double ratio = plain[i] / scaled[i];
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

TEST(Rotary, TableHoldsCosinesThenSines) {
  ModelConfig config;
  config.rotary_embedding = 4;
  const auto table = rotary_table(config, 3);
  ASSERT_EQ(table.size(), 12U);
  EXPECT_FLOAT_EQ(table[0], 1.0F);
  EXPECT_FLOAT_EQ(table[2], 0.0F);
  EXPECT_FLOAT_EQ(table[8], std::cos(2.0F));
  EXPECT_FLOAT_EQ(table[10], std::sin(2.0F));
  EXPECT_FLOAT_EQ(table[11], std::sin(0.02F));
}

}  // namespace
}  // namespace charonia::model
