// Injects a fault into the emulated device, for tests of error handling. Like CUDA errors that persist until the
// process ends, every later operation fails with Error(device_failed).
//
// Environment variable CHARONIA_EMULATED_CUDA_FAULT=
//   step=N: fails in step N of an engine, counted from 1. Like an illegal access in a kernel, the fault appears when
//     the host waits for the end of that step.
//   file=PATH: fails in the first operation that finds a file there, while an engine is loaded or computes.
#pragma once

#include <string>
#include <string_view>

namespace charonia::cuda::host_fault {

// Overrides the environment variable; the device works again until the new fault. step 0: no fault.
void arm(int step);

// Receives the text of runtime.h's set_step() for the calling thread.
void set_step(std::string text);
// check() is called for every operation, end_of_step() for the wait for the end of the calling thread's step. Both
// throw after the device has failed, and throw Error(invalid_argument) if the environment variable is invalid.
void check(std::string_view operation);
void end_of_step(std::string_view operation);

}  // namespace charonia::cuda::host_fault
