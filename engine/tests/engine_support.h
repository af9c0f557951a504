// What the tests of the engine share: requests, and what becomes of them.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "charonia/engine.h"

namespace charonia::testing {

// Greedy, and never ended by an end id.
inline Request request(std::vector<TokenId> ids, int max_tokens) {
  Request out;
  out.input_ids = std::move(ids);
  out.sampling.temperature = 0;
  out.sampling.max_tokens = max_tokens;
  out.sampling.ignore_eos = true;
  return out;
}

// Collects the results of a request.
class Collector {
 public:
  Engine::Callback callback() {
    return [this](Result&& result) {
      const std::lock_guard lock(mutex_);
      EXPECT_FALSE(done_) << "a result came after the last";
      done_ = result.finish_reason != FinishReason::none;
      results_.push_back(std::move(result));
      changed_.notify_all();
    };
  }
  void wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ || results_.size() >= count; });
  }
  const std::vector<Result>& wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return results_;
  }
  std::vector<TokenId> tokens() {
    std::vector<TokenId> out;
    for (const auto& result : wait()) out.insert(out.end(), result.token_ids.begin(), result.token_ids.end());
    return out;
  }
  std::vector<float> logprobs() {
    std::vector<float> out;
    for (const auto& result : wait()) out.insert(out.end(), result.logprobs.begin(), result.logprobs.end());
    return out;
  }
  std::string text() {
    std::string out;
    for (const auto& result : wait()) out += result.text;
    return out;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Result> results_;
  bool done_ = false;
};

}  // namespace charonia::testing
