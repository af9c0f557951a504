// Which way a product goes: cuBLASLt's or our own kernels, measured once per weight shape and number of rows.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/blas.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {

// Microseconds of one of many like products in a row: issue(i) issues the i-th, with operands that are not in the
// caches from the one before. expected: roughly what comes out, to choose their number by.
using ProductTimer =
    std::function<double(Stream& stream, double expected, const std::function<void(int index)>& issue)>;
inline constexpr int kMostTimedProducts = 32;

// By the device's clock; null where kernels run on the CPU, whose times say nothing.
ProductTimer make_product_timer();

// $CHARONIA_CACHE_DIR/products.json, by default in ~/.cache/charonia; empty when there is neither variable nor home.
std::filesystem::path product_memory_path();

class Products {
 public:
  struct Options {
    bool reproducible = false;
    std::unique_ptr<Blas> blas;    // null: own kernels only
    std::string no_blas;           // why there is none
    std::filesystem::path memory;  // where results are remembered; empty: nowhere
    ProductTimer timer;            // null: ways are chosen by rules
    double seconds = 10;           // to measure in, all shapes together
  };

  // The workspaces of all products are allocated here.
  // reproducible: our own kernels only, which give a row the same bits whatever the number of rows. Otherwise cuBLASLt
  // takes part, and where it cannot be loaded our own kernels do everything and warning() says so.
  Products(const DeviceInfo& device, bool reproducible);
  Products(const DeviceInfo& device, Options options);
  ~Products();

  // Chooses the ways of these products for numbers of rows up to max_rows: those that are remembered, and of the others
  // the fastest that is measured; when time or memory to measure runs out, by rules. `shapes` have type, out_type, n,
  // k, weight_stride and a weight, and rows: the most there will be (0: max_rows). In and out are made here. What was
  // measured is remembered by device, versions of driver and library, shape and rows.
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  // Also of what was not prepared: then by rules. Never allocates device memory, waits or measures.
  void run(Stream& stream, const Gemm& gemm);

  // What was chosen, a line each, for logs and benchmarks:
  // "rows 1..8 n 4096 k 4096 bf16 -> bf16: own stream 8 x 16, 4 stages, 8.0 us, 4.19 TB/s".
  std::vector<std::string> report() const;

  // What a user should know: that cuBLASLt is missing, with what to install; that results could not be written. Or
  // empty.
  std::string warning() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
