// What the back end takes from a model's config.pbtxt, and where the model lies.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "charonia/config.h"
#include "triton_api.h"

namespace charonia::triton {

struct ModelOptions {
  Settings settings;    // `parameters` whose keys are the engine's; those without a value are left out
  bool warmup = false;  // the server sends requests before the model is ready
  // Parameter drain_timeout_s, over which CHARONIA_DRAIN_TIMEOUT_S wins: how long requests may go on at server exit.
  std::chrono::seconds drain{10};
};

// Reads a model configuration as Triton writes it in JSON. Throws Error(invalid_argument) where it asks for what this
// back end does not do: a model that is not decoupled, max_batch_size other than 0, more than one instance, a sequence
// batcher.
ModelOptions read_model_options(std::string_view json);

// A model as the server names it.
struct ModelIdentity {
  std::string name;
  std::uint64_t version = 0;
  std::filesystem::path repository;  // the model's folder

  std::filesystem::path weights_dir() const { return repository / std::to_string(version) / "weights"; }
  std::filesystem::path config_file() const { return repository / "config.pbtxt"; }
};
ModelIdentity identify(TRITONBACKEND_Model* model);

// The model's configuration in JSON, as the server completed it.
std::string config_json(TRITONBACKEND_Model* model);

}  // namespace charonia::triton
