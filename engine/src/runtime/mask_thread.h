// The token masks of sequences, worked out while forward passes run.
//
// A step waits a bounded time for all of its masks together. Sequences whose mask comes later are left out of steps until
// it is there: they sit out. So does, at once, a sequence that has had a mask which took long; its masks are worked out
// on a thread of their own, behind which no other mask waits.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "charonia/token_mask.h"
#include "charonia/types.h"
#include "ops/step.h"

namespace charonia::runtime {

// How long a step waits for its masks, from when the first one is waited for.
class MaskDeadline {
 public:
  std::chrono::steady_clock::time_point get();

 private:
  std::mutex mutex_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;  // once it was asked for
};

// How long masks of one grammar take: that of one of a request's sequences tells of the others'.
class MaskPace {
 public:
  void took(double seconds);  // of computing time
  // Whether one mask has taken long, and not many since were quick.
  bool slow() const { return slow_; }

 private:
  std::atomic<bool> slow_ = false;
  std::atomic<int> quick_ = 0;  // since the last slow one
};

// Whether the error of a row says that its mask came too late for the step.
bool is_late_mask(std::string_view error);

// The mask of a sequence's next token. It is asked for once per token; who samples waits for the answer. The thread
// that asks and the devices that wait are different ones. What was asked for is answered as long as anybody holds it.
class SequenceMask : public ops::TokenMask {
 public:
  // pace: of all sequences with this grammar.
  SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size,
               std::shared_ptr<MaskPace> pace = std::make_shared<MaskPace>());

  // Of the step that is launched next, which waits for it. Without one it is waited for as long as it takes.
  void set_deadline(std::shared_ptr<MaskDeadline> deadline);
  // What the first who waits is told, all are told: the mask, or that it is late.
  std::span<const std::uint32_t> wait() const override;

  // The sequence waits for its mask outside of steps. False: it is known already. Else `known` of the thread is called
  // once it is.
  bool sit_out();
  bool known() const;
  // Adds what the provider says is certain after the last of the tokens, which was sampled with the mask.
  void add_forced(std::vector<TokenId>& tokens) const;
  bool slow() const { return pace_->slow(); }

 private:
  friend class MaskThread;
  bool work();  // on a thread of masks; whether somebody sits out for it
  std::string check_forced() const;

  const std::shared_ptr<TokenMaskProvider> provider_;
  const int vocab_size_;
  const std::shared_ptr<MaskPace> pace_;
  std::vector<TokenId> output_;       // stays as it is while the provider works
  std::vector<std::uint32_t> words_;  // [ceil(vocab / 32)]
  std::vector<TokenId> forced_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool known_ = false;         // under mutex_, as is the rest:
  mutable bool late_ = false;  // for the step that waited
  bool sits_out_ = false;
  std::string error_;
  std::shared_ptr<MaskDeadline> deadline_;
};

// Starts a thread when the first mask is asked for, and another one for sequences whose masks take long. Asking never
// blocks, and what is asked for is handed over at once for all sequences of a step, so that the thread is woken once.
class MaskThread {
 public:
  // worked: told how long each mask took, in seconds. known: for a mask that somebody sits out for. Both on the threads.
  MaskThread(std::function<void(double)> worked, std::function<void()> known)
      : worked_(std::move(worked)), known_(std::move(known)) {}
  // Answers first what somebody holds: a device may wait for it.
  ~MaskThread();
  MaskThread(const MaskThread&) = delete;
  MaskThread& operator=(const MaskThread&) = delete;

  // The mask of the first token, and of the token after those `accepted`. Nobody may be waiting for the mask before.
  void begin(std::shared_ptr<SequenceMask> mask);
  void next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted);
  // Has them worked out. Nobody may wait for a mask before.
  void hand_over();

 private:
  using Masks = std::vector<std::shared_ptr<SequenceMask>>;
  struct Lane {
    std::condition_variable wake;
    Masks asked;
    std::thread thread;
  };
  void put(std::shared_ptr<SequenceMask> mask);  // under mutex_
  void run(Lane& lane);

  const std::function<void(double)> worked_;
  const std::function<void()> known_;
  Masks begun_;  // asked for and not handed over; the asking thread's
  std::mutex mutex_;
  bool stop_ = false;
  std::array<Lane, 2> lanes_;  // the second one: of those that are slow
};

}  // namespace charonia::runtime
