#include "ops/cuda/prompt_kernels.h"

#include <algorithm>

#include "base/text.h"

namespace charonia::cuda {
namespace {

using Chunk = AttentionChoice::Chunk;
using Step = AttentionChoice::Step;

// Measured steps: rows of each chunk, and positions before it in some chunks of a step, or after many positions.
constexpr int kMeasuredRows[] = {PromptKernels::kMinRows, 256, 1024};
constexpr int kMeasuredBefore = 1024, kMeasuredMany = 8192;
constexpr int kRowsOfStep = 256;  // at least, if chunks are shorter

// Ends before, at and after ends of blocks and tiles, and is long enough for splits, also of the windows of a check.
constexpr Chunk kCheckedPrompts[] = {{0, 130}, {62, 66}, {77, 64}, {1300, 40}};

// Chunks of this number of rows: as many as fill a step, at the beginning of prompts and within them, or one after many
// positions. Empty if sequences are too short.
std::vector<Chunk> chunks_of(int rows, bool after_many, int max_positions) {
  const int most = max_positions - rows;
  if (after_many) {
    return most < PromptKernels::kManyPositions ? std::vector<Chunk>{}
                                                : std::vector<Chunk>{{std::min(kMeasuredMany, most), rows}};
  }
  std::vector<Chunk> chunks;
  for (int i = 0; most >= 0 && (i == 0 || i * rows < kRowsOfStep); ++i) {
    chunks.push_back({i % 2 == 0 ? 0 : std::min(kMeasuredBefore, most), rows});
  }
  return chunks;
}

std::vector<Step> steps_of(int max_rows, int max_positions) {
  std::vector<Step> steps;
  for (const int rows : kMeasuredRows) {
    for (const bool after_many : {false, true}) {
      const auto chunks = chunks_of(rows, after_many, max_positions);
      if (rows > max_rows || chunks.empty()) continue;
      const auto others = chunks.size() > 1 ? cat(" and ", chunks[1].before) : "";
      steps.push_back({rows, cat("after ", chunks[0].before, others, " positions"), chunks});
    }
  }
  return steps;
}

bool is_after_many(std::int64_t before) { return before >= PromptKernels::kManyPositions; }

}  // namespace

PromptKernels::PromptKernels(const DeviceInfo& device, Options options)
    : device_(device),
      asked_(options.asked.has_value()),
      choice_(device, std::move(options),
              {.of = "prompts",
               .usual = "tiles",
               .candidate = "wgmma",
               .selects = &AttentionShape::wgmma,
               .checked = kCheckedPrompts,
               .checked_sms = 4}) {}

void PromptKernels::prepare(Stream& stream, std::span<const AttentionLayers> plans, int max_rows, int max_positions) {
  chosen_.assign(plans.size(), {});
  choice_.begin();
  if (!choice_.considers_candidates()) return;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].scores.empty()) continue;  // of another kernel
    if (asked_) {
      chosen_[i] = {{kMinRows, "", {{0, kMinRows}}}, {kMinRows, "", {{kManyPositions, kMinRows}}}};
    } else {
      chosen_[i] = steps_of(max_rows, max_positions);
    }
    choice_.choose(stream, plans[i], why_no_wgmma(device_, plans[i].shape, plans[i].cache), chosen_[i]);
  }
  choice_.end();
}

bool PromptKernels::uses_wgmma(std::size_t plan, std::int64_t rows, std::int64_t before) const {
  bool wgmma = false;
  if (plan >= chosen_.size()) return wgmma;
  for (const auto& step : chosen_[plan]) {
    if (step.rows <= rows && is_after_many(step.chunks[0].before) == is_after_many(before)) wgmma = step.candidate;
  }
  return wgmma;
}

bool PromptKernels::chosen(std::size_t plan) const {
  return plan < chosen_.size() && std::ranges::any_of(chosen_[plan], &AttentionChoice::Step::candidate);
}

}  // namespace charonia::cuda
