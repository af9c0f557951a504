// A library of GEMMs, loaded at run time: cuBLASLt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// An algorithm of the library for a GEMM, in the library's serialised form. Valid only for the same version of the
// library.
struct BlasTactic {
  std::array<std::uint64_t, 8> algorithm{};
  std::size_t workspace_bytes = 0;
  bool operator==(const BlasTactic&) const = default;
};

class Blas {
 public:
  virtual ~Blas() = default;

  // The version, which stored algorithms depend on, besides the device.
  virtual std::string version() const = 0;

  // The algorithms that the library considers fastest, most likely first, with sums in float and at most this
  // workspace; empty if it does not support the GEMM. A GEMM of type i8 has sums in int32, which is its out_type.
  virtual std::vector<BlasTactic> tactics(const Gemm& gemm, std::size_t workspace_bytes) = 0;

  // Whether a stored algorithm can run this GEMM with this workspace.
  virtual bool serves(const Gemm& gemm, const BlasTactic& tactic, std::size_t workspace_bytes) = 0;

  // Issues the GEMM without its bias. Returns false, and issues nothing, if the library rejects it. Throws
  // Error(internal) for other failures.
  virtual bool run(Stream& stream, const Gemm& gemm, const BlasTactic& tactic, void* workspace,
                   std::size_t workspace_bytes) = 0;
};

// cuBLASLt for the current device; null, with the reason in `why`, if it cannot be loaded. If the environment variable
// CHARONIA_CUBLASLT is set, loads only that file, or the library in that folder. Otherwise tries the system's loader,
// then the Python packages next to this module.
std::unique_ptr<Blas> load_cublas(std::string& why);

// The driver's version, which stored algorithms depend on too.
std::string driver_version();

}  // namespace charonia::cuda
