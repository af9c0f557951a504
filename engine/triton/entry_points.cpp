// What Triton calls: the life of the backend, of its models and of their instances, and the execution of requests.
#include <memory>
#include <span>
#include <string>

#include "error.h"
#include "metrics_sink.h"
#include "model.h"
#include "triton_api.h"

namespace charonia::triton {
namespace {

void check_api_version() {
  std::uint32_t major = 0, minor = 0;
  check(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != kBackendApiMajor || minor < kBackendApiMinor) {
    throw Error(ErrorCode::unsupported, "the server's backend API is " + std::to_string(major) + "." +
                                            std::to_string(minor) + "; this backend needs " +
                                            std::to_string(kBackendApiMajor) + "." + std::to_string(kBackendApiMinor) +
                                            " or newer: Triton 24.10 or newer");
  }
}

MetricFamilies& families_of(TRITONBACKEND_Backend* backend) {
  void* state = nullptr;
  check(TRITONBACKEND_BackendState(backend, &state));
  return *static_cast<MetricFamilies*>(state);
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
    auto families = std::make_unique<MetricFamilies>();
    check(TRITONBACKEND_BackendSetState(backend, families.get()));
    families.release();  // Finalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  return guarded([backend] { delete &families_of(backend); });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([model] {
    auto state = std::make_unique<Model>(model, families_of(backend_of(model)));
    check(TRITONBACKEND_ModelSetState(model, state.get()));
    state.release();  // ModelFinalize deletes it
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([model] { delete state_of(model); });
}

// The model has one instance and all state is the model's.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*) { return nullptr; }
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance*) { return nullptr; }

// An error returned from here would hand all requests back, so each is answered on its own and null is returned.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests, std::uint32_t count) {
  Model* model = nullptr;
  if (auto* error = guarded([&] { model = state_of(instance); })) return error;
  for (auto* request : std::span(requests, count)) model->execute(instance, request);
  return nullptr;
}

}  // extern "C"
