// Selects the kernel for the attention of prompts, for the layers that share a plan and for several sizes of steps.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/attention_choice.h"

namespace charonia::cuda {

class PromptKernels {
 public:
  using Options = AttentionChoice::Options;
  PromptKernels(const DeviceInfo& device, Options options);

  // Selects the kernels of each element of `plans`: measures steps with chunks of several numbers of rows, at the
  // beginning of prompts and after many positions. The kernel with products of warpgroups is chosen for a step as
  // AttentionChoice says. max_rows: of a step; max_positions: of a sequence. Throws Error if the device fails after a
  // kernel ran.
  void prepare(Stream& stream, std::span<const AttentionLayers> plans, int max_rows, int max_positions);

  // Whether a step uses products of warpgroups in these layers. rows, before: the rows of its longest chunk, and the
  // positions before them. The largest measured number of rows up to `rows` decides.
  bool uses_wgmma(std::size_t plan, std::int64_t rows, std::int64_t before) const;
  // Whether some step uses them.
  bool chosen(std::size_t plan) const;

  // A line for each plan and measured step (KernelChoice::report()). Empty if the kernel was not considered.
  const std::vector<std::string>& report() const { return choice_.report(); }
  const std::string& warning() const { return choice_.warning(); }
  double seconds_left() const { return choice_.seconds_left(); }

  // Shorter prompts do not fill the tiles of 128 rows.
  static constexpr int kMinRows = 64;
  // A chunk after fewer positions uses the choice for the beginning of prompts.
  static constexpr int kManyPositions = 2048;

 private:
  DeviceInfo device_;
  bool asked_;  // for a kernel
  AttentionChoice choice_;
  std::vector<std::vector<AttentionChoice::Step>> chosen_;  // of each plan, in ascending order of rows
};

}  // namespace charonia::cuda
