// Which way a product goes: cuBLASLt's or our own kernels, measured once per weight shape and number of rows.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

class Products {
 public:
  // reproducible: our own kernels only, which give a row the same bits whatever the number of rows.
  // Throws Error(unavailable) when cuBLASLt is needed and not to be found, with what to install.
  Products(const DeviceInfo& device, bool reproducible);
  ~Products();

  // Measures the ways of these products for numbers of rows up to max_rows and keeps the fastest of each; results are
  // remembered in a file under $CHARONIA_CACHE_DIR (default: ~/.cache/charonia), by device, library version and shape.
  // `shapes` have type, out_type, n, k, weight_stride and a weight; rows and in and out are made here. Allocates the
  // workspace that run() needs.
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  // Also without prepare(): then by rules. Never allocates after prepare().
  void run(Stream& stream, const Gemm& gemm);

  // What was chosen, a line each, for logs and benchmarks: "rows 1..8 n 4096 k 4096: own 16x8, 3 stages, 3.1 TB/s".
  std::vector<std::string> report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether cuBLASLt can be loaded: empty, or why not.
std::string cublas_missing();

}  // namespace charonia::cuda
