// The memory of a step's tensors: one allocation, sized for the largest step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/dtype.h"
#include "ops/device.h"
#include "ops/step.h"

namespace charonia::model {

// The formats that a device stores, and the scratch memory of its experts.
struct DeviceRules {
  std::function<ops::Precision(DType)> precision;
  std::function<std::size_t(const ops::ExpertsShape&, std::int64_t rows)> experts_scratch_bytes;
};
DeviceRules rules_of(const ops::Device& device);

class Activations {
 public:
  Activations(const DeviceRules& rules, DType weight, const ops::StepLimits& limits)
      : precision(rules.precision(weight)), rules_(rules), limits_(limits) {}

  // A tensor, or scratch memory.
  struct Part {
    std::size_t offset = 0;  // bytes
    DType dtype = DType::f32;
    std::int64_t cols = 0;
  };
  Part rows(std::int64_t cols, DType dtype) { return place(limits_.max_rows, cols, dtype); }  // of all rows
  Part kept_rows(std::int64_t cols, DType dtype) { return place(limits_.kept_hidden, cols, dtype); }
  Part logits_rows(std::int64_t cols, DType dtype) { return place(limits_.logits_rows(), cols, dtype); }
  Part experts_scratch(const ops::ExpertsShape& shape);

  // Parts that follow are used in this block only: the parts of all blocks have the same memory. Parts before the first
  // block keep theirs during the step.
  void begin_block();

  std::size_t bytes() const { return bytes_; }

  const ops::Precision precision;

 private:
  Part place(int rows, std::int64_t cols, DType dtype);
  std::size_t take(std::size_t size);

  const DeviceRules& rules_;
  const ops::StepLimits& limits_;
  std::size_t next_ = 0, kept_ = 0, bytes_ = 0;
  bool in_block_ = false;
};

}  // namespace charonia::model
