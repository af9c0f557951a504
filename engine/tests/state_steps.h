// Steps of the operations of recurrent layers, which cut sequences anywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "ops_support.h"

namespace charonia::ops {

constexpr int kStateSlots = 9;

// Layer 1 has a state of this many floats.
inline KvLayout state_layout(std::int64_t floats) {
  return {.layers = {{.kind = CacheKind::state, .state_floats = 3}, {.kind = CacheKind::state, .state_floats = floats}},
          .block_len = 4};
}

// A part of a sequence in a step: rows [begin, end) of its inputs. The last `proposed` rows are like proposals: the state
// before them and the state after each of them have a slot. The last state has state_out.
template <class Inputs>
struct StatePart {
  const Inputs* in = nullptr;
  int begin = 0, end = 0;
  std::int32_t state_in = -1, state_out = 0;
  int proposed = 0;
  std::vector<std::int32_t> row_states = {};  // [proposed]
};

// The rows of all parts, one after the other. inputs_of(inputs) returns the matrix that they are taken from.
template <class Inputs>
Matrix joined(const std::vector<StatePart<Inputs>>& parts, int gap, const auto& inputs_of) {
  std::int64_t rows = 0;
  for (const auto& part : parts) rows += part.end - part.begin;
  const Matrix& first = inputs_of(*parts.front().in);
  Matrix out(first.dtype, rows, first.cols, gap);
  std::int64_t to = 0;
  for (const auto& part : parts) {
    for (int p = part.begin; p < part.end; ++p, ++to) {
      for (std::int64_t c = 0; c < out.cols; ++c) out.set(to, c, inputs_of(*part.in).at(p, c));
    }
  }
  return out;
}

template <class Inputs>
void run_state_step(Ops& ops, const std::vector<StatePart<Inputs>>& parts, const auto& issue) {
  std::vector<std::int32_t> starts = {0}, positions, state_in, state_out, row_states;
  const bool proposed = std::ranges::any_of(parts, [](const auto& part) { return part.proposed > 0; });
  for (const auto& part : parts) {
    if (proposed) {
      row_states.insert(row_states.end(), static_cast<std::size_t>(part.end - part.begin - part.proposed), -1);
      if (part.proposed > 0) row_states.back() = part.row_states.front();
      row_states.insert(row_states.end(), part.row_states.begin() + (part.proposed > 0), part.row_states.end());
      if (part.proposed > 0) row_states.push_back(part.state_out);
    }
    for (int p = part.begin; p < part.end; ++p) positions.push_back(p);
    starts.push_back(static_cast<std::int32_t>(positions.size()));
    state_in.push_back(part.state_in);
    state_out.push_back(part.state_out);
  }
  const std::vector<std::int32_t> ids(positions.size(), 0);
  run_step(ops,
           {.ids = ids,
            .attention = {.query_start = starts,
                          .positions = positions,
                          .block_tables = {},
                          .state_in = state_in,
                          .state_out = state_out,
                          .row_states = row_states},
            .logits_rows = {},
            .sample = {}},
           issue);
}

// Computes the sequences again, in steps that have any number of rows of each sequence. A sequence moves to another
// slot at times. run(parts) returns the outputs of the parts, whose bits must be those of `whole`. Some steps write the
// states after several rows of a sequence, which then continues after any of them.
template <class Inputs>
void expect_cuts_change_no_bit(Random& random, const std::vector<Inputs>& sequences, const std::vector<Matrix>& whole,
                               const auto& run) {
  std::vector<std::int32_t> slot(sequences.size(), -1), free;
  for (int i = 0; i < kStateSlots; ++i) free.push_back(i);
  std::vector<int> computed(sequences.size());
  while (true) {
    std::vector<StatePart<Inputs>> parts;
    std::vector<std::size_t> of_part;
    int left_in_all = 0;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      const int left = static_cast<int>(whole[s].rows) - computed[s];
      left_in_all += left;
      if (left == 0 || uniform(random, 0, 3) == 0) continue;
      const int rows = uniform(random, 0, 2) == 0 ? 1 : uniform(random, 1, left);
      auto out = slot[s];
      if (out < 0 || uniform(random, 0, 2) == 0) {
        out = free.back();
        free.pop_back();
        if (slot[s] >= 0) free.insert(free.begin(), slot[s]);
      }
      auto& part = parts.emplace_back(&sequences[s], computed[s], computed[s] + rows, slot[s], out);
      of_part.push_back(s);
      slot[s] = out;
      if (uniform(random, 0, 1) == 0) continue;
      while (part.proposed < rows - 1 && free.size() > sequences.size()) {
        part.row_states.push_back(free.back());
        free.pop_back();
        ++part.proposed;
      }
    }
    if (left_in_all == 0) return;
    if (parts.empty()) continue;
    const Matrix result = run(parts);
    std::int64_t row = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      for (int p = parts[i].begin; p < parts[i].end; ++p, ++row) {
        ASSERT_TRUE(result.same_bits(row, whole[of_part[i]], p)) << "row " << p << " of sequence " << of_part[i];
      }
      // The sequence continues after a row whose state has a slot.
      const auto s = of_part[i];
      const auto& part = parts[i];
      computed[s] = part.end;
      if (part.proposed == 0) continue;
      const int dropped = uniform(random, 0, part.proposed);
      computed[s] -= dropped;
      if (dropped > 0) {
        std::swap(slot[s], parts[i].row_states[static_cast<std::size_t>(part.proposed - dropped)]);
      }
      free.insert(free.begin(), part.row_states.begin(), part.row_states.end());
    }
  }
}

}  // namespace charonia::ops
