#include "runtime/settings.h"

#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/rope.h"

namespace charonia::runtime {

ResolvedSettings read_settings(const std::filesystem::path& weights_dir, const Settings& overrides) {
  ResolvedSettings out;
  out.warnings = apply_settings(read_config_ini(weights_dir / "config.ini"), out.config, &out.model);
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
  model::apply_engine_settings(out.model, config);
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
