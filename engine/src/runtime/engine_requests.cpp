// The life of a request, from submission to its last result. Its sequences compute in engine_loop.cpp.
//
//     submitted -> (waits for its session's turn) -> (waits for its grammar) -> begun: in the scheduler -> ended, sequence by sequence -> closed
#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>
#include <utility>

#include "base/duration.h"
#include "base/guide_name.h"
#include "base/text.h"
#include "model/rope.h"
#include "runtime/engine_impl.h"
#include "text/utf8.h"

namespace charonia {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// By token, each once: devices merge it with what else changes logits, at every step.
void sort_bias(std::vector<std::pair<TokenId, float>>& bias) {
  std::ranges::stable_sort(bias, {}, &std::pair<TokenId, float>::first);
  auto end = bias.begin();
  for (const auto& one : bias) {
    if (end != bias.begin() && end[-1].first == one.first) {
      end[-1].second += one.second;
    } else {
      *end++ = one;
    }
  }
  bias.erase(end, bias.end());
}

// Ascending, each once: as devices take them.
void sort_ids(std::vector<TokenId>& ids) {
  std::ranges::sort(ids);
  const auto rest = std::ranges::unique(ids);
  ids.erase(rest.begin(), rest.end());
}

// Takes the words of one token out of `words`: they are banned at every step.
std::vector<TokenId> take_single(std::vector<std::vector<TokenId>>& words) {
  std::vector<TokenId> out;
  for (const auto& word : words) {
    if (word.size() == 1) out.push_back(word.front());
  }
  std::erase_if(words, [](const auto& word) { return word.size() == 1; });
  sort_ids(out);
  return out;
}

ErrorCode code_of(const std::exception& error) {
  if (const auto* const ours = dynamic_cast<const Error*>(&error)) return ours->code();
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? ErrorCode::resource_exhausted : ErrorCode::internal;
}

}  // namespace

// ---- the calling thread ----

void Engine::Impl::check_tokens(std::string_view field, const std::vector<TokenId>& ids) const {
  for (const auto id : ids) {
    if (id < 0 || id >= info.model.vocab_size) {
      throw Error(
          ErrorCode::invalid_argument,
          cat(field, " holds ", id, ", which is no token id: the vocabulary is [0, ", info.model.vocab_size, ")"));
    }
  }
}

void Engine::Impl::check(const Request& request) const {
  const auto reject = [](const auto&... text) { throw Error(ErrorCode::invalid_argument, cat(text...)); };
  const auto& sampling = request.sampling;
  const bool continues = !request.continuation_ids.empty();
  if (request.input_ids.empty() && !continues) reject("input_ids is empty: send at least one token");
  check_tokens("input_ids", request.input_ids);
  check_tokens("continuation_ids", request.continuation_ids);
  sampling.validate(info.model.vocab_size);
  const int sequences = std::max(sampling.n, sampling.best_of);
  if (request.stream && sequences > sampling.n) {
    reject("best_of = ", sampling.best_of, " with n = ", sampling.n,
           " cannot be streamed: the best are known when all have ended. Send stream = false, or best_of = n");
  }
  if (request.prompt_logits && (!request.stream || sampling.prompt_logprobs < 0)) {
    reject("prompt_logits come in results of their own: they need stream = true and prompt_logprobs >= 0");
  }
  if (request.timeout_ms && *request.timeout_ms < 1) {
    reject("timeout_ms = ", *request.timeout_ms, " is out of range: it must be >= 1");
  }
  if (request.guide) check_guide(request);
  if (request.cache_salt.size() > kMaxCacheSalt) {
    reject("cache_salt has ", request.cache_salt.size(), " bytes and must have at most ", kMaxCacheSalt);
  }
  if (request.stop_until.size() > kMaxStopWords) {
    reject("stop_until has ", request.stop_until.size(), " texts and must have at most ", kMaxStopWords);
  }
  if (continues && request.session_id.empty()) {
    reject("continuation_ids need a session_id: they are appended to that session's history");
  }
  if (!request.session_id.empty() && sequences > 1) {
    reject("n = ", sampling.n, " and best_of = ", sampling.best_of,
           " with session_id: a session goes on with one completion. ", "Send n = 1 and no best_of, or no session_id");
  }
  if (continues && !sessions_->enabled()) {
    reject("sessions are off (session_ttl_s = 0): send the whole conversation in input_ids, without continuation_ids");
  }
}

void Engine::Impl::check_guide(const Request& request) const {
  const auto reject = [](const auto&... text) { throw Error(ErrorCode::invalid_argument, cat(text...)); };
  const auto& text = request.guide->text;
  const auto type = to_string(request.guide->type);
  if (request.mask) reject("a request has a guide or a token mask provider of its own, and not both");
  if (request.sampling.ignore_eos || request.sampling.min_tokens > 0) {
    reject("ignore_eos and min_tokens cannot be combined with structured output: its grammar says where the text ends");
  }
  if (end_ids_of(request.sampling).empty()) {
    reject("structured output needs a token that ends the text: the model names none. Send end_id");
  }
  if (request.guide->type == GuideType::json && !text.empty()) {
    reject("guided_decoding_guide_type = json takes no guided_decoding_guide: to give a schema, send json_schema");
  }
  if (request.guide->type != GuideType::json && text.empty()) {
    reject("guided_decoding_guide: it is empty, and guided_decoding_guide_type = ", type, " needs one");
  }
  if (text.size() > static_cast<std::size_t>(info.config.guide_max_bytes)) {
    reject(called(*request.guide), ": the guide has ", text.size(), " bytes, and guide_max_bytes is ",
           info.config.guide_max_bytes);
  }
  if (text.find('\0') != std::string::npos || text::to_valid_utf8(text) != text) {
    reject("guided_decoding_guide: it is no UTF-8 text");
  }
}

// What is more than the context leaves says no more than no limit.
void Engine::Impl::fit_max_tokens(Request& request) const {
  const auto prompt = std::max(request.input_ids.size(), request.continuation_ids.size());
  auto& max_tokens = request.sampling.max_tokens;
  if (max_tokens && *max_tokens > info.config.session_len - static_cast<std::int64_t>(prompt)) max_tokens.reset();
}

void Engine::Impl::check_fits(const std::vector<TokenId>& input, const SamplingParams& sampling) const {
  const auto prompt = static_cast<std::int64_t>(input.size());
  const std::int64_t limit = info.config.session_len;
  if (prompt + 1 > limit) {
    throw Error(ErrorCode::invalid_argument,
                cat("the prompt does not fit: it has ", prompt, " tokens and the context (session_len) holds ", limit,
                    ", one of them to be generated. Shorten the prompt by at least ", prompt + 1 - limit, " tokens"));
  }
  const auto& max_tokens = sampling.max_tokens;
  if (max_tokens && prompt + *max_tokens > limit) {
    throw Error(ErrorCode::invalid_argument,
                cat("prompt and max_tokens do not fit: ", prompt, " prompt tokens and max_tokens = ", *max_tokens,
                    " make ", prompt + *max_tokens, ", and the context (session_len) holds ", limit,
                    ". Lower max_tokens to at most ", limit - prompt, " or shorten the prompt"));
  }
}

std::vector<TokenId> Engine::Impl::end_ids_of(const SamplingParams& sampling) const {
  auto out = sampling.end_ids.empty() ? info.model.end_ids : sampling.end_ids;
  sort_ids(out);
  return out;
}

void Engine::Impl::reject(runtime::Rejection reason) { count(Metric::requests_rejected, 1, static_cast<int>(reason)); }

std::unique_ptr<Engine::Impl::Group> Engine::Impl::make_group(Request request, Callback callback,
                                                              std::vector<TokenId> end_ids) const {
  auto group = std::make_unique<Group>();
  const int sequences = std::max(request.sampling.n, request.sampling.best_of);
  if (request.mask) {
    try {
      for (int i = 1; i < sequences; ++i) group->masks.push_back(request.mask->clone());
    } catch (const std::exception& error) {
      throw Error(ErrorCode::invalid_argument, cat("the token mask provider cannot be cloned: ", error.what()));
    }
    group->masks.insert(group->masks.begin(), std::move(request.mask));
  }
  if (!sessions_->enabled()) request.session_id.clear();
  const auto& config = info.config;
  group->submitted = Clock::now();
  if (config.max_queue_time_s > 0) group->queue_deadline = group->submitted + duration_of(config.max_queue_time_s);
  if (request.timeout_ms) {
    group->deadline = group->submitted + duration_of(*request.timeout_ms / 1000.0);
  } else if (config.request_timeout_s > 0) {
    group->deadline = group->submitted + duration_of(config.request_timeout_s);
  }
  auto& sampling = request.sampling;
  if (!sampling.stop_words.empty()) {
    group->stop_words = std::make_shared<const text::StopWords>(std::exchange(sampling.stop_words, {}));
    if (!request.stop_until.empty()) {
      group->stop_until = std::make_shared<const text::StopWords>(std::exchange(request.stop_until, {}));
    }
  }
  sort_bias(sampling.logit_bias);
  group->banned = take_single(sampling.bad_words);
  std::ranges::set_union(group->banned, end_ids, std::back_inserter(group->banned_at_first));
  group->request = std::move(request);
  group->callback = std::make_shared<Callback>(std::move(callback));
  group->end_ids = std::move(end_ids);
  return group;
}

Engine::Handle Engine::Impl::submit(Request request, Callback callback) {
  check(request);
  auto end_ids = end_ids_of(request.sampling);
  if (request.sampling.bad_words.size() + end_ids.size() >= static_cast<std::size_t>(info.model.vocab_size)) {
    throw Error(ErrorCode::invalid_argument,
                cat("bad_words has ", request.sampling.bad_words.size(),
                    " entries, which may leave no token of the vocabulary's ", info.model.vocab_size));
  }
  try {
    if (request.fit_max_tokens) fit_max_tokens(request);
    check_fits(request.input_ids, request.sampling);
    check_fits(request.continuation_ids, request.sampling);
  } catch (const Error&) {
    reject(runtime::Rejection::never_fits);
    throw;
  }
  auto group = make_group(std::move(request), std::move(callback), std::move(end_ids));
  // Of a session the history comes on top, but much of it is found in the cache.
  const auto& asked = group->request;
  const auto prompt = static_cast<std::int64_t>(std::max(asked.input_ids.size(), asked.continuation_ids.size()));
  const auto max_tokens = asked.sampling.max_tokens.value_or(info.config.session_len - static_cast<int>(prompt));

  std::unique_lock lock(mutex_);
  if (!failure_.empty()) throw Error(ErrorCode::device_failed, failure_);
  if (closing_) throw Error(ErrorCode::unavailable, "the engine is shutting down and takes no new request");
  const auto waiting = static_cast<int>(inbox_.submitted.size()) + stats_.num_waiting;
  if (auto rejected = admission_->admit(waiting, prompt, group->num_sequences(), max_tokens, group->work)) {
    lock.unlock();
    reject(rejected->reason);
    throw Error(ErrorCode::resource_exhausted, rejected->text);
  }
  group->seed = asked.sampling.seed.value_or(seeds_());
  const Handle handle = group->handle = next_handle_++;
  live_.emplace(handle, asked.id);
  inbox_.submitted.push_back(std::move(group));
  lock.unlock();
  wake_.notify_one();
  return handle;
}

bool Engine::Impl::end(Handle handle, bool keep) {
  {
    const std::lock_guard lock(mutex_);
    if (!live_.contains(handle)) return false;
    inbox_.ends.push_back({handle, Clock::now(), keep});
  }
  wake_.notify_one();
  return true;
}

bool Engine::Impl::end(std::string_view id, bool keep) {
  if (id.empty()) return false;  // requests without an id are not one request's name
  bool known = false;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (const auto& [handle, name] : live_) {
      if (name != id) continue;
      inbox_.ends.push_back({handle, now, keep});
      known = true;
    }
  }
  if (known) wake_.notify_one();
  return known;
}

// ---- the engine thread ----

void Engine::Impl::take(Inbox& inbox) {
  // What has been taken is not there any more: after an exception the next call goes on with the rest.
  while (!inbox.submitted.empty()) {
    auto group = std::move(inbox.submitted.front());
    inbox.submitted.pop_front();
    take(std::move(group));
  }
  while (!inbox.ends.empty()) {
    const auto end = inbox.ends.front();
    inbox.ends.pop_front();
    const auto found = groups_.find(end.handle);
    if (found == groups_.end()) {  // it has ended, or memory did not suffice to take it in
      const std::lock_guard lock(mutex_);
      live_.erase(end.handle);
      if (live_.empty()) drained_.notify_all();
      continue;
    }
    found->second->keep_turn = end.keep;
    end_request(*found->second, FinishReason::cancelled);
    observe(Metric::cancel_to_free_seconds, seconds(Clock::now() - end.asked));
  }
  while (!inbox.tasks.empty()) {
    const auto task = std::move(inbox.tasks.front());
    inbox.tasks.pop_front();
    task();
  }
}

void Engine::Impl::take(std::unique_ptr<Group> taken) {
  auto& group = *groups_.emplace(taken->handle, std::move(taken)).first->second;
  if (group.queue_deadline) timers_.insert({*group.queue_deadline, group.handle, Timer::Kind::queue_deadline});
  if (group.deadline) timers_.insert({*group.deadline, group.handle, Timer::Kind::deadline});
  if (auto& guide = group.request.guide) {
    // A gateway's salts begin with the id of the client's key.
    const auto& salt = group.request.cache_salt;
    group.grammar = guides_->compile(std::move(*guide), group.request.strip_leading_space && tokens_->strip_leading_space(),
                                     salt.substr(0, salt.find('/')));
    guide.reset();
  }
  if (!group.in_session()) return begin(group);
  const auto& session = group.request.session_id;
  auto& turns = turns_[session];
  turns.push_back(group.handle);
  sessions_->enter(session);
  group.entered = true;
  if (turns.size() == 1) return begin(group);
  ++num_parked_;
}

// A request that cannot begin ends, and no other one does.
void Engine::Impl::begin(Group& group) {
  if (group.grammar && !group.grammar->done()) {
    compiling_.insert(group.handle);
    return;
  }
  try {
    if (group.grammar) {
      const auto* const grammar = group.grammar->compiled();
      if (grammar == nullptr) throw Error(group.grammar->error_code(), group.grammar->error());
    }
    make_sequences(group);
  } catch (const std::exception& error) {
    for (const auto& sequence : group.sequences) {
      scheduler_->remove(sequence->id);
      sequences_.erase(sequence->id);
    }
    several_.erase(&group);
    group.begun = false;
    end_request(group, FinishReason::error, error.what(), code_of(error));
  }
}

// Begins the requests whose grammars are compiled.
void Engine::Impl::begin_compiled() {
  const std::vector<Handle> waiting(compiling_.begin(), compiling_.end());
  for (const auto handle : waiting) {
    if (!compiling_.contains(handle) || !groups_.at(handle)->grammar->done()) continue;
    compiling_.erase(handle);
    begin(*groups_.at(handle));
  }
}

void Engine::Impl::make_providers(Group& group) {
  std::optional<std::vector<TokenId>> prompt;  // none: nothing is forced
  if (token_split_ && !group.steered()) {
    const auto& input = group.request.input_ids;
    prompt.emplace(input.end() - std::min(std::ssize(input), std::ptrdiff_t{text::TokenSplit::kContext + 1}), input.end());
  }
  for (int i = 0; i < group.num_sequences(); ++i) {
    group.masks.push_back(group.grammar->compiled()->provider(group.end_ids, prompt));
  }
}

// Its prompt is known from here on, and its sequences are the scheduler's.
void Engine::Impl::make_sequences(Group& group) {
  if (group.in_session()) set_prompt(group);
  if (group.grammar) make_providers(group);
  auto& request = group.request;
  const auto& sampling = request.sampling;
  const int prompt = static_cast<int>(request.input_ids.size());
  const int left = info.config.session_len - prompt;
  const int max_tokens = std::min(sampling.max_tokens.value_or(left), left);
  count(Metric::prompt_tokens, prompt);
  observe(Metric::request_prompt_tokens, prompt);
  group.begun = true;
  group.num_live = group.num_sequences();
  if (group.num_live > 1) several_.insert(&group);
  const auto salt = salts_.number(request.cache_salt, prefix_class(prompt));
  for (int i = 0; i < group.num_live; ++i) {
    auto& sequence =
        *group.sequences.emplace_back(std::make_unique<Sequence>(group, i, next_sequence_++, *tokens_, max_tokens));
    sequences_.emplace(sequence.id, &sequence);
    if (group.masks.empty()) continue;
    auto& provider = group.masks[static_cast<std::size_t>(i)];
    sequence.mask = std::make_shared<runtime::SequenceMask>(std::move(provider), info.model.vocab_size);
    masks_.begin(sequence.mask);
  }
  auto& first = *group.sequences.front();
  const bool wants_rows = sampling.prompt_logprobs >= 0 && prompt > 1;
  if (wants_rows) first.prompt_logprobs.emplace(prompt, sampling.prompt_logprobs);
  for (const auto& sequence : group.sequences) {
    const bool is_first = sequence->index == 0;
    scheduler_->add(sequence->id, request.input_ids, prompt + max_tokens,
                    {.priority = request.priority,
                     .salt = salt,
                     .all_rows = is_first && wants_rows,
                     .parent = is_first ? 0 : first.id});
  }
}

std::uint64_t Engine::Impl::prefix_class(int prompt_tokens) const {
  return model::rotary_class(info.model, prompt_tokens);
}

void Engine::Impl::set_prompt(Group& group) {
  auto& request = group.request;
  auto end_ids = group.end_ids;
  end_ids.insert(end_ids.end(), info.model.end_ids.begin(), info.model.end_ids.end());
  group.turn = sessions_->begin(request.session_id);
  // Where the answer may end with the context, no more of the history is left out for it than without max_tokens.
  auto room = request.sampling.max_tokens;
  if (request.fit_max_tokens && room && *room > info.config.session_len / 4) room.reset();
  auto prompt = runtime::session_prompt(*group.turn->history, request.input_ids, request.continuation_ids,
                                        {.session_len = info.config.session_len,
                                         .max_tokens = room,
                                         .start_id = info.model.start_id,
                                         .end_ids = end_ids});
  request.input_ids = std::move(prompt.tokens);
  request.continuation_ids.clear();
  group.turns = std::move(prompt.turns);
  group.num_session_tokens = prompt.num_history;
}

void Engine::Impl::end_overdue(Clock::time_point now) {
  while (!timers_.empty() && timers_.begin()->when <= now) {
    auto& group = *groups_.at(timers_.begin()->handle);
    const double waited = std::round(1000 * seconds(now - group.submitted)) / 1000;
    if (group.deadline && *group.deadline <= now) {
      reject(runtime::Rejection::deadline);
      end_request(
          group, FinishReason::error,
          cat("the request did not end within its time limit: ",
              std::round(1000 * seconds(*group.deadline - group.submitted)), " ms (timeout_ms or request_timeout_s)"),
          ErrorCode::deadline_exceeded);
    } else {
      reject(runtime::Rejection::queue_time);
      end_request(group, FinishReason::error,
                  cat("the request waited ", waited, " s and did not begin; max_queue_time_s is ",
                      info.config.max_queue_time_s, "; retry after ", admission_->retry_after_s(), " s"),
                  ErrorCode::resource_exhausted);
    }
  }
  if (next_expiry_ && *next_expiry_ <= now) tidy_sessions();
}

// After every change to them.
void Engine::Impl::tidy_sessions() {
  sessions_->tidy();
  next_expiry_ = sessions_->next_expiry();
  num_sessions_ = sessions_->count();
}

std::optional<Engine::Impl::Clock::time_point> Engine::Impl::next_timer() const {
  std::optional<Clock::time_point> out = next_expiry_;
  if (!timers_.empty() && (!out || timers_.begin()->when < *out)) out = timers_.begin()->when;
  return out;
}

// Ends all that is left of a request. The group is gone afterwards.
void Engine::Impl::end_request(Group& group, FinishReason reason, const std::string& error, ErrorCode code) {
  if (group.begun) {
    // The last of them closes the group: its list of sequences is not looked at after that.
    std::vector<SeqId> live;
    for (const auto& sequence : group.sequences) {
      if (sequences_.contains(sequence->id)) live.push_back(sequence->id);
    }
    for (const auto id : live) finish(id, reason, error, code);
    return;
  }
  group.reason = reason;
  std::vector<Result> last(static_cast<std::size_t>(group.request.sampling.n));
  for (std::size_t i = 0; i < last.size(); ++i) {
    auto& result = last[i];
    result.index = static_cast<int>(i);
    result.finish_reason = reason;
    result.error = error;
    result.error_code = code;
    result.num_input_tokens = static_cast<int>(group.request.input_ids.size());
    result.timings.queue_ms = result.timings.total_ms = 1000 * seconds(Clock::now() - group.submitted);
  }
  close(group, std::move(last));
}

// Ends a sequence; with its last one the group is gone.
void Engine::Impl::finish(SeqId id, FinishReason reason, std::string error, ErrorCode code) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  auto& sequence = *found->second;
  auto& group = sequence.group;
  const bool answered = reason == FinishReason::stop || reason == FinishReason::length;
  if (group.turn && (answered || (reason == FinishReason::cancelled && group.keep_turn))) keep_turn(sequence);
  scheduler_->remove(id);
  sequences_.erase(found);
  auto last = group.ended(sequence.last(reason, Clock::now(), std::move(error), code));
  if (--group.num_live == 0) {
    close(group, std::move(last));
  } else {
    for (auto& result : last) delivery_.push(group.callback, std::move(result));
  }
}

// What the scheduler has of a sequence is its session's history from now on.
void Engine::Impl::keep_turn(const Sequence& sequence) {
  const auto& group = sequence.group;
  auto tokens = scheduler_->tokens(sequence.id);
  if (tokens.back() < 0) tokens = tokens.first(tokens.size() - 1);  // nobody has seen that one
  sessions_->keep(group.request.session_id, *group.turn, {{tokens.begin(), tokens.end()}, group.turns},
                  scheduler_->inserted(sequence.id));
}

void Engine::Impl::close(Group& group, std::vector<Result> last) {
  const auto now = Clock::now();
  const auto handle = group.handle;
  count(Metric::request_success, 1, static_cast<int>(group.reason) - 1);
  observe(Metric::e2e_request_latency_seconds, seconds(now - group.submitted));
  observe(Metric::request_generation_tokens, static_cast<double>(group.num_output));
  admission_->ended(group.work, group.num_output / group.num_sequences());
  if (group.queue_deadline) timers_.erase({*group.queue_deadline, handle, Timer::Kind::queue_deadline});
  if (group.deadline) timers_.erase({*group.deadline, handle, Timer::Kind::deadline});
  compiling_.erase(handle);
  several_.erase(&group);
  const auto owned = std::move(groups_.at(handle));
  groups_.erase(handle);
  std::string session;
  if (group.in_session()) {
    session = group.request.session_id;
    if (const auto turns = turns_.find(session); turns != turns_.end()) {  // else memory did not suffice for the line
      if (group.entered && !group.begun && turns->second.front() != handle) --num_parked_;
      std::erase(turns->second, handle);
    }
    if (group.request.end_session) sessions_->forget(session);
    if (group.entered) sessions_->leave(session);
    tidy_sessions();
  }
  {
    // A request whose last result is on its way is no longer live: cancel() has nothing to do for it.
    const std::lock_guard lock(mutex_);
    for (auto& result : last) delivery_.push(group.callback, std::move(result));
    live_.erase(handle);
    if (live_.empty()) drained_.notify_all();
  }
  if (!session.empty()) begin_next_turn(session);
}

void Engine::Impl::begin_next_turn(const std::string& session_id) {
  const auto found = turns_.find(session_id);
  if (found == turns_.end()) return;
  if (found->second.empty()) {
    turns_.erase(found);
    return;
  }
  auto& next = *groups_.at(found->second.front());
  if (next.begun) return;
  --num_parked_;
  begin(next);
}

}  // namespace charonia
