// Selects the kernel of a GEMM: cuBLASLt's or a built-in one, measured once per weight shape and number of rows.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "charonia/error.h"
#include "ops/cuda/gemm/blas.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/rows.h"

namespace charonia::cuda {

// Returns the time in microseconds of one of many equal GEMMs in sequence. issue(i) issues the i-th, with operands that
// the previous one has not left in the caches. expected: an estimate of the result, to choose the number of GEMMs.
using GemmTimer = std::function<double(Stream& stream, double expected, const std::function<void(int index)>& issue)>;
inline constexpr int kMaxTimedGemms = 32;

// Uses the device's clock; null on the emulated device, whose times mean nothing.
GemmTimer make_gemm_timer();

// $CHARONIA_CACHE_DIR/gemms.json, by default in ~/.cache/charonia; empty if neither the variable nor a home folder
// exists.
std::filesystem::path autotune_cache_path();

// $CHARONIA_CUDA_MEASURE_S: seconds for the measurement of GEMMs; 0: no kernel is measured. Throws
// Error(invalid_argument) if the variable is not a number, or below 0.
double measure_seconds();

// Call after an error of a kernel that is measured or checked. Throws Error if every later call fails too, as after an
// illegal address. The message names the kernel and the computation. is_unproven: no GPU has run the kernel yet.
void require_device(Stream& stream, const std::string& kernel, const std::string& computation, bool is_unproven,
                    const Error& error);

std::string to_string(const GemmTactic& tactic);  // "tile 32 x 64, 6 stages, 2 blocks over k, a cluster"

class GemmRunner {
 public:
  struct Options {
    bool reproducible = false;
    std::unique_ptr<Blas> blas;    // null: built-in kernels only
    std::string no_blas;           // the reason if blas is null
    std::filesystem::path memory;  // the file for results; empty: none
    GemmTimer timer;               // null: tactics are chosen by rule
    double seconds = 10;           // limit for all measurements together; default of $CHARONIA_CUDA_MEASURE_S
    bool unproven = unproven_setting();   // also candidates for which unproven() (gemm.h) is true
    Overlap overlap = overlap_setting();  // how launches overlap; results are stored by it
    std::size_t dequantised_bytes = kDequantisedBytes;  // maximum size of a dequantised part of a weight
  };

  // Allocates the workspaces of all GEMMs. reproducible: only built-in kernels, which give a row the same bits for any
  // number of rows. Otherwise cuBLASLt is used too. If it cannot be loaded, built-in kernels compute everything, and
  // warning() says so.
  GemmRunner(const DeviceInfo& device, bool reproducible);
  GemmRunner(const DeviceInfo& device, Options options);
  ~GemmRunner();

  // Selects the kernels of these GEMMs for all numbers of rows up to max_rows: stored results first, then measurements;
  // when time or memory for measurements runs out, by rule. `shapes` have type, out_type, n, k, weight_stride, a
  // weight, and rows: the maximum (0: max_rows). Inputs and outputs are created here. Measured results are stored by
  // device, versions of driver and library, settings of kernels, shape and rows. A GEMM with a gate is measured without the gate, and for
  // few rows also with it. The results of a measured or stored kernel are compared with those of a reference kernel
  // (reference_tactic()); a kernel whose results differ is not chosen, and warning() names it.
  void prepare(Stream& stream, std::span<const Gemm> shapes, int max_rows);

  // Reserves the memory that GEMMs with this quantised weight need: prepared inputs (quant_gemm.h), and a dequantised
  // part. Call for every such weight before prepare().
  void reserve(const Gemm& gemm);

  // Memory for the input codes of an 8-bit GEMM, valid until the GEMM is run; empty if there is no memory, or if its
  // columns have an order. codes_given() returns that GEMM with such inputs.
  std::optional<RowCodes> room_for_codes(const Gemm& gemm);
  static Gemm codes_given(const Gemm& gemm, const RowCodes& codes);

  // Unprepared GEMMs use tactics that are chosen by rule. Never allocates device memory, waits or measures.
  void run(Stream& stream, const Gemm& gemm);

  // The same for a GEMM with a gate, if one kernel for both was faster than two. If that was not measured: if the
  // stream kernel was chosen for the GEMM without the gate. Otherwise returns false and issues nothing.
  bool run_gated(Stream& stream, const Gemm& gemm);

  // The chosen kernels, one line each, for people to read: "rows 1..8 n 4096 k 4096 bf16 -> bf16: own stream 8 x 16, 4
  // stages, 8.0 us, 4.19 TB/s". After a shape's lines follow the GEMMs of rejected(): "n 4096 k 4096 bf16 -> bf16:
  // own kernels computed 3 GEMMs of 5..7 rows although cuBLASLt was chosen".
  std::vector<std::string> report() const;

  // Number of GEMMs in run() that a built-in kernel computed although the library was chosen: the library rejected the
  // GEMM, or there was no memory to pad its rows. The first of each is also a warning in the log. A captured GEMM
  // counts when it is captured, not when it is replayed. Callable from any thread.
  std::int64_t rejected() const;

  // Whether weights of this type should be packed (gemm.h): only in reproducible mode, where only built-in kernels read
  // them. The library reads only row-major weights, and a weight is stored once.
  bool packs(DType weight) const;

  // "cublasLt 130200", or "own kernels only" with the reason, if there is one.
  std::string library() const;

  // A warning for the user: that cuBLASLt is missing, with what to install, that results could not be written, or that
  // kernels had wrong results. Otherwise empty.
  std::string warning() const;

  // Seconds that prepare() has left of Options::seconds.
  double seconds_left() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::cuda
