// Common parts of the engine's tests: requests and their results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "charonia/engine.h"
#include "errors.h"

namespace charonia::testing {

using charonia::error_of;

// Greedy, and never ended by an end id.
inline Request request(std::vector<TokenId> ids, int max_tokens) {
  Request out;
  out.input_ids = std::move(ids);
  out.sampling.temperature = 0;
  out.sampling.max_tokens = max_tokens;
  out.sampling.ignore_eos = true;
  return out;
}

// Collects the results of a request with one or several sequences.
class Collector {
 public:
  explicit Collector(int sequences = 1) : done_(static_cast<std::size_t>(sequences), false) {}
  // Submits a request and collects its results.
  Collector(Engine& engine, const Request& request) : Collector(request.sampling.n) {
    engine.submit(request, callback());
  }

  Engine::Callback callback() {
    return [this](Result&& result) {
      const std::lock_guard lock(mutex_);
      const auto index = static_cast<std::size_t>(result.index);
      if (index >= done_.size()) {
        ADD_FAILURE() << "a result of sequence " << index;
        return;
      }
      EXPECT_FALSE(done_[index]) << "a result came after the last one";
      done_[index] = result.finish_reason != FinishReason::none;
      results_.push_back(std::move(result));
      changed_.notify_all();
    };
  }
  // Expects no result of a sequence.
  void leave_out(std::size_t index) { done_[index] = true; }
  void wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_done() || results_.size() >= count; });
  }
  // All results, in the order of arrival.
  const std::vector<Result>& wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_done(); });
    return results_;
  }
  bool ended() {
    const std::lock_guard lock(mutex_);
    return is_done();
  }
  // The last result of a sequence.
  const Result& last(int index = 0) {
    const auto& results = wait();
    return *std::ranges::find_if(results, [&](const Result& result) {
      return result.index == index && result.finish_reason != FinishReason::none;
    });
  }
  std::vector<TokenId> tokens(int index = 0) {
    return joined<TokenId>(index, [](const Result& result) -> auto& { return result.token_ids; });
  }
  std::vector<float> logprobs(int index = 0) {
    return joined<float>(index, [](const Result& result) -> auto& { return result.logprobs; });
  }
  std::vector<float> prompt_logprobs(int index = 0) {
    return joined<float>(index, [](const Result& result) -> auto& { return result.prompt_logprobs; });
  }
  std::string text(int index = 0) {
    std::string out;
    for (const auto& result : wait()) {
      if (result.index == index) out += result.text;
    }
    return out;
  }

 private:
  bool is_done() const {
    return std::ranges::all_of(done_, [](bool done) { return done; });
  }
  template <class T, class Of>
  std::vector<T> joined(int index, Of of) {
    std::vector<T> out;
    for (const auto& result : wait()) {
      if (result.index == index) out.insert(out.end(), of(result).begin(), of(result).end());
    }
    return out;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Result> results_;
  std::vector<bool> done_;  // by sequence
};

// The tokens of a response.
inline std::vector<TokenId> tokens_of(Engine& engine, const Request& request) {
  return Collector(engine, request).tokens();
}

// The results of a request; of several sequences one after the other.
struct Completion {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs, prompt_logprobs;
  bool operator==(const Completion&) const = default;
};

// Submits all requests together and waits for their results.
inline std::vector<Completion> completions(Engine& engine, const std::vector<Request>& all) {
  std::vector<std::unique_ptr<Collector>> collectors;
  for (const auto& one : all) collectors.push_back(std::make_unique<Collector>(engine, one));
  std::vector<Completion> out;
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& to = out.emplace_back();
    for (int s = 0; s < all[i].sampling.n; ++s) {
      const auto tokens = collectors[i]->tokens(s);
      const auto logprobs = collectors[i]->logprobs(s);
      to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
      to.logprobs.insert(to.logprobs.end(), logprobs.begin(), logprobs.end());
    }
    to.prompt_logprobs = collectors[i]->prompt_logprobs();
  }
  engine.check_integrity();
  return out;
}
inline std::vector<Completion> completions(const std::filesystem::path& folder, const Settings& settings,
                                           const std::vector<Request>& all) {
  Engine engine(folder, settings);
  return completions(engine, all);
}

// Expects equal tokens, and log probabilities that differ by at most `tolerance`.
inline void expect_near(const std::vector<Completion>& got, const std::vector<Completion>& expected,
                        float tolerance = 1e-4F) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].tokens, expected[i].tokens) << "request " << i;
    for (const auto of : {&Completion::logprobs, &Completion::prompt_logprobs}) {
      const auto &a = got[i].*of, &b = expected[i].*of;
      ASSERT_EQ(a.size(), b.size()) << "request " << i;
      for (std::size_t t = 0; t < a.size(); ++t) ASSERT_NEAR(a[t], b[t], tolerance) << "request " << i << ", " << t;
    }
  }
}

// Allows a token if `allowed` returns true.
class MaskOf : public TokenMaskProvider {
 public:
  using Allowed = std::function<bool(TokenId token, std::span<const TokenId> output)>;
  MaskOf(int vocab, Allowed allowed) : vocab_(vocab), allowed_(std::move(allowed)) {}
  void fill(std::span<const TokenId> output, std::span<std::uint32_t> mask) override {
    for (TokenId t = 0; t < vocab_; ++t) {
      if (allowed_(t, output)) mask[static_cast<std::size_t>(t) / 32] |= 1U << (t % 32);
    }
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<MaskOf>(vocab_, allowed_); }
  // Some are not allowed.
  std::vector<TokenId> propose(std::span<const TokenId> /*output*/, std::span<const TokenId> guess,
                               int most) override {
    return {guess.begin(), guess.begin() + std::min(std::ssize(guess), std::ptrdiff_t{most})};
  }

 private:
  int vocab_;
  Allowed allowed_;
};

// The last five of every seven tokens of the output are certain: they follow from the tokens before them.
class RunsOf : public TokenMaskProvider {
 public:
  explicit RunsOf(TokenId vocab) : vocab_(vocab) {}
  void fill(std::span<const TokenId> output, std::span<std::uint32_t> mask) override {
    forced_.clear();
    std::vector<TokenId> next(output.begin(), output.end());
    while (next.size() % 7 >= 2) {
      const auto size = static_cast<TokenId>(next.size());
      forced_.push_back((5 * next.back() + 3 * next[next.size() - 2] + size) % vocab_);
      next.push_back(forced_.back());
    }
    for (TokenId t = 0; t < vocab_; ++t) {
      const bool allowed = forced_.empty() || t == forced_.front();
      if (allowed) mask[static_cast<std::size_t>(t) / 32] |= 1U << (t % 32);
    }
  }
  std::span<const TokenId> forced() const override { return forced_; }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<RunsOf>(vocab_); }

 private:
  TokenId vocab_;
  std::vector<TokenId> forced_;
};

// With the tokens of RunsOf, which are sampled one by one if log probabilities are requested.
inline Request with_runs(Request asked, TokenId vocab, bool one_by_one) {
  asked.mask = std::make_shared<RunsOf>(vocab);
  if (one_by_one) asked.sampling.logprobs = 0;
  return asked;
}

}  // namespace charonia::testing
