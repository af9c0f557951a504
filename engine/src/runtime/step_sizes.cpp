#include "runtime/step_sizes.h"

#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// How a size follows from a GPU.
struct Rule {
  std::size_t per_sm;
  std::size_t bytes_each;  // of the free memory
  std::size_t multiple;    // rounded down to
  std::size_t min, max;
};
constexpr Rule kTokens = {.per_sm = 16, .bytes_each = 8 * kMiB, .multiple = 256, .min = 512, .max = 8192};
constexpr Rule kSequences = {.per_sm = 2, .bytes_each = 256 * kMiB, .multiple = 64, .min = 64, .max = 512};

int size_by(const Rule& rule, const StepDevice& device) {
  if (device.device == "cpu") return static_cast<int>(rule.min);
  const auto wanted = std::min(static_cast<std::size_t>(device.sms) * rule.per_sm, device.free_bytes / rule.bytes_each);
  return static_cast<int>(std::clamp(wanted / rule.multiple * rule.multiple, rule.min, rule.max));
}

}  // namespace

void resolve_step_sizes(EngineConfig& config, const StepDevice& device) {
  if (config.token_budget == 0) config.token_budget = size_by(kTokens, device);
  if (config.max_batch_size == 0) config.max_batch_size = size_by(kSequences, device);
}

void require_step_sizes(const EngineConfig& config) {
  const auto require = [](std::string_view name, int value) {
    if (value >= 1) return;
    throw Error(ErrorCode::internal,
                cat(name, " = ", value, " was not resolved: runtime::resolve_step_sizes must come before it is used"));
  };
  require("token_budget", config.token_budget);
  require("max_batch_size", config.max_batch_size);
}

}  // namespace charonia::runtime
