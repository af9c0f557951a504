// The file that stores the fastest kernel candidate of each GEMM, and the times of other kernels (kernel_choice.h).
//
// All processes of a user share it. It is replaced as a whole, never modified in place, and entries of other processes
// are kept. Entries that cannot be read or have another format are ignored.
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

// The properties, besides the number of rows, that the choice of a GEMM tactic depends on.
struct GemmShape {
  DType type = DType::bf16, out_type = DType::bf16;
  std::int64_t n = 0, k = 0;
  std::optional<ops::QuantFormat> quant{};  // of the weight, if it is quantised
  Gate gate = Gate::none;
  bool ordered = false;  // Gemm::ordered
  auto operator<=>(const GemmShape&) const = default;
};
// "n 4096 k 4096 bf16 -> fp32", and ", int4, groups of 128", ", silu gate" or ", one order"
std::string to_string(const GemmShape& shape);

struct GemmCandidate {
  std::optional<BlasTactic> blas{};  // tactic of the library; if empty, `own` is used
  GemmTactic own{};                  // also the fallback if the library rejects the GEMM
  double microseconds = 0;           // 0: chosen by rule
  // If > 0, the library multiplies the quantised weight in dequantised parts of this number of rows (dequantised.h).
  std::int64_t dequantised_rows = 0;
  std::int64_t integer_rows = 0;  // the same for int8 codes, whose sums are scaled afterwards (integer_parts.h)
  std::int64_t padded_rows = 0;  // the library computes this number of rows if there are fewer; 0: the GEMM's rows
  bool apart = false;            // of a GEMM with a gate: the GEMM's own choice, then the gate
  bool same_tactic(const GemmCandidate& other) const {
    return blas == other.blas && dequantised_rows == other.dequantised_rows && integer_rows == other.integer_rows &&
           padded_rows == other.padded_rows && apart == other.apart && (blas || apart || own == other.own);
  }
};

// The key of results. It has everything that changes a measurement; library: with the version, and with the mode.
std::string autotune_key(const DeviceInfo& device, const std::string& library, Overlap overlap, bool unproven);

class AutotuneCache {
 public:
  // `key`: see autotune_key(). Results with other keys are kept and ignored. An empty path: no file.
  AutotuneCache(std::filesystem::path path, std::string key);

  std::optional<GemmCandidate> find(const GemmShape& shape, int rows) const {
    return find_named(to_string(shape), rows);
  }
  void keep(const GemmShape& shape, int rows, const GemmCandidate& tactic) {
    keep_named(to_string(shape), rows, tactic);
  }
  // The same for a kernel that is not a GEMM's, by a name of the computation.
  std::optional<GemmCandidate> find_named(const std::string& name, int rows) const;
  void keep_named(const std::string& name, int rows, const GemmCandidate& tactic);

  // Writes the new results. Returns an empty text, or why the file could not be written.
  std::string save();

 private:
  using Entries = std::map<std::pair<std::string, int>, GemmCandidate>;  // by shape and rows
  std::filesystem::path path_;
  std::string key_;
  Entries known_, added_;
};

}  // namespace charonia::cuda
