#include "runtime/session_history.h"

#include <algorithm>

namespace charonia::runtime {
namespace {

SessionPrompt fresh(std::span<const TokenId> input) { return {{input.begin(), input.end()}, {0}, 0}; }

// The prompt if the input is the whole conversation. If it begins with the history, the begins of the turns are kept.
SessionPrompt replaced(const History& history, std::span<const TokenId> input) {
  auto out = fresh(input);
  const auto& before = history.tokens;
  if (before.size() < input.size() && std::equal(before.begin(), before.end(), input.begin())) {
    out.turns = history.turns;
    out.turns.push_back(static_cast<std::int32_t>(before.size()));
  }
  return out;
}

}  // namespace

SessionPrompt session_prompt(const History& history, std::span<const TokenId> input_ids,
                             std::span<const TokenId> continuation_ids, const PromptRules& rules) {
  const auto beginning = input_ids.empty() ? continuation_ids : input_ids;
  if (history.tokens.empty()) return fresh(beginning);
  if (continuation_ids.empty()) return replaced(history, input_ids);

  const auto& before = history.tokens;
  auto input = continuation_ids;
  const bool closes = std::ranges::find(rules.end_ids, input.front()) != rules.end_ids.end();
  // The completion already ended with this end token, and the continuation begins with it again.
  const bool closed = closes && before.back() == input.front();
  if (closed) input = input.subspan(1);

  const auto size = static_cast<std::int64_t>(before.size());
  const auto reserved = rules.max_tokens.value_or(std::max(1, rules.session_len / 4));
  const auto fits = [&](std::int64_t kept) {
    return kept + static_cast<std::int64_t>(input.size()) + reserved <= rules.session_len;
  };
  const bool has_start = before.front() == rules.start_id;
  // Whether the start token is added if the turns before `turn` are dropped. At position 0 the turn itself has it.
  const auto starts = [&](std::size_t turn) { return has_start && history.turns[turn] > 0; };
  std::size_t first = 0;
  while (first < history.turns.size() && !fits(size - history.turns[first] + (starts(first) ? 1 : 0))) ++first;
  // If the whole history is dropped, the input keeps its leading end token.
  if (first == history.turns.size() || history.turns[first] == size) return fresh(beginning);

  SessionPrompt out;
  if (starts(first)) out.tokens.push_back(before.front());
  const auto shift = static_cast<std::int32_t>(out.tokens.size()) - history.turns[first];
  out.tokens.insert(out.tokens.end(), before.begin() + history.turns[first], before.end());
  for (auto turn = first; turn < history.turns.size(); ++turn) out.turns.push_back(history.turns[turn] + shift);
  out.num_history = static_cast<int>(out.tokens.size());
  // An end token that closes the previous completion belongs to the previous turn.
  out.turns.push_back(out.num_history + (closes && !closed ? 1 : 0));
  out.tokens.insert(out.tokens.end(), input.begin(), input.end());
  return out;
}

}  // namespace charonia::runtime
