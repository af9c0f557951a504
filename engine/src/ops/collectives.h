// Collectives between tensor-parallel ranks. All ranks issue the same operations in the same order, each on its own
// thread. A collective waits for all ranks.
#pragma once

#include <string_view>

#include "ops/tensor.h"

namespace charonia::ops {

class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual int ranks() const = 0;
  virtual int rank() const = 0;
  // tensor [rows, cols] = the sum of all ranks' tensors, added in rank order.
  virtual void all_reduce(const Tensor& tensor) = 0;
  // out [rows, ranks * cols] = the ranks' `in` [rows, cols], concatenated along the columns.
  virtual void all_gather(const Tensor& out, const Tensor& in) = 0;
  // This rank's step has failed, so the rank will not join the next collective. All ranks that wait in a collective, or
  // join one later, get an Error(internal) with `why`. There are no collectives after that.
  virtual void abort_collectives(std::string_view why) noexcept = 0;
};

}  // namespace charonia::ops
