// The functions that Triton calls. They create and destroy the backend, its models and their instances, and execute
// requests.
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/text.h"
#include "control_pipe.h"
#include "error.h"
#include "model.h"
#include "triton_api.h"

namespace charonia::triton {
namespace {

void check_api_version() {
  std::uint32_t major = 0, minor = 0;
  check(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != kBackendApiMajor || minor < kBackendApiMinor) {
    throw Error(ErrorCode::unsupported,
                cat("the server's backend API is ", major, ".", minor, "; this backend needs ", kBackendApiMajor, ".",
                    kBackendApiMinor, " or newer: Triton 24.10 or newer"));
  }
}

// State that the models of the backend share. The server keeps the backend until the server ends, even without models.
struct Shared {
  MetricFamilies families;
  Generations generations;
  std::once_flag has_control;
  std::optional<ControlPipe> control;  // set with the first model, because only models know the server
};

Shared& shared_of(TRITONBACKEND_Backend* backend) {
  void* state = nullptr;
  check(TRITONBACKEND_BackendState(backend, &state));
  return *static_cast<Shared*>(state);
}

TRITONBACKEND_Backend* backend_of(TRITONBACKEND_Model* model) {
  TRITONBACKEND_Backend* backend = nullptr;
  check(TRITONBACKEND_ModelBackend(model, &backend));
  return backend;
}

Model* state_of(TRITONBACKEND_Model* model) {
  void* state = nullptr;
  check(TRITONBACKEND_ModelState(model, &state));
  return static_cast<Model*>(state);
}

Model* state_of(TRITONBACKEND_ModelInstance* instance) {
  TRITONBACKEND_Model* model = nullptr;
  check(TRITONBACKEND_ModelInstanceModel(instance, &model));
  return state_of(model);
}

}  // namespace
}  // namespace charonia::triton

using namespace charonia::triton;

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  return guarded([backend] {
    check_api_version();
    log_to_server();
    auto shared = std::make_unique<Shared>();
    check(TRITONBACKEND_BackendSetState(backend, shared.get()));
    shared.release();  // Finalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return guarded([backend] { delete &shared_of(backend); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([model] {
    auto& shared = shared_of(backend_of(model));
    std::call_once(shared.has_control, [&] { shared.control.emplace(server_of(model)); });
    auto state = std::make_unique<Model>(model, shared.families, shared.generations);
    check(TRITONBACKEND_ModelSetState(model, state.get()));
    state.release();  // ModelFinalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([model] { delete state_of(model); });
}

// A model has one instance. The model has all the state.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance*) { return nullptr; }

// Always returns null. An error would return all requests to the server, so each request receives its own response.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests, std::uint32_t count) {
  Model* model = nullptr;
  if (auto* error = guarded([&] { model = state_of(instance); })) return error;
  for (auto* request : std::span(requests, count)) model->execute(instance, request);
  return nullptr;
}

}  // extern "C"
