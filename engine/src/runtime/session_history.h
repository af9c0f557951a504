// The history of a session, and the prompt of a request that continues it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "charonia/types.h"

namespace charonia::runtime {

// The tokens of a conversation so far. A turn is an input with its completion.
struct History {
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> turns;  // the index in tokens where each turn begins, ascending
};

struct SessionPrompt {
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> turns;  // where each turn begins in tokens; the last one is the request's turn
  int num_history = 0;              // number of tokens from the history, before the input
};

// The limits of a prompt, and the ids of special tokens.
struct PromptRules {
  int session_len = 0;
  std::optional<int> max_tokens;     // reserved for the completion; unset: a quarter of session_len
  TokenId start_id = -1;             // -1: none
  std::span<const TokenId> end_ids;  // end tokens of the request and of the model
};

// Returns the prompt of a request (see Request). The input alone must fit into session_len. If the history does not fit
// with it, the oldest turns are dropped. A start token at the beginning of the history is kept if it fits.
SessionPrompt session_prompt(const History& history, std::span<const TokenId> input_ids,
                             std::span<const TokenId> continuation_ids, const PromptRules& rules);

}  // namespace charonia::runtime
