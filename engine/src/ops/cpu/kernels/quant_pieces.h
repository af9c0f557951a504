// Divides a panel of a quantised weight (kernels.h) into pieces: several groups, or a part of one group.
#pragma once

#include "ops/cpu/kernels.h"

namespace charonia::ops::cpu {
namespace {

// A piece has at most K of k, a multiple of kQuantAlign, with each group rounded up to a multiple of kQuantAlign.
template <int K>
struct QuantPieces {
  static constexpr int kK = K;
  static constexpr int kGroups = K / kQuantAlign;  // maximum groups of a piece

  explicit QuantPieces(const QuantPanel& panel) : shape(panel) {
    const std::int64_t all = (shape.group + kQuantAlign - 1) / kQuantAlign * kQuantAlign;
    stride = all < K ? all : K;
    most = all < K ? static_cast<int>(K / all) : 1;
    measure();
  }
  bool done() const { return group >= shape.groups(); }
  // Whether the piece contains the end of its groups.
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
  std::int64_t group = 0;   // the first group of the piece
  int count = 0;            // number of groups; 1 if a group has several pieces
  std::int64_t begin = 0;   // k within a group
  std::int64_t length = 0;  // k of each group
  std::int64_t stride = 0;  // distance between the numbers of two groups
  int most = 1;             // maximum groups of a piece

 private:
  void measure() {
    const std::int64_t left = shape.groups() - group;
    count = static_cast<int>(left < most ? left : most);
    length = shape.group - begin < stride ? shape.group - begin : stride;
  }
};

}  // namespace
}  // namespace charonia::ops::cpu
