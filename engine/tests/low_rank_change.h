// Random changes of weights by LoRA adapters, for tests.
#pragma once

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

  HostChange(Random& random, DType type, std::int64_t in, std::int64_t out, bool one_part) {
    shape.type = type;
    shape.in_features = in;
    shape.out_features = out;
    std::int64_t column = uniform(random, 0, 3), elements = 0;
    while (column < out) {
      LowRank::Part part{.first_column = column,
                         .columns = std::min<std::int64_t>(one_part ? out : uniform(random, 1, 200), out - column),
                         .first_rank = shape.ranks,
                         .ranks = one_part ? 37 : uniform(random, 1, 40),
                         .b = elements};
      column += part.columns + uniform(random, 0, 5);
      shape.ranks += part.ranks;
      elements += shape.b_elements(part);
      bs.push_back(Matrix::random(random, type, part.columns, part.ranks, 0.3F));
      scales.resize(static_cast<std::size_t>(shape.ranks), static_cast<float>(uniform(random, 1, 4)));
      shape.parts.push_back(part);
    }
    a = Matrix::random(random, type, shape.ranks, in, 0.3F);
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

}  // namespace charonia::ops
