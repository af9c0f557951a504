#include "runtime/weight_check.h"

#include <chrono>
#include <exception>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "model/weights.h"

namespace charonia::runtime {
namespace {

// A gigabyte or more of weights that are in memory; requests of other sequences wait as long, once.
constexpr std::chrono::seconds kWait{2};

std::string check(const std::filesystem::path& dir, int ranks, const std::string& manifest,
                  DType data, const std::stop_token& stop) {
  try {
    const model::WeightFiles files(model::Manifest(dir, ranks, manifest), false);
    auto broken = files.find_broken(data, stop);
    if (!broken.empty()) return broken;
    if (stop.stop_requested()) return "the engine was closed before all weights were read for the cause";
    return "all weights are finite: the computation overflows; where weight_type is fp16, use --dtype bf16";
  } catch (const std::exception& error) {
    return cat("the weights cannot be read again (", error.what(), ")");
  }
}

}  // namespace

WeightCheck::WeightCheck(const std::filesystem::path& weights_dir, int ranks, DType data)
    : dir_(weights_dir),
      manifest_(model::Manifest::read(weights_dir)),
      ranks_(ranks),
      data_(data) {}

std::string WeightCheck::explain(const std::string& error) {
  const bool first = !answer_.valid();
  if (first) {
    std::promise<std::string> promise;
    answer_ = promise.get_future().share();
    try {
      thread_ = std::thread([this, promise = std::move(promise)]() mutable {
        const auto stop = stop_.get_token();
        auto answer = check(dir_, ranks_, manifest_, data_, stop);
        if (!stop.stop_requested()) log({LogLevel::error, cat("logits are not finite: ", answer), "", {}});
        promise.set_value(std::move(answer));
      });
    } catch (const std::exception& no_thread) {
      std::promise<std::string> known;
      answer_ = known.get_future().share();
      known.set_value(cat("the cause cannot be looked for: ", no_thread.what()));
    }
  }
  if (answer_.wait_for(first ? kWait : std::chrono::seconds{0}) == std::future_status::ready) {
    return cat(error, " (", answer_.get(), ")");
  }
  return cat(error, " (the weights are being read for the cause, which the log will have)");
}

void WeightCheck::join() {
  stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace charonia::runtime
