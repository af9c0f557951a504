#include "model_config.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "error.h"
#include "raii.h"

namespace charonia::triton {
namespace {

using nlohmann::json;

constexpr std::string_view kDrainKey = "drain_timeout_s";
constexpr const char* kDrainVariable = "CHARONIA_DRAIN_TIMEOUT_S";

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

std::chrono::seconds read_drain(const std::string& place, std::string_view text) {
  constexpr int kMost = 86400;
  int seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || seconds < 0 || seconds > kMost) {
    refuse(place + " is \"" + std::string(text) + "\"; it must be a whole number of seconds from 0 to " +
           std::to_string(kMost));
  }
  return std::chrono::seconds(seconds);
}

// config.instance_group, completed by the server: one group of count 1, on at most one device.
void check_single_instance(const json& config) {
  std::int64_t instances = 0;
  for (const auto& group : config.value("instance_group", json::array())) {
    const auto devices = static_cast<std::int64_t>(group.value("gpus", json::array()).size());
    instances += group.value("count", std::int64_t{1}) * std::max<std::int64_t>(devices, 1);
  }
  if (instances > 1) {
    refuse("instance_group asks for " + std::to_string(instances) +
           " instances; the engine batches by itself and needs exactly one: "
           "instance_group [ { count: 1 kind: KIND_CPU } ]");
  }
}

}  // namespace

ModelOptions read_model_options(std::string_view text) {
  const auto config = json::parse(text);
  if (!config.value("model_transaction_policy", json::object()).value("decoupled", false)) {
    refuse("the model answers in streams: set model_transaction_policy { decoupled: true }");
  }
  if (const auto size = config.value("max_batch_size", std::int64_t{0}); size != 0) {
    refuse("max_batch_size is " + std::to_string(size) +
           "; the engine batches by itself, so it must be 0 (the engine's own limit is the parameter max_batch_size)");
  }
  if (config.contains("sequence_batching")) {
    refuse("sequence_batching cancels what it thinks belongs together; remove it");
  }
  check_single_instance(config);

  ModelOptions options;
  options.warmup = !config.value("model_warmup", json::array()).empty();
  const auto parameters = config.value("parameters", json::object());
  for (const auto& [key, parameter] : parameters.items()) {
    auto value = parameter.value("string_value", std::string());
    if (value.empty()) continue;
    if (key == kDrainKey) {
      options.drain = read_drain("parameter drain_timeout_s", value);
    } else {
      options.settings.emplace(key, std::move(value));
    }
  }
  if (const char* value = std::getenv(kDrainVariable); value != nullptr && *value != '\0') {
    options.drain = read_drain(kDrainVariable, value);
  }
  return options;
}

ModelIdentity identify(TRITONBACKEND_Model* model) {
  ModelIdentity identity;
  const char* text = nullptr;
  check(TRITONBACKEND_ModelName(model, &text));
  identity.name = text;
  check(TRITONBACKEND_ModelVersion(model, &identity.version));
  TRITONBACKEND_ArtifactType type{};
  check(TRITONBACKEND_ModelRepository(model, &type, &text));
  if (type != TRITONBACKEND_ARTIFACT_FILESYSTEM) {
    throw Error(ErrorCode::unsupported, "the model repository is no folder of this machine; copy the model to one");
  }
  identity.repository = text;
  return identity;
}

std::string config_json(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* raw = nullptr;
  check(TRITONBACKEND_ModelConfig(model, 1, &raw));
  const MessagePtr message(raw);
  const char* text = nullptr;
  std::size_t bytes = 0;
  check(TRITONSERVER_MessageSerializeToJson(message.get(), &text, &bytes));
  return {text, bytes};
}

}  // namespace charonia::triton
