// Chooses between two kernels of attention at the start of an engine, for the layers that share a plan and for several
// steps.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/cuda/kernel_choice.h"
#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {

// Layers that share a plan.
struct AttentionLayers {
  AttentionShape shape;
  CacheLayer cache;                          // of one of them
  std::vector<ops::AttentionParams> scores;  // of one layer for each version of the kernels
};

// Adds a layer's scores if none of `layers` uses the same parts of the kernels.
void add_scores(AttentionLayers& layers, const ops::AttentionParams& how);

class AttentionChoice : public KernelChoice {
 public:
  using Attention = void(Stream&, const DeviceInfo&, const Tensor&, const Tensor&, const CacheLayer&,
                         const AttentionShape&, const ops::AttentionParams&, const AttentionWork&);
  struct Options : KernelChoice::Options {
    Attention* attention = &cuda::attention;
  };

  // Rows of a sequence after `before` positions.
  struct Chunk {
    int before, rows;
  };
  struct Step {
    int rows;          // that it stands for: of a chunk, or of the step
    std::string name;  // "after 1024 positions"
    std::vector<Chunk> chunks;
    bool candidate = false;  // the choice
  };
  struct Kernels {
    std::string_view of;  // "prompts"
    const char *usual, *candidate;
    bool AttentionShape::*selects;   // true: the candidate
    std::span<const Chunk> checked;  // a step that is compared at every start, before all others
    int checked_sms;                 // for this step, so that a thread block takes several items
  };

  AttentionChoice(const DeviceInfo& device, Options options, const Kernels& kernels)
      : KernelChoice(device, options),
        device_(device),
        attention_(options.attention),
        asked_(options.asked.has_value()),
        kernels_(kernels) {}

  // Sets Step::candidate (KernelChoice::choose_all()), and removes steps whose operands take more than
  // kGemmOperandBytes. Sets the same for all steps, and removes none, if Options::asked decides or the candidate is
  // unsupported. Frees all memory; partial results of attention take more.
  void choose(Stream& stream, const AttentionLayers& layers, std::string_view unsupported, std::vector<Step>& steps);

 private:
  bool agree(Stream& stream, const AttentionLayers& layers, std::span<const Chunk> chunks, int sms) const;
  std::optional<KernelTimes> measure(Stream& stream, const AttentionLayers& layers,
                                     std::span<const Chunk> chunks) const;

  DeviceInfo device_;
  Attention* attention_;
  bool asked_;  // for a kernel
  Kernels kernels_;
};

}  // namespace charonia::cuda
