#include "runtime/guide_thread.h"

#include <sys/resource.h>

#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "base/text.h"

namespace charonia::runtime {
namespace {

constexpr int kNice = 10;

}  // namespace

GuideGrammar::State GuideGrammar::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

GuideThread::GuideThread(const text::TokenTable& table, int vocab_size, std::vector<TokenId> end_ids,
                         std::int64_t cache_bytes, std::shared_ptr<MetricsSink> sink, std::function<void()> done,
                         const text::TokenSplit* split)
    : table_(table),
      vocab_size_(vocab_size),
      end_ids_(std::move(end_ids)),
      cache_bytes_(cache_bytes),
      sink_(std::move(sink)),
      done_(std::move(done)),
      split_(split) {}

GuideThread::~GuideThread() { close(); }

void GuideThread::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    queue_.clear();
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

GuideThread::Handle GuideThread::find(const Guide& guide, bool after_space) {
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
    }
    if (!out) {
      hit = false;
      out = std::make_shared<GuideGrammar>();
      out->guide_ = guide;
      out->after_space_ = after_space;
      running_[key] = out;
      queue_.emplace_back(std::move(key), out);
      if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { run(); });
    }
  }
  if (!hit) wake_.notify_one();
  if (sink_) sink_->add(hit ? Metric::guide_cache_hits : Metric::guide_cache_misses, 1, 0);
  return out;
}

std::optional<double> GuideThread::overdue(const Handle& grammar, double limit_s) {
  {
    const std::lock_guard lock(grammar->mutex_);
    if (grammar->state_ == GuideGrammar::State::queued) return std::nullopt;
    if (grammar->state_ >= GuideGrammar::State::ready) return 0;
    // The error is kept for later requests: the time that others took is not this one's.
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - grammar->begun_;
    if (took.count() < limit_s) return limit_s - took.count();
  }
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
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    auto [key, grammar] = std::move(queue_.front());
    queue_.pop_front();
    // Whoever asked may have gone; who asks while it is given up finds it here and takes it on.
    bool compiled = false;
    while (!compiled && grammar.use_count() > 1) {
      lock.unlock();
      compiled = compile(grammar);
      lock.lock();
      if (stop_) return;
    }
    running_.erase(key);
    if (!compiled) continue;
    keep(key, grammar);
    grammar.reset();
    lock.unlock();
    done_();
    lock.lock();
  }
}

// False when it was given up: nobody waits for it, or the engine closes.
bool GuideThread::compile(const Handle& handle) {
  auto& grammar = *handle;
  const auto begun = std::chrono::steady_clock::now();
  {
    const std::lock_guard lock(grammar.mutex_);
    grammar.state_ = GuideGrammar::State::compiling;
    grammar.begun_ = begun;
  }
  const auto given_up = [&] { return stop_ || handle.use_count() == 1; };
  try {
    if (!compiler_) compiler_ = std::make_unique<grammar::GuideCompiler>(table_, vocab_size_, end_ids_, split_);
    grammar.compiled_ =
        compiler_->compile(grammar.guide_, grammar.after_space_, [&] { return grammar.overdue_ || given_up(); });
    if (!grammar.compiled_) {
      if (!grammar.overdue_) return false;
      grammar.error_ = cat(grammar::called(grammar.guide_), ": its grammar was not compiled within ", grammar.limit_s_,
                           " s (guide_timeout_s): make it simpler");
    }
  } catch (const Error& error) {
    grammar.error_ = error.what();
    grammar.error_code_ = error.code();
  } catch (const std::exception& error) {
    grammar.error_ = cat("the grammar could not be compiled: ", error.what());
    grammar.error_code_ =
        dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? ErrorCode::resource_exhausted : ErrorCode::internal;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  if (sink_) sink_->observe(Metric::guide_compile_seconds, took.count());
  const std::lock_guard lock(grammar.mutex_);
  grammar.state_ = grammar.compiled_ ? GuideGrammar::State::ready : GuideGrammar::State::failed;
  return true;
}

// What is wrong with a guide is kept as well: it stays wrong.
void GuideThread::keep(const std::string& key, const Handle& grammar) {
  if (grammar->state() == GuideGrammar::State::failed && grammar->error_code_ != ErrorCode::invalid_argument) return;
  const auto compiled = grammar->compiled_ ? grammar->compiled_->bytes() : grammar->error_.size();
  const auto bytes = static_cast<std::int64_t>(compiled + 3 * key.size());
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
