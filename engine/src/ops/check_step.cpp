#include "ops/check_step.h"

#include <algorithm>
#include <string_view>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::ops {
namespace {

void require(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::begin_step: ", what));
}

std::int64_t count(const auto& span) { return static_cast<std::int64_t>(span.size()); }

// `text` is called only for an error, because these checks run over every row of every step.
template <class Text>
void require_that(bool holds, Text text) {
  if (!holds) [[unlikely]]
    require(false, text());
}

void check_attention(const AttentionBatch& batch, std::int64_t rows, const StepFacts& facts) {
  if (batch.query_start.empty() && batch.positions.empty()) return;  // a step without attention
  require(!batch.query_start.empty() && batch.query_start.front() == 0 && batch.query_start.back() == rows &&
              count(batch.positions) == rows,
          "query_start must run from 0 to the number of rows, and every row needs a position");
  require(batch.rotary_rows.empty() || count(batch.rotary_rows) == rows,
          "rotary_rows must have one entry for every row, or be empty");
  for (const auto row : batch.rotary_rows) {
    require_that(row >= 0, [&] { return cat("rotary row ", row, " is negative"); });
  }
  const auto sequences = count(batch.query_start) - 1;
  for (const auto kind : kTableKinds) {
    const auto entries = count(batch.block_tables[kind]);
    require(batch.table_stride >= 0 &&
                (entries >= sequences * batch.table_stride || (entries == 0 && facts.num_blocks[kind] == 0)),
            "block_tables must be [sequences, table_stride]");
  }
  const bool has_tables = std::ranges::any_of(
      kTableKinds, [&](CacheKind kind) { return facts.num_blocks[kind] > 0 || !batch.block_tables[kind].empty(); });
  const auto slots = facts.num_blocks.state;
  require(count(batch.state_in) == count(batch.state_out) &&
              (count(batch.state_in) == sequences || (batch.state_in.empty() && slots == 0)),
          "state_in and state_out must have one entry for every sequence");
  require(batch.row_states.empty() || (count(batch.row_states) == rows && !batch.state_in.empty()),
          "row_states must have one entry for every row, or be empty");
  for (const auto slot : batch.row_states) {
    require_that(slot >= -1 && (slots == 0 || slot < slots),
                 [&] { return cat("a row writes the state of slot ", slot, ", but the cache has ", slots, " slots"); });
  }
  for (std::int64_t s = 0; s < sequences; ++s) {
    const auto begin = batch.query_start[static_cast<std::size_t>(s)];
    const auto end = batch.query_start[static_cast<std::size_t>(s + 1)];
    require(begin <= end && end <= rows, "query_start must not descend");
    if (begin == end) continue;
    const auto first = batch.positions[static_cast<std::size_t>(begin)];
    for (auto row = begin; row < end; ++row) {
      const auto position = batch.positions[static_cast<std::size_t>(row)];
      require_that(position >= 0 && position - first == row - begin, [&] {
        return cat("row ", row, " has position ", position, ": positions must ascend by one within a sequence");
      });
    }
    const auto last = first + (end - 1 - begin);
    require_that(facts.max_positions == 0 || last < facts.max_positions,
                 [&] { return cat("position ", last, " is not below the maximum of ", facts.max_positions); });
    if (!batch.state_in.empty()) {
      const auto in = batch.state_in[static_cast<std::size_t>(s)], out = batch.state_out[static_cast<std::size_t>(s)];
      require_that((in >= 0 || first == 0) && (in < 0 || first > 0) && out >= 0 &&
                       (slots == 0 || std::max(in, out) < slots),
                   [&] {
                     return cat("sequence ", s, " at position ", first, " reads the state of slot ", in,
                                " and writes slot ", out, ", but the cache has ", slots, " slots");
                   });
    }
    if (facts.block_len == 0 || !has_tables) continue;
    const auto blocks = last / facts.block_len + 1;
    require_that(blocks <= batch.table_stride, [&] {
      return cat("position ", last, " of sequence ", s, " is beyond its table of ", batch.table_stride, " blocks");
    });
    for (const auto kind : kTableKinds) {
      const auto most = facts.num_blocks[kind];
      if (batch.block_tables[kind].empty()) continue;
      for (const auto block :
           batch.block_tables[kind].subspan(static_cast<std::size_t>(s * batch.table_stride),
                                            static_cast<std::size_t>(blocks))) {
        require_that(block >= 0 && (most == 0 || block < most), [&] {
          return cat("the table of sequence ", s, " has block ", block, ", but the cache has ", most, " blocks");
        });
      }
    }
  }
}

}  // namespace

void check_limits(const StepLimits& limits) {
  if (limits.max_rows >= 1 && limits.max_sequences >= 1 && limits.max_positions >= 1) return;
  throw Error(ErrorCode::internal, cat("ops::prepare: ", limits.max_rows, " rows, ", limits.max_sequences,
                                       " sequences and ", limits.max_positions, " positions must all be at least 1"));
}

void check_step(const StepInput& input, const StepFacts& facts, std::int64_t sampled_before) {
  const auto rows = count(input.ids), logits_rows = count(input.logits_rows);
  require_that(facts.max_rows == 0 || rows <= facts.max_rows,
               [&] { return cat(rows, " rows, but prepare() was called with at most ", facts.max_rows); });
  const auto sequences = std::max<std::int64_t>(count(input.attention.query_start) - 1, 0);
  const auto most_logits = facts.max_logits_rows > 0 ? facts.max_logits_rows : facts.max_sequences;
  require_that(facts.max_sequences == 0 || (sequences <= facts.max_sequences && logits_rows <= most_logits), [&] {
    return cat(sequences, " sequences and ", logits_rows, " rows of logits, but prepare() was called with at most ",
               facts.max_sequences, " and ", most_logits);
  });
  for (const auto id : input.ids) {
    require_that(id < 0 || facts.vocab == 0 || id < facts.vocab,
                 [&] { return cat("token id ", id, " is not below the vocabulary of ", facts.vocab); });
    require_that(id >= 0 || -1 - std::int64_t{id} < sampled_before, [&] {
      return cat("a token refers to sample row ", -1 - std::int64_t{id}, " of the previous step, which sampled ",
                 sampled_before, " rows");
    });
  }
  check_attention(input.attention, rows, facts);
  require(std::is_sorted(input.logits_rows.begin(), input.logits_rows.end()) &&
              (input.logits_rows.empty() || input.logits_rows.front() >= 0),
          "logits_rows must ascend");
  require(input.logits_rows.empty() || input.logits_rows.back() < rows, "logits_rows must be rows of the step");
  require(input.hidden_rows.empty() || count(input.hidden_rows) == rows,
          "hidden_rows must have one entry for every row, or be empty");
  for (const auto row : input.hidden_rows) {
    require_that(row >= -1 && (facts.hidden_rows == 0 || row < facts.hidden_rows),
                 [&] { return cat("hidden row ", row, " is not one of ", facts.hidden_rows); });
  }
  require(input.sample.size() == input.logits_rows.size(), "every row of logits needs a SampleRow");
  for (const auto& row : input.sample) {
    require_that(row.pending < sampled_before, [&] {
      return cat("a row refers to sample row ", row.pending, " of the previous step, which sampled ", sampled_before,
                 " rows");
    });
    require(!row.logits || row.target >= 0, "a row needs a target to return its logits");
  }
}

void check_rotation(const RotaryParams& how, int head_dim) {
  const auto require = [](bool holds, std::string_view what) {
    if (!holds) throw Error(ErrorCode::internal, cat("ops::rotary_store: ", what));
  };
  if (how.cos_sin != nullptr && (how.rotary_dim < 2 || how.rotary_dim > head_dim || how.rotary_dim % 2 != 0)) {
    require(false, cat("rotary_dim ", how.rotary_dim, " must be even and in [2, ", head_dim, "]"));
  }
  require((how.q_norm == nullptr) == (how.k_norm == nullptr), "q_norm and k_norm must both be set or both be null");
  require(how.squares == nullptr || (how.q_norm != nullptr && !how.norm_after),
          "squares needs q_norm, and a norm before the rotation");
  require(!how.v_norm || how.q_norm != nullptr, "v_norm needs q_norm");
  require(!how.v_from_k || how.squares == nullptr, "v_from_k needs a norm of each head");
}

}  // namespace charonia::ops
