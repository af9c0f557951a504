// Selects the kernel for the attention of decodes over a KV cache of integers, for the layers that share a plan: the
// one that scales elements of k, or the one that scales scores (AttentionShape::k_outside).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/cuda/attention_choice.h"

namespace charonia::cuda {

class DecodeKernels {
 public:
  using Options = AttentionChoice::Options;
  DecodeKernels(const DeviceInfo& device, Options options);

  // Selects the kernels of each element of `plans`: measures decodes of several numbers of sequences, each over few and
  // over many positions, and chooses as AttentionChoice says. max_positions: of a sequence. seconds: limit for
  // measurements. Throws Error if the device fails after a kernel ran.
  void prepare(Stream& stream, std::span<const AttentionLayers> plans, int max_sequences, int max_positions,
               double seconds);

  // Whether decodes in a step with this number of rows use k_outside in these layers: if it is faster for each number
  // of positions with the largest measured number of sequences up to `rows`. Rows of prompts and of proposals count
  // too, because a captured step only knows its rows; they change which kernel is the faster one, not which ones are
  // right.
  bool k_outside(std::size_t plan, std::int64_t rows) const;

  // A line for each plan and measured step (KernelChoice::report()). Empty if the kernel was not considered.
  const std::vector<std::string>& report() const { return choice_.report(); }
  const std::string& warning() const { return choice_.warning(); }

 private:
  AttentionChoice choice_;
  std::vector<std::vector<AttentionChoice::Step>> chosen_;  // of each plan, in ascending order of rows
};

}  // namespace charonia::cuda
