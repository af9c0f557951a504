#include "ops/cuda/emulated/host_fault.h"

#include <atomic>
#include <string>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda::host_fault {
namespace {

std::atomic<int> failing_step = 0;
std::atomic<bool> failed = false;
thread_local std::string step_text;

}  // namespace

void arm(int step) {
  failing_step = step;
  failed = false;
}

void set_step(std::string text) { step_text = std::move(text); }

void check(std::string_view operation) {
  if (!failed) return;
  throw Error(ErrorCode::internal,
              cat(operation, ": the emulated device has failed", step_text.empty() ? "" : ", in ", step_text));
}

// CudaOps::begin_step() makes the text.
void end_of_step(std::string_view operation) {
  if (failing_step > 0 && step_text.starts_with(cat("step ", failing_step.load(), " "))) failed = true;
  check(operation);
}

}  // namespace charonia::cuda::host_fault
