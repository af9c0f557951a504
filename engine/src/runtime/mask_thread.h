// The token masks of sequences, worked out on one thread while forward passes run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "charonia/token_mask.h"
#include "charonia/types.h"
#include "ops/step.h"

namespace charonia::runtime {

// The mask of a sequence's next token. It is asked for once per token; who samples waits for the answer. The thread
// that asks and the devices that wait are different ones; what was asked for is answered even when the sequence has
// ended.
class SequenceMask : public ops::TokenMask {
 public:
  SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size);

  std::span<const std::uint32_t> wait() const override;

 private:
  friend class MaskThread;
  void work();  // on the thread of masks

  const std::shared_ptr<TokenMaskProvider> provider_;
  const int vocab_size_;
  std::vector<TokenId> output_;       // stays as it is while the provider works
  std::vector<std::uint32_t> words_;  // [ceil(vocab / 32)]
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool known_ = false;  // under mutex_, as is:
  std::string error_;
};

// Starts its thread when the first mask is asked for. Asking never blocks, and what is asked for is handed over at once
// for all sequences of a step, so that the thread is woken once.
class MaskThread {
 public:
  // worked: told how long each mask took, in seconds.
  explicit MaskThread(std::function<void(double)> worked) : worked_(std::move(worked)) {}
  // Answers what was asked for first: a device may wait for it.
  ~MaskThread();
  MaskThread(const MaskThread&) = delete;
  MaskThread& operator=(const MaskThread&) = delete;

  // The mask of the first token, and of the token after `accepted`. Nobody may be waiting for the mask before.
  void begin(std::shared_ptr<SequenceMask> mask);
  void next(std::shared_ptr<SequenceMask> mask, TokenId accepted);
  // Has them worked out. Nobody may wait for a mask before.
  void hand_over();

 private:
  using Masks = std::vector<std::shared_ptr<SequenceMask>>;
  void run();

  const std::function<void(double)> worked_;
  Masks begun_;  // asked for and not handed over; the asking thread's
  std::mutex mutex_;
  std::condition_variable wake_;
  Masks asked_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace charonia::runtime
