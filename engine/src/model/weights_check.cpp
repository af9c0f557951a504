// Reads all weights again to find values that no model can compute with.
#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"
#include "model/weights.h"

namespace charonia::model {
namespace {

// Bytes between two checks for a stop request: a millisecond from memory, some dozens of milliseconds from most disks.
constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;

// Whether the magnitude bits of any value are `limit` or more. Magnitude bits rise with the magnitude; infinities and
// NaN have the largest. Data may be unaligned.
template <class Bits>
bool any_from(const ops::HostMatrix& matrix, Bits limit, const std::stop_token& stop) {
  constexpr auto kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1U);
  const auto rows_at_once = std::max<std::int64_t>(1, kBlockBytes / static_cast<std::int64_t>(sizeof(Bits)) /
                                                          std::max<std::int64_t>(1, matrix.cols));
  Bits greatest = 0;
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    if (row % rows_at_once == 0 && stop.stop_requested()) return false;
    const auto* const data = matrix.row(row);
    for (std::int64_t i = 0; i < matrix.cols; ++i) {
      Bits bits = 0;
      std::memcpy(&bits, data + static_cast<std::size_t>(i) * sizeof bits, sizeof bits);
      greatest = std::max(greatest, static_cast<Bits>(bits & kMagnitude));
    }
  }
  return greatest >= limit;
}

// `held` is the type that the weights are rounded to. The smallest magnitude that rounds to infinity in it counts too.
bool any_infinite(const ops::HostMatrix& matrix, DType held, const std::stop_token& stop) {
  switch (matrix.dtype) {
    case DType::f32:
      return any_from<std::uint32_t>(matrix, held == DType::f16    ? 0x477ff000U  // 65520
                                             : held == DType::bf16 ? 0x7f7f8000U
                                                                   : 0x7f800000U,
                                     stop);
    case DType::bf16:
      return any_from<std::uint16_t>(matrix, held == DType::f16 ? 0x4780 : 0x7f80, stop);  // 65536
    case DType::f16:
      return any_from<std::uint16_t>(matrix, 0x7c00, stop);
    default:
      return false;
  }
}

}  // namespace

// Reading checks the scales, zeros and codes.
std::string WeightFiles::find_broken(const Part& part, const std::stop_token& stop) {
  try {
    const auto source = opened(part);
    const auto rows = std::max<std::int64_t>(1, kBlockBytes / source->cols());
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    std::vector<std::uint8_t> codes(size(rows * source->cols()));
    std::vector<float> scales(size(rows * source->groups()));
    std::vector<std::int8_t> zeros(scales.size());
    for (std::int64_t first = 0; first < source->rows() && !stop.stop_requested(); first += rows) {
      source->read(first, std::min(rows, source->rows() - first), codes.data(), scales.data(), zeros.data());
    }
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

std::string WeightFiles::find_broken(DType data, const std::stop_token& stop) const {
  for (const auto& [name, parts] : tensors_) {
    for (const auto& part : parts) {
      if (stop.stop_requested()) return {};
      if (part.quantised) {
        if (auto broken = find_broken(part, stop); !broken.empty()) return broken;
        continue;
      }
      const auto& values = view(part);
      const auto tensor = cat("tensor ", part.name, " of ", part.file->path().string());
      if (any_infinite(values, values.dtype, stop)) {
        return cat(tensor, " has values that are not finite (NaN or infinity): download the model again");
      }
      // Vectors are kept as float.
      if (values.cols > 1 && any_infinite(values, data, stop)) {
        return cat(tensor, " has values that ", to_string(data), " cannot hold: use another --dtype");
      }
    }
    drop_pages();
  }
  return {};
}

}  // namespace charonia::model
