// How often a request that streams is sent a response.
#pragma once

#include <algorithm>
#include <chrono>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

// The weight of a stream of joined responses. Triton sends the responses of a subscription together, so each of them
// takes about a fifth of the CPU time of a response of its own call, gateway included.
inline constexpr double kJoinedStreamWeight = 0.2;

// A stream as stream_interval() counts it.
inline double stream_weight(const Request& request) {
  return !request.stream ? 0 : request.joined_responses ? kJoinedStreamWeight : 1;
}

// The minimum time between two responses of a request while sequences of so many streams run. Every response has its
// price in Triton, in the gateway and in the client, whatever it carries: where many stream, each has fewer of them.
// Once a step takes longer than the interval, every stream is due at every step.
inline std::chrono::nanoseconds stream_interval(const EngineConfig& config, double streams) {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  const double least = config.stream_interval_ms;
  if (config.stream_interval_ms == 0) return {};  // a response per token was asked for
  const double grown = std::min<double>(config.stream_interval_per_stream_ms * streams, config.stream_interval_max_ms);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Milliseconds(std::max(least, grown)));
}

}  // namespace charonia::runtime
