// Which grammar is compiled when: what takes little does not wait for what takes long, and owners take turns.
#include "runtime/guide_thread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "charonia/metrics.h"
#include "runtime/turns.h"

namespace charonia::runtime {
namespace {

using State = GuideGrammar::State;
using Texts = std::vector<std::string>;

constexpr std::chrono::minutes kHang{2};

template <class Until>
void wait(const Until& until) {
  const auto deadline = std::chrono::steady_clock::now() + kHang;
  while (!until()) {
    if (std::chrono::steady_clock::now() >= deadline) throw std::runtime_error("what is waited for does not happen");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

class Compiled : public grammar::CompiledGuide {
 public:
  std::size_t bytes() const override { return 1; }
  std::unique_ptr<TokenMaskProvider> provider(const std::vector<TokenId>& /*end_ids*/,
                                              std::optional<std::vector<TokenId>> /*prompt*/) const override {
    return nullptr;
  }
};

// Compiles by what a test says.
class Compiler : public grammar::GuideCompiler {
 public:
  using Compile =
      std::function<std::shared_ptr<const grammar::CompiledGuide>(const std::string& text, const std::function<bool()>& stopped)>;
  explicit Compiler(Compile compile) : compile_(std::move(compile)) {}
  std::shared_ptr<const grammar::CompiledGuide> compile(const Guide& guide, bool /*after_space*/,
                                                        const std::function<bool()>& stopped) const override {
    return compile_(guide.text, stopped);
  }
  std::string largest_part(const Guide& guide) const override { return cat("; all of ", guide.text); }

 private:
  const Compile compile_;
};

class Counts : public MetricsSink {
 public:
  void add(Metric metric, double /*value*/, int /*label*/) override { misses += metric == Metric::guide_cache_misses; }
  void observe(Metric metric, double /*value*/) override { compiled += metric == Metric::guide_compile_seconds; }
  void set(Metric /*metric*/, double /*value*/) override {}

  std::atomic<int> misses = 0, compiled = 0;
};

class GuideThreadTest : public ::testing::Test {
 protected:
  GuideThreadTest() { compiler_ = &own_; }
  ~GuideThreadTest() override {
    for (const auto& text : begun()) open(text);
  }

  GuideThread::Handle find(const std::string& text, const std::string& owner = "a") {
    return thread_.find({GuideType::regex, text}, false, owner);
  }
  // What was begun, in its order; what was begun twice twice.
  Texts begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  bool has_begun(const std::string& text) const { return std::ranges::count(begun(), text) > 0; }
  // Lets what is blocked end.
  void open(const std::string& text) {
    const std::lock_guard lock(mutex_);
    opened_.insert(text);
    changed_.notify_all();
  }
  // One of owner a that is blocked in the slow lane, and one in the quick lane: others wait.
  std::vector<GuideThread::Handle> block_both(const std::string& second = "a") {
    std::vector<GuideThread::Handle> out{find("blocked 1")};
    wait([&] { return has_begun("blocked 1"); });
    out.push_back(find("blocked 2", second));
    wait([&] { return has_begun("blocked 2"); });
    return out;
  }

  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();

 private:
  // blocked: until it is let go, and nothing stops it. long: where it is begun for the first time, until it is stopped.
  // Others take no time.
  std::shared_ptr<const grammar::CompiledGuide> compile(const std::string& text, const std::function<bool()>& stopped) {
    const bool again = has_begun(text);
    {
      const std::lock_guard lock(mutex_);
      begun_.push_back(text);
    }
    if (text.starts_with("blocked")) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return opened_.contains(text); });
    }
    if (text.starts_with("long") && !again) {
      while (!stopped()) {
      }
      return nullptr;
    }
    return std::make_shared<Compiled>();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Texts begun_;
  std::set<std::string> opened_;

 protected:
  // Null: what compiles is not there yet.
  std::atomic<const grammar::GuideCompiler*> compiler_ = nullptr;
  const Compiler own_{[this](const auto& text, const auto& stopped) { return compile(text, stopped); }};
  GuideThread thread_{[this]() -> const grammar::GuideCompiler& {
                        if (compiler_ == nullptr) throw Error(ErrorCode::pending, "not yet");
                        return *compiler_;
                      },
                      1 << 20, counts_, [] {}};
};

TEST_F(GuideThreadTest, WhatTakesLittleDoesNotWaitForWhatTakesLong) {
  const auto blocked = find("blocked");
  wait([&] { return has_begun("blocked"); });
  const auto quick = find("quick");
  wait([&] { return quick->done(); });
  EXPECT_NE(quick->compiled(), nullptr);
  EXPECT_EQ(blocked->state(), State::compiling);
  open("blocked");
  wait([&] { return blocked->done(); });
  EXPECT_NE(blocked->compiled(), nullptr);
  EXPECT_EQ(begun(), (Texts{"blocked", "quick"}));
  EXPECT_EQ(find("quick"), quick);
  EXPECT_EQ(counts_->misses, 2);
  EXPECT_EQ(counts_->compiled, 2);
}

TEST_F(GuideThreadTest, WhatNothingCompilesYetIsCompiledWhenItIsAskedForAgain) {
  compiler_ = nullptr;
  const auto early = find("quick");
  wait([&] { return early->done(); });
  EXPECT_EQ(early->state(), State::failed);
  EXPECT_EQ(early->error_code(), ErrorCode::pending);
  EXPECT_EQ(early->error(), "not yet");
  compiler_ = &own_;
  const auto later = find("quick");
  wait([&] { return later->done(); });
  EXPECT_NE(later->compiled(), nullptr);
}

TEST_F(GuideThreadTest, OwnersTakeTurnsInBothLanes) {
  const auto blocked = block_both("b");
  const auto first = find("long 1"), quick = find("quick"), other = find("long 2", "b");
  open("blocked 2");
  wait([&] { return quick->done(); });
  EXPECT_EQ(begun(), (Texts{"blocked 1", "blocked 2", "long 1", "long 2", "quick"}));
  // It waits for the slow lane: a request may be sent again.
  EXPECT_EQ(first->state(), State::queued);
  EXPECT_EQ(thread_.overdue(first, 1e-9), std::nullopt);
  open("blocked 1");
  wait([&] { return first->done() && other->done(); });
  auto after = begun();
  after.erase(after.begin(), after.begin() + 5);
  EXPECT_EQ(after, (Texts{"long 2", "long 1"}));
  EXPECT_EQ(counts_->compiled, 5);
}

TEST_F(GuideThreadTest, WhatNobodyWaitsForIsLeftOutAndWhatTwoWaitForIsOfBoth) {
  const auto blocked = block_both();
  auto left = find("left");
  const auto own = find("own"), shared = find("shared");
  EXPECT_EQ(find("shared", "b"), shared);
  left.reset();
  open("blocked 2");
  wait([&] { return own->done() && shared->done(); });
  EXPECT_EQ(begun(), (Texts{"blocked 1", "blocked 2", "shared", "own"}));
  // Who leaves what is being compiled ends it.
  auto stopped = find("long");
  wait([&] { return has_begun("long"); });
  stopped.reset();
  const auto next = find("next");
  wait([&] { return next->done(); });
  EXPECT_EQ(blocked[0]->state(), State::compiling);
  EXPECT_EQ(counts_->compiled, 4);
}

// It is an error for good, which no time that others took may lead to.
TEST_F(GuideThreadTest, OnlyTheTimeOfItsOwnCompilationCounts) {
  const auto blocked = block_both();
  const auto waiting = find("waiting");
  EXPECT_EQ(thread_.overdue(waiting, 1e-9), std::nullopt);
  for (const auto& one : blocked) EXPECT_GT(thread_.overdue(one, 1000).value_or(0), 0);
  open("blocked 2");
  wait([&] { return waiting->done(); });
  EXPECT_NE(waiting->compiled(), nullptr);
  open("blocked 1");  // or what takes long would wait behind it
  wait([&] { return blocked.front()->done(); });
  const auto late = find("long");
  wait([&] { return late->state() == State::compiling; });
  EXPECT_EQ(thread_.overdue(late, 1e-9), 0);
  wait([&] { return late->done(); });
  EXPECT_NE(late->error().find("guide_timeout_s"), std::string::npos) << late->error();
  wait([&] { return find("long") == late; });  // it is kept
}

TEST_F(GuideThreadTest, ItIsClosedWithoutCompilingWhatWaits) {
  const auto first = find("long 1"), second = find("long 2"), third = find("long 3");
  wait([&] { return has_begun("long 1"); });
  thread_.close();
  const auto before = begun();
  EXPECT_FALSE(first->done() || second->done() || third->done());
  find("late");
  EXPECT_EQ(begun(), before);
}

TEST(TurnsTest, WhatNobodyHoldsIsForgotten) {
  Turns<int> turns;
  auto one = std::make_shared<int>(1);
  const auto two = std::make_shared<int>(2), three = std::make_shared<int>(3);
  turns.add("a", one);
  turns.add("b", two);
  turns.add("c", three);
  one.reset();
  turns.tidy();
  turns.count("b");
  const auto any = [](int) { return true; };
  EXPECT_EQ(turns.next(any), three);
  EXPECT_EQ(turns.next([](int value) { return value != 2; }), nullptr);
  EXPECT_TRUE(turns.empty());
}

}  // namespace
}  // namespace charonia::runtime
