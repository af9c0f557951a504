// Policy: bounds on rows of logits. A row of logits has as many numbers as the vocabulary, so the memory for them is
// bounded by max_logits_rows.
//
// A sequence needs a row of logits when it samples, and for each row of its prompt with all_rows. Each decode has one:
// the bound is at least max_batch_size, so those always fit. (The engine sets it to max_batch_size, so it is felt only
// with all_rows.) The other sequences share what is left, in the order of the plan. One that finds no row left computes
// all its tokens but the last, and samples in a later step. With all_rows one takes at most what leaves a quarter of all
// rows, so that a long prompt does not keep others from being admitted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "schedule/sequence_state.h"

namespace charonia::schedule {

class LogitsRows {
 public:
  explicit LogitsRows(int max_rows) : max_(max_rows > 0 ? max_rows : std::numeric_limits<int>::max()), left_(max_) {}

  void begin_step() { left_ = max_; }
  bool any_left() const { return left_ > 0; }

  // The part of a step that computes at most `num_tokens` of the sequence's next tokens, and takes its rows. May have
  // no tokens at all.
  ScheduledSeq take_part(const Seq& seq, std::int32_t num_tokens) {
    ScheduledSeq part{.id = seq.id, .first_position = seq.computed};
    const bool in_prompt = seq.computed < seq.prompt_tokens;
    if (seq.all_rows && in_prompt && seq.rows_given < seq.prompt_tokens) {
      // After a preemption the rows that have been given come first, without logits. A part has rows of one kind.
      part.all_rows = seq.computed >= seq.rows_given;
      num_tokens = std::min(num_tokens, part.all_rows ? std::min(seq.prompt_tokens - seq.computed, most_of_prompt())
                                                      : seq.rows_given - seq.computed);
    }
    if (!part.all_rows && num_tokens == seq.gap() && left_ == 0) --num_tokens;
    part.num_tokens = num_tokens;
    part.samples = num_tokens == seq.gap();
    left_ -= part.num_logits_rows();
    return part;
  }

 private:
  int most_of_prompt() const { return std::min(left_, std::max(1, left_ - max_ / 4)); }

  int max_, left_;
};

}  // namespace charonia::schedule
