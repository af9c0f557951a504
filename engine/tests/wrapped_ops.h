// A device around another one, for tests of the engine: it computes steps on a separate thread, like a GPU, and fails
// on request.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "charonia/error.h"
#include "forwarding_ops.h"
#include "ops/ops.h"

namespace charonia::testing {

// The steps that should fail, counted from the next: 0 is the next one; < 0: none.
struct Faults {
  std::atomic<int> launch_in{-1}, collect_in{-1};
  std::atomic<int> most_in_flight{0};  // maximum observed
  std::atomic<bool> hold{false};       // launched steps wait until it is false (notify_all())
  std::atomic<int> step_ms{0};         // minimum time of a step
  std::atomic<std::int64_t> free_bytes{-1};  // free memory of a rank; < 0: of the device
  std::function<void()> on_download = [] {};
};

// A deep copy of the arrays of a step.
class StepCopy {
 public:
  explicit StepCopy(const ops::StepInput& input)
      : ids_(input.ids.begin(), input.ids.end()),
        query_start_(input.attention.query_start.begin(), input.attention.query_start.end()),
        positions_(input.attention.positions.begin(), input.attention.positions.end()),
        logits_rows_(input.logits_rows.begin(), input.logits_rows.end()),
        prompt_tokens_(input.prompt_tokens.begin(), input.prompt_tokens.end()),
        rotary_rows_(input.attention.rotary_rows.begin(), input.attention.rotary_rows.end()),
        adapters_(input.adapters.begin(), input.adapters.end()),
        state_in_(input.attention.state_in.begin(), input.attention.state_in.end()),
        state_out_(input.attention.state_out.begin(), input.attention.state_out.end()),
        row_states_(input.attention.row_states.begin(), input.attention.row_states.end()),
        hidden_rows_(input.hidden_rows.begin(), input.hidden_rows.end()),
        reads_main_(input.reads_main),
        block_copies_(input.block_copies.begin(), input.block_copies.end()),
        table_stride_(input.attention.table_stride),
        rows_(input.sample.begin(), input.sample.end()) {
    for (const auto kind : kCacheKinds) block_tables_[kind] = keep(input.attention.block_tables[kind]);
    for (auto& row : rows_) {
      row.prompt = keep(row.prompt);
      row.output = keep(row.output);
      row.banned = keep(row.banned);
      EXPECT_TRUE(std::ranges::is_sorted(row.banned));
      biases_.emplace_back(row.bias.begin(), row.bias.end());
      row.bias = biases_.back();
    }
  }
  StepCopy(const StepCopy&) = delete;

  ops::StepInput input() const {
    return {.ids = ids_,
            .attention = {query_start_, positions_, block_tables_, table_stride_, rotary_rows_, state_in_, state_out_,
                          row_states_},
            .logits_rows = logits_rows_,
            .sample = rows_,
            .prompt_tokens = prompt_tokens_,
            .adapters = adapters_,
            .hidden_rows = hidden_rows_,
            .reads_main = reads_main_,
            .block_copies = block_copies_};
  }

 private:
  std::span<const std::int32_t> keep(std::span<const std::int32_t> list) {
    return lists_.emplace_back(list.begin(), list.end());
  }

  PerKind<std::span<const std::int32_t>> block_tables_;
  std::vector<std::int32_t> ids_, query_start_, positions_, logits_rows_, prompt_tokens_, rotary_rows_, adapters_,
      state_in_, state_out_, row_states_, hidden_rows_;
  bool reads_main_ = false;
  std::vector<BlockCopy> block_copies_;
  std::int64_t table_stride_;
  std::vector<ops::SampleRow> rows_;
  std::deque<std::vector<std::int32_t>> lists_;
  std::deque<std::vector<std::pair<std::int32_t, float>>> biases_;
};

class WrappedOps : public ForwardingOps {
 public:
  WrappedOps(std::unique_ptr<ops::Ops> inner, bool asynchronous, std::shared_ptr<Faults> faults)
      : ForwardingOps(std::move(inner)), asynchronous_(asynchronous), faults_(std::move(faults)) {
    if (asynchronous_) thread_ = std::thread([this] { work(); });
  }
  ~WrappedOps() override {
    if (!asynchronous_) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  bool asynchronous() const override { return asynchronous_; }
  std::size_t free_memory() const override {
    const auto bytes = faults_->free_bytes.load();
    return bytes < 0 ? ForwardingOps::free_memory() : static_cast<std::size_t>(bytes);
  }

  void begin_step(const ops::StepInput& input) override {
    if (faults_->launch_in-- == 0) throw Error(ErrorCode::internal, "the test fails this launch");
    const bool fails = faults_->collect_in-- == 0;
    begun_ = std::make_unique<Step>(input, fails);
  }
  // After the steps in flight, like on a GPU.
  void upload(void* device, const void* host, std::size_t bytes) override {
    wait_for_steps();
    ForwardingOps::upload(device, host, bytes);
  }
  void download(void* host, const void* device, std::size_t bytes) override {
    wait_for_steps();
    faults_->on_download();
    ForwardingOps::download(host, device, bytes);
  }
  // As part of the step, because a step in flight still reads the blocks that are overwritten.
  void copy_blocks(ops::KvCache& cache, std::span<const BlockCopy> copies) override {
    begun_->cache = &cache;
    begun_->copies.assign(copies.begin(), copies.end());
  }
  void run_step(const Issue& issue) override {
    begun_->issue = issue;
    if (!asynchronous_) {
      compute(*begun_);
      begun_->done = true;
    }
    {
      const std::lock_guard lock(mutex_);
      steps_.push_back(std::move(begun_));
      const int in_flight = static_cast<int>(steps_.size());
      faults_->most_in_flight = std::max(faults_->most_in_flight.load(), in_flight);
      if (in_flight > ops::kMaxStepsInFlight) throw Error(ErrorCode::internal, "too many steps are in flight");
    }
    changed_.notify_all();
  }
  std::vector<ops::Sampled> collect() override {
    std::unique_lock lock(mutex_);
    if (steps_.empty()) throw Error(ErrorCode::internal, "there is no step to collect");
    changed_.wait(lock, [this] { return steps_.front()->done; });
    const auto step = std::move(steps_.front());
    steps_.pop_front();
    if (step->error) std::rethrow_exception(step->error);
    return std::move(step->sampled);
  }

 private:
  void wait_for_steps() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return std::ranges::all_of(steps_, [](const auto& step) { return step->done; }); });
  }

  struct Step {
    Step(const ops::StepInput& input, bool fails_in) : copy(input), fails(fails_in) {}
    StepCopy copy;
    bool fails;
    Issue issue;
    ops::KvCache* cache = nullptr;
    std::vector<BlockCopy> copies;
    bool done = false;  // guarded by mutex_; the following fields are then valid
    std::vector<ops::Sampled> sampled;
    std::exception_ptr error;
  };

  // A failing step computes nothing: the cache does not change.
  void compute(Step& step) {
    faults_->hold.wait(true);
    std::this_thread::sleep_for(std::chrono::milliseconds(faults_->step_ms));
    try {
      if (step.fails) throw Error(ErrorCode::internal, "the test fails this step");
      ForwardingOps::begin_step(step.copy.input());
      if (step.cache != nullptr) ForwardingOps::copy_blocks(*step.cache, step.copies);
      ForwardingOps::run_step(step.issue);
      step.sampled = ForwardingOps::collect();
    } catch (const std::exception& error) {
      step.error = std::current_exception();
      // The next step must not meet the other ranks in this one.
      abort_collectives(error.what());
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto next = [this] {
        return std::ranges::find(steps_, false, [](const auto& step) { return step->done; });
      };
      changed_.wait(lock, [&] { return stop_ || next() != steps_.end(); });
      if (stop_) return;
      auto& step = **next();
      lock.unlock();
      compute(step);
      lock.lock();
      step.done = true;
      changed_.notify_all();
    }
  }

  const bool asynchronous_;
  const std::shared_ptr<Faults> faults_;
  std::unique_ptr<Step> begun_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Step>> steps_;  // not collected
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace charonia::testing
