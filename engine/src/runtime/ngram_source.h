// Proposals from the sequence itself: looks for an earlier place where the last tokens of the sequence occur, and
// proposes the tokens that followed there. It helps where the output repeats the prompt or itself: edited texts and
// code, summaries with quotes, tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "runtime/proposals.h"

namespace charonia::runtime {

// Clients choose the tokens, so the hash has a random seed. Otherwise a prompt could put all its pairs into one bucket.
struct PairHash {
  std::size_t operator()(std::uint64_t pair) const;
};

class NgramSource final : public ProposalSource {
 public:
  // Proposes what followed the longest match of the last tokens; of equally long ones, the latest.
  Proposal propose(std::span<const TokenId> tokens, int max_tokens) override;

 private:
  void index(std::span<const TokenId> tokens);

  std::int32_t begin_ = 0;  // tokens before it are not indexed, because the prompt is very long
  std::int32_t end_ = 0;    // pairs that end before it are indexed
  std::unordered_map<std::uint64_t, std::int32_t, PairHash> latest_;  // by two tokens: the latest position after them
  std::vector<std::int32_t> earlier_;  // [end - begin]: the next earlier position after the same pair; 0: none
};

}  // namespace charonia::runtime
