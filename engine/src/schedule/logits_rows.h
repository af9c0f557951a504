// Policy: limits the rows of logits of a step. A row has vocab_size numbers, so max_logits_rows bounds their memory.
//
// A sequence needs a row of logits when it samples; with all_rows it needs one for each row of its prompt. Each decode
// has one row. The limit is at least max_batch_size, so the decodes always fit. (The engine adds rows only for
// proposals, so only all_rows and proposals are affected.) The other sequences share the remaining rows in the order of
// the plan. A sequence that gets no row computes all its tokens except the last, and samples in a later step. A
// sequence with all_rows leaves at least a quarter of all rows, so that a long prompt does not delay the admission of
// others.
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
  int left() const { return left_; }
  void take(int rows) { left_ -= rows; }

  // The part of a step that computes at most `num_tokens` of the sequence's next tokens; takes its rows. May have no
  // tokens.
  ScheduledSeq take_part(const Seq& seq, std::int32_t num_tokens) {
    ScheduledSeq part{.id = seq.id, .first_position = seq.computed};
    const bool in_prompt = seq.computed < seq.prompt_tokens;
    if (seq.all_rows && in_prompt && seq.rows_given < seq.prompt_tokens) {
      // After a preemption, the rows that the caller already has are computed first, without logits. A part has rows of
      // one kind only.
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
