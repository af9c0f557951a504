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

// The masks of a sequence's rows in a step: of the next token, and of the tokens after proposals. They are computed
// once per step, after MaskThreads::begin(), by the first of MaskThreads and wait().
class SequenceMask : public ops::TokenMask {
 public:
  // lazy: the forward pass needs the processors too, so MaskThreads does not compute it on a small machine. computed:
  // called with the seconds of each mask, on the thread that computed it.
  SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size, bool lazy = false,
               std::function<void(double)> computed = {});

  // Waits for the mask of the next token. Throws Error if it could not be computed.
  std::span<const std::uint32_t> wait() const override { return rows_.front().wait(); }
  // The mask of the token after the first `row` proposals.
  const ops::TokenMask* row(std::size_t row) const { return &rows_.at(row); }

  // Appends the tokens that the provider forces after the last token, which was sampled with the mask.
  void add_forced(std::vector<TokenId>& tokens) const;

  // Returns TokenMaskProvider::propose() for the next token. Call it before the masks of the step are requested.
  std::vector<TokenId> propose(std::span<const TokenId> guess, int most) const;

 private:
  friend class MaskThreads;
  struct Row final : ops::TokenMask {
    explicit Row(const SequenceMask& of) : sequence(of) {}
    std::span<const std::uint32_t> wait() const override;
    const SequenceMask& sequence;
    std::vector<std::uint32_t> words;  // [ceil(vocab / 32)]
    std::string error;
  };

  void compute_once() const;  // does nothing if another thread computes or has computed the masks
  void compute() const;
  std::string compute(Row& row) const;
  std::string check_forced() const;
  // Allows the masks of the next token, and of the tokens after `proposed`, to be computed.
  void request(std::span<const TokenId> proposed);
  // To the mask of the token after the `accepted` tokens. The previous masks must be computed, or not requested.
  void advance(std::span<const TokenId> accepted);

  const std::shared_ptr<TokenMaskProvider> provider_;
  const int vocab_size_;
  const bool lazy_;
  const std::function<void(double)> computed_;
  std::vector<TokenId> proposed_;  // not changed while the provider works
  // Written by the thread that has set begun_, before it sets known_. output_ is longer only while the provider works.
  mutable std::vector<TokenId> output_;
  mutable std::deque<Row> rows_;
  mutable std::vector<TokenId> forced_;
  mutable std::atomic<bool> begun_ = true;  // also until the masks are requested
  bool requested_ = false;                  // used by the requesting thread
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable bool known_ = false;  // under mutex_, like the next one
  mutable bool slow_ = false;   // the masks after proposals took too long, so there are no more proposals
};

// begin() and next() request masks and do not block. hand_over() passes all requested masks of a step to the threads,
// so that they are woken once. The threads start with the first hand_over().
class MaskThreads {
 public:
  MaskThreads() = default;
  ~MaskThreads();
  MaskThreads(const MaskThreads&) = delete;
  MaskThreads& operator=(const MaskThreads&) = delete;

  // begin() requests the masks of the next token and of the tokens after `proposed`. Does nothing if they are requested
  // already. next() goes to the token after the `accepted` tokens, and requests its mask if `wanted`. No device may
  // still wait for a previous mask of the sequence.
  void begin(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> proposed = {});
  void next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted, bool wanted = true);
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
