// The grammars of guides: compiled on a thread of their own, and kept by content.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "charonia/error.h"
#include "charonia/metrics.h"
#include "charonia/types.h"
#include "grammar/guide_compiler.h"
#include "text/token_table.h"

namespace charonia::runtime {

// The grammar of one guide, compiled or on its way. Shared by the requests that have asked for it.
class GuideGrammar {
 public:
  enum class State { queued, compiling, ready, failed };

  State state() const;
  bool done() const { return state() >= State::ready; }
  // Null unless it is ready.
  const grammar::CompiledGuide* compiled() const { return compiled_.get(); }
  // Once it has failed: what is wrong with the guide, or that memory does not suffice.
  const std::string& error() const { return error_; }
  ErrorCode error_code() const { return error_code_; }

 private:
  friend class GuideThread;

  Guide guide_;
  bool after_space_ = false;
  mutable std::mutex mutex_;
  State state_ = State::queued;                  // under mutex_; the rest is written once before it is done
  std::chrono::steady_clock::time_point begun_;  // under mutex_; of its compilation
  std::atomic<bool> overdue_ = false;
  double limit_s_ = 0;  // of the request that found it overdue
  std::shared_ptr<const grammar::CompiledGuide> compiled_;
  std::string error_;
  ErrorCode error_code_ = ErrorCode::invalid_argument;
};

// One thread, which goes after the engine's: a grammar takes milliseconds.
class GuideThread {
 public:
  using Handle = std::shared_ptr<GuideGrammar>;

  // table, split (see GuideCompiler): kept. sink: takes the engine's metrics. done: called on the thread when something is
  // done. The thread starts when it is needed.
  GuideThread(const text::TokenTable& table, int vocab_size, std::vector<TokenId> end_ids, std::int64_t cache_bytes,
              std::shared_ptr<MetricsSink> sink, std::function<void()> done,
              const text::TokenSplit* split = nullptr);
  ~GuideThread();
  GuideThread(const GuideThread&) = delete;
  GuideThread& operator=(const GuideThread&) = delete;

  // Ends the thread at once; nothing is compiled any more. Idempotent.
  void close();

  // From any thread; never waits for a compilation. What nobody holds a handle of any more is not compiled to its end.
  Handle find(const Guide& guide, bool after_space);
  // For a request that has waited limit_s. Without a value: its grammar is queued behind others. Else the seconds that
  // are left of limit_s for the compilation itself; at 0 it ends, as an error for good.
  std::optional<double> overdue(const Handle& grammar, double limit_s);

 private:
  struct Kept {
    Handle grammar;
    std::int64_t bytes;
    std::list<std::string>::iterator use;
  };

  void run();
  bool compile(const Handle& grammar);
  void keep(const std::string& key, const Handle& grammar);

  const text::TokenTable& table_;
  const int vocab_size_;
  const std::vector<TokenId> end_ids_;
  const std::int64_t cache_bytes_;
  const std::shared_ptr<MetricsSink> sink_;
  const std::function<void()> done_;
  const text::TokenSplit* const split_;
  std::unique_ptr<grammar::GuideCompiler> compiler_;  // the thread's

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<std::string, Handle>> queue_;                      // with their keys
  std::unordered_map<std::string, std::weak_ptr<GuideGrammar>> running_;  // queued or compiling, by key
  std::unordered_map<std::string, Kept> kept_;                            // done, by key
  std::list<std::string> uses_;                                           // keys of kept_, the latest first
  std::int64_t kept_bytes_ = 0;
  std::atomic<bool> stop_ = false;  // written under mutex_
  std::thread thread_;
};

}  // namespace charonia::runtime
