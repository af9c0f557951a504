// Selects the kernels for the GEMMs of quantised experts, once for the layers of one shape.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/cuda_experts.h"
#include "ops/cuda/kernel_choice.h"
#include "ops/cuda/kernels/experts.h"

namespace charonia::cuda {

// Layers of experts with the same shape: they share the choices.
struct ExpertLayers {
  std::vector<const CudaExperts*> layers;
  int top_k = 0;
  ops::Activation activation{};
};

class ExpertKernels {
 public:
  using Multiply = void(Stream&, const DeviceInfo&, const ExpertGemm&);
  struct Options : KernelChoice::Options {
    bool reproducible = false;  // wgmma adds in another order than the other kernels, so it is not used
    Multiply* multiply = &multiply_experts;
  };

  ExpertKernels(const DeviceInfo& device, Options options)
      : device_(device),
        reproducible_(options.reproducible),
        asked_(options.asked),
        multiply_(options.multiply),
        choice_(device, std::move(options)) {}

  // Adds a layer to the layers of its shape.
  static void add(std::vector<ExpertLayers>& all, const CudaExperts& layer, int top_k, ops::Activation activation);

  // Selects the kernels of steps of up to max_rows rows. wgmma is chosen for a GEMM of experts and an average number of
  // rows per expert if it is faster than the other kernel. If it fails, or if its results differ, for one average, it is
  // not used for any, and warning() names it. Needs at most kGemmOperandBytes of memory, and frees all of it. seconds:
  // limit for measurements. Throws Error if the device fails after a kernel ran.
  void prepare(Stream& stream, std::span<const ExpertLayers> all, int max_rows, double seconds);

  // Whether a step with this number of rows uses wgmma.
  struct Use {
    bool gate_up = false, down = false;
  };
  Use use(const CudaExperts& layer, int top_k, std::int64_t rows) const;

  // A line for each GEMM and range of averages (KernelChoice::report()). Empty if wgmma was not considered.
  const std::vector<std::string>& report() const { return choice_.report(); }
  const std::string& warning() const { return choice_.warning(); }

  // A step uses the choice of the next larger average of rows per expert, or of the last one. Up to kStreamAverage, the
  // kernel for few rows computes the GEMMs. Tiles have 32 rows up to an average of 32, and 64 rows beyond
  // (quant_expert_tile_rows()).
  static constexpr std::array kAverages{8, 16, 32, 64, 128};
  static constexpr int kStreamAverage = 4;

 private:
  // The properties that a choice depends on.
  struct Shape {
    DType type;
    int experts, top_k;
    std::int64_t hidden, inter;
    ops::QuantFormat gate_up, down;
    bool gate_up_bias, down_bias, ordered;
    auto operator<=>(const Shape&) const = default;
  };
  static Shape shape_of(const CudaExperts& layer, int top_k);

  // A GEMM of the layers, with the rows of a range of averages.
  struct Case {
    const ExpertLayers* of;
    bool down;
    std::size_t range;  // index of kAverages
    int rows;           // of the measured step
    int tile_rows;
  };
  static std::string name_of(const ExpertLayers& of, bool down, const std::string& averages);
  static std::vector<Case> cases_of(const ExpertLayers& of, bool down, int max_rows);
  KernelChoice::Computation computation(Stream& stream, const Case& one) const;
  void report_asked(Stream& stream, const ExpertLayers& of);
  bool agrees(Stream& stream, const Case& one) const;
  KernelTimes measure(Stream& stream, const Case& one) const;

  DeviceInfo device_;
  bool reproducible_;
  std::optional<bool> asked_;
  Multiply* multiply_;
  KernelChoice choice_;
  std::map<Shape, std::array<Use, kAverages.size()>> chosen_;
};

}  // namespace charonia::cuda
