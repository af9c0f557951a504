// What a session remembers, and what it makes of a request's input.
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
  std::vector<std::int32_t> turns;  // where each begins in tokens, ascending
};

struct SessionPrompt {
  std::vector<TokenId> tokens;
  std::vector<std::int32_t> turns;  // where each begins, that of the request last
  int num_history = 0;              // tokens that the session put before the input
};

// What bounds a prompt and what its tokens mean.
struct PromptRules {
  int session_len = 0;
  std::optional<int> max_tokens;     // room that must stay; unset: a quarter of session_len
  TokenId start_id = -1;             // -1: none
  std::span<const TokenId> end_ids;  // those of the request and of the model
};

// The prompt of a request (see Request). The input alone must fit into session_len. Of a history that does not fit with
// it, the oldest turns are left out; a start token at its beginning stays where there is room.
SessionPrompt session_prompt(const History& history, std::span<const TokenId> input_ids,
                             std::span<const TokenId> continuation_ids, const PromptRules& rules);

}  // namespace charonia::runtime
