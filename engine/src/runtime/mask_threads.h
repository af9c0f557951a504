// Computes the token masks of sequences, on threads while forward passes run, or when a device waits for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "charonia/token_mask.h"
#include "charonia/types.h"
#include "ops/step.h"

namespace charonia::runtime {

// The mask of a sequence's next token. It is computed once per token: by the first of MaskThreads and wait().
class SequenceMask : public ops::TokenMask {
 public:
  // lazy: the forward pass needs the processors too, so MaskThreads does not compute it on a small machine. computed:
  // called with the seconds of each mask, on the thread that computed it.
  SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size, bool lazy = false,
               std::function<void(double)> computed = {});

  // Throws Error if the mask could not be computed.
  std::span<const std::uint32_t> wait() const override;

  // Appends the tokens that the provider forces after the last token, which was sampled with the mask.
  void add_forced(std::vector<TokenId>& tokens) const;

 private:
  friend class MaskThreads;
  void compute_once() const;  // does nothing if another thread computes or has computed the mask
  std::string compute() const;
  std::string check_forced() const;
  // To the mask of the token after the `accepted` tokens. The previous mask must be computed, or never begun.
  void advance(std::span<const TokenId> accepted);

  const std::shared_ptr<TokenMaskProvider> provider_;
  const int vocab_size_;
  const bool lazy_;
  const std::function<void(double)> computed_;
  std::vector<TokenId> output_;  // not changed while the provider works
  // Written by the thread that has set begun_, before it sets known_.
  mutable std::vector<std::uint32_t> words_;  // [ceil(vocab / 32)]
  mutable std::vector<TokenId> forced_;
  mutable std::atomic<bool> begun_ = false;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable bool known_ = false;  // under mutex_, like error_
  mutable std::string error_;
};

// begin() and next() request a mask and do not block. hand_over() passes all requested masks of a step to the threads,
// so that they are woken once. The threads start with the first hand_over().
class MaskThreads {
 public:
  MaskThreads() = default;
  ~MaskThreads();
  MaskThreads(const MaskThreads&) = delete;
  MaskThreads& operator=(const MaskThreads&) = delete;

  // begin() requests the mask of the first token; next() requests the mask of the token after the `accepted` tokens. No
  // device may still wait for the previous mask of the sequence.
  void begin(std::shared_ptr<SequenceMask> mask);
  void next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted);
  void hand_over();

 private:
  void run();

  std::vector<std::shared_ptr<SequenceMask>> begun_;  // requested, not handed over; used only by the requesting thread
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<SequenceMask>> waiting_;  // under mutex_
  bool stop_ = false;                                  // under mutex_
  std::vector<std::thread> threads_;
};

}  // namespace charonia::runtime
