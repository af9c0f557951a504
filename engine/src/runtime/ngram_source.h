// Proposals from the sequence itself: looks for an earlier place where the last tokens of the sequence occur, and
// proposes the tokens that followed there. It helps where the output repeats the prompt or itself: edited texts and
// code, summaries with quotes, tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "runtime/proposals.h"

namespace charonia::runtime {

// Clients choose the tokens, so the hash has a random seed. Otherwise a prompt could put all its pairs into one bucket.
struct PairHash {
  std::size_t operator()(std::uint64_t pair) const;
};

// The places of pairs of tokens in a text: the positions after the two tokens. The places of all pairs with one hash form
// a list, the latest first, as in zlib. A place takes 4 bytes, and a bucket 8.
class PairIndex {
 public:
  // begin: the first place. step: from a place to the next one, 1 or -1. buckets: rounded up to a power of two.
  PairIndex(std::int32_t begin, std::int32_t step, std::int32_t buckets);

  // The place that add() adds next, and the tokens of the text, at least up to this place.
  std::int32_t next() const { return begin_ + step_ * static_cast<std::int32_t>(earlier_.size()); }
  void add(std::span<const TokenId> tokens);
  // The latest place with the hash of this pair, and the next earlier one after a place of the list; 0: none.
  std::int32_t latest(std::uint64_t pair) const { return buckets_[bucket_of(pair)].latest; }
  std::int32_t earlier(std::int32_t place) const { return earlier_[index_of(place)]; }

 private:
  struct Bucket {
    std::int32_t latest = 0, earliest = 0;
  };
  std::size_t bucket_of(std::uint64_t pair) const { return PairHash()(pair) & (buckets_.size() - 1); }
  std::size_t index_of(std::int32_t place) const { return static_cast<std::size_t>((place - begin_) * step_); }

  std::int32_t begin_, step_;
  std::vector<Bucket> buckets_;         // a power of two
  std::vector<std::int32_t> earlier_;   // by place: the next earlier place in its bucket
};

class NgramSource final : public ProposalSource {
 public:
  // prompt: prompt_index() of the first tokens, which several sources may share. Null: they have no index of their own.
  explicit NgramSource(std::shared_ptr<PairIndex> prompt = nullptr, std::int32_t prompt_tokens = 0);
  static std::shared_ptr<PairIndex> prompt_index(std::int32_t prompt_tokens);

  // Proposes what followed the longest match of the last tokens; of equally long ones, the latest.
  Proposal propose(std::span<const TokenId> tokens, int max_tokens,
                   int max_read = std::numeric_limits<int>::max()) override;

 private:
  std::shared_ptr<PairIndex> prompt_;
  std::int32_t prompt_end_;  // the last place that prompt_ may have
  PairIndex output_;
};

}  // namespace charonia::runtime
