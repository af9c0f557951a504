#include "runtime/guide_thread.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "base/guide_name.h"
#include "base/text.h"
#include "base/thread_time.h"

namespace charonia::runtime {
namespace {

constexpr int kNice = 10;
// What takes longer is for the slow lane.
constexpr std::chrono::milliseconds kQuick{300};

}  // namespace

GuideGrammar::State GuideGrammar::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

GuideThread::GuideThread(Compiler compiler, std::int64_t cache_bytes, std::shared_ptr<MetricsSink> sink,
                         std::function<void()> done)
    : compiler_(std::move(compiler)), cache_bytes_(cache_bytes), sink_(std::move(sink)), done_(std::move(done)) {}

GuideThread::~GuideThread() { close(); }

void GuideThread::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    quick_.waiting.clear();
    slow_.waiting.clear();
  }
  wake_.notify_all();
  for (auto& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

GuideThread::Handle GuideThread::find(const Guide& guide, bool after_space, const std::string& owner) {
  auto key = cat(to_string(guide.type), after_space ? "+" : " ", guide.text);
  Handle out;
  bool hit = true;
  {
    const std::lock_guard lock(mutex_);
    if (const auto kept = kept_.find(key); kept != kept_.end()) {
      uses_.splice(uses_.begin(), uses_, kept->second.use);
      out = kept->second.grammar;
    } else if (const auto running = running_.find(key); running != running_.end()) {
      out = running->second.lock();
      if (out && std::ranges::find(out->owners_, owner) == out->owners_.end()) ask(out, owner);
    }
    if (!out) {
      hit = false;
      out = std::make_shared<GuideGrammar>();
      out->guide_ = guide;
      out->after_space_ = after_space;
      out->key_ = key;
      out->waits_ = true;
      tidy();
      running_[std::move(key)] = out;
      ask(out, owner);
      const auto missing = std::ranges::find_if(threads_, [](const auto& thread) { return !thread.joinable(); });
      if (missing != threads_.end() && !stop_) {
        try {
          *missing = std::thread([this] { run(); });
        } catch (const std::system_error&) {  // one alone does the work of both, only later
          if (missing == threads_.begin()) throw;
        }
      }
    }
  }
  if (!hit) wake_.notify_one();
  if (sink_) sink_->add(hit ? Metric::guide_cache_hits : Metric::guide_cache_misses, 1, 0);
  return out;
}

void GuideThread::ask(const Handle& grammar, const std::string& owner) {
  grammar->owners_.push_back(owner);
  if (grammar->waits_) lane_of(*grammar).waiting.add(owner, grammar);
}

// Of what many asked for and left before its turn, the keys would stay.
void GuideThread::tidy() {
  if (running_.size() < most_running_) return;
  std::erase_if(running_, [](const auto& item) { return item.second.expired(); });
  quick_.waiting.tidy();
  slow_.waiting.tidy();
  most_running_ = 2 * running_.size() + 64;
}

std::optional<double> GuideThread::overdue(const Handle& grammar, double limit_s) {
  const std::lock_guard lock(grammar->mutex_);
  if (grammar->state_ == GuideGrammar::State::queued) return std::nullopt;
  if (grammar->state_ >= GuideGrammar::State::ready) return 0;
  // The error is kept for later requests: the time that others took is not this one's.
  const std::chrono::duration<double> took = Clock::now() - grammar->begun_;
  if (took.count() < limit_s) return limit_s - took.count();
  if (!grammar->overdue_) {
    grammar->limit_s_ = limit_s;
    grammar->overdue_ = true;
  }
  return 0;
}

void GuideThread::run() {
  // Linux: of this thread alone. The engine's threads go first.
  setpriority(PRIO_PROCESS, 0, kNice);
  std::unique_lock lock(mutex_);
  while (!stop_) {
    clear_quick_lane();
    auto grammar = begin_next();
    if (!grammar) {
      if (quick_.waiting.empty() || slow_.compiling != nullptr) {
        wake_.wait(lock);
      } else {
        wake_.wait_until(lock, quick_.begun + kQuick);
      }
      continue;
    }
    // Whoever asked may have gone; who asks while it is given up finds it here and takes it on.
    auto end = End::abandoned;
    while (end == End::abandoned && grammar.use_count() > 1) {
      lock.unlock();
      end = compile(grammar);
      lock.lock();
      if (stop_) return;
    }
    lane_of(*grammar).compiling = nullptr;
    if (end == End::displaced) {
      grammar->slow_ = grammar->waits_ = true;
      for (const auto& owner : grammar->owners_) slow_.waiting.add(owner, grammar);
      continue;
    }
    running_.erase(grammar->key_);
    if (end == End::abandoned) continue;
    keep(grammar);
    grammar.reset();
    lock.unlock();
    done_();
    lock.lock();
  }
}

// What has been in the quick lane for long goes on in the slow one where that is free.
void GuideThread::clear_quick_lane() {
  if (quick_.compiling == nullptr || slow_.compiling != nullptr || Clock::now() - quick_.begun < kQuick) return;
  slow_.compiling = std::exchange(quick_.compiling, nullptr);
  slow_.compiling->slow_ = true;
  slow_.waiting.count(slow_.compiling->owners_.front());
}

// Null: nothing waits for a lane that is free.
GuideThread::Handle GuideThread::begin_next() {
  for (auto* const lane : {&quick_, &slow_}) {
    if (lane->compiling != nullptr) continue;
    auto grammar = lane->waiting.next([&](const auto& one) { return one.waits_ && &lane_of(one) == lane; });
    if (!grammar) continue;
    grammar->waits_ = false;
    lane->compiling = grammar.get();
    lane->begun = Clock::now();
    return grammar;
  }
  return nullptr;
}

bool GuideThread::is_displaced(const GuideGrammar& grammar) {
  const std::lock_guard lock(mutex_);
  return !grammar.slow_ && slow_.compiling != nullptr;
}

GuideThread::End GuideThread::compile(const Handle& handle) {
  auto& grammar = *handle;
  const auto begun = Clock::now();
  {
    const std::lock_guard lock(grammar.mutex_);
    grammar.state_ = GuideGrammar::State::compiling;
    grammar.begun_ = begun;
  }
  bool displaced = false;
  const auto stopped = [&, cpu_begun = thread_seconds()] {
    if (grammar.overdue_ || stop_ || handle.use_count() == 1) return true;
    // Computing time: on a busy machine, what takes little is there for long.
    displaced = Clock::now() - begun >= kQuick &&
                thread_seconds() - cpu_begun >= std::chrono::duration<double>(kQuick).count() && is_displaced(grammar);
    return displaced;
  };
  const grammar::GuideCompiler* compiler = nullptr;
  try {
    compiler = &compiler_();
    grammar.compiled_ = compiler->compile(grammar.guide_, grammar.after_space_, stopped);
  } catch (const Error& error) {
    grammar.error_ = error.what();
    grammar.error_code_ = error.code();
  } catch (const std::exception& error) {
    grammar.error_ = cat("the grammar could not be compiled: ", error.what());
    grammar.error_code_ =
        dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? ErrorCode::resource_exhausted : ErrorCode::internal;
  }
  const std::chrono::duration<double> took = Clock::now() - begun;
  const bool stopped_early = !grammar.compiled_ && grammar.error_.empty() && !displaced;
  const auto largest = stopped_early ? compiler->largest_part(grammar.guide_) : std::string();
  const std::lock_guard lock(grammar.mutex_);
  if (!grammar.compiled_ && grammar.error_.empty()) {
    if (!grammar.overdue_) {
      grammar.state_ = GuideGrammar::State::queued;
      return displaced ? End::displaced : End::abandoned;
    }
    grammar.error_ = cat(called(grammar.guide_), ": its grammar was not compiled within ", grammar.limit_s_,
                         " s (guide_timeout_s): make it simpler", largest);
  }
  if (sink_) sink_->observe(Metric::guide_compile_seconds, took.count());
  grammar.state_ = grammar.compiled_ ? GuideGrammar::State::ready : GuideGrammar::State::failed;
  return End::done;
}

// What is wrong with a guide is kept as well: it stays wrong.
void GuideThread::keep(const Handle& grammar) {
  if (grammar->state() == GuideGrammar::State::failed && grammar->error_code_ != ErrorCode::invalid_argument) return;
  const auto& key = grammar->key_;
  const auto compiled = grammar->compiled_ ? grammar->compiled_->bytes() : grammar->error_.size();
  const auto bytes = static_cast<std::int64_t>(compiled + 4 * key.size());
  if (bytes > cache_bytes_) return;
  while (kept_bytes_ + bytes > cache_bytes_) {
    const auto oldest = kept_.find(uses_.back());
    kept_bytes_ -= oldest->second.bytes;
    kept_.erase(oldest);
    uses_.pop_back();
  }
  uses_.push_front(key);
  kept_.emplace(key, Kept{grammar, bytes, uses_.begin()});
  kept_bytes_ += bytes;
}

}  // namespace charonia::runtime
