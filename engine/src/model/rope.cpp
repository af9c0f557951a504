#include "model/rope.h"

#include <cmath>
#include <numbers>

namespace charonia::model {

std::vector<float> inverse_frequencies(const ModelConfig& config) {
  const int half = config.rotary_embedding / 2;
  std::vector<float> out(static_cast<std::size_t>(half));
  for (int i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rotary_embedding);
    out[static_cast<std::size_t>(i)] = 1.0F / std::pow(config.rope_theta, exponent);
  }
  if (config.rope_scaling_type != "llama3") return out;

  const auto original = static_cast<float>(config.rope_original_max_position_embeddings);
  const float longest_kept = original / config.rope_high_freq_factor;
  const float shortest_stretched = original / config.rope_low_freq_factor;
  for (auto& frequency : out) {
    const float wavelength = 2.0F * std::numbers::pi_v<float> / frequency;
    if (wavelength > shortest_stretched) {
      frequency /= config.rope_factor;
    } else if (wavelength >= longest_kept) {
      const float smooth = (original / wavelength - config.rope_low_freq_factor) /
                           (config.rope_high_freq_factor - config.rope_low_freq_factor);
      frequency = (1.0F - smooth) * frequency / config.rope_factor + smooth * frequency;
    }
  }
  return out;
}

std::vector<float> rotary_table(const ModelConfig& config, int positions) {
  const auto frequencies = inverse_frequencies(config);
  const std::size_t half = frequencies.size();
  std::vector<float> table(static_cast<std::size_t>(positions) * 2 * half);
  for (int position = 0; position < positions; ++position) {
    float* row = table.data() + static_cast<std::size_t>(position) * 2 * half;
    for (std::size_t i = 0; i < half; ++i) {
      // The product is rounded to float first, as Hugging Face's is.
      const float angle = static_cast<float>(position) * frequencies[i];
      row[i] = std::cos(angle);
      row[half + i] = std::sin(angle);
    }
  }
  return table;
}

}  // namespace charonia::model
