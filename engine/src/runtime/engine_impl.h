// The engine's state and threads. Only the engine thread uses the members below the comment "Engine thread".
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cache/block_manager.h"
#include "charonia/engine.h"
#include "ops/step.h"
#include "runtime/adapter.h"
#include "runtime/load_tracker.h"
#include "runtime/cache_salts.h"
#include "runtime/delivery.h"
#include "runtime/draft_model.h"
#include "runtime/executor.h"
#include "runtime/request_state.h"
#include "runtime/guide_thread.h"
#include "runtime/kv_offload.h"
#include "runtime/completion.h"
#include "runtime/mask_threads.h"
#include "runtime/proposals.h"
#include "runtime/session_store.h"
#include "schedule/scheduler.h"
#include "text/token_split.h"
#include "text/token_table.h"

namespace charonia {

class Engine::Impl {
 public:
  Impl(const std::filesystem::path& weights_dir, const Settings& overrides, std::shared_ptr<MetricsSink> sink);
  ~Impl();

  Handle submit(Request request, Callback callback);
  // keep: the session keeps the tokens that its turn has so far.
  bool end(Handle handle, bool keep);
  bool end(std::string_view id, bool keep);
  bool end_session(std::string_view session_id);
  std::vector<SessionInfo> sessions() const { return sessions_->list(); }
  void load_adapter(const std::string& name, const std::filesystem::path& folder);
  bool unload_adapter(std::string_view name);
  std::vector<AdapterInfo> adapters() const;
  Error no_adapter(std::string_view name) const;
  void shutdown(int timeout_ms);
  void close();
  void on_failure(std::function<void()> function) { on_failure_ = std::move(function); }
  void on_delivered(std::function<void()> function) { delivery_.after_each(std::move(function)); }
  EngineStats stats() const;
  std::string_view token_bytes(TokenId id) const { return tokens_->text_bytes(id); }
  std::string_view raw_token_bytes(TokenId id) const { return tokens_->raw_bytes(id); }
  std::vector<std::string> kernel_report();
  void check_integrity();

  EngineInfo info;

 private:
  using Clock = runtime::Clock;
  using RequestState = runtime::RequestState;
  using Completion = runtime::Completion;
  using SeqId = schedule::SeqId;

  struct End {
    Handle handle;
    Clock::time_point asked;
    bool keep = false;
  };
  // Requests, ends and tasks from other threads for the engine thread.
  struct Inbox {
    std::deque<std::unique_ptr<RequestState>> submitted;
    std::deque<End> ends;
    std::deque<std::function<void()>> tasks;
    bool empty() const { return submitted.empty() && ends.empty() && tasks.empty(); }
  };

  // A deadline for the begin or the end of a request. Both deadlines of a request may have the same time.
  struct Timer {
    enum class Kind : std::uint8_t { queue_deadline, deadline };
    Clock::time_point when;
    Handle handle;
    Kind kind;
    auto operator<=>(const Timer&) const = default;
  };

  // A step and the arrays that the device receives. Steps are reused to avoid allocations.
  struct Step {
    schedule::StepPlan plan;
    std::vector<std::int32_t> ids, positions, query_start, logits_rows, prompt_tokens;
    PerKind<std::vector<std::int32_t>> block_tables;
    std::vector<std::int32_t> state_in, state_out, row_states, hidden_rows;
    std::vector<ops::SampleRow> sample_rows;
    std::vector<std::shared_ptr<runtime::SequenceMask>> masks;  // used by sample_rows: they outlive sequences that end
    std::vector<std::shared_ptr<const runtime::Adapter>> adapters;  // [sequences]; null: none
    std::vector<std::int32_t> adapter_slots;      // of these adapters; -1: none. Empty: the device has no slots
    double streams = 0;  // sum of stream_weight() of the sequences that sample
    std::int32_t num_accepted = 0;  // proposals
    bool beside = false;            // a layer has caught up while it ran, so its time is not measured
    Clock::time_point begun;
    bool waited = false;  // for the samples of the previous step, only because of speculation
  };

  void load(const std::filesystem::path& weights_dir, const Settings& overrides);
  void plan_draft(const std::filesystem::path& weights_dir);
  void make_scheduler();
  std::vector<std::string> kernels() const;
  void report_kernels();
  void make_sessions();
  void make_offload(const std::filesystem::path& weights_dir);
  void make_guides(const std::filesystem::path& weights_dir);
  // Runs a task between two steps and waits for it. Rethrows its exception. Must not be called from the engine thread.
  void on_engine_thread(const std::function<void()>& task);
  // engine_adapters.cpp, any thread.
  std::shared_ptr<const runtime::Adapter> find_adapter(std::string_view name) const;
  // Null if the request names none. Throws Error(not_found).
  std::shared_ptr<const runtime::Adapter> adapter_of(const Request& request) const;
  // Queues a task to run between two steps, and does not wait. From any thread.
  void hand_task(std::function<void()> task);
  // engine_requests.cpp, the calling thread.
  void check(const Request& request) const;
  void check_guide(const Request& request) const;
  void check_resumed(const Request& request) const;
  void check_tokens(std::string_view field, const std::vector<TokenId>& ids) const;
  void fit_max_tokens(Request& request) const;
  void check_fits(const Request& request) const;
  void check_fits(const std::vector<TokenId>& input, const SamplingParams& sampling) const;
  std::vector<TokenId> end_ids_of(const SamplingParams& sampling) const;
  std::unique_ptr<RequestState> make_state(Request request, Callback callback, std::vector<TokenId> end_ids) const;
  void reject(runtime::Rejection reason);

  // engine_requests.cpp, the engine thread: the life of a request.
  void take(Inbox& inbox);
  void take(std::unique_ptr<RequestState> state);
  void begin(RequestState& state);
  void begin_compiled();
  void make_providers(RequestState& state);
  void make_completions(RequestState& state);
  void resume(Completion& completion, const std::vector<TokenId>& tokens);
  void set_prompt(RequestState& state);
  // Prompts of different classes do not share KV blocks: the model computes them differently.
  std::uint64_t prefix_class(int prompt_tokens) const;
  // SeqOptions::scope: what decides the KV of the request's tokens besides KvOffload's identity, and who may find it.
  std::string kv_scope(const RequestState& state) const;
  void end_overdue(Clock::time_point now);
  void end_request(RequestState& state, FinishReason reason, const std::string& error = {},
                   ErrorCode code = ErrorCode::internal);
  void finish(SeqId id, FinishReason reason, std::string error = {}, ErrorCode code = ErrorCode::internal);
  void keep_turn(const Completion& completion);
  void close(RequestState& state, std::vector<Result> last);
  void begin_next_turn(const std::string& session_id);
  std::optional<Clock::time_point> next_timer() const;
  void tidy_sessions();

  // engine_loop.cpp, the engine thread: steps.
  void run();
  // Whether there is nothing to compute.
  bool idle() const { return completions_.empty() && in_flight_ == nullptr; }
  // Whether the engine thread has anything to do, besides its inbox.
  bool has_work() const { return (!idle() && !waits_for_load_) || (offload_ && offload_->has_work()); }
  void step();
  bool may_overlap(const Step& running) const;
  Step* launch_next();
  bool wants_mask(const schedule::StepPlan& plan) const;
  void fill(Step& step, schedule::StepPlan plan);
  void fill_row_states(Step& step, const schedule::ScheduledSeq& part, std::size_t kind);
  void fill_rows(Step& step, const schedule::ScheduledSeq& part, Completion& completion);
  void schedule_first(Completion& completion, Clock::time_point now);
  void settle(Step& step);
  void measure(const Step& step, Clock::time_point now, double draft_s);
  void deliver(Step& step, std::vector<ops::Sampled> sampled);
  void fail_row(SeqId id, const std::string& error);
  void forget_tokens(SeqId id, std::size_t known_good = 0);
  void report_progress(const schedule::ScheduledSeq& part, const Completion& completion, Clock::time_point now);
  bool take_prompt_rows(const schedule::ScheduledSeq& part, std::span<ops::Sampled> rows, Completion& completion);
  bool deliver_rows(Result result, const Completion& completion);
  int accept(Completion& completion, const ops::Sampled& sampled, Clock::time_point now);
  void fail(const std::exception& error);
  void end_all(const std::string& error);

  // engine_speculation.cpp, the engine thread: proposals
  struct Proposed {
    Completion* completion;
    int most;  // tokens
    runtime::Proposal proposal;
  };
  void propose();
  bool may_propose(const Step& running);
  std::optional<Proposed> propose_known(SeqId id);
  double rate_of(const Proposed& one) const;
  void check_guess(Completion& completion, runtime::Proposal& proposal, int most);
  // The candidates of a sequence, of known tokens and of drafts if these are better. missing: DraftModel::set_tokens().
  void add_candidates(const Proposed& one, std::optional<int> missing,
                      std::vector<runtime::SpeculationPolicy::Candidate>& known,
                      std::vector<runtime::SpeculationPolicy::Candidate>& with_drafts) const;
  std::optional<int> set_draft_tokens(const Proposed& one);
  void draft(std::span<Proposed> all, std::span<runtime::SpeculationPolicy::Candidate> candidates);
  void catch_up(std::vector<runtime::DraftModel::Wanted>& wanted);
  void compute_drafts(std::span<runtime::DraftModel::Wanted> wanted);
  void keep_hidden(const Step& step);
  void end_drafts(const Completion& completion, FinishReason reason);
  int accept_all(Step& step, const schedule::ScheduledSeq& part, std::span<const ops::Sampled> rows,
                 Completion& completion, Clock::time_point now);

  // engine_metrics.cpp
  void count_requests(EngineStats& stats) const;
  void report_gauges();
  void count(Metric metric, double value, int label = 0);
  void observe(Metric metric, double seconds_or_count);

  std::shared_ptr<MetricsSink> sink_;
  std::unique_ptr<runtime::Executor> executor_;
  int max_positions_ = 0;  // of the executor
  std::unique_ptr<cache::BlockManager> blocks_;
  std::unique_ptr<schedule::StepTime> step_time_;
  std::unique_ptr<schedule::Scheduler> scheduler_;
  std::unique_ptr<text::TokenTable> tokens_;
  std::unique_ptr<runtime::ThinkingRules> thinking_rules_;
  std::unique_ptr<const text::TokenSplit> token_split_;  // null: text of grammars is neither forced nor proposed
  std::unique_ptr<runtime::LoadTracker> load_;
  std::unique_ptr<runtime::SessionStore> sessions_;

  // Shared, under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable wake_;     // the engine thread waits for it: the inbox is not empty
  std::condition_variable drained_;  // shutdown() waits for it: live_ became empty
  Inbox inbox_;
  std::unordered_map<Handle, std::string> live_;  // requests without a last result, with their ids
  Handle next_handle_ = 1;
  bool closing_ = false, stop_ = false;
  std::string failure_;  // why the engine has failed; empty while it works; written only by the engine thread
  std::map<std::string, std::shared_ptr<const runtime::Adapter>, std::less<>> adapters_;
  EngineStats stats_;
  std::mt19937_64 seeds_{std::random_device{}()};
  std::mutex adapters_mutex_;        // one load at a time
  std::uint64_t last_adapter_ = 0;   // under adapters_mutex_
  std::mutex shutdown_mutex_;  // one shutdown at a time
  bool stored_ = false;        // under shutdown_mutex_: offload_ was flushed
  // After the members that its thread uses by hand_task(). Null: no KV offload.
  std::unique_ptr<runtime::KvOffload> offload_;

  // Engine thread.
  std::unordered_map<Handle, std::unique_ptr<RequestState>> requests_;
  std::unordered_map<SeqId, Completion*> completions_;  // all completions in the scheduler
  SeqId next_completion_ = 1;
  std::set<RequestState*> several_;  // requests with more than one completion that have begun
  std::unordered_map<std::string, std::deque<Handle>> turns_;  // requests by session; the first one has the turn
  runtime::CacheSalts salts_;
  int num_parked_ = 0;                                         // requests that wait for their session's turn
  std::set<Handle> compiling_;                                 // requests that wait only for their grammar
  std::set<Timer> timers_;                                     // the deadlines of all requests
  std::optional<Clock::time_point> next_expiry_;               // when the next session expires
  Clock::time_point period_begun_{};  // when the last step was settled, or when there was work again
  bool waited_ = false;  // may_propose() kept the next step from overlapping
  std::chrono::nanoseconds interval_{};  // between two responses of a stream; from the last settled step
  std::array<Step, ops::kMaxStepsInFlight> steps_;
  bool waits_for_load_ = false;  // all sequences wait for KV that is being read
  Step* in_flight_ = nullptr;  // launched, but not settled; only on asynchronous devices
  std::function<void()> on_failure_;
  int num_sessions_ = 0;
  EngineStats reported_;        // the values last sent to the sink
  bool reported_any_ = false;
  int reported_committed_ = 0;  // KV blocks that have memory
  double reported_usage_ = 0;   // the share of blocks in use, of the kind of cache that has the largest

  std::unique_ptr<runtime::SpeculationPolicy> speculation_;  // null: speculation is off
  std::optional<runtime::DraftPlan> draft_plan_;             // of the model to load
  std::unique_ptr<runtime::DraftModel> draft_;               // null: no draft model
  double draft_s_ = 0;                                       // seconds that it took since the last settled step
  double search_s_ = 0;                                      // what check_guess() may still take for known tokens
  SeqId first_search_ = 0;                                   // the first sequence that had no time for it; 0: none
  std::vector<SeqId> decodes_;                               // the sequences that sampled in the last settled step
  std::vector<SeqId> computed_;  // sequences of the last settled step whose tokens draft_ lacks; only if it reads_hidden()

  runtime::MaskThreads masks_;
  std::unique_ptr<runtime::GuideThread> guides_;

  // Last, so that it delivers the queued results before the members above are destroyed.
  runtime::Delivery delivery_;
  std::thread thread_;
};

}  // namespace charonia
