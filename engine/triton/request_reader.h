// Converts a Triton request to a request for the engine (docs/contracts.md, model `engine`).
#pragma once

#include <cstdint>
#include <string>

#include "charonia/types.h"
#include "responses.h"
#include "triton_api.h"

namespace charonia::triton {

// The action of a call. All actions except `generate` need no input_ids.
enum class Action {
  generate,
  stop,         // ends requests; a session keeps the turn
  cancel,       // ends requests; a session drops the turn
  end_session,  // forgets a session
  load_adapter,    // loads a LoRA adapter from lora_path
  unload_adapter,
  list_adapters,
  subscribe,    // opens a subscription
  acknowledge,  // the client has read deliveries of a subscription
  unsubscribe,  // ends a subscription
};

struct EngineCall {
  Action action = Action::generate;
  // For the last three actions. With generate: receives the results; empty for a stream. With cancel: the subscription
  // of the request, which may not have arrived yet; may be empty.
  std::string subscription;
  std::uint64_t key = 0;     // subscription_key
  std::uint64_t read = 0;    // subscription_read
  // With stop and cancel, only session_id or id is set: they name the requests.
  Request request;
  std::string lora_path;      // with load_adapter; the name is request.lora_name
  std::string echo;           // sent with the first response of each sequence
  bool in_reasoning = false;  // the prompt ends within the reasoning
  OutputSet outputs;          // requested by the client
};

// Returns the id that the client gave the request, or an empty string.
std::string request_id(TRITONBACKEND_Request* request);

// Copies all inputs of `request`. Throws Error(invalid_argument), which names the field, its value and valid values.
// The engine checks the ranges of sampling parameters. defaults: values of sampling parameters that are not set.
EngineCall read_call(TRITONBACKEND_Request* request, const SamplingParams& defaults);

}  // namespace charonia::triton
