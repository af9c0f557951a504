// What the server makes of a model: whether it is ready, and whether it ever was.
#pragma once

#include <cstdint>
#include <string>

#include "model_config.h"
#include "triton_api.h"

namespace charonia::triton {

// unknown: the server cannot say, or the model was never ready: then it is being loaded or warmed up, by a server that
// is perhaps starting itself.
enum class Standing { unknown, served, unloading, exiting };

class ModelStanding {
 public:
  // warmup: the server sends requests before the model is ready; otherwise the first one shows that it is.
  ModelStanding(TRITONSERVER_Server* server, const ModelIdentity& model, bool warmup)
      : server_(server), name_(model.name), version_(static_cast<std::int64_t>(model.version)), was_served_(!warmup) {}

  // Asks the server, which must not have ended.
  Standing now();

 private:
  TRITONSERVER_Server* server_;
  std::string name_;
  std::int64_t version_;
  bool was_served_;
};

}  // namespace charonia::triton
