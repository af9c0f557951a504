// What a token mask costs a decode step: the same requests with and without a provider that allows digits alone, in
// turns, on one engine: times per step, their ratios, and that of the fastest rounds, which other programs of the
// machine have disturbed the least; DESIGN.md's bound is 1.02.
//
//     charonia benchmark program build/charonia_token_mask WEIGHTS [ROUNDS] [BATCH] [TOKENS] [THREADS]
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "charonia/engine.h"
#include "record.h"

namespace {

using namespace charonia;

// Tokens that are nothing but digits. The set is fixed, so a mask is a copy of it.
class Digits : public TokenMaskProvider {
 public:
  explicit Digits(const Engine& engine) {
    const int vocab = engine.info().model.vocab_size;
    auto words = std::make_shared<std::vector<std::uint32_t>>((static_cast<std::size_t>(vocab) + 31) / 32);
    for (TokenId token = 0; token < vocab; ++token) {
      const auto bytes = engine.token_bytes(token);
      if (bytes.empty() || bytes.find_first_not_of("0123456789") != std::string_view::npos) continue;
      (*words)[static_cast<std::size_t>(token) / 32] |= 1U << (token % 32);
    }
    words_ = std::move(words);
  }
  void fill(std::span<const TokenId>, std::span<std::uint32_t> mask) override {
    std::ranges::copy(*words_, mask.begin());
  }
  std::unique_ptr<TokenMaskProvider> clone() const override { return std::make_unique<Digits>(*this); }

 private:
  std::shared_ptr<const std::vector<std::uint32_t>> words_;
};

// Seconds per token of a batch of greedy requests, from the first token of the last one to the end.
double seconds_per_step(Engine& engine, int batch, int tokens, const std::shared_ptr<TokenMaskProvider>& provider) {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::condition_variable changed;
  int running = batch, begun = 0;
  Clock::time_point first, last;
  for (int i = 0; i < batch; ++i) {
    Request request;
    request.input_ids = {5, 6, 7, 8 + i};
    request.sampling.temperature = 0;
    request.sampling.max_tokens = tokens;
    request.sampling.ignore_eos = true;
    if (provider) request.mask = provider->clone();
    engine.submit(std::move(request), [&, is_first = true](Result&& result) mutable {
      const std::lock_guard lock(mutex);
      last = Clock::now();
      if (std::exchange(is_first, false) && ++begun == batch) first = last;
      if (result.finish_reason == FinishReason::none) return;
      if (result.finish_reason == FinishReason::error) std::fprintf(stderr, "%s\n", result.error.c_str());
      if (--running == 0) changed.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return running == 0; });
  return std::chrono::duration<double>(last - first).count() / (tokens - 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s WEIGHTS [ROUNDS] [BATCH] [TOKENS] [THREADS]\n", argv[0]);
    return 2;
  }
  const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
  const int rounds = number(2, 15), batch = number(3, 1), tokens = number(4, 200);
  try {
    const auto threads = argc > 5 ? argv[5] : "0";
    Engine engine(argv[1], {{"stream_interval_ms", "0"}, {"cache_max_entry_count", "64"}, {"threads", threads}});
    const auto digits = std::make_shared<Digits>(engine);
    std::vector<double> without, with, ratios;
    seconds_per_step(engine, batch, tokens, nullptr);
    for (int round = 0; round < rounds; ++round) {
      without.push_back(seconds_per_step(engine, batch, tokens, nullptr));
      with.push_back(seconds_per_step(engine, batch, tokens, digits));
      ratios.push_back(with.back() / without.back());
    }
    const bench::Case of{"token_mask", {{"batch", batch}, {"tokens", tokens}}};
    for (auto* const seconds : {&without, &with}) {
      for (auto& one : *seconds) one *= 1e6;
    }
    bench::print_figure(of, "step without a mask", "us", without);
    bench::print_figure(of, "step with a mask", "us", with);
    bench::print_figure(of, "with of without", "times", ratios);
    bench::print_figure(of, "the fastest, with of without", "times",
                        {std::ranges::min(with) / std::ranges::min(without)});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
