#include "model_config.h"

#include <cstddef>

#include "error.h"

namespace charonia::triton {

ModelIdentity identify(TRITONBACKEND_Model* model) {
  ModelIdentity identity;
  const char* text = nullptr;
  check(TRITONBACKEND_ModelName(model, &text));
  identity.name = text;
  check(TRITONBACKEND_ModelVersion(model, &identity.version));
  TRITONBACKEND_ArtifactType type{};
  check(TRITONBACKEND_ModelRepository(model, &type, &text));
  if (type != TRITONBACKEND_ARTIFACT_FILESYSTEM) {
    throw Error(ErrorCode::unsupported, "the model repository must be a folder on this machine");
  }
  identity.repository = text;
  return identity;
}

TRITONSERVER_Server* server_of(TRITONBACKEND_Model* model) {
  TRITONSERVER_Server* server = nullptr;
  check(TRITONBACKEND_ModelServer(model, &server));
  return server;
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
