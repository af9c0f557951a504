// The grammars of guides: compiled on threads of their own, and kept by content.
//
// There are two lanes, in each of which one grammar is compiled at a time, so that what takes little never waits for what
// takes long. Every grammar begins in the quick lane. One that has taken long there goes on in the slow lane; while that
// has another one, it is given up and begins anew once it is its turn there. In both lanes the owners of requests take
// turns.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "charonia/error.h"
#include "charonia/metrics.h"
#include "charonia/types.h"
#include "grammar/guide_compiler.h"
#include "runtime/turns.h"

namespace charonia::runtime {

// The grammar of one guide, compiled or on its way. Shared by the requests that have asked for it.
class GuideGrammar {
 public:
  enum class State { queued, compiling, ready, failed };

  State state() const;
  bool done() const { return state() >= State::ready; }
  // Null unless it is ready.
  const grammar::CompiledGuide* compiled() const { return compiled_.get(); }
  // Once it has failed: what is wrong with the guide, that memory does not suffice, or that nothing compiles guides yet.
  const std::string& error() const { return error_; }
  ErrorCode error_code() const { return error_code_; }

 private:
  friend class GuideThread;

  Guide guide_;
  bool after_space_ = false;
  std::string key_;
  // Under the mutex of GuideThread:
  std::vector<std::string> owners_;  // of the requests that have asked for it
  bool slow_ = false;                // in the slow lane
  bool waits_ = false;               // for its turn there or in the quick one

  mutable std::mutex mutex_;
  State state_ = State::queued;                  // under mutex_; the rest is written once before it is done
  std::chrono::steady_clock::time_point begun_;  // under mutex_; of its compilation
  std::atomic<bool> overdue_ = false;
  double limit_s_ = 0;  // of the request that found it overdue
  std::shared_ptr<const grammar::CompiledGuide> compiled_;
  std::string error_;
  ErrorCode error_code_ = ErrorCode::invalid_argument;
};

// Two threads, which go after the engine's: a grammar takes milliseconds.
class GuideThread {
 public:
  using Handle = std::shared_ptr<GuideGrammar>;
  // What compiles. Asked before each grammar, on both threads at the same time. Throws Error where there is none, or none
  // yet.
  using Compiler = std::function<const grammar::GuideCompiler&()>;

  // sink: takes the engine's metrics. done: called on a thread when something is done. The threads start when they are
  // needed.
  GuideThread(Compiler compiler, std::int64_t cache_bytes, std::shared_ptr<MetricsSink> sink, std::function<void()> done);
  ~GuideThread();
  GuideThread(const GuideThread&) = delete;
  GuideThread& operator=(const GuideThread&) = delete;

  // Ends the threads at once; nothing is compiled any more. Idempotent.
  void close();

  // From any thread; never waits for a compilation. What nobody holds a handle of any more is not compiled to its end.
  // owner: who takes turns with others.
  Handle find(const Guide& guide, bool after_space, const std::string& owner);
  // For a request that has waited limit_s. Without a value: its grammar is queued behind others. Else the seconds that
  // are left of limit_s for the compilation itself; at 0 it ends, as an error for good.
  std::optional<double> overdue(const Handle& grammar, double limit_s);

 private:
  using Clock = std::chrono::steady_clock;
  enum class End { done, abandoned, displaced };

  struct Lane {
    Turns<GuideGrammar> waiting;
    GuideGrammar* compiling = nullptr;
    Clock::time_point begun;  // the compilation
  };
  struct Kept {
    Handle grammar;
    std::int64_t bytes;
    std::list<std::string>::iterator use;
  };

  void run();
  // Under mutex_:
  Lane& lane_of(const GuideGrammar& grammar) { return grammar.slow_ ? slow_ : quick_; }
  void ask(const Handle& grammar, const std::string& owner);
  Handle begin_next();
  void clear_quick_lane();
  void keep(const Handle& grammar);
  void tidy();

  End compile(const Handle& grammar);
  bool is_displaced(const GuideGrammar& grammar);

  const Compiler compiler_;
  const std::int64_t cache_bytes_;
  const std::shared_ptr<MetricsSink> sink_;
  const std::function<void()> done_;

  std::mutex mutex_;
  std::condition_variable wake_;
  Lane quick_, slow_;
  std::unordered_map<std::string, std::weak_ptr<GuideGrammar>> running_;  // queued or compiling, by key
  std::size_t most_running_ = 64;                                         // from which on those of nobody are forgotten
  std::unordered_map<std::string, Kept> kept_;                            // done, by key
  std::list<std::string> uses_;                                           // keys of kept_, the latest first
  std::int64_t kept_bytes_ = 0;
  std::atomic<bool> stop_ = false;  // written under mutex_
  std::array<std::thread, 2> threads_;
};

}  // namespace charonia::runtime
