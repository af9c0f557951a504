// A fault of the emulated device, for tests of what follows one. As with the errors of CUDA that stay until the process
// ends, every operation fails from then on, with Error(device_failed).
//
// In the environment, CHARONIA_EMULATED_CUDA_FAULT=
//   step=N: in step N of an engine, counted from 1. Like an illegal access of a kernel it shows when the host waits for
//     the end of that step.
//   file=PATH: in the first operation that finds a file there, whether an engine is being loaded or computes.
#pragma once

#include <string>
#include <string_view>

namespace charonia::cuda::host_fault {

// In place of what the environment says; the device works again until then. step 0: it does not fail.
void arm(int step);

// What runtime.h's set_step says, of the calling thread.
void set_step(std::string text);
// An operation, and the wait for the end of the calling thread's step. Both throw once the device has failed.
// Error(invalid_argument): the environment says something else.
void check(std::string_view operation);
void end_of_step(std::string_view operation);

}  // namespace charonia::cuda::host_fault
