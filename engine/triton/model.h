// One loaded model: its engine and the requests in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "calls.h"
#include "charonia/engine.h"
#include "model_options.h"
#include "request_reader.h"
#include "model_state.h"
#include "subscriptions.h"
#include "telemetry.h"
#include "triton_api.h"

namespace charonia::triton {

// The name and the folder of a model.
struct ModelIdentity {
  std::string name;
  std::uint64_t version = 0;
  std::filesystem::path repository;

  std::filesystem::path weights_dir() const { return repository / std::to_string(version) / "weights"; }
};

// The server that loads the model.
TRITONSERVER_Server* server_of(TRITONBACKEND_Model* model);

class Model {
 public:
  // Loads the engine of <repository>/<version>/weights. Precedence of settings: config.ini, the `parameters` of
  // config.pbtxt, the environment (CHARONIA_<KEY>); later ones win. The Error for a wrong setting says where it is set.
  Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations);

  // Takes one request and sends it responses or an error. Never waits for the engine, and never throws. Releases the
  // request before it returns; a traced request is released with its last response.
  void execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) noexcept;

 private:
  Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations,
        const ModelIdentity& identity, const ModelOptions& options);

  // Returns true if the request is in the engine or its action was done.
  bool take(TRITONBACKEND_Request* request, std::shared_ptr<TracedRequest> traced);
  void act(const EngineCall& asked, const std::shared_ptr<Call>& call);
  void end_requests(const EngineCall& asked);
  // On a thread of its own, because reading the files may take long. Throws Error if a load is running.
  void load_adapter(const EngineCall& asked, const std::shared_ptr<Call>& call);
  void list_adapters(Call& call);
  void open(const std::string& subscription, Call& call);
  // Adds `change` to the gauge. The gauge is not set, because a model shares it with the model that replaces it.
  void count_subscriptions(int change);
  void submit(Request request, const std::shared_ptr<Call>& call);
  void deliver(Call& call, const Result& result) noexcept;
  void send(Call& call, const Result& result, bool last);
  std::optional<Error> error_of(const Result& result);
  std::string why_ended();  // empty while the model is served
  void end_all(const std::string& why);
  void log_loaded(const std::string& name) const;

  // Ends the response stream of a request, or the request in its subscription, with an error.
  void fail(Call& call, const std::exception& error);

  Generation generation_;
  RequestLog request_log_;
  CallTable calls_;
  const std::shared_ptr<MetricsSink> sink_;  // null if the server has no metrics
  Subscriptions subscriptions_{[this] { count_subscriptions(1); }, [this] { count_subscriptions(-1); }};
  std::mutex why_mutex_;
  std::string why_ended_;  // set before end_all() ends the requests
  // The watcher is destroyed first, because it uses the engine. The engine is next: its last results use the members
  // above.
  Engine engine_;
  std::atomic<bool> loads_adapter_ = false;
  std::jthread adapter_loader_;  // the model is destroyed only after its response
  Watcher watcher_;
};

}  // namespace charonia::triton
