// The file that remembers which kernel candidate of a GEMM was fastest.
//
// It belongs to all processes of a user: it is replaced as a whole, never written in place, and what others have added
// is kept. What cannot be read, or has another format, counts as nothing.
#pragma once

#include <compare>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "ops/cuda/gemm/blas.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// What tactics of GEMMs are chosen by, besides the number of rows.
struct GemmShape {
  DType type = DType::bf16, out_type = DType::bf16;
  std::int64_t n = 0, k = 0;
  std::optional<ops::QuantFormat> quant{};  // of the weight, where it is quantised
  auto operator<=>(const GemmShape&) const = default;
};
std::string to_string(const GemmShape& shape);  // "n 4096 k 4096 bf16 -> fp32", and ", int4, groups of 128"

struct GemmCandidate {
  std::optional<BlasTactic> blas{};  // of the library; else `own`
  GemmTactic own{};                  // also what serves where the library refuses
  double microseconds = 0;           // 0: chosen by rule
  // The library takes a quantised weight dequantised, so many rows at a time (dequantised.h); 0: as it is.
  std::int64_t dequantised_rows = 0;
  bool same_tactic(const GemmCandidate& other) const {
    return blas == other.blas && dequantised_rows == other.dequantised_rows && (blas || own == other.own);
  }
};

class AutotuneCache {
 public:
  // `key`: device, versions and mode; results of other keys are kept and not looked at. An empty path: no file.
  AutotuneCache(std::filesystem::path path, std::string key);

  std::optional<GemmCandidate> find(const GemmShape& shape, int rows) const;
  void keep(const GemmShape& shape, int rows, const GemmCandidate& tactic);

  // Writes what was kept since the last time; empty, or why it could not be written.
  std::string save();

 private:
  using Entries = std::map<std::pair<std::string, int>, GemmCandidate>;  // shape and rows
  std::filesystem::path path_;
  std::string key_;
  Entries known_, added_;
};

}  // namespace charonia::cuda
