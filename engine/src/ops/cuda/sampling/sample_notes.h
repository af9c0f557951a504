// The part of a step's sampling that stays on the host until the step is collected: the masks of its rows, which are
// awaited after the forward pass was issued, and errors that do not depend on the logits.
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
  // Replaces the previous notes. A row with a target needs no mask.
  void take(std::span<const ops::SampleRow> rows, int vocab);

  // Masks are numbered in the order of their rows. -1: the row has no mask.
  std::int32_t mask_of(std::size_t row) const;
  std::int64_t masks() const { return static_cast<std::int64_t>(masked_.size()); }

  // Waits for each mask and writes them to `to` [masks(), ceil(vocab / 32)]. If a mask fails or has a wrong length, it
  // becomes a mask that allows no token, and the row gets the error.
  void wait(std::uint32_t* to);

  // Why no token of the row could be sampled although its logits are valid.
  std::string why_no_token(std::size_t row) const;

 private:
  struct Masked {
    std::size_t row = 0;
    const ops::TokenMask* mask = nullptr;
  };
  int vocab_ = 0;
  std::vector<Masked> masked_;  // ascending by row
  std::map<std::size_t, std::string> errors_;
};

}  // namespace charonia::cuda
