#include "ops/cuda/emulated/host_fault.h"

#include <atomic>
#include <cstdlib>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda::host_fault {
namespace {

constexpr const char* kVariable = "CHARONIA_EMULATED_CUDA_FAULT";
constexpr std::string_view kStep = "step=";

int step_of_environment() {
  const char* const value = std::getenv(kVariable);
  if (value == nullptr || *value == '\0') return 0;
  const std::string_view text = value;
  const auto step = text.starts_with(kStep) ? parse_number<int>(text.substr(kStep.size())) : std::nullopt;
  if (!step || *step < 1) {
    throw Error(ErrorCode::invalid_argument, cat(kVariable, "=", text, " is not valid: it takes step=N, N from 1 on"));
  }
  return *step;
}

std::atomic<int>& failing_step() {
  static std::atomic<int> step = step_of_environment();
  return step;
}

std::atomic<bool> failed = false;
thread_local std::string step_text;

}  // namespace

void arm(int step) {
  failing_step() = step;
  failed = false;
}

void set_step(std::string text) { step_text = std::move(text); }

void check(std::string_view operation) {
  if (!failed) return;
  throw Error(ErrorCode::device_failed,
              cat(operation, ": the emulated device has failed (", kVariable, "), in ", step_text));
}

// Texts of steps are CudaOps::begin_step's.
void end_of_step(std::string_view operation) {
  const int step = failing_step();
  if (step > 0 && step_text.starts_with(cat("step ", step, " "))) failed = true;
  check(operation);
}

}  // namespace charonia::cuda::host_fault
