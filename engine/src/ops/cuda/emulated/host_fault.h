// A fault of the emulated device, for tests. As with most CUDA errors, every later operation fails too.
#pragma once

#include <string>
#include <string_view>

namespace charonia::cuda::host_fault {

// The device fails in step N of an engine, counted from 1, and works until then. The error shows when the host waits
// for the end of the step, as the error of a kernel does. step 0: the device does not fail.
void arm(int step);

// The text of runtime.h's set_step() for the calling thread.
void set_step(std::string text);
// Called by an operation, and by the wait for the end of the calling thread's step. Both throw after a failure.
void check(std::string_view operation);
void end_of_step(std::string_view operation);

}  // namespace charonia::cuda::host_fault
