// Settings of the emulated device, for tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "ops/cuda/gemm/blas.h"

namespace charonia::cuda {

// The device fails in step N of an engine, counted from 1, and works until then. The error shows when the host waits
// for the end of the step, as the error of a kernel does. As with most CUDA errors, every later operation fails too.
// 0: the device works (again).
void fail_in_step(int step);

// Number of calls of launch() with this name since the process began.
std::uint64_t launches(std::string_view kernel);

// Sets the result of load_cublas(), which is otherwise null. An empty function restores null.
void set_host_blas(std::function<std::unique_ptr<Blas>()> make);

}  // namespace charonia::cuda
