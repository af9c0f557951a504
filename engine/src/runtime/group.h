// A request in flight: its sequences, and which of their completions go out.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "charonia/engine.h"
#include "runtime/admission.h"
#include "runtime/guide_thread.h"
#include "runtime/sequence.h"
#include "runtime/session_store.h"
#include "runtime/unread_rows.h"

namespace charonia::runtime {

struct Group {
  Engine::Handle handle = 0;
  Request request;  // input_ids: the whole prompt, once it has begun; bad_words: those of several tokens
  std::shared_ptr<Engine::Callback> callback;
  std::vector<TokenId> end_ids;                           // that end its sequences; ascending, each once
  std::vector<TokenId> banned;                            // bad words of one token; ascending
  std::vector<TokenId> banned_at_first;                   // these and end_ids: up to min_tokens; ascending
  std::shared_ptr<const text::StopWords> stop_words;      // null: none
  std::shared_ptr<const text::StopWords> stop_until;      // null: none. See Request::stop_until
  std::uint64_t seed = 0;                                 // of the first sequence
  std::vector<std::shared_ptr<TokenMaskProvider>> masks;  // one for each sequence, or none
  GuideThread::Handle grammar;                           // of the request's guide; null: none
  Clock::time_point submitted;
  std::optional<Clock::time_point> queue_deadline;  // it ends when it has not begun by then; unset once it has
  std::optional<Clock::time_point> deadline;
  Work work;
  UnreadRows unread_logits;  // of Request::prompt_logits

  bool entered = false;  // of a session: it stands in the line for its turn
  bool begun = false;  // its sequences were made and are the scheduler's
  bool first_scheduled = false;
  std::vector<std::unique_ptr<Sequence>> sequences;
  int num_live = 0;                        // sequences that have not ended
  std::optional<SessionStore::Turn> turn;  // of a session, once it has begun
  std::vector<std::int32_t> turns;         // see SessionPrompt
  int num_session_tokens = 0;              // of the prompt, put there by the session
  bool keep_turn = false;                  // what it has so far goes into the session's history

  int num_sequences() const { return std::max(request.sampling.n, request.sampling.best_of); }
  bool chooses() const { return num_sequences() > request.sampling.n; }
  // Whether single tokens are banned or preferred: then each is sampled, as what is certain might be banned.
  bool steered() const {
    const auto& sampling = request.sampling;
    return !sampling.logit_bias.empty() || !sampling.bad_words.empty() || !banned.empty() || sampling.min_tokens > 0;
  }
  bool in_session() const { return !request.session_id.empty(); }

  // A sequence has ended with this result. Returns what goes out now: the result, or, where the best are chosen,
  // nothing until all have ended and then the n best, best first.
  std::vector<Result> ended(Result result);

  // Of the sequences that have ended.
  FinishReason reason = FinishReason::none;  // of the request: an error of any, else that of the first
  std::int64_t num_output = 0;

 private:
  std::vector<Result> held_;
};

}  // namespace charonia::runtime
