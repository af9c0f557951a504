// What of a step's sampling stays on the host until it is collected: the masks of its rows, which are asked for when
// the forward pass is under way, and why a row cannot be sampled whatever its logits.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "ops/step.h"

namespace charonia::cuda {

class SampleNotes {
 public:
  // Replaces what was noted. A row that reports a target needs no mask.
  void take(std::span<const ops::SampleRow> rows, int vocab);

  // Masks are numbered in the order of their rows. -1: the row has none.
  std::int32_t mask_of(std::size_t row) const;
  std::int64_t masks() const { return static_cast<std::int64_t>(masked_.size()); }

  // Waits for one mask after the other and writes them to `to` [masks(), ceil(vocab / 32)]. One that fails, or has
  // another length, becomes one that allows no token, and is the row's error.
  void wait(std::uint32_t* to);

  // Why no token of the row could be taken though its logits were sound.
  std::string why_nothing(std::size_t row) const;

 private:
  struct Masked {
    std::size_t row = 0;
    const ops::TokenMask* mask = nullptr;
  };
  int vocab_ = 0;
  std::vector<Masked> masked_;  // ascending rows
  std::map<std::size_t, std::string> errors_;
};

}  // namespace charonia::cuda
