// The error text in ops::Sampled::error for a row of logits that are not numbers. All devices use the same text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/text.h"

namespace charonia::ops {

inline constexpr std::string_view kBrokenLogits = "the model's weights or its computation are broken";

// value: NaN or +infinity.
inline std::string broken_logit(std::int64_t token, float value) {
  return cat("the logit of token ", token, " is ", value, ": ", kBrokenLogits);
}
// Whether an error text comes from broken_logit().
inline bool has_broken_logit(std::string_view error) { return error.ends_with(kBrokenLogits); }

}  // namespace charonia::ops
