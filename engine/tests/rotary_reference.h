// Heads of q and k after norm, rotation and scaling, by their definition in double.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "ops_support.h"

namespace charonia::ops {

struct RotaryReference {
  int heads = 1, kv_heads = 1, dim = 2;
  int rotary_dim = 0;  // 0: nothing is rotated
  bool interleaved = false;
  bool normed = false;      // q and k, per head
  bool norm_after = false;  // applies the norm after the rotation
  bool norm_rows = false;   // the norm is over all heads of q, and over all heads of k
  bool v_norm = false;      // v too, per head and without weights
  bool v_from_k = false;    // v is k before its norm and rotation
  bool scaled = false;      // q, by position
  float eps = 0;
  std::span<const float> cos_sin = {};            // [rows of the table, rotary_dim]
  std::span<const float> q_norm = {}, k_norm = {};  // [dim], or [heads * dim]
  std::span<const float> q_scale = {};            // [positions]

  struct Head {
    std::vector<double> value, magnitude;  // magnitude: the sum of the absolute values of an element's terms
  };
  // Head `head` of a row of qkv; v heads follow those of k. turn: the row of cos_sin.
  Head operator()(const Matrix& qkv, std::int64_t row, int head, int position, int turn) const {
    const bool is_q = head < heads, is_v = head >= heads + kv_heads;
    Head out;
    auto& [x, magnitude] = out;
    const int source = is_v && v_from_k ? head - kv_heads : head;
    for (int d = 0; d < dim; ++d) x.push_back(qkv.at(row, source * dim + d));
    for (const double one : x) magnitude.push_back(std::abs(one));
    const auto scale_by = [&](int d, double factor) {
      x[static_cast<std::size_t>(d)] *= factor;
      magnitude[static_cast<std::size_t>(d)] *= std::abs(factor);
    };
    if (is_v) {
      double squares = 0;
      for (const double one : x) squares += one * one;
      for (int d = 0; v_norm && d < dim; ++d) scale_by(d, 1 / std::sqrt(squares / dim + static_cast<double>(eps)));
      return out;
    }
    const auto normalise = [&] {
      double squares = 0;
      int count = dim;
      for (const double one : x) squares += one * one;
      if (norm_rows) {
        const int first = is_q ? 0 : heads * dim;
        count = (is_q ? heads : kv_heads) * dim;
        squares = 0;
        for (int i = first; i < first + count; ++i) squares += std::pow(qkv.at(row, i), 2.0);
      }
      const double factor = 1 / std::sqrt(squares / count + static_cast<double>(eps));
      const int first = norm_rows ? (is_q ? head : head - heads) * dim : 0;
      for (int d = 0; d < dim; ++d) {
        scale_by(d, factor * static_cast<double>((is_q ? q_norm : k_norm)[static_cast<std::size_t>(first + d)]));
      }
    };
    if (normed && !norm_after) normalise();
    const auto half = static_cast<std::size_t>(rotary_dim / 2);
    for (std::size_t d = 0; d < half; ++d) {
      const std::size_t first = interleaved ? 2 * d : d, second = interleaved ? 2 * d + 1 : half + d;
      const auto at = static_cast<std::size_t>(turn * rotary_dim) + d;
      const double cosine = cos_sin[at], sine = cos_sin[at + half], a = x[first], b = x[second];
      x[first] = a * cosine - b * sine;
      x[second] = b * cosine + a * sine;
      magnitude[first] = std::abs(a * cosine) + std::abs(b * sine);
      magnitude[second] = std::abs(b * cosine) + std::abs(a * sine);
    }
    if (normed && norm_after) normalise();
    for (int d = 0; is_q && scaled && d < dim; ++d) scale_by(d, q_scale[static_cast<std::size_t>(position)]);
    return out;
  }
};

}  // namespace charonia::ops
