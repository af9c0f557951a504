// A Triton request becomes a request for the engine (docs/contracts.md, model `engine`).
#pragma once

#include <cstdint>
#include <string>

#include "charonia/types.h"
#include "outputs.h"
#include "triton_api.h"

namespace charonia::triton {

// What a call wants. All but `generate` act on what is there already and need no input_ids.
enum class Action {
  generate,
  stop,         // ends requests; of a session, the turn stays
  cancel,       // ends requests; of a session, the turn is dropped
  end_session,  // forgets a session
  subscribe,    // opens a subscription
  read,         // a subscription's reader has got further
  unsubscribe,  // ends one
};

struct EngineCall {
  Action action = Action::generate;
  std::string subscription;     // of the last three; with generate, where its results go: empty for its own stream
  std::uint64_t key = 0;        // in there
  std::uint64_t read = 0;       // the delivery up to which was read
  bool parsed = false;          // with a subscription: what its answer is read by goes there, too
  // With stop and cancel: session_id, or where there is none id, says which requests. Everything else is then unset.
  Request request;
  std::string echo;             // goes out with each sequence's first response
  std::string parsing_options;  // goes out with every response
  OutputSet outputs;            // what the client asked for
};

// The caller's id of a request, or empty.
std::string request_id(TRITONBACKEND_Request* request);

// Copies everything out of `request`. Throws Error(invalid_argument) naming the field, its value and what would be
// right. Ranges of sampling parameters are the engine's to check. defaults: sampling parameters that are not set.
EngineCall read_call(TRITONBACKEND_Request* request, const SamplingParams& defaults);

}  // namespace charonia::triton
