// A copy of a step's host arrays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace charonia::cuda {

class KeptStep {
 public:
  // sampled_before: the number of sample rows of the step before.
  KeptStep(const ops::StepInput& input, std::int64_t sampled_before)
      : sampled_before_(sampled_before),
        ids_(copy(input.ids)),
        query_start_(copy(input.attention.query_start)),
        positions_(copy(input.attention.positions)),
        rotary_rows_(copy(input.attention.rotary_rows)),
        block_tables_(copy(input.attention.block_tables)),
        table_stride_(input.attention.table_stride),
        logits_rows_(copy(input.logits_rows)),
        sample_(copy(input.sample)),
        lists_(sample_.size()) {
    for (std::size_t i = 0; i < sample_.size(); ++i) {
      auto& row = sample_[i];
      auto& lists = lists_[i];
      lists = {copy(row.prompt), copy(row.output), copy(row.banned), copy(row.bias)};
      row.prompt = lists.prompt;
      row.output = lists.output;
      row.banned = lists.banned;
      row.bias = lists.bias;
    }
  }
  KeptStep(const KeptStep&) = delete;
  KeptStep& operator=(const KeptStep&) = delete;

  ops::StepInput input() const {
    return {ids_, {query_start_, positions_, block_tables_, table_stride_, rotary_rows_}, logits_rows_, sample_};
  }
  std::int64_t sampled_before() const { return sampled_before_; }

 private:
  template <class T>
  static std::vector<T> copy(std::span<const T> from) {
    return {from.begin(), from.end()};
  }

  struct Lists {
    std::vector<std::int32_t> prompt, output, banned;
    std::vector<std::pair<std::int32_t, float>> bias;
  };
  std::int64_t sampled_before_;
  std::vector<std::int32_t> ids_, query_start_, positions_, rotary_rows_, block_tables_;
  std::int64_t table_stride_;
  std::vector<std::int32_t> logits_rows_;
  std::vector<ops::SampleRow> sample_;
  std::vector<Lists> lists_;
};

}  // namespace charonia::cuda
