#include "model_options.h"

#include <algorithm>
#include <cstdint>

#include "base/json.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::triton {
namespace {

using nlohmann::json;

constexpr std::string_view kRightGroup = "instance_group [ { count: 1 kind: KIND_MODEL } ]";

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

// The server creates an instance for each GPU of a group. All instances use one engine, which has one rank on each GPU.
json single_group(const json& config) {
  const auto groups = config.value("instance_group", json::array());
  std::int64_t instances = 0;
  for (const auto& group : groups) instances += group.value("count", std::int64_t{1});
  if (instances > 1) {
    refuse(cat("instance_group asks for ", instances,
               " instances; the engine batches by itself and needs exactly one: ", kRightGroup));
  }
  return groups.empty() ? json::object() : groups.front();
}

void read_device(const json& group, ModelOptions& options) {
  const auto kind = group.value("kind", std::string("KIND_MODEL"));
  if (kind != "KIND_CPU" && kind != "KIND_GPU") return;
  const std::string device = kind == "KIND_CPU" ? "cpu" : "cuda";
  const auto given = options.settings.find("device");
  if (given != options.settings.end() && given->second != device && given->second != "auto") {
    refuse(cat("instance_group has ", kind, " and the parameter device is ", given->second,
               ": remove one of them, or set ", kRightGroup, ", with which the setting device decides"));
  }
  options.settings.insert_or_assign("device", device);
  if (kind == "KIND_GPU") options.gpus = group.value("gpus", std::vector<int>());
  const auto ids = options.settings.find("device_ids");
  if (!options.gpus.empty() && ids != options.settings.end()) {
    refuse(cat("instance_group has ", kind, " with GPUs, and there is a parameter device_ids (", ids->second,
               "): remove the parameter, or set ", kRightGroup));
  }
}

}  // namespace

ModelOptions read_model_options(std::string_view text) {
  const auto config = json::parse(text);
  if (!config.value("model_transaction_policy", json::object()).value("decoupled", false)) {
    refuse("the model sends streams of responses: set model_transaction_policy { decoupled: true }");
  }
  if (const auto size = config.value("max_batch_size", std::int64_t{0}); size != 0) {
    refuse(cat(
        "max_batch_size is ", size,
        "; the engine batches by itself, so it must be 0 (the engine's own limit is the parameter max_batch_size)"));
  }
  if (config.contains("sequence_batching")) {
    refuse("sequence_batching is not supported; remove it");
  }
  const auto group = single_group(config);

  ModelOptions options;
  options.warmup = !config.value("model_warmup", json::array()).empty();
  const auto parameters = config.value("parameters", json::object());
  for (const auto& [key, parameter] : parameters.items()) {
    auto value = parameter.value("string_value", std::string());
    if (!value.empty()) options.settings.emplace(key, std::move(value));
  }
  read_device(group, options);
  return options;
}

std::string device_ids_of(const std::vector<int>& gpus, int ranks) {
  std::string ids;
  for (std::size_t i = 0; i < std::min(gpus.size(), static_cast<std::size_t>(ranks)); ++i) {
    ids += cat(i == 0 ? "" : ",", gpus[i]);
  }
  return ids;
}

}  // namespace charonia::triton
