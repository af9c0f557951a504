// The life of a request, from submission to its last result. engine_loop.cpp computes its sequences.
//
//     submitted -> (waits for its session's turn) -> (waits for its grammar) -> begun: in the scheduler
//               -> its sequences end one by one -> closed
#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>
#include <utility>

#include "base/duration.h"
#include "base/guide_name.h"
#include "base/text.h"
#include "model/layers.h"
#include "model/rope.h"
#include "runtime/engine_impl.h"
#include "runtime/pooling.h"
#include "text/utf8.h"

namespace charonia {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Sorts the biases by token, and adds up the biases of the same token. Devices merge the sorted list with other changes
// of logits at every step.
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

// Makes the ids ascending and unique, as devices require.
void sort_ids(std::vector<TokenId>& ids) {
  std::ranges::sort(ids);
  const auto rest = std::ranges::unique(ids);
  ids.erase(rest.begin(), rest.end());
}

// Removes the words of one token from `words` and returns their tokens, which are banned at every step.
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
          cat(field, " holds ", id, ", which is not a token id: the vocabulary is [0, ", info.model.vocab_size, ")"));
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
  check_resumed(request);
  runtime::check_pooling(request, info.model);
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
    reject("sessions are off (session_ttl_s = 0): send the whole conversation, without a session_id");
  }
}

void Engine::Impl::check_resumed(const Request& request) const {
  const auto& resumed = request.resumed;
  if (resumed.empty()) return;
  const auto reject = [](const auto&... text) { throw Error(ErrorCode::invalid_argument, cat(text...)); };
  if (std::ssize(resumed) != request.sampling.n) {
    reject("resumed is for ", resumed.size(), " sequences, and n = ", request.sampling.n, ": send an entry for each");
  }
  if (!request.stream || !request.sampling.seed || !request.continuation_ids.empty() || request.prompt_logits) {
    reject("resumed needs stream = true and a seed, and allows neither continuation_ids nor prompt_logits");
  }
  if (std::ranges::none_of(resumed, &std::optional<std::vector<TokenId>>::has_value)) {
    reject("resumed says that all sequences have ended: there is nothing to compute");
  }
  const int most = std::min(request.sampling.max_tokens.value_or(info.config.session_len), info.config.session_len);
  for (const auto& tokens : resumed) {
    if (!tokens) continue;
    if (std::ssize(*tokens) >= most) {
      reject("resumed has ", tokens->size(), " tokens of a sequence, and the sequence ends after at most ", most,
             ". Send only sequences that have not ended");
    }
    check_tokens("resumed", *tokens);
  }
}

void Engine::Impl::check_guide(const Request& request) const {
  const auto reject = [](const auto&... text) { throw Error(ErrorCode::invalid_argument, cat(text...)); };
  const auto& text = request.guide->text;
  const auto type = to_string(request.guide->type);
  if (request.mask) reject("a request has a guide or a token mask provider of its own, and not both");
  if (request.sampling.ignore_eos || request.sampling.min_tokens > 0) {
    reject(
        "ignore_eos and min_tokens cannot be combined with structured output: its grammar says where the text ends, ",
        "so leave them out");
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

// A max_tokens larger than the remaining context is treated as unset.
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

std::unique_ptr<Engine::Impl::RequestState> Engine::Impl::make_state(Request request, Callback callback,
                                                              std::vector<TokenId> end_ids) const {
  auto state = std::make_unique<RequestState>();
  const int sequences = std::max(request.sampling.n, request.sampling.best_of);
  if (request.mask) {
    try {
      for (int i = 1; i < sequences; ++i) state->masks.push_back(request.mask->clone());
    } catch (const std::exception& error) {
      throw Error(ErrorCode::invalid_argument, cat("the token mask provider cannot be cloned: ", error.what()));
    }
    state->masks.insert(state->masks.begin(), std::move(request.mask));
  }
  if (!sessions_->enabled()) request.session_id.clear();
  const auto& config = info.config;
  state->submitted = Clock::now();
  if (config.max_queue_time_s > 0 && request.resumed.empty())
    state->queue_deadline = state->submitted + duration_of(config.max_queue_time_s);
  if (request.timeout_ms) {
    state->deadline = state->submitted + duration_of(*request.timeout_ms / 1000.0);
  } else if (config.request_timeout_s > 0) {
    state->deadline = state->submitted + duration_of(config.request_timeout_s);
  }
  auto& sampling = request.sampling;
  if (!sampling.stop_words.empty()) {
    state->stop_words = std::make_shared<const text::StopWords>(std::exchange(sampling.stop_words, {}));
    if (!request.stop_until.empty()) {
      state->stop_until = std::make_shared<const text::StopWords>(std::exchange(request.stop_until, {}));
    }
  }
  if (sampling.thinking_budget) state->thinking.emplace(sampling, thinking_rules_->of(sampling));
  sort_bias(sampling.logit_bias);
  state->banned = take_single(sampling.bad_words);
  std::ranges::set_union(state->banned, end_ids, std::back_inserter(state->banned_at_first));
  state->request = std::move(request);
  state->callback = std::make_shared<Callback>(std::move(callback));
  state->end_ids = std::move(end_ids);
  return state;
}

// The input of an embedding may fill the context. The scheduler has a token more, which is never computed.
void Engine::Impl::check_fits(const Request& request) const {
  if (request.pooling.empty()) {
    check_fits(request.input_ids, request.sampling);
    return check_fits(request.continuation_ids, request.sampling);
  }
  const auto blocks = std::int64_t{info.num_blocks} * info.config.cache_block_seq_len;
  const auto most = std::min<std::int64_t>(info.config.session_len, blocks - 1);
  const auto size = std::ssize(request.input_ids);
  if (size <= most) return;
  throw Error(ErrorCode::invalid_argument, cat("the input does not fit: it has ", size, " tokens and at most ", most,
                                               " fit into the context (session_len). Shorten it by at least ",
                                               size - most, " tokens"));
}

Engine::Handle Engine::Impl::submit(Request request, Callback callback) {
  if (request.pooling == "any") request.pooling = model::pools(info.model) ? info.model.model_task : "";
  check(request);
  auto adapter = adapter_of(request);
  if (!request.pooling.empty()) request.sampling.max_tokens = 1;
  auto end_ids = end_ids_of(request.sampling);
  if (request.sampling.bad_words.size() + end_ids.size() >= static_cast<std::size_t>(info.model.vocab_size)) {
    throw Error(ErrorCode::invalid_argument,
                cat("bad_words has ", request.sampling.bad_words.size(),
                    " entries, which may leave no token of the vocabulary's ", info.model.vocab_size));
  }
  try {
    if (request.fit_max_tokens) fit_max_tokens(request);
    check_fits(request);
  } catch (const Error&) {
    reject(runtime::Rejection::never_fits);
    throw;
  }
  auto state = make_state(std::move(request), std::move(callback), std::move(end_ids));
  state->adapter = std::move(adapter);
  // The history of a session is not counted, because much of it is found in the prefix cache.
  const auto& asked = state->request;
  const auto prompt = static_cast<std::int64_t>(std::max(asked.input_ids.size(), asked.continuation_ids.size()));
  const auto max_tokens = asked.sampling.max_tokens.value_or(info.config.session_len - static_cast<int>(prompt));

  std::unique_lock lock(mutex_);
  if (!failure_.empty()) throw Error(ErrorCode::unavailable, failure_);
  if (closing_) throw Error(ErrorCode::unavailable, "the engine is shutting down and takes no new request");
  const auto waiting = static_cast<int>(inbox_.submitted.size()) + stats_.num_waiting;
  if (auto rejected = load_->admit(waiting, prompt, state->num_completions(), max_tokens, state->work,
                                    !asked.resumed.empty())) {
    lock.unlock();
    reject(rejected->reason);
    throw Error(ErrorCode::resource_exhausted, rejected->text);
  }
  state->seed = asked.sampling.seed.value_or(seeds_());
  const Handle handle = state->handle = next_handle_++;
  live_.emplace(handle, asked.id);
  inbox_.submitted.push_back(std::move(state));
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
  if (id.empty()) return false;  // an empty id names no request
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
  // Each entry is removed before it is handled, so that the next call continues with the rest after an exception.
  while (!inbox.submitted.empty()) {
    auto state = std::move(inbox.submitted.front());
    inbox.submitted.pop_front();
    take(std::move(state));
  }
  while (!inbox.ends.empty()) {
    const auto end = inbox.ends.front();
    inbox.ends.pop_front();
    const auto found = requests_.find(end.handle);
    if (found == requests_.end()) {  // it has ended, or there was not enough memory to add it
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

void Engine::Impl::take(std::unique_ptr<RequestState> taken) {
  auto& state = *requests_.emplace(taken->handle, std::move(taken)).first->second;
  if (state.queue_deadline) timers_.insert({*state.queue_deadline, state.handle, Timer::Kind::queue_deadline});
  if (state.deadline) timers_.insert({*state.deadline, state.handle, Timer::Kind::deadline});
  if (auto& guide = state.request.guide) {
    state.grammar = guides_->compile(
        std::move(*guide), state.request.strip_leading_space && tokens_->strip_leading_space(), state.request.owner);
    guide.reset();
  }
  if (!state.in_session()) return begin(state);
  const auto& session = state.request.session_id;
  auto& turns = turns_[session];
  turns.push_back(state.handle);
  sessions_->enter(session);
  state.entered = true;
  if (turns.size() == 1) return begin(state);
  ++num_parked_;
}

// Begins a request, or lets it wait for its grammar. An error ends only this request.
void Engine::Impl::begin(RequestState& state) {
  if (state.grammar && !state.grammar->done()) {
    compiling_.insert(state.handle);
    return;
  }
  try {
    if (state.grammar) {
      const auto* const grammar = state.grammar->compiled();
      if (grammar == nullptr) throw Error(state.grammar->error_code(), state.grammar->error());
    }
    make_completions(state);
  } catch (const std::exception& error) {
    for (const auto& completion : state.completions) {
      scheduler_->remove(completion->id);
      completions_.erase(completion->id);
    }
    several_.erase(&state);
    state.begun = false;
    end_request(state, FinishReason::error, error.what(), code_of(error));
  }
}

// Begins the requests whose grammars are compiled.
void Engine::Impl::begin_compiled() {
  const std::vector<Handle> waiting(compiling_.begin(), compiling_.end());
  for (const auto handle : waiting) {
    if (!compiling_.contains(handle) || !requests_.at(handle)->grammar->done()) continue;
    compiling_.erase(handle);
    begin(*requests_.at(handle));
  }
}

void Engine::Impl::make_providers(RequestState& state) {
  std::optional<std::vector<TokenId>> prompt;  // unset: no text is forced or proposed
  const bool proposes = speculation_ && !info.config.jump_forward;
  if (token_split_ && (proposes || !state.steered())) {
    const auto& input = state.request.input_ids;
    prompt.emplace(input.end() - std::min(std::ssize(input), std::ptrdiff_t{text::TokenSplit::kContext + 1}),
                   input.end());
  }
  for (int i = 0; i < state.num_completions(); ++i) {
    state.masks.push_back(state.grammar->compiled()->provider(state.end_ids, prompt, proposes));
  }
}

// Sets the prompt of a request, creates its completions, and adds their sequences to the scheduler.
void Engine::Impl::make_completions(RequestState& state) {
  if (state.in_session()) set_prompt(state);
  if (state.grammar) make_providers(state);
  auto& request = state.request;
  const auto& sampling = request.sampling;
  const int prompt = static_cast<int>(request.input_ids.size());
  const int left = request.pooling.empty() ? info.config.session_len - prompt : 1;
  const int max_tokens = std::min(sampling.max_tokens.value_or(left), left);
  count(Metric::prompt_tokens, prompt);
  observe(Metric::request_prompt_tokens, prompt);
  state.begun = true;
  if (state.num_completions() > 1) several_.insert(&state);
  const auto salt = salts_.number(request.cache_salt, prefix_class(prompt), state.adapter ? state.adapter->id : 0);
  // No request reads the stored KV of a mean: it computes all its tokens, and so do all others of its model.
  const bool is_mean = !request.pooling.empty() && info.model.pooling == "mean";
  if (offload_ && !is_mean) state.kv_scope = kv_scope(state);
  const bool resumes = !request.resumed.empty();
  for (int i = 0; i < state.num_completions(); ++i) {
    if (resumes && !request.resumed[static_cast<std::size_t>(i)]) continue;
    auto& completion = *state.completions.emplace_back(
        std::make_unique<Completion>(state, i, next_completion_++, *tokens_, max_tokens));
    completions_.emplace(completion.id, &completion);
    completion.salt = salt;
    ++state.num_live;
    if (state.masks.empty()) continue;
    auto& provider = state.masks[static_cast<std::size_t>(i)];
    completion.mask = std::make_shared<runtime::SequenceMask>(
        std::move(provider), info.model.vocab_size, state.grammar != nullptr && !executor_->asynchronous(),
        [this](double seconds) { observe(Metric::token_mask_seconds, seconds); });
    if (resumes) {
      masks_.next(completion.mask, *request.resumed[static_cast<std::size_t>(i)], false);
    } else if (!completion.forces_next()) {
      masks_.begin(completion.mask);
    }
  }
  auto& first = *state.completions.front();
  // The first result of sequence 0 has the log probabilities of the prompt.
  const bool wants_rows = sampling.prompt_logprobs >= 0 && prompt > 1 && first.index == 0 &&
                          (!resumes || request.resumed.front()->empty());
  if (wants_rows) first.prompt_logprobs.emplace(prompt, sampling.prompt_logprobs);
  if (is_mean) first.mean.emplace();
  for (const auto& completion : state.completions) {
    const bool is_first = completion.get() == &first;
    // A sequence that has tokens of its own begins like a preempted one, without a parent.
    scheduler_->add(completion->id, request.input_ids, prompt + max_tokens,
                    {.priority = request.priority,
                     .owner = std::hash<std::string>{}(request.owner),
                     .salt = salt,
                     .adapter = state.adapter ? state.adapter->id : 0,
                     .all_rows = is_first && (wants_rows || is_mean),
                     .parent = is_first || resumes ? 0 : first.id,
                     .scope = state.kv_scope});
    if (resumes) resume(*completion, *request.resumed[static_cast<std::size_t>(completion->index)]);
  }
}

void Engine::Impl::resume(Completion& completion, const std::vector<TokenId>& tokens) {
  if (!completion.resume(tokens)) {
    throw Error(ErrorCode::invalid_argument,
                cat("resumed: sequence ", completion.index, " has ended within its ", tokens.size(),
                    " tokens. Send only sequences that have not ended"));
  }
  for (const auto token : tokens) {
    scheduler_->append(completion.id, token);
    load_->sampled(completion.state.work);
  }
}

std::uint64_t Engine::Impl::prefix_class(int prompt_tokens) const {
  return model::rotary_class(info.model, prompt_tokens);
}

// Depends on the same things as the number for the prefix cache (CacheSalts), but holds for all processes.
std::string Engine::Impl::kv_scope(const RequestState& state) const {
  const auto& request = state.request;
  return cat(prefix_class(static_cast<int>(request.input_ids.size())), state.adapter ? "+" : "",
             state.adapter ? state.adapter->digest : "", "/", request.cache_salt);
}

void Engine::Impl::set_prompt(RequestState& state) {
  auto& request = state.request;
  auto end_ids = state.end_ids;
  end_ids.insert(end_ids.end(), info.model.end_ids.begin(), info.model.end_ids.end());
  state.turn = sessions_->begin(request.session_id);
  // With fit_max_tokens, a large max_tokens does not drop more of the history than an unset one (see PromptRules).
  auto room = request.sampling.max_tokens;
  if (request.fit_max_tokens && room && *room > info.config.session_len / 4) room.reset();
  auto prompt = runtime::session_prompt(*state.turn->history, request.input_ids, request.continuation_ids,
                                        {.session_len = info.config.session_len,
                                         .max_tokens = room,
                                         .start_id = info.model.start_id,
                                         .end_ids = end_ids});
  request.input_ids = std::move(prompt.tokens);
  request.continuation_ids.clear();
  state.turns = std::move(prompt.turns);
  state.num_session_tokens = prompt.num_history;
}

void Engine::Impl::end_overdue(Clock::time_point now) {
  while (!timers_.empty() && timers_.begin()->when <= now) {
    auto& state = *requests_.at(timers_.begin()->handle);
    const double waited = std::round(1000 * seconds(now - state.submitted)) / 1000;
    if (state.deadline && *state.deadline <= now) {
      reject(runtime::Rejection::deadline);
      end_request(
          state, FinishReason::error,
          cat("the request did not end within its time limit: ",
              std::round(1000 * seconds(*state.deadline - state.submitted)), " ms (timeout_ms or request_timeout_s)"),
          ErrorCode::deadline_exceeded);
    } else {
      reject(runtime::Rejection::queue_time);
      end_request(state, FinishReason::error,
                  cat("the request waited ", waited, " s and did not begin; max_queue_time_s is ",
                      info.config.max_queue_time_s, "; retry after ", load_->retry_after_s(), " s"),
                  ErrorCode::resource_exhausted);
    }
  }
  if (next_expiry_ && *next_expiry_ <= now) tidy_sessions();
}

// Must be called after every change of the sessions.
void Engine::Impl::tidy_sessions() {
  sessions_->tidy();
  next_expiry_ = sessions_->next_expiry();
  num_sessions_ = sessions_->count();
}

std::optional<Engine::Impl::Clock::time_point> Engine::Impl::next_timer() const {
  std::optional<Clock::time_point> out = next_expiry_;
  if (!timers_.empty() && (!out || timers_.begin()->when < *out)) out = timers_.begin()->when;
  // A Load gives up some time after its disk has stopped to answer.
  if (const auto soon = Clock::now() + std::chrono::seconds(1); waits_for_load_ && (!out || soon < *out)) out = soon;
  return out;
}

// Ends the remaining completions of a request, and destroys the request.
void Engine::Impl::end_request(RequestState& state, FinishReason reason, const std::string& error, ErrorCode code) {
  if (state.begun) {
    // A copy of the list, because the last finish() destroys the request and its list.
    std::vector<SeqId> live;
    for (const auto& completion : state.completions) {
      if (completions_.contains(completion->id)) live.push_back(completion->id);
    }
    for (const auto id : live) finish(id, reason, error, code);
    return;
  }
  state.reason = reason;
  std::vector<Result> last;
  for (int i = 0; i < state.request.sampling.n; ++i) {
    const auto& resumed = state.request.resumed;
    if (!resumed.empty() && !resumed[static_cast<std::size_t>(i)]) continue;
    auto& result = last.emplace_back();
    result.index = i;
    result.finish_reason = reason;
    result.error = error;
    result.error_code = code;
    result.num_input_tokens = static_cast<int>(state.request.input_ids.size());
    result.timings.queue_ms = result.timings.total_ms = 1000 * seconds(Clock::now() - state.submitted);
  }
  close(state, std::move(last));
}

// Ends a completion. After the last one the request is destroyed.
void Engine::Impl::finish(SeqId id, FinishReason reason, std::string error, ErrorCode code) {
  const auto found = completions_.find(id);
  if (found == completions_.end()) return;
  auto& completion = *found->second;
  auto& state = completion.state;
  const bool answered = reason == FinishReason::stop || reason == FinishReason::length;
  if (state.turn && (answered || (reason == FinishReason::cancelled && state.keep_turn))) keep_turn(completion);
  if (offload_ && failure_.empty() && !state.kv_scope.empty()) {
    offload_->offer(state.kv_scope, scheduler_->tokens(id), scheduler_->inserted(id), scheduler_->hit_ends(id));
  }
  end_drafts(completion, reason);
  scheduler_->remove(id);
  completions_.erase(found);
  auto last = state.ended(completion.last(reason, Clock::now(), std::move(error), code), completion.mean_logprob());
  if (--state.num_live == 0) {
    close(state, std::move(last));
  } else {
    for (auto& result : last) delivery_.push(state.callback, std::move(result));
  }
}

// Stores the scheduler's tokens as the history of the session.
void Engine::Impl::keep_turn(const Completion& completion) {
  const auto& state = completion.state;
  auto tokens = scheduler_->tokens(completion.id);
  if (tokens.back() < 0) tokens = tokens.first(tokens.size() - 1);  // a placeholder
  sessions_->keep(state.request.session_id, *state.turn, {{tokens.begin(), tokens.end()}, state.turns},
                  scheduler_->inserted(completion.id));
}

void Engine::Impl::close(RequestState& state, std::vector<Result> last) {
  const auto now = Clock::now();
  const auto handle = state.handle;
  count(Metric::request_success, 1, static_cast<int>(state.reason) - 1);
  observe(Metric::e2e_request_latency_seconds, seconds(now - state.submitted));
  observe(Metric::request_generation_tokens, static_cast<double>(state.num_output));
  load_->ended(state.work, state.num_output / state.num_completions());
  if (state.queue_deadline) timers_.erase({*state.queue_deadline, handle, Timer::Kind::queue_deadline});
  if (state.deadline) timers_.erase({*state.deadline, handle, Timer::Kind::deadline});
  compiling_.erase(handle);
  several_.erase(&state);
  const auto owned = std::move(requests_.at(handle));
  requests_.erase(handle);
  std::string session;
  if (state.in_session()) {
    session = state.request.session_id;
    if (const auto turns = turns_.find(session); turns != turns_.end()) {  // missing if memory ran out
      if (state.entered && !state.begun && turns->second.front() != handle) --num_parked_;
      std::erase(turns->second, handle);
    }
    if (state.request.end_session) sessions_->forget(session);
    if (state.entered) sessions_->leave(session);
    tidy_sessions();
  }
  {
    // A request whose last result is queued is no longer live: cancel() returns false for it.
    const std::lock_guard lock(mutex_);
    for (auto& result : last) delivery_.push(state.callback, std::move(result));
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
  auto& next = *requests_.at(found->second.front());
  if (next.begun) return;
  --num_parked_;
  begin(next);
}

}  // namespace charonia
