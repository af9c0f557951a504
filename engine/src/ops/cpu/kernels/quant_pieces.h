// In which pieces a panel of a quantised weight (kernels.h) is worked through: several groups, or a part of one.
#pragma once

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {
namespace {

// At most K of k, a multiple of kQuantAlign, with each group rounded up to a multiple of that.
template <int K>
struct QuantPieces {
  static constexpr int kK = K;
  static constexpr int kGroups = K / kQuantAlign;  // of a piece, at most

  explicit QuantPieces(const QuantPanel& panel) : shape(panel) {
    const std::int64_t all = (shape.group + kQuantAlign - 1) / kQuantAlign * kQuantAlign;
    stride = all < K ? all : K;
    most = all < K ? static_cast<int>(K / all) : 1;
    measure();
  }
  bool done() const { return group >= shape.groups(); }
  // The end of its groups is in it.
  bool last() const { return begin + length == shape.group; }
  void next() {
    if (last()) {
      group += count;
      begin = 0;
    } else {
      begin += length;
    }
    measure();
  }

  QuantPanel shape;
  std::int64_t group = 0;   // the first of the piece,
  int count = 0;            // and how many there are; 1 where a group has several pieces
  std::int64_t begin = 0;   // k within a group
  std::int64_t length = 0;  // k of each group
  std::int64_t stride = 0;  // from the numbers of a group to those of the next
  int most = 1;             // groups of a piece

 private:
  void measure() {
    const std::int64_t left = shape.groups() - group;
    count = static_cast<int>(left < most ? left : most);
    length = shape.group - begin < stride ? shape.group - begin : stride;
  }
};

}  // namespace
}  // namespace charonia::ops::cpu
