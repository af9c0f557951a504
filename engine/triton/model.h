// One loaded model: its engine and the requests in it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "calls.h"
#include "charonia/engine.h"
#include "generations.h"
#include "metrics_sink.h"
#include "model_config.h"
#include "model_options.h"
#include "request_log.h"
#include "request_reader.h"
#include "standing.h"
#include "subscriptions.h"
#include "triton_api.h"
#include "watcher.h"

namespace charonia::triton {

class Model {
 public:
  // Loads the engine of <repository>/<version>/weights. Precedence of settings: config.ini, the `parameters` of
  // config.pbtxt, the environment (CHARONIA_<KEY>). Throws Error saying where the wrong setting stands.
  Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations);

  // Takes one request and answers it, with responses or with an error; never blocks on the engine. The request is
  // released when this returns, or with its last response where it is traced. Never throws.
  void execute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) noexcept;

 private:
  Model(TRITONBACKEND_Model* model, const MetricFamilies& families, Generations& generations,
        const ModelIdentity& identity, const ModelOptions& options);

  // Returns true if the request is in the engine or its action was done.
  bool take(TRITONBACKEND_Request* request, std::shared_ptr<TracedRequest> traced);
  void act(const EngineCall& asked, Call& call);
  void end_requests(Action action, const Request& request);
  void open(const std::string& subscription, Call& call);
  // By 1 or -1: a model shares the gauge with the one that takes its place.
  void count_subscriptions(int change);
  void submit(Request request, const std::shared_ptr<Call>& call);
  void deliver(Call& call, const Result& result) noexcept;
  void send(Call& call, const Result& result, bool last);
  std::optional<Error> error_of(const Result& result);
  std::string why_ended();  // empty while the model is served
  void end_all(const std::string& why);
  void log_loaded(const std::string& name) const;

  // Ends a response stream, or what a subscription has of a request, with an error.
  void fail(Call& call, const std::exception& error);

  ModelStanding standing_;
  Generation generation_;
  RequestLog request_log_;
  CallTable calls_;
  const std::shared_ptr<MetricsSink> sink_;  // null: the server takes no metrics
  Subscriptions subscriptions_{[this] { count_subscriptions(1); }, [this] { count_subscriptions(-1); }};
  std::mutex why_mutex_;
  std::string why_ended_;  // set before end_all() ends the requests
  // Destroyed in this order: the watcher, which uses the engine; the engine, whose last results use the rest.
  Engine engine_;
  Watcher watcher_;
};

}  // namespace charonia::triton
