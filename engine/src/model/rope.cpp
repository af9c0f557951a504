#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

bool is(const ModelConfig& config, std::string_view kind) { return config.rope_scaling_type == kind; }

// The longest text without scaling, if the scaling depends on the length.
int trained_positions(const ModelConfig& config) {
  const int original = config.rope_original_max_position_embeddings;
  return original > 0 && !is(config, "dynamic") ? original : config.max_position_embeddings;
}

// Roughly doubles with each doubling of the text beyond the trained length.
int qwen_alpha(const ModelConfig& config, int length) {
  if (length <= trained_positions(config)) return 1;
  const double ratio = static_cast<double>(length) / trained_positions(config);
  return static_cast<int>(std::exp2(std::ceil(std::log2(ratio) + 1))) - 1;
}

std::vector<float> geometric(float theta, int dim) {
  std::vector<float> out(static_cast<std::size_t>(dim / 2));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = 1.0F / std::pow(theta, static_cast<float>(2 * i) / static_cast<float>(dim));
  }
  return out;
}

// NTK-aware scaling changes the base.
float stretched_base(const ModelConfig& config, float by) {
  const auto dim = static_cast<float>(config.rotary_embedding);
  return config.rope_theta * std::pow(by, dim / (dim - 2));
}

void stretch_as_llama3(const ModelConfig& config, std::vector<float>& frequencies) {
  const auto original = static_cast<float>(config.rope_original_max_position_embeddings);
  const float longest_kept = original / config.rope_high_freq_factor;
  const float shortest_stretched = original / config.rope_low_freq_factor;
  for (auto& frequency : frequencies) {
    const float wavelength = 2.0F * std::numbers::pi_v<float> / frequency;
    if (wavelength > shortest_stretched) {
      frequency /= config.rope_factor;
    } else if (wavelength >= longest_kept) {
      const float smooth = (original / wavelength - config.rope_low_freq_factor) /
                           (config.rope_high_freq_factor - config.rope_low_freq_factor);
      frequency = (1.0F - smooth) * frequency / config.rope_factor + smooth * frequency;
    }
  }
}

void stretch_as_yarn(const ModelConfig& config, std::vector<float>& frequencies) {
  const double dim = config.rotary_embedding;
  // The dimension that makes this many rotations within the original length.
  const auto dimension_of = [&](double turns) {
    const double original = config.rope_original_max_position_embeddings;
    return dim * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(double{config.rope_theta}));
  };
  double low = dimension_of(config.rope_beta_fast), high = dimension_of(config.rope_beta_slow);
  if (config.rope_truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // avoids a ramp of width 0
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float at = (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low);
    const float kept = 1.0F - std::clamp(at, 0.0F, 1.0F);
    const float period = std::pow(config.rope_theta, static_cast<float>(2 * i) / static_cast<float>(dim));
    const float stretched = 1.0F / (config.rope_factor * period);
    frequencies[i] = stretched * (1.0F - kept) + frequencies[i] * kept;
  }
}

void write_row(float* row, int position, const std::vector<float>& frequencies, float factor) {
  const std::size_t half = frequencies.size();
  for (std::size_t i = 0; i < half; ++i) {
    // The product is first rounded to float, like in Hugging Face transformers.
    const float angle = static_cast<float>(position) * frequencies[i];
    row[i] = std::cos(angle) * factor;
    row[half + i] = std::sin(angle) * factor;
  }
}

// The length that decides the frequencies for `position` of a text whose prompt has prompt_tokens tokens; 0 if the
// length has no effect.
int length_for(const ModelConfig& config, int position, int prompt_tokens) {
  const int trained = trained_positions(config);
  const int length = is(config, "qwen") ? prompt_tokens : std::max(position + 1, prompt_tokens);
  if (length <= trained) return 0;
  if (is(config, "longrope")) return trained + 1;
  return is(config, "dynamic") || is(config, "qwen") ? length : 0;
}

// A prompt length that belongs to the class.
int prompt_of(const ModelConfig& config, std::uint64_t rotary_class) {
  if (rotary_class == 0) return 0;
  const int trained = trained_positions(config);
  if (!is(config, "qwen")) return trained + 1;
  // alpha = 2^n - 1 begins beyond trained * 2^(n - 2).
  return static_cast<int>(static_cast<std::int64_t>(trained) * static_cast<std::int64_t>(rotary_class + 2) / 4) + 1;
}

}  // namespace

std::vector<float> inverse_frequencies(const ModelConfig& config, int length) {
  if (is(config, "dynamic")) {
    const auto trained = static_cast<float>(config.max_position_embeddings);
    const float over = config.rope_factor * std::max(static_cast<float>(length), trained) / trained;
    return geometric(stretched_base(config, over - (config.rope_factor - 1)), config.rotary_embedding);
  }
  if (is(config, "qwen")) {
    return geometric(stretched_base(config, static_cast<float>(qwen_alpha(config, length))), config.rotary_embedding);
  }
  if (is(config, "longrope")) {
    const auto& factors = length > trained_positions(config) ? config.rope_long_factors : config.rope_short_factors;
    const auto dim = static_cast<float>(config.rotary_embedding);
    std::vector<float> out(factors.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = 1.0F / (factors[i] * std::pow(config.rope_theta, static_cast<float>(2 * i) / dim));
    }
    return out;
  }
  auto out = geometric(config.rope_theta, config.rotary_embedding);
  if (is(config, "linear") || is(config, "proportional")) {
    for (auto& frequency : out) frequency /= config.rope_factor;
    if (is(config, "proportional")) std::fill(out.begin() + config.rope_turned / 2, out.end(), 0.0F);
  } else if (is(config, "llama3")) {
    stretch_as_llama3(config, out);
  } else if (is(config, "yarn")) {
    stretch_as_yarn(config, out);
  }
  return out;
}

int local_rotary_dim(const ModelConfig& config) {
  return config.rope_local_embedding > 0 ? config.rope_local_embedding : config.rotary_embedding;
}

std::vector<float> local_inverse_frequencies(const ModelConfig& config) {
  return geometric(config.rope_local_theta, local_rotary_dim(config));
}

float rotary_attention_factor(const ModelConfig& config) {
  const bool yarn = is(config, "yarn"), longrope = is(config, "longrope");
  if (!yarn && !longrope) return 1;
  if (config.rope_attention_factor > 0) return config.rope_attention_factor;
  const double original = config.rope_original_max_position_embeddings;
  if (yarn) {
    const auto scale = [&](double mscale) {
      return config.rope_factor <= 1 ? 1.0 : 0.1 * mscale * std::log(double{config.rope_factor}) + 1;
    };
    const bool both = config.rope_mscale > 0 && config.rope_mscale_all_dim > 0;
    return static_cast<float>(both ? scale(config.rope_mscale) / scale(config.rope_mscale_all_dim) : scale(1));
  }
  // Without a factor in the configuration, the factor is the ratio of the two lengths.
  const double factor = config.rope_factor > 1 ? config.rope_factor : config.max_position_embeddings / original;
  return factor <= 1 ? 1.0F : static_cast<float>(std::sqrt(1 + std::log(factor) / std::log(original)));
}

std::uint64_t rotary_class(const ModelConfig& config, int prompt_tokens) {
  if (config.rotary_embedding == 0 || prompt_tokens <= trained_positions(config)) return 0;
  if (is(config, "dynamic")) return static_cast<std::uint64_t>(prompt_tokens);
  if (is(config, "longrope")) return 1;
  if (is(config, "qwen")) return static_cast<std::uint64_t>(qwen_alpha(config, prompt_tokens) - 1);
  return 0;
}

RotaryTables::RotaryTables(const ModelConfig& config, int positions, int step_rows)
    : config_(config), positions_(positions), rows_(positions) {
  if (config.rotary_embedding == 0) {
    rows_ = 0;
    return;
  }
  const auto longest = rotary_class(config, positions);
  by_prompt_ = longest != 0;
  if (!by_prompt_) return;
  if (is(config, "dynamic")) {
    spare_rows_ = step_rows;
  } else {
    // The classes of qwen are 2, 6, 14, ...
    for (std::uint64_t one = is(config, "qwen") ? 2 : 1; one <= longest; one = 2 * one + 2) classes_.push_back(one);
  }
  rows_ = positions_ * (1 + static_cast<std::int64_t>(classes_.size())) + spare_rows_;
}

std::size_t RotaryTables::bytes() const {
  const std::int64_t elements = std::int64_t{config_.rotary_embedding} + (has_local() ? local_rotary_dim(config_) : 0);
  return static_cast<std::size_t>(rows_ * elements) * sizeof(float);
}

std::vector<float> RotaryTables::global_table() const {
  const auto dim = static_cast<std::size_t>(config_.rotary_embedding);
  const float factor = rotary_attention_factor(config_);
  std::vector<float> out(static_cast<std::size_t>(rows_) * dim);
  auto* row = out.data();
  const auto part = [&](std::uint64_t rotary_class) {
    const int prompt = prompt_of(config_, rotary_class);
    std::vector<float> frequencies;
    int computed_for = -1;
    for (int position = 0; position < positions_; ++position, row += dim) {
      const int length = length_for(config_, position, prompt);
      if (length != computed_for) frequencies = inverse_frequencies(config_, length);
      computed_for = length;
      write_row(row, position, frequencies, factor);
    }
  };
  part(0);
  for (const auto one : classes_) part(one);
  return out;
}

std::vector<float> RotaryTables::local_table() const {
  const auto dim = static_cast<std::size_t>(local_rotary_dim(config_));
  const auto frequencies = local_inverse_frequencies(config_);
  std::vector<float> out(static_cast<std::size_t>(rows_) * dim);
  for (std::int64_t row = 0; row < rows_ - spare_rows_; ++row) {
    write_row(out.data() + static_cast<std::size_t>(row) * dim, static_cast<int>(row % positions_), frequencies, 1);
  }
  return out;
}

void RotaryTables::place(const ops::AttentionBatch& batch, std::span<const std::int32_t> prompt_tokens,
                         std::vector<std::int32_t>& rows, Spare& spare) const {
  rows.assign(batch.positions.begin(), batch.positions.end());
  spare.first_row = rows_ - spare_rows_;
  spare.global.clear();
  spare.local.clear();
  const auto dim = static_cast<std::size_t>(config_.rotary_embedding);
  std::int64_t spares = 0;
  for (std::size_t s = 0; s < prompt_tokens.size() && s + 1 < batch.query_start.size(); ++s) {
    const int prompt = prompt_tokens[s];
    const auto its_class = rotary_class(config_, prompt);
    if (its_class == 0) continue;
    const auto begin = static_cast<std::size_t>(batch.query_start[s]),
               end = static_cast<std::size_t>(batch.query_start[s + 1]);
    if (spare_rows_ == 0) {
      const auto part = std::ranges::find(classes_, its_class) - classes_.begin() + 1;
      for (auto row = begin; row < end; ++row) rows[row] += static_cast<std::int32_t>(part * positions_);
      continue;
    }
    std::vector<float> frequencies, local;
    for (auto row = begin; row < end && rows[row] < prompt; ++row) {
      if (frequencies.empty()) frequencies = inverse_frequencies(config_, prompt);
      const int position = rows[row];
      spare.global.resize(spare.global.size() + dim);
      write_row(spare.global.data() + spare.global.size() - dim, position, frequencies, 1);
      if (has_local()) {
        if (local.empty()) local = local_inverse_frequencies(config_);
        const auto size = 2 * local.size();
        spare.local.resize(spare.local.size() + size);
        write_row(spare.local.data() + spare.local.size() - size, position, local, 1);
      }
      rows[row] = static_cast<std::int32_t>(spare.first_row + spares++);
    }
  }
}

bool has_q_scales(const ModelConfig& config) { return config.logn_length > 0 || config.q_scale_beta > 0; }

std::vector<float> q_scales(const ModelConfig& config, int positions) {
  std::vector<float> out;
  for (int p = 0; p < positions; ++p) {
    double scale = 1;
    if (config.logn_length > 0 && p >= config.logn_length) {
      scale = std::log(p + 1.0) / std::log(static_cast<double>(config.logn_length));
    }
    if (config.q_scale_beta > 0) {
      const int lengths = p / config.q_scale_length;
      scale *= 1 + double{config.q_scale_beta} * std::log1p(lengths);
    }
    out.push_back(static_cast<float>(scale));
  }
  return out;
}

std::vector<float> alibi_slopes(int heads) {
  int power = 1;
  while (2 * power <= heads) power *= 2;
  std::vector<float> out;
  for (int i = 1; i <= power; ++i) out.push_back(static_cast<float>(std::exp2(-8.0 * i / power)));
  for (int i = 1; static_cast<int>(out.size()) < heads; i += 2) {
    out.push_back(static_cast<float>(std::exp2(-4.0 * i / power)));
  }
  return out;
}

void apply_engine_settings(ModelConfig& model, const EngineConfig& engine) {
  const auto refuse = [&](const auto&... what) { throw Error(ErrorCode::invalid_argument, cat(what...)); };
  if (engine.rope_scaling_factor > 0) {
    const auto setting = cat("rope_scaling_factor = ", engine.rope_scaling_factor);
    if (model.rotary_embedding == 0) {
      refuse(setting, " does not apply: the model has no rotary embeddings", model.alibi ? " (it has ALiBi)" : "",
             ". Set it to 0");
    }
    const auto& kind = model.rope_scaling_type;
    if (kind == "qwen") {
      // The model's own dynamic NTK is already active, and has no factor.
      if (engine.rope_scaling_factor > 1) {
        refuse(setting, " does not apply: the model has its own dynamic NTK, without a factor. Set it to 0 or 1");
      }
    } else if (kind == "default" || kind == "dynamic") {
      model.rope_scaling_type = "dynamic";
      model.rope_factor = std::max(static_cast<float>(engine.rope_scaling_factor), 1.0F);
      if (model.rotary_embedding < 4) {
        refuse(setting, " needs rotary_embedding >= 4, but it is ", model.rotary_embedding, ". Set it to 0");
      }
    } else {
      refuse(setting, " does not apply: the model has its own rotary scaling (rope_scaling_type = ", kind,
             "), made for ", model.max_position_embeddings, " positions. Set it to 0");
    }
  }
  if (engine.use_logn_attn == 1 && model.logn_length == 0) {
    if (model.rotary_embedding == 0) {
      refuse("use_logn_attn = 1 does not apply: the model has no rotary embeddings",
             model.alibi ? " (it has ALiBi)" : "", ". Set it to 0");
    }
    model.logn_length = std::max(model.max_position_embeddings, 2);
  }
}

}  // namespace charonia::model
