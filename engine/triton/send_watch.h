// Notices a response that the server does not take.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace charonia::triton {

// Sending a response only queues it. But Triton's gRPC server takes two locks in one order where it sends a response of
// a stream, and in the other where it sees that the stream's client has cancelled (stream_infer_handler.cc, 24.10 to
// 26.08). The two can wait for each other for ever, and then all other streams wait, too.
class SendWatch {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr std::chrono::seconds kLimit{30};
  // A process that was stopped for a while is looked at so often before it is taken for stuck.
  static constexpr int kLooks = 100;

  // For the one thread that sends.
  void begins() { count_.fetch_add(1, std::memory_order_relaxed); }
  void ended() { count_.fetch_add(1, std::memory_order_relaxed); }

  // For one other thread, again and again: whether the same response has been on its way for kLimit.
  bool stuck(Clock::time_point now) {
    const auto count = count_.load(std::memory_order_relaxed);
    if (count % 2 == 0 || count != seen_) {
      seen_ = count;
      since_ = now;
      looks_ = 0;
      return false;
    }
    return ++looks_ >= kLooks && now - since_ >= kLimit;
  }

 private:
  std::atomic<std::uint64_t> count_{0};  // odd while a response is sent
  std::uint64_t seen_ = 0;
  Clock::time_point since_{};
  int looks_ = 0;
};

}  // namespace charonia::triton
