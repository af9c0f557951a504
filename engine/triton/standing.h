// The state of a model in the server: whether the model is ready, and whether it ever was ready.
#pragma once

#include <cstdint>
#include <string>

#include "model_config.h"
#include "triton_api.h"

namespace charonia::triton {

// unknown: the server returns an error, or the model was never ready. In the second case, the model is being loaded or
// warmed up, perhaps while the server itself starts.
enum class Standing { unknown, served, unloading, exiting };

class ModelStanding {
 public:
  // warmup: the server sends requests before the model is ready. Without warmup, a request shows that the model is
  // ready.
  ModelStanding(TRITONSERVER_Server* server, const ModelIdentity& model, bool warmup)
      : server_(server), name_(model.name), version_(static_cast<std::int64_t>(model.version)), was_served_(!warmup) {}

  // Asks the server for the current state. The server must not have ended.
  Standing now();

 private:
  TRITONSERVER_Server* server_;
  std::string name_;
  std::int64_t version_;
  bool was_served_;
};

}  // namespace charonia::triton
