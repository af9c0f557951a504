#include "runtime/guide_thread.h"

#include <chrono>
#include <cstddef>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "base/text.h"

namespace charonia::runtime {
namespace {

// llguidance recurses for each nested schema, also through references, and needs 10 kB of stack each time. The stack
// uses memory only as far as it grows.
constexpr std::size_t kStackBytes = 512UL << 20;

}  // namespace

GuideThread::GuideThread(MakeCompiler make, std::shared_ptr<MetricsSink> sink, std::function<void()> done)
    : make_(std::move(make)), sink_(std::move(sink)), done_(std::move(done)) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  const auto run = [](void* self) -> void* {
    static_cast<GuideThread*>(self)->run();
    return nullptr;
  };
  const int error = pthread_create(&thread_, &attributes, run, this);
  pthread_attr_destroy(&attributes);
  if (error != 0) throw std::system_error(error, std::generic_category(), "the thread of guides cannot be started");
}

GuideThread::~GuideThread() { close(); }

void GuideThread::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    waiting_.clear();
  }
  wake_.notify_all();
  if (!std::exchange(joined_, true)) pthread_join(thread_, nullptr);
}

GuideThread::Handle GuideThread::compile(Guide guide, bool after_space, const std::string& owner) {
  auto out = std::make_shared<GuideGrammar>(std::move(guide), after_space, owner);
  {
    const std::lock_guard lock(mutex_);
    waiting_.add(owner, out);
  }
  wake_.notify_one();
  return out;
}

void GuideThread::run() {
  try {
    compiler_ = make_();
  } catch (const std::exception&) {  // the first guide tries again, and its request receives the error
  }
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    auto grammar = waiting_.next();
    if (!grammar) continue;
    lock.unlock();
    compile(*grammar);
    grammar.reset();
    done_();
    lock.lock();
  }
}

std::shared_ptr<const grammar::CompiledGuide> GuideThread::compiled(const GuideGrammar& grammar) {
  const auto& guide = grammar.guide_;
  std::erase_if(in_use_, [](const auto& one) { return one.second.expired(); });
  auto& known = in_use_[{grammar.owner_, guide.type, guide.text, grammar.after_space_}];
  auto out = known.lock();
  if (!out) {
    if (!compiler_) compiler_ = make_();
    known = out = compiler_->compile(guide, grammar.after_space_);
  }
  return out;
}

void GuideThread::compile(GuideGrammar& grammar) {
  const auto begun = std::chrono::steady_clock::now();
  try {
    grammar.compiled_ = compiled(grammar);
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
  grammar.done_.store(true, std::memory_order_release);
}

}  // namespace charonia::runtime
