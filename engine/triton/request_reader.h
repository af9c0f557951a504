// A Triton request becomes a request for the engine (docs/contracts.md, model `engine`).
#pragma once

#include <string>

#include "charonia/types.h"
#include "outputs.h"
#include "triton_api.h"

namespace charonia::triton {

struct EngineCall {
  Request request;
  std::string echo;   // goes out with the first response
  bool stop = false;  // cancels the requests with this id; everything else is then unset
  OutputSet outputs;  // what the client asked for
};

// The caller's id of a request, or empty.
std::string request_id(TRITONBACKEND_Request* request);

// Copies everything out of `request`. Throws Error(invalid_argument) naming the field, its value and what would be
// right. Ranges of sampling parameters are the engine's to check.
EngineCall read_call(TRITONBACKEND_Request* request);

}  // namespace charonia::triton
