// A step on the CPU: stores and checks its arrays, and computes its operations when they are issued.
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_ops.h"

namespace charonia::ops::cpu {

void CpuOps::prepare(const StepLimits& limits, const Issue&) {
  check_limits(limits);
  if (!results_.empty()) throw Error(ErrorCode::internal, "ops::prepare: results of steps were not collected");
  begun_ = false;
  prepared_ = true;
  sampled_ids_.clear();
  facts_ = {.max_rows = limits.max_rows,
            .max_sequences = limits.max_sequences,
            .max_positions = limits.max_positions,
            .max_logits_rows = limits.logits_rows()};
}

void CpuOps::begin_step(const StepInput& input) {
  begun_ = false;
  if (!prepared_) throw Error(ErrorCode::internal, "ops::begin_step: prepare() was not called");
  if (results_.size() >= kMaxStepsInFlight) {
    throw Error(ErrorCode::internal, cat("ops::begin_step: results of ", results_.size(), " steps were not collected"));
  }
  check_step(input, facts_, std::ssize(sampled_ids_));
  ids_.assign(input.ids.begin(), input.ids.end());
  for (auto& id : ids_) {
    if (id >= 0) continue;
    const auto row = -1 - std::int64_t{id};
    // A failed row has no token. Its sequence ends, so any token will do.
    id = std::max(0, sampled_ids_[static_cast<std::size_t>(row)]);
  }
  const auto& starts = input.attention.query_start;
  sequence_of_row_.assign(ids_.size(), 0);
  for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
    std::fill(sequence_of_row_.begin() + starts[s], sequence_of_row_.begin() + starts[s + 1],
              static_cast<std::int32_t>(s));
  }
  input_ = input;
  begun_ = true;
}

void CpuOps::run_step(const Issue& issue) {
  if (!begun_) throw Error(ErrorCode::internal, "ops::run_step: begin_step() was not called");
  begun_ = false;
  sampled_.clear();
  // The samples that the next step reads, also if this step fails.
  std::vector<std::int32_t> ids(input_.sample.size(), -1);
  try {
    issue({.rows = static_cast<std::int64_t>(sequence_of_row_.size()),
           .logits_rows = static_cast<std::int64_t>(input_.logits_rows.size()),
           .reads_main = input_.reads_main});
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
  if (results_.empty()) throw Error(ErrorCode::internal, "ops::collect: run_step() was not called");
  auto out = std::move(results_.front());
  results_.pop_front();
  return out;
}

}  // namespace charonia::ops::cpu
