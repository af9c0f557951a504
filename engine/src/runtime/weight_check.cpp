#include "runtime/weight_check.h"

#include <chrono>
#include <exception>
#include <utility>

#include "base/dtype.h"
#include "base/log.h"
#include "base/text.h"
#include "model/weights.h"

namespace charonia::runtime {
namespace {

// A gigabyte or more of weights that are in memory; requests of other sequences wait as long, once.
constexpr std::chrono::seconds kWait{2};

std::string check(const std::filesystem::path& dir, int ranks, const std::string& weight_type,
                  const std::stop_token& stop) {
  try {
    const auto broken = model::WeightFiles(dir, ranks).find_broken(weight_dtype(weight_type), stop);
    if (!broken.empty()) return cat(broken, ": download the model again, or use another --dtype");
    return "all weights are finite: the computation overflows; where weight_type is fp16, use --dtype bf16";
  } catch (const std::exception& error) {
    return cat("the weights cannot be read again (", error.what(), ")");
  }
}

}  // namespace

std::string WeightCheck::explain(const std::string& error) {
  const bool first = !answer_.valid();
  if (first) {
    std::promise<std::string> promise;
    answer_ = promise.get_future().share();
    thread_ = std::jthread([this, promise = std::move(promise)](const std::stop_token& stop) mutable {
      auto answer = check(dir_, ranks_, weight_type_, stop);
      if (!stop.stop_requested()) log({LogLevel::error, cat("logits are not finite: ", answer), "", {}});
      promise.set_value(std::move(answer));
    });
  }
  const auto state = answer_.wait_for(first ? kWait : std::chrono::seconds{0});
  return cat(error, state == std::future_status::ready ? cat(" (", answer_.get(), ")")
                                                       : ". The weights are being read; the log will say what they have");
}

}  // namespace charonia::runtime
