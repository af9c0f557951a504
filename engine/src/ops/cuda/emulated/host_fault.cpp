#include "ops/cuda/emulated/host_fault.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda::host_fault {
namespace {

constexpr const char* kVariable = "CHARONIA_EMULATED_CUDA_FAULT";
constexpr std::string_view kStep = "step=", kFile = "file=";

// When the device should fail. step 0: in no step. Empty file: no trigger file.
struct Fault {
  int step = 0;
  std::string file;
};

Fault fault_of_environment() {
  const char* const value = std::getenv(kVariable);
  if (value == nullptr || *value == '\0') return {};
  const std::string_view text = value;
  if (text.starts_with(kFile) && text.size() > kFile.size()) return {0, std::string(text.substr(kFile.size()))};
  const auto step = text.starts_with(kStep) ? parse_number<int>(text.substr(kStep.size())) : std::nullopt;
  if (!step || *step < 1) {
    throw Error(ErrorCode::invalid_argument,
                cat(kVariable, "=", text, " is not valid: it takes step=N, N from 1 on, or file=PATH"));
  }
  return {*step, ""};
}

const Fault& environment() {
  static const Fault fault = fault_of_environment();
  return fault;
}

std::atomic<int>& failing_step() {
  static std::atomic<int> step = environment().step;
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
  if (const auto& file = environment().file; !file.empty() && std::filesystem::exists(file)) failed = true;
  if (!failed) return;
  auto text = cat(operation, ": the emulated device has failed (", kVariable, ")");
  if (!step_text.empty()) text += cat(", in ", step_text);
  throw Error(ErrorCode::device_failed, text);
}

// CudaOps::begin_step sets the names of steps.
void end_of_step(std::string_view operation) {
  const int step = failing_step();
  if (step > 0 && step_text.starts_with(cat("step ", step, " "))) failed = true;
  check(operation);
}

}  // namespace charonia::cuda::host_fault
