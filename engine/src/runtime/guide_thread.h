// Compiles the guides of requests on its own thread, so that the engine thread never waits for a grammar.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "charonia/error.h"
#include "charonia/metrics.h"
#include "charonia/types.h"
#include "grammar/guide_compiler.h"
#include "runtime/turns.h"

namespace charonia::runtime {

// The grammar of one request, compiled or waiting.
class GuideGrammar {
 public:
  GuideGrammar(Guide guide, bool after_space, std::string owner)
      : guide_(std::move(guide)), after_space_(after_space), owner_(std::move(owner)) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  // After done(): null if it failed.
  const grammar::CompiledGuide* compiled() const { return compiled_.get(); }
  const std::string& error() const { return error_; }
  ErrorCode error_code() const { return error_code_; }

 private:
  friend class GuideThread;

  const Guide guide_;
  const bool after_space_;
  const std::string owner_;
  std::shared_ptr<const grammar::CompiledGuide> compiled_;
  std::string error_;
  ErrorCode error_code_ = ErrorCode::invalid_argument;
  std::atomic<bool> done_ = false;
};

class GuideThread {
 public:
  using Handle = std::shared_ptr<GuideGrammar>;
  using MakeCompiler = std::function<std::unique_ptr<grammar::GuideCompiler>()>;

  // Calls `make` on the thread when it starts; after an error, again for the next guide. Calls `done` on the thread
  // after each guide.
  GuideThread(MakeCompiler make, std::shared_ptr<MetricsSink> sink, std::function<void()> done);
  ~GuideThread();
  GuideThread(const GuideThread&) = delete;
  GuideThread& operator=(const GuideThread&) = delete;

  // Ends the thread after the guide that is being compiled. Idempotent.
  void close();

  // Queues a guide. Thread-safe. Owners take turns. If the handle is dropped before the turn of the guide, the guide is
  // not compiled. Requests of one owner that use equal guides at the same time share one grammar.
  Handle compile(Guide guide, bool after_space, const std::string& owner);

 private:
  using Key = std::tuple<std::string, GuideType, std::string, bool>;  // owner, type and text, after_space

  void run();
  void compile(GuideGrammar& grammar);
  std::shared_ptr<const grammar::CompiledGuide> compiled(const GuideGrammar& grammar);

  const MakeCompiler make_;
  const std::shared_ptr<MetricsSink> sink_;
  const std::function<void()> done_;
  // Used only by the thread.
  std::unique_ptr<grammar::GuideCompiler> compiler_;
  std::map<Key, std::weak_ptr<const grammar::CompiledGuide>> in_use_;

  std::mutex mutex_;
  std::condition_variable wake_;
  Turns<GuideGrammar> waiting_;  // under mutex_
  bool stop_ = false;            // under mutex_
  pthread_t thread_;
  bool joined_ = false;
};

}  // namespace charonia::runtime
