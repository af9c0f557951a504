// How often a streaming request sends a response.
#pragma once

#include <algorithm>
#include <chrono>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

// The weight of a request whose responses are joined in a subscription. Triton sends these responses together, so each
// of them takes about a fifth of the CPU time of a response in its own stream, gateway included.
inline constexpr double kJoinedStreamWeight = 0.2;

// The weight of a request for stream_interval().
inline double stream_weight(const Request& request) {
  return !request.stream ? 0 : request.joined_responses ? kJoinedStreamWeight : 1;
}

// Returns the minimum time between two responses of a request. streams: the sum of the weights of the running
// sequences. Every response costs time in Triton, in the gateway and in the client, even a small one. So when many
// requests stream, each sends fewer responses. If a step takes longer than the interval, every stream sends a response
// at every step.
inline std::chrono::nanoseconds stream_interval(const EngineConfig& config, double streams) {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  const double least = config.stream_interval_ms;
  if (config.stream_interval_ms == 0) return {};  // the setting asks for a response per token
  const double grown = std::min<double>(config.stream_interval_per_stream_ms * streams, config.stream_interval_max_ms);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Milliseconds(std::max(least, grown)));
}

}  // namespace charonia::runtime
