#include "ops/cuda/decode_kernels.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/text.h"

namespace charonia::cuda {
namespace {

using Chunk = AttentionChoice::Chunk;

// Measured steps.
constexpr int kMeasuredSequences[] = {1, 8, 64};
constexpr int kMeasuredPositions[] = {1024, 8192};

// Ends before, at and after ends of blocks and tiles, and is long enough for splits, also of the windows of a check.
constexpr Chunk kCheckedDecodes[] = {{0, 1},   {14, 1},  {15, 1},  {16, 1},  {62, 1},  {63, 1},  {64, 1},   {126, 1},
                              {127, 1}, {128, 1}, {254, 1}, {255, 1}, {256, 1}, {700, 1}, {1087, 1}, {1340, 1}};

}  // namespace

DecodeKernels::DecodeKernels(const DeviceInfo& device, Options options)
    : choice_(device, std::move(options),
              {.of = "decodes",
               .usual = "scaled keys",
               .candidate = "scaled scores",
               .selects = &AttentionShape::k_outside,
               .checked = kCheckedDecodes,
               .checked_sms = 1}) {}

void DecodeKernels::prepare(Stream& stream, std::span<const AttentionLayers> plans, int max_sequences,
                            int max_positions, double seconds) {
  chosen_.assign(plans.size(), {});
  choice_.begin(seconds);
  if (!choice_.considers_candidates()) return;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].scores.empty() || !has_k_outside(plans[i].shape, plans[i].cache)) continue;
    for (const int sequences : kMeasuredSequences) {
      if (sequences > max_sequences) continue;
      std::set<int> measured;
      for (const int most : kMeasuredPositions) measured.insert(std::min(most, max_positions));
      for (const int positions : measured) {
        chosen_[i].push_back({sequences, cat("over ", positions, " positions"),
                              std::vector<Chunk>(static_cast<std::size_t>(sequences), {positions - 1, 1})});
      }
    }
    choice_.choose(stream, plans[i], {}, chosen_[i]);
  }
  choice_.end();
}

bool DecodeKernels::k_outside(std::size_t plan, std::int64_t rows) const {
  if (plan >= chosen_.size()) return false;
  int measured = 0;
  bool out = false;
  for (const auto& step : chosen_[plan]) {
    if (step.rows > rows) break;
    out = step.candidate && (out || step.rows != measured);
    measured = step.rows;
  }
  return out;
}

}  // namespace charonia::cuda
