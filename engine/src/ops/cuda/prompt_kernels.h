// Selects the kernel for the attention of prompts, for the layers that share a plan and for several sizes of steps.
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
      : device_(device),
        attention_(options.attention),
        asked_(options.wgmma.has_value()),
        choice_(device, std::move(options)) {}

  // Selects the kernels of each element of `plans`: measures steps with chunks of several numbers of rows, at the
  // beginning of prompts and after many positions. The kernel with products of warpgroups is chosen for a step if it is
  // faster than the other one and its results agree with the other one's. warning() names a kernel whose results differ
  // or that fails: no step then uses it. It also names a size that there is no memory to measure with. Needs at most
  // kGemmOperandBytes of memory for operands, and more for partial results of attention, and frees all of it. max_rows:
  // of a step; max_positions: of a sequence. Throws Error if the device fails after a kernel ran.
  void prepare(Stream& stream, std::span<const PromptLayers> plans, int max_rows, int max_positions);

  // Whether a step uses products of warpgroups in these layers. rows, before: the rows of its longest chunk, and the
  // positions before them. The largest measured number of rows up to `rows` decides.
  bool uses_wgmma(std::size_t plan, std::int64_t rows, std::int64_t before) const;
  // Whether some step uses them.
  bool chosen(std::size_t plan) const;

  // A line for each plan and measured step (KernelChoice::report()). Empty if the kernel was not considered.
  const std::vector<std::string>& report() const { return choice_.report(); }
  const std::string& warning() const { return choice_.warning(); }

  // Shorter prompts do not fill the tiles of 128 rows.
  static constexpr int kMinRows = 64;
  // A chunk after fewer positions uses the choice for the beginning of prompts.
  static constexpr int kManyPositions = 2048;

  // Rows of a sequence after `before` positions.
  struct Chunk {
    int before, rows;
  };

 private:
  struct Choice {
    int rows;
    bool after_many, wgmma;
  };
  std::vector<Choice> choose(Stream& stream, const PromptLayers& layers, int max_rows, int max_positions);
  bool agrees(Stream& stream, const PromptLayers& layers, const ops::AttentionParams& how) const;
  std::optional<KernelTimes> measure(Stream& stream, const PromptLayers& layers, std::span<const Chunk> step) const;

  DeviceInfo device_;
  Attention* attention_;
  bool asked_;  // for a kernel
  KernelChoice choice_;
  std::vector<std::vector<Choice>> chosen_;  // of each plan, in ascending order of rows
};

}  // namespace charonia::cuda
