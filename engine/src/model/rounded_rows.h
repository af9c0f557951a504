// Rounds the rows of a 16-bit or fp32 weight to codes and scales while they are read (setting `quantization`).
//
// The codes are symmetric. The arithmetic is done in the weight's own type, as in compressed-tensors, so the result has
// the same bits as a checkpoint that `charonia quantize --method rtn` writes:
//   scale = max |w| / limit, with limit = 127.5 (i8), 7.5 (u4) or 448 (f8_e4m3); 0 becomes the type's epsilon
//   code  = w / scale, rounded to the weight's type, clamped to the code's range, and rounded with ties to even
#pragma once

#include <cstdint>
#include <vector>

#include "ops/quant_weight.h"
#include "ops/tensor.h"

namespace charonia::model {

class RoundedRows {
 public:
  // group: columns that share a scale, a divisor of own.cols; 0: all columns of the whole row. rest: with group = 0,
  // the other columns of the same rows, which other ranks hold. They have the type of `own`. Reads the matrices as long
  // as the object exists.
  RoundedRows(const ops::HostMatrix& own, std::vector<ops::HostMatrix> rest, ops::Code code, std::int64_t group);

  const ops::HostMatrix& own() const { return own_; }
  std::int64_t group() const { return group_; }

  // Like QuantSource::read(), without zeros. Returns false if a value is NaN or infinite.
  bool read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales) const;

 private:
  ops::HostMatrix own_;
  std::vector<ops::HostMatrix> rest_;
  ops::Code code_;
  std::int64_t group_;
};

}  // namespace charonia::model
