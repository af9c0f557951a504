// The name, folder and configuration of a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "triton_api.h"

namespace charonia::triton {

struct ModelIdentity {
  std::string name;
  std::uint64_t version = 0;
  std::filesystem::path repository;  // the model's folder

  std::filesystem::path weights_dir() const { return repository / std::to_string(version) / "weights"; }
  std::filesystem::path config_file() const { return repository / "config.pbtxt"; }
};
ModelIdentity identify(TRITONBACKEND_Model* model);

// The server that loads the model.
TRITONSERVER_Server* server_of(TRITONBACKEND_Model* model);

// Returns the model's configuration in JSON, as completed by the server.
std::string config_json(TRITONBACKEND_Model* model);

}  // namespace charonia::triton
