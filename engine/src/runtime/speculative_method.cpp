#include "runtime/speculative_method.h"

#include <algorithm>

#include "base/text.h"

namespace charonia::runtime {

const SpeculativeMethod& method_of(const EngineConfig& config) {
  return *std::ranges::find(kSpeculativeMethods, config.speculative_method, &SpeculativeMethod::name);
}

std::string speculation_obstacle(const EngineConfig& config, const ModelConfig& model) {
  if (config.device != "cpu" && config.device != "cuda") {
    return cat("it needs a CPU or a GPU, and the device is ", config.device, ": set device = cpu or cuda");
  }
  if (model.model_task != "generate") {
    return cat("the model is for task = ", model.model_task, " and generates no text: serve a model that does");
  }
  if (method_of(config).reads_hidden && config.tensor_para_size > 1) {
    return cat("it needs one rank, and tensor_para_size is ", config.tensor_para_size, ": set tensor_para_size = 1");
  }
  return {};
}

bool speculates(const EngineConfig& config, const ModelConfig& model) {
  return config.speculative_method != "off" && speculation_obstacle(config, model).empty();
}

std::string speculation_warning(const EngineConfig& config, const ModelConfig& model) {
  if (config.speculative_method == "off") return {};
  const auto why = speculation_obstacle(config, model);
  return why.empty() ? why : cat("speculative_method = ", config.speculative_method, " has no effect: ", why);
}

}  // namespace charonia::runtime
