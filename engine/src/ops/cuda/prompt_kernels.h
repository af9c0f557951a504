// Selects the kernel for the attention of prompts, once for the layers that share a plan.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/kernel_choice.h"
#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {

// Layers that share a plan.
struct PromptLayers {
  AttentionShape shape;
  CacheLayer cache;                          // of one of them
  std::vector<ops::AttentionParams> scores;  // of one layer for each version of the kernels
};

// Adds a layer's scores if none of `layers` uses the same parts of the kernels.
void add_scores(PromptLayers& layers, const ops::AttentionParams& how);

class PromptKernels {
 public:
  using Attention = void(Stream&, const DeviceInfo&, const Tensor&, const Tensor&, const CacheLayer&,
                         const AttentionShape&, const ops::AttentionParams&, const AttentionWork&);
  struct Options : KernelChoice::Options {
    Attention* attention = &cuda::attention;
  };

  PromptKernels(const DeviceInfo& device, Options options)
      : device_(device), attention_(options.attention), choice_(device, std::move(options)) {}

  // Selects the kernel of each element of `plans`. The kernel with products of warpgroups is chosen if it is faster
  // than the other one and its results agree with the other one's. warning() names a kernel whose results differ, or
  // that could not be measured. Needs at most kGemmOperandBytes of memory for operands, and more for partial results of
  // attention, and frees all of it. max_rows: of a step. Throws Error if the device fails after a kernel ran.
  void prepare(Stream& stream, std::span<const PromptLayers> plans, int max_rows);

  // Whether a step with this number of rows of its longest sequence uses products of warpgroups in these layers.
  bool uses_wgmma(std::size_t plan, std::int64_t longest) const { return longest >= kMinRows && chosen(plan); }
  bool chosen(std::size_t plan) const { return plan < chosen_.size() && chosen_[plan]; }

  // A line for each plan (KernelChoice::report()). Empty if the kernel was not considered.
  const std::vector<std::string>& report() const { return choice_.report(); }
  const std::string& warning() const { return choice_.warning(); }

  // Shorter prompts do not fill the tiles of 128 rows.
  static constexpr std::int64_t kMinRows = 64;

 private:
  bool choose(Stream& stream, const PromptLayers& layers, int max_rows);
  bool agrees(Stream& stream, const PromptLayers& layers, const ops::AttentionParams& how) const;
  std::optional<KernelTimes> measure(Stream& stream, const PromptLayers& layers, int rows) const;

  DeviceInfo device_;
  Attention* attention_;
  KernelChoice choice_;
  std::vector<bool> chosen_;
};

}  // namespace charonia::cuda
