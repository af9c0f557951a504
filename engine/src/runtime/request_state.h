// A request in the engine and its completions. Decides which completions are sent.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "charonia/engine.h"
#include "runtime/adapter.h"
#include "runtime/load_tracker.h"
#include "runtime/guide_thread.h"
#include "runtime/ngram_source.h"
#include "runtime/completion.h"
#include "runtime/session_store.h"
#include "runtime/thinking.h"
#include "runtime/unread_rows.h"

namespace charonia::runtime {

struct RequestState {
  Engine::Handle handle = 0;
  Request request;  // input_ids: the whole prompt once it has begun; bad_words: only words of several tokens
  std::shared_ptr<Engine::Callback> callback;
  std::vector<TokenId> end_ids;                           // tokens that end its completions; ascending, unique
  std::vector<TokenId> banned;                            // bad words of one token; ascending
  std::vector<TokenId> banned_at_first;                   // `banned` and end_ids, for the first min_tokens; ascending
  std::shared_ptr<const text::StopWords> stop_words;      // null: none
  std::shared_ptr<const text::StopWords> stop_until;      // null: none. See Request::stop_until
  std::string kv_scope;                                   // Engine::Impl::kv_scope(), or empty: its KV is not stored
  std::optional<Thinking> thinking;                       // of a completion without tokens; unset: no budget
  std::uint64_t seed = 0;                                 // of the first completion
  std::vector<std::shared_ptr<TokenMaskProvider>> masks;  // one for each completion, or none
  GuideThread::Handle grammar;                           // of the request's guide; null: none
  std::shared_ptr<const Adapter> adapter;                // null: none
  Clock::time_point submitted;
  std::optional<Clock::time_point> queue_deadline;  // it must begin before; unset once it has begun
  std::optional<Clock::time_point> deadline;
  Work work;
  UnreadRows unread_logits;  // rows for Request::prompt_logits

  bool entered = false;  // it is in the queue of its session
  bool begun = false;    // its completions exist and are in the scheduler
  bool first_scheduled = false;
  std::vector<std::unique_ptr<Completion>> completions;
  std::shared_ptr<PairIndex> prompt_index;  // of the prompt, for proposals of all completions; null: none has any yet
  int num_live = 0;                        // completions that have not ended
  std::optional<SessionStore::Turn> turn;  // the turn of its session; set when the request begins
  std::vector<std::int32_t> turns;         // see SessionPrompt
  int num_session_tokens = 0;              // tokens of the prompt that come from the session
  bool keep_turn = false;                  // its tokens so far are added to the session's history

  // Also counts the completions that had ended in another engine.
  int num_completions() const { return std::max(request.sampling.n, request.sampling.best_of); }
  bool chooses() const { return num_completions() > request.sampling.n; }
  // Whether single tokens are banned or preferred. Then every token is sampled, because a forced token may be banned.
  bool steered() const {
    const auto& sampling = request.sampling;
    return !sampling.logit_bias.empty() || !sampling.bad_words.empty() || !banned.empty() || sampling.min_tokens > 0;
  }
  bool in_session() const { return !request.session_id.empty(); }

  // Called when a completion has ended with this result and mean log probability. Returns the results to send now. If
  // best_of is greater than n, this is nothing until all completions have ended, and then the n best, best first.
  // Otherwise it is this result.
  std::vector<Result> ended(Result result, double mean_logprob);

  // Sums over the completions that have ended.
  FinishReason reason = FinishReason::none;  // error if a completion failed, else the reason of the first completion
  std::int64_t num_output = 0;

 private:
  std::vector<std::pair<double, Result>> held_;  // with the mean log probability
};

}  // namespace charonia::runtime
