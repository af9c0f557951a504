#include "runtime/settings.h"

#include <string_view>
#include <type_traits>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/layers.h"
#include "model/rope.h"
#include "ops/kv_quant.h"
#include "runtime/speculative_method.h"

namespace charonia::runtime {
namespace {

// Returns the sampling defaults of the model's generation_config.json.
SamplingParams default_sampling(const ModelConfig& model) {
  SamplingParams sampling;
#include "runtime/generated/sampling_defaults.inc"
  return sampling;
}

// Returns the parameters that differ from the engine's own defaults, such as "temperature = 0.6, top_k = 20".
std::string differences(const SamplingParams& sampling) {
  const SamplingParams own;
  std::string out;
  visit_sampling([&](std::string_view name, std::string_view, auto member) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(own.*member)>>) {
      if (sampling.*member != own.*member) out += cat(out.empty() ? "" : ", ", name, " = ", sampling.*member);
    }
  });
  return out;
}

}  // namespace

std::string kv_type(const ModelConfig& model, const EngineConfig& config) {
  if (config.quant_policy == 0) return std::string(to_string(model::data_type(model)));
  return config.quant_policy == ops::kKvFp8 ? "fp8" : cat("int", config.quant_policy);
}

ResolvedSettings read_settings(const std::filesystem::path& weights_dir, const Settings& overrides) {
  ResolvedSettings out;
  const auto file = weights_dir / "config.ini";
  const auto stored = read_config_ini(file);
  try {
    out.warnings = apply_settings(stored, out.config, &out.model);
  } catch (const Error& error) {
    throw Error(error.code(),
                cat(file.string(), ": ", error.what(), ". If another version of Charonia has written it, ",
                    "create the workspace again with: charonia convert MODEL --dst-path WORKSPACE --force"));
  }
  for (const auto& [key, value] : overrides) {
    for (const auto& field : config_fields()) {
      if (field.key == key && field.model_attribute) {
        throw Error(ErrorCode::invalid_argument,
                    cat("setting ", key, " is the model's own and cannot be changed (", value, ")"));
      }
    }
  }
  for (auto& warning : apply_settings(overrides, out.config)) out.warnings.push_back(std::move(warning));

  auto& config = out.config;
  if (config.task != "auto" && config.task != out.model.model_task) {
    throw Error(ErrorCode::invalid_argument,
                cat("task = ", config.task, ", but this workspace was converted for task = ", out.model.model_task,
                    ". Leave task out, or convert the model again with: charonia convert MODEL --task ", config.task));
  }
  const auto& method = method_of(config);
  if (!method.model.empty() && config.speculative_model.empty()) {
    throw Error(ErrorCode::invalid_argument,
                cat("speculative_method = ", method.name, " needs speculative_model: ", method.model));
  }
  if (method.model.empty() && !config.speculative_model.empty()) {
    out.warnings.push_back(cat("speculative_model = ", config.speculative_model,
                               " has no effect: speculative_method = ", method.name,
                               ", and it needs draft_model or eagle3"));
  }
  if (method.name == "off" && overrides.contains("speculative_tokens")) {
    out.warnings.push_back(cat("speculative_tokens = ", config.speculative_tokens,
                               " has no effect: choose a speculative_method, such as ngram"));
  }
  if (method.name != "off" && config.jump_forward) {
    out.warnings.push_back(cat("speculative_method = ", method.name,
                               " has no effect on structured output, because jump_forward is on"));
  }
  // Latents cannot be quantised, which is an error.
  if (config.quant_policy == ops::kKvFp8 && out.model.kv_scales == "none" && out.model.latent_size == 0) {
    out.warnings.push_back(cat("quant_policy = ", config.quant_policy, ": the weights have no usable scales of keys and ",
                               "values (k_scale, v_scale of all layers), so they are stored in FP8 with scale 1, and ",
                               "magnitudes above 448 become 448",
                               stored.contains("kv_scales")
                                   ? ""
                                   : ". This workspace is of a version without such scales: if the model has them, "
                                     "convert it again with: charonia convert"));
  }
  model::apply_engine_settings(out.model, config);
  if (config.generation_config == "auto") {
    out.default_sampling = default_sampling(out.model);
    if (const auto found = differences(out.default_sampling); !found.empty()) {
      out.warnings.push_back(cat("requests use the sampling defaults of generation_config.json: ", found,
                                 ". The setting generation_config = none turns them off"));
    }
  }
  const int trained = out.model.max_position_embeddings;
  if (config.session_len == 0) config.session_len = trained;
  const auto& kind = out.model.rope_scaling_type;
  if (config.session_len > trained && kind != "dynamic" && kind != "qwen") {
    out.warnings.push_back(cat("session_len = ", config.session_len, " is more than the ", trained,
                               " positions that the model was trained for; completions may suffer beyond them",
                               out.model.rotary_embedding > 0 && kind == "default"
                                   ? ". rope_scaling_factor = 1 makes it see further (dynamic NTK)"
                                   : ""));
  }
  return out;
}

}  // namespace charonia::runtime
