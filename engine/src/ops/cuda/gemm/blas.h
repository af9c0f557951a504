// A library of GEMMs with weights, loaded at run time: cuBLASLt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// One of the library's algorithms for a GEMM, as the library writes it down. It means something to the same version
// of the library only.
struct BlasTactic {
  std::array<std::uint64_t, 8> algorithm{};
  std::size_t workspace_bytes = 0;
  bool operator==(const BlasTactic&) const = default;
};

class Blas {
 public:
  virtual ~Blas() = default;

  // What remembered algorithms depend on besides the device.
  virtual std::string version() const = 0;

  // The algorithms that the library holds for the fastest, most likely first, with sums in float and at most so much
  // workspace; none when it does not take such a GEMM.
  virtual std::vector<BlasTactic> tactics(const Gemm& gemm, std::size_t workspace_bytes) = 0;

  // Whether an algorithm that was written down serves this GEMM with so much workspace.
  virtual bool serves(const Gemm& gemm, const BlasTactic& tactic, std::size_t workspace_bytes) = 0;

  // Issues the GEMM without its bias. False, with nothing issued: the library refuses. Throws Error(internal) when
  // it fails in another way.
  virtual bool run(Stream& stream, const Gemm& gemm, const BlasTactic& tactic, void* workspace,
                   std::size_t workspace_bytes) = 0;
};

// cuBLASLt for the current device; null, with the reason in `why`, when it cannot be loaded. It is looked for where the
// environment variable CHARONIA_CUBLASLT says (a file, or the folder that holds it), and nowhere else if that is set;
// else where the system's loader looks, and then among the Python packages beside this module.
std::unique_ptr<Blas> load_cublas(std::string& why);

#if defined(CHARONIA_CUDA_ON_HOST)
// For tests: what load_cublas() gives from now on, where it otherwise gives nothing; empty: nothing again.
void set_host_blas(std::function<std::unique_ptr<Blas>()> make);
#endif

// The driver's version, for the same purpose as Blas::version.
std::string driver_version();

}  // namespace charonia::cuda
