// The emulated device's types for runtime.h.
#pragma once

#include <functional>

namespace charonia::cuda {

struct StreamImpl;
struct EventImpl;
struct GraphImpl;
using NativeStream = StreamImpl*;
using NativeEvent = EventImpl*;
using NativeGraph = GraphImpl*;

using NativeKernel = std::function<void()>;
template <class Params>
NativeKernel bind_kernel(void (*kernel)(Params), const Params& params) {
  return [=] { kernel(params); };
}

// Adds work that runs on the host to a stream.
void enqueue(NativeStream stream, std::function<void()> work);

}  // namespace charonia::cuda
