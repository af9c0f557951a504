// The engine model's output tensors, and the filling of a response with them.
#pragma once

#include <bitset>
#include <span>
#include <string_view>

#include "charonia/types.h"
#include "generated/outputs.h"
#include "triton_api.h"

namespace charonia::triton {

using OutputSet = std::bitset<kOutputNames.size()>;

// What the client asked for; a request that names none asks for all.
OutputSet requested_outputs(TRITONBACKEND_Request* request);

// What a response holds beside its result.
struct Extras {
  std::string_view echo;
  std::string_view parsing_options;
  std::span<const TokenId> prompt_ids;
};

// Adds the tensors in `wanted` to a response; `deliveries` is none of them. Throws Error where Triton refuses one.
void fill(TRITONBACKEND_Response* response, const Result& result, const Extras& extras, const OutputSet& wanted);

// Adds `deliveries` alone. Throws Error where Triton refuses it.
void fill(TRITONBACKEND_Response* response, std::string_view delivery);

}  // namespace charonia::triton
