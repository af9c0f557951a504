#include "runtime/ngram_source.h"

#include <algorithm>
#include <array>
#include <random>

#include "cache/block_manager.h"

namespace charonia::runtime {
namespace {

constexpr std::int32_t kPair = 2;            // a match has at least two tokens
constexpr int kMaxMatch = 32;                // longer matches count as equal
constexpr int kMaxPlaces = 32;               // the latest places are compared
constexpr std::int32_t kMaxPrompt = 32768;   // the last tokens of a longer prompt are indexed

// The last two tokens before a position.
std::uint64_t pair_before(std::span<const TokenId> tokens, std::int32_t position) {
  const auto at = static_cast<std::size_t>(position);
  return std::uint64_t{static_cast<std::uint32_t>(tokens[at - 2])} << 32 | static_cast<std::uint32_t>(tokens[at - 1]);
}

int match_length(std::span<const TokenId> tokens, std::int32_t place, std::int32_t end) {
  int length = kPair;
  while (length < kMaxMatch && length < place &&
         tokens[static_cast<std::size_t>(place - 1 - length)] == tokens[static_cast<std::size_t>(end - 1 - length)]) {
    ++length;
  }
  return length;
}

int confidence_of(int match) { return match < 3 ? 0 : match < 4 ? 1 : match < 6 ? 2 : match < 9 ? 3 : 4; }

}  // namespace

std::size_t PairHash::operator()(std::uint64_t pair) const {
  static const std::uint64_t seed = std::random_device{}() | std::uint64_t{std::random_device{}()} << 32;
  const std::array tokens = {static_cast<TokenId>(pair >> 32), static_cast<TokenId>(pair)};
  return cache::BlockManager::default_hash(seed, 0, tokens);
}

void NgramSource::index(std::span<const TokenId> tokens) {
  const auto size = static_cast<std::int32_t>(tokens.size());
  if (end_ == 0) begin_ = end_ = std::max(kPair, size - kMaxPrompt);
  for (; end_ < size; ++end_) {
    auto& latest = latest_[pair_before(tokens, end_)];
    earlier_.push_back(latest);
    latest = end_;
  }
}

Proposal NgramSource::propose(std::span<const TokenId> tokens, int max_tokens) {
  index(tokens);
  const auto size = static_cast<std::int32_t>(tokens.size());
  if (size < kPair || max_tokens <= 0) return {};
  const auto found = latest_.find(pair_before(tokens, size));
  if (found == latest_.end()) return {};
  std::int32_t best = 0;
  int longest = 0;
  auto place = found->second;
  for (int i = 0; i < kMaxPlaces && place > 0 && longest < kMaxMatch; ++i) {
    if (const auto length = match_length(tokens, place, size); length > longest) {
      longest = length;
      best = place;
    }
    place = earlier_[static_cast<std::size_t>(place - begin_)];
  }
  Proposal out{.tokens = {}, .confidence = confidence_of(longest)};
  // After the end of the sequence, the text between the match and the end repeats.
  for (int i = 0; i < max_tokens; ++i) {
    const auto at = static_cast<std::size_t>(best + i);
    out.tokens.push_back(at < tokens.size() ? tokens[at] : out.tokens[at - tokens.size()]);
  }
  return out;
}

}  // namespace charonia::runtime
