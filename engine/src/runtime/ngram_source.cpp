#include "runtime/ngram_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <random>
#include <utility>

#include "cache/block_manager.h"

namespace charonia::runtime {
namespace {

constexpr std::int32_t kPair = 2;            // a match has at least two tokens
constexpr int kMaxMatch = 32;                // longer matches count as equal
constexpr int kMaxPlaces = 32;               // the latest places are compared
constexpr int kMaxSteps = 128;               // the same, with places of other pairs with the same hash
constexpr std::int32_t kOutputBuckets = 4096;  // of a longer output, the lists are longer
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

PairIndex::PairIndex(std::int32_t begin, std::int32_t step, std::int32_t buckets)
    : begin_(begin), step_(step), buckets_(std::bit_ceil(static_cast<std::size_t>(buckets))) {}

void PairIndex::add(std::span<const TokenId> tokens) {
  const auto place = next();
  auto& [latest, earliest] = buckets_[bucket_of(pair_before(tokens, place))];
  earlier_.push_back(step_ > 0 ? latest : 0);
  if (step_ < 0 && latest != 0) earlier_[index_of(earliest)] = place;
  if (step_ > 0 || latest == 0) latest = place;
  if (step_ < 0) earliest = place;
}

NgramSource::NgramSource(std::shared_ptr<PairIndex> prompt, std::int32_t prompt_tokens)
    : prompt_(std::move(prompt)),
      prompt_end_(std::max(kPair, prompt_tokens - kMaxPrompt)),
      output_(std::max(kPair, prompt_tokens), 1, kOutputBuckets) {}

std::shared_ptr<PairIndex> NgramSource::prompt_index(std::int32_t prompt_tokens) {
  return std::make_shared<PairIndex>(prompt_tokens - 1, -1, std::min(prompt_tokens, kMaxPrompt));
}

Proposal NgramSource::propose(std::span<const TokenId> tokens, int max_tokens, int max_read) {
  const auto size = static_cast<std::int32_t>(tokens.size());
  for (; max_read > 0 && output_.next() < size; --max_read) output_.add(tokens);
  for (; prompt_ && max_read > 0 && prompt_->next() >= prompt_end_; --max_read) prompt_->add(tokens);
  if (size < kPair || max_tokens <= 0) return {};
  const auto pair = pair_before(tokens, size);
  std::int32_t best = 0;
  int longest = 0, places = 0, steps = 0;
  for (const auto* index : {&output_, prompt_.get()}) {
    for (auto place = index == nullptr ? 0 : index->latest(pair);
         place > 0 && places < kMaxPlaces && longest < kMaxMatch && steps < kMaxSteps;
         place = index->earlier(place), ++steps) {
      if (pair_before(tokens, place) != pair) continue;
      ++places;
      if (const auto length = match_length(tokens, place, size); length > longest) {
        longest = length;
        best = place;
      }
    }
  }
  if (best == 0) return {};
  Proposal out{.tokens = {}, .confidence = confidence_of(longest)};
  // After the end of the sequence, the text between the match and the end repeats.
  for (int i = 0; i < max_tokens; ++i) {
    const auto at = static_cast<std::size_t>(best + i);
    out.tokens.push_back(at < tokens.size() ? tokens[at] : out.tokens[at - tokens.size()]);
  }
  return out;
}

}  // namespace charonia::runtime
