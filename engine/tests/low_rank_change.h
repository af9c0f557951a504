// Random changes of weights by LoRA adapters, for tests.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "ops/low_rank.h"
#include "ops_support.h"

namespace charonia::ops {

// A change of a weight, with its matrices on the host.
struct HostChange {
  LowRank shape;              // without memory
  Matrix a;                   // [ranks, in_features]
  std::vector<Matrix> bs;     // of each part: [columns, ranks of the part]
  std::vector<float> scales;  // [ranks], equal in a part
  Matrix stored_a, stored_b;  // as LowRank stores them

  // ranks: of a part; 0: any few.
  HostChange(Random& random, DType type, std::int64_t in, std::int64_t out, bool one_part, std::int64_t ranks = 0,
             float a_values = 0.3F, float b_values = 0.3F) {
    shape.type = type;
    shape.in_features = in;
    shape.out_features = out;
    std::int64_t column = uniform(random, 0, 3), elements = 0;
    while (column < out) {
      LowRank::Part part{.first_column = column,
                         .columns = std::min<std::int64_t>(one_part ? out : uniform(random, 1, 200), out - column),
                         .first_rank = shape.ranks,
                         .ranks = ranks > 0 ? ranks : one_part ? 37 : uniform(random, 1, 40),
                         .b = elements};
      column += part.columns + uniform(random, 0, 5);
      shape.ranks += part.ranks;
      elements += shape.b_elements(part);
      bs.push_back(Matrix::random(random, type, part.columns, part.ranks, b_values));
      scales.resize(static_cast<std::size_t>(shape.ranks), static_cast<float>(uniform(random, 1, 4)));
      shape.parts.push_back(part);
    }
    a = Matrix::random(random, type, shape.ranks, in, a_values);
    stored_a = Matrix(type, 1, shape.a_elements());
    stored_b = Matrix(type, 1, elements);
    for (std::int64_t j = 0; j < shape.ranks; ++j) {
      for (std::int64_t k = 0; k < in; ++k) stored_a.set(0, shape.a_at(j, k), a.at(j, k));
    }
    for (std::size_t p = 0; p < bs.size(); ++p) {
      const auto& part = shape.parts[p];
      for (std::int64_t c = 0; c < part.columns; ++c) {
        for (std::int64_t j = 0; j < part.ranks; ++j) stored_b.set(0, shape.b_at(part, j, c), bs[p].at(c, j));
      }
    }
  }

  // Of all columns.
  std::vector<double> of(const Matrix& in, std::int64_t row) const {
    std::vector<double> out(static_cast<std::size_t>(shape.out_features));
    for (std::size_t p = 0; p < bs.size(); ++p) {
      const auto& part = shape.parts[p];
      for (std::int64_t j = 0; j < part.ranks; ++j) {
        double t = 0;
        for (std::int64_t k = 0; k < in.cols; ++k) t += double{in.at(row, k)} * a.at(part.first_rank + j, k);
        t *= scales[static_cast<std::size_t>(part.first_rank + j)];
        for (std::int64_t c = 0; c < part.columns; ++c) {
          out[static_cast<std::size_t>(part.first_column + c)] += t * bs[p].at(c, j);
        }
      }
    }
    return out;
  }
};

// An adapter may leave out weights.
using HostAdapter = std::vector<std::optional<HostChange>>;

// The image of an adapter for a slot of a device.
inline std::unique_ptr<Buffer> image_of(Ops& ops, const HostAdapter& adapter) {
  std::vector<std::byte> out;
  const auto put = [&](const void* data, std::size_t bytes) {
    out.resize((out.size() + 63) / 64 * 64);
    const auto at = out.size();
    out.resize(at + bytes);
    std::memcpy(out.data() + at, data, bytes);
    return static_cast<std::int64_t>(at);
  };
  std::vector<std::int64_t> table(adapter.size());
  put(table.data(), table.size() * sizeof table[0]);
  for (std::size_t w = 0; w < adapter.size(); ++w) {
    if (!adapter[w]) continue;
    const auto& change = *adapter[w];
    const auto a = put(change.stored_a.bytes.data(), change.stored_a.bytes.size());
    const auto b = put(change.stored_b.bytes.data(), change.stored_b.bytes.size());
    const SlotChange header{.a = a,
                            .ranks = static_cast<std::int32_t>(change.shape.ranks),
                            .parts = static_cast<std::int32_t>(change.bs.size())};
    table[w] = put(&header, sizeof header);
    for (const auto& part : change.shape.parts) {
      const SlotPart one{.b = b + part.b * static_cast<std::int64_t>(size_of(change.shape.type)),
                         .first_column = static_cast<std::int32_t>(part.first_column),
                         .columns = static_cast<std::int32_t>(part.columns),
                         .first_rank = static_cast<std::int32_t>(part.first_rank),
                         .ranks = static_cast<std::int32_t>(part.ranks),
                         .scale = change.scales[static_cast<std::size_t>(part.first_rank)]};
      const auto* const bytes = reinterpret_cast<const std::byte*>(&one);
      out.insert(out.end(), bytes, bytes + sizeof one);
    }
  }
  std::memcpy(out.data(), table.data(), table.size() * sizeof table[0]);
  auto buffer = ops.allocate_host(out.size());
  std::memcpy(buffer->data(), out.data(), out.size());
  return buffer;
}

}  // namespace charonia::ops
