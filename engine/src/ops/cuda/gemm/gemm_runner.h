// Which kernel a GEMM goes to: cuBLASLt's or our own kernels, measured once per weight shape and number of rows.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/gemm/blas.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {

// Microseconds of one of many like GEMMs in a row: issue(i) issues the i-th, with operands that are not in the
// caches from the one before. expected: roughly what comes out, to choose their number by.
using GemmTimer = std::function<double(Stream& stream, double expected, const std::function<void(int index)>& issue)>;
inline constexpr int kMaxTimedGemms = 32;

// By the device's clock; null where kernels run on the CPU, whose times say nothing.
GemmTimer make_gemm_timer();

// $CHARONIA_CACHE_DIR/gemms.json, by default in ~/.cache/charonia; empty when there is neither variable nor home.
std::filesystem::path autotune_cache_path();

std::string to_string(const GemmTactic& tactic);  // "tile 32 x 64, 6 stages, 2 blocks over k, a cluster"

class GemmRunner {
 public:
  struct Options {
    bool reproducible = false;
    std::unique_ptr<Blas> blas;    // null: own kernels only
    std::string no_blas;           // why there is none
    std::filesystem::path memory;  // where results are remembered; empty: nowhere
    GemmTimer timer;               // null: tactics are chosen by rules
    double seconds = 10;           // to measure in, all shapes together; default of $CHARONIA_CUDA_MEASURE_S
    std::size_t dequantised_bytes = kDequantisedBytes;  // most that a part of a weight may take for the library
  };

  // The workspaces of all GEMMs are allocated here.
  // reproducible: our own kernels only, which give a row the same bits whatever the number of rows. Otherwise cuBLASLt
  // takes part, and where it cannot be loaded our own kernels do everything and warning() says so.
  GemmRunner(const DeviceInfo& device, bool reproducible);
  GemmRunner(const DeviceInfo& device, Options options);
  ~GemmRunner();

  // Chooses the kernel candidates of these GEMMs for numbers of rows up to max_rows: those that are remembered, and of
  // the others the fastest that is measured; when time or memory to measure runs out, by rules. `shapes` have type,
  // out_type, n, k, weight_stride and a weight, and rows: the most there will be (0: max_rows). In and out are made
  // here. What was measured is remembered by device, versions of driver and library, shape and rows.
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  // Makes room for what GEMMs with this quantised weight may need: its inputs prepared (quant_gemm.h), and a part of it
  // dequantised. To be called of every such weight before GEMMs are prepared.
  void reserve(const Gemm& gemm);

  // Where codes of the inputs of a GEMM of 8-bit numbers may lie until it is run; none where there is no room, or where
  // its columns have an order of their own. codes_given() is that GEMM with such inputs.
  std::optional<RowCodes> room_for_codes(const Gemm& gemm);
  static Gemm codes_given(const Gemm& gemm, const RowCodes& codes);

  // Also of what was not prepared: then by rules. Never allocates device memory, waits or measures.
  void run(Stream& stream, const Gemm& gemm);

  // The same of a GEMM with a gate, where its kernel is one that gates: that which was chosen for the GEMM without it.
  // Otherwise false, and nothing is issued.
  bool run_gated(Stream& stream, const Gemm& gemm);

  // What was chosen, a line each, for people to read:
  // "rows 1..8 n 4096 k 4096 bf16 -> bf16: own stream 8 x 16, 4 stages, 8.0 us, 4.19 TB/s". Behind a shape's lines,
  // where the library rejected what it had been chosen for: "n 4096 k 4096 bf16 -> bf16: cuBLASLt rejected 3 GEMMs
  // of 5..7 rows, which own kernels took".
  std::vector<std::string> report() const;

  // How often run() met such a rejection; the first one is also a warning in the log. A captured GEMM counts when it
  // is captured, not when it is replayed. From any thread.
  std::int64_t rejected() const;

  // Whether weights of this type should be packed (gemm.h): in reproducible mode, where our own kernels alone read
  // them. The library reads rows only, and a weight lies in memory once.
  bool packs(DType weight) const;

  // "cublasLt 130200", or "own kernels only" and, where there is one, the reason.
  std::string library() const;

  // What a user should know: that cuBLASLt is missing, with what to install; that results could not be written. Or
  // empty.
  std::string warning() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
