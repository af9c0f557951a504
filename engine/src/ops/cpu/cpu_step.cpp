// A step on the CPU: its arrays are checked and kept, its operations computed as they are issued.
#include <algorithm>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {
namespace {

void require(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::begin_step: ", what));
}

void check_attention(const AttentionBatch& batch, std::size_t rows) {
  if (batch.query_start.empty() && batch.positions.empty()) return;
  require(!batch.query_start.empty() && batch.query_start.front() == 0 && batch.positions.size() == rows &&
              batch.query_start.back() == static_cast<std::int32_t>(rows),
          "query_start must run from 0 to the number of rows, and every row needs a position");
  const auto sequences = batch.query_start.size() - 1;
  require(
      batch.table_stride >= 0 && batch.block_tables.size() >= sequences * static_cast<std::size_t>(batch.table_stride),
      "block_tables must be [sequences, table_stride]");
  require(batch.rotary_rows.empty() || batch.rotary_rows.size() == rows, "rotary_rows must be [rows] or empty");
  for (const auto row : batch.rotary_rows) require(row >= 0, cat("no row ", row, " of the rotary table"));
  for (std::size_t s = 0; s < sequences; ++s) {
    const auto begin = batch.query_start[s], end = batch.query_start[s + 1];
    require(begin <= end, "query_start must not descend");
    for (auto row = begin; row < end; ++row) {
      const auto position = batch.positions[static_cast<std::size_t>(row)];
      require(position >= 0 && position - batch.positions[static_cast<std::size_t>(begin)] == row - begin,
              cat("row ", row, " stands at position ", position, ": positions must ascend by one"));
    }
  }
}

}  // namespace

void CpuOps::begin_step(const StepInput& input) {
  begun_ = false;
  require(results_.size() < kMaxStepsInFlight, cat("results of ", results_.size(), " steps were not collected"));
  const auto rows = input.ids.size();
  check_attention(input.attention, rows);
  require(std::is_sorted(input.logits_rows.begin(), input.logits_rows.end()) &&
              (input.logits_rows.empty() || input.logits_rows.front() >= 0),
          "logits_rows must ascend");
  require(input.logits_rows.empty() || static_cast<std::size_t>(input.logits_rows.back()) < rows,
          "logits_rows must be rows of the step");
  require(input.sample.size() == input.logits_rows.size(), "every row of logits needs a SampleRow");
  for (const auto& row : input.sample) {
    require(row.pending < static_cast<std::int64_t>(sampled_ids_.size()),
            cat("sample row ", row.pending, " of the step before, which sampled ", sampled_ids_.size()));
  }
  ids_.assign(input.ids.begin(), input.ids.end());
  for (auto& id : ids_) {
    if (id >= 0) continue;
    const auto row = -1 - std::int64_t{id};
    require(row < static_cast<std::int64_t>(sampled_ids_.size()),
            cat("token of sample row ", row, " of the step before, which sampled ", sampled_ids_.size()));
    // A row that failed has no token; its sequence ends, and any will do.
    id = std::max(0, sampled_ids_[static_cast<std::size_t>(row)]);
  }
  const auto& starts = input.attention.query_start;
  sequence_of_row_.assign(rows, 0);
  for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
    std::fill(sequence_of_row_.begin() + starts[s], sequence_of_row_.begin() + starts[s + 1],
              static_cast<std::int32_t>(s));
  }
  input_ = input;
  begun_ = true;
}

void CpuOps::run_step(const Issue& issue) {
  if (!begun_) throw Error(ErrorCode::internal, "ops::run_step: no step was begun");
  begun_ = false;
  sampled_.clear();
  // What the next step finds of this one, also where this one fails.
  std::vector<std::int32_t> ids(input_.sample.size(), -1);
  try {
    issue({static_cast<std::int64_t>(sequence_of_row_.size()), static_cast<std::int64_t>(input_.logits_rows.size())});
  } catch (...) {
    sampled_ids_ = std::move(ids);
    throw;
  }
  for (std::size_t i = 0; i < sampled_.size(); ++i) {
    if (sampled_[i].error.empty()) ids[i] = sampled_[i].token;
  }
  sampled_ids_ = std::move(ids);
  results_.push_back(std::move(sampled_));
}

std::vector<Sampled> CpuOps::collect() {
  if (results_.empty()) throw Error(ErrorCode::internal, "ops::collect: no step was run");
  auto out = std::move(results_.front());
  results_.pop_front();
  return out;
}

}  // namespace charonia::ops::cpu
