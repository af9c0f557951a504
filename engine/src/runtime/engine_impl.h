// The engine's state and threads. Everything below "engine thread" is touched by that thread alone.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cache/block_manager.h"
#include "charonia/engine.h"
#include "ops/ops.h"
#include "runtime/delivery.h"
#include "runtime/executor.h"
#include "runtime/sequence.h"
#include "sample/token_table.h"
#include "schedule/scheduler.h"

namespace charonia {

class Engine::Impl {
 public:
  Impl(const std::filesystem::path& weights_dir, const Settings& overrides, std::shared_ptr<MetricsSink> sink);
  ~Impl();

  Handle submit(Request request, Callback callback);
  bool cancel(Handle handle);
  bool cancel(std::string_view id);
  void shutdown(int timeout_ms);
  void close();
  EngineStats stats() const;
  void check_integrity();

  EngineInfo info;

 private:
  using Clock = runtime::Clock;
  using SequencePtr = std::unique_ptr<runtime::Sequence>;

  struct Cancel {
    Handle handle;
    Clock::time_point asked;
  };
  // What other threads hand to the engine thread.
  struct Inbox {
    std::deque<std::pair<Handle, SequencePtr>> submitted;
    std::vector<Cancel> cancels;
    std::vector<std::function<void()>> tasks;
    bool empty() const { return submitted.empty() && cancels.empty() && tasks.empty(); }
  };

  // A step with what its device gets, kept to spare allocations.
  struct Step {
    schedule::StepPlan plan;
    std::vector<std::int32_t> ids, positions, query_start, block_tables, logits_rows;
    std::vector<ops::SampleRow> sample_rows;
    std::string error;  // why it could not be launched
  };

  void load(const std::filesystem::path& weights_dir, const Settings& overrides);
  void make_scheduler();
  void check_fits(const Request& request) const;
  std::vector<TokenId> end_ids_of(const SamplingParams& sampling) const;
  int seconds_until_room() const;  // under mutex_

  // Engine thread.
  void run();
  bool idle() const { return sequences_.empty() && in_flight_ == nullptr; }
  void take(Inbox& inbox);
  void step();
  bool may_overlap(const Step& running) const;
  Step* launch_next();
  void fill(Step& step, schedule::StepPlan plan);
  bool settle(Step& step);
  std::vector<ops::Sampled> collect();
  void deliver(const schedule::StepPlan& plan, const std::vector<ops::Sampled>& sampled);
  void fail(const schedule::StepPlan& plan, const std::string& error);
  void fail_all(const std::string& error);
  void finish(Handle handle, FinishReason reason, std::string error = {});
  void report_gauges();
  void count(Metric metric, double value, int label = 0);
  void observe(Metric metric, double seconds_or_count);

  std::shared_ptr<MetricsSink> sink_;
  std::unique_ptr<runtime::Executor> executor_;
  std::unique_ptr<cache::BlockManager> blocks_;
  std::unique_ptr<schedule::Scheduler> scheduler_;
  std::unique_ptr<sample::TokenTable> tokens_;

  // Shared, under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable wake_;     // the engine thread: something is in the inbox
  std::condition_variable drained_;  // shutdown(): live_ became empty
  Inbox inbox_;
  std::unordered_map<Handle, std::string> live_;  // requests without a last result, with their ids
  Handle next_handle_ = 1;
  bool closing_ = false, stop_ = false;
  EngineStats stats_;
  double seconds_per_finish_ = 0;  // moving average; 0: nothing finished yet
  std::mt19937_64 seeds_{std::random_device{}()};
  std::mutex shutdown_mutex_;  // one shutdown at a time

  // Engine thread.
  std::unordered_map<Handle, SequencePtr> sequences_;
  Clock::time_point last_finish_{};
  std::array<Step, ops::kMaxStepsInFlight> steps_;
  Step* in_flight_ = nullptr;  // launched and advanced, not settled; only on asynchronous devices
  int num_uncollected_ = 0;    // steps launched
  EngineStats reported_;       // what the metrics have seen

  // Last, so that it delivers what is queued while everything above still lives.
  runtime::Delivery delivery_;
  std::thread thread_;
};

}  // namespace charonia
