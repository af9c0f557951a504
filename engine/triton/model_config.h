// A model as the server knows it: its name, where it lies, its configuration.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "triton_api.h"

namespace charonia::triton {

// A model as the server names it.
struct ModelIdentity {
  std::string name;
  std::uint64_t version = 0;
  std::filesystem::path repository;  // the model's folder

  std::filesystem::path weights_dir() const { return repository / std::to_string(version) / "weights"; }
  std::filesystem::path config_file() const { return repository / "config.pbtxt"; }
};
ModelIdentity identify(TRITONBACKEND_Model* model);

// The server that the model is loaded into.
TRITONSERVER_Server* server_of(TRITONBACKEND_Model* model);

// The model's configuration in JSON, as the server completed it.
std::string config_json(TRITONBACKEND_Model* model);

}  // namespace charonia::triton
