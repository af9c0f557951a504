// What the scheduler costs per step: 256 sequences run, 10,000 wait.
//
//     cmake -S . -B build -DCHARONIA_BENCHMARKS=ON ... && cmake --build build --target charonia_scheduler
//     charonia benchmark program build/charonia_scheduler [steps]
//
// A step is plan(), advance() and resolve(), in the order in which the engine overlaps them. Prompts have 2,000 tokens,
// of which 1,000 are the same for all; a block has 64. Three loads:
//   decode     the batch is full, and nobody ends
//   turnover   sequences end after 1 to 400 tokens; each is removed, another one added, and one that waits is admitted:
//              its prompt looked up, blocks of others evicted for it
//   no room    the same, but blocks are what there are too few of: the first that waits does not fit most of the time,
//   and
//              now and then a running one is preempted
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "cache/block_manager.h"
#include "record.h"
#include "schedule/scheduler.h"

using namespace charonia;
using schedule::SeqId;

namespace {

constexpr int kRunning = 256, kWaiting = 10'000, kPrompt = 2'000, kShared = 1'000, kBlock = 64;
// Blocks: for everybody, for those that run and some that ended, and for about 256 sequences and nothing more.
constexpr int kMany = 30'000, kFew = 10'000, kTooFew = 15 + kRunning * 20;

struct Load {
  const char* name;
  int num_blocks, max_batch_size;
  bool ends;
};

// Processor time of this thread: what other programs do on the machine does not count.
class Timer {
 public:
  template <class Call>
  void add(Call call) {
    const auto before = now_us();
    call();
    us_ += now_us() - before;
  }
  double take_us() { return std::exchange(us_, 0); }

 private:
  static double now_us() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
  }

  double us_ = 0;
};

double percentile(std::vector<double>& times, double share) {
  const auto place = static_cast<std::ptrdiff_t>(share * static_cast<double>(times.size() - 1));
  std::nth_element(times.begin(), times.begin() + place, times.end());
  return times[static_cast<std::size_t>(place)];
}

void measure(const Load& load, int steps) {
  cache::BlockManager pool(load.num_blocks, kBlock, true);
  schedule::Scheduler scheduler({.max_batch_size = load.max_batch_size, .token_budget = 2 * kPrompt + kRunning}, pool);
  std::mt19937 random(1);
  SeqId next_id = 0;
  std::vector<std::size_t> totals;  // tokens, by id
  std::vector<double> step_us, add_us, remove_us;
  double running_sum = 0;
  const auto add = [&] {
    std::vector<schedule::TokenId> prompt(kPrompt);
    for (int i = 0; i < kPrompt; ++i) {
      prompt[static_cast<std::size_t>(i)] = i < kShared ? i : static_cast<schedule::TokenId>(random() % 50'000);
    }
    const int tokens = load.ends ? 1 + static_cast<int>(random() % 400) : steps + 1'000;
    totals.push_back(static_cast<std::size_t>(kPrompt + tokens));
    Timer timer;
    timer.add([&] { scheduler.add(next_id++, std::move(prompt), kPrompt + tokens); });
    add_us.push_back(timer.take_us());
  };
  for (int i = 0; i < kRunning + kWaiting; ++i) add();

  std::optional<schedule::StepPlan> running;
  std::vector<schedule::TokenId> sampled;
  std::int64_t ended = 0;
  int warmed = 0;
  bool warm = false;
  for (int step = 0; step < steps;) {
    Timer timer;
    std::optional<schedule::StepPlan> next;
    timer.add([&] { next = scheduler.plan(); });
    if (running) {
      sampled.clear();
      for (const auto& part : running->seqs) {
        if (part.samples) sampled.push_back(static_cast<schedule::TokenId>(random() % 50'000));
      }
      timer.add([&] { scheduler.resolve(*running, sampled); });
      for (const auto& part : running->seqs) {
        if (!part.samples || scheduler.tokens(part.id).size() < totals[part.id]) continue;
        Timer removal;
        removal.add([&] { scheduler.remove(part.id); });
        remove_us.push_back(removal.take_us());
        add();
        ++ended;
      }
    }
    timer.add([&] { scheduler.advance(*next); });
    running = std::move(next);
    if (!warm) {
      warm = ++warmed >= 500;
      if (warm) add_us.clear(), remove_us.clear(), ended = 0;
      continue;
    }
    step_us.push_back(timer.take_us());
    running_sum += scheduler.num_running();
    ++step;
  }
  const bench::Case of{"scheduler", {{"load", load.name}}};
  bench::print_figure(of, "running", "", {running_sum / steps});
  bench::print_figure(of, "waiting", "", {static_cast<double>(scheduler.num_waiting())});
  bench::print_figure(of, "step", "us", step_us);
  bench::print_figure(of, "step, 99th", "us", {percentile(step_us, 0.99)});
  bench::print_figure(of, "step, longest", "us", {percentile(step_us, 1)});
  if (!load.ends) return;
  bench::print_figure(of, "ends in a step", "", {static_cast<double>(ended) / steps});
  bench::print_figure(of, "add", "us", add_us);
  bench::print_figure(of, "remove", "us", remove_us);
  bench::print_figure(of, "preemptions", "", {static_cast<double>(scheduler.num_preemptions())});
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 4'000;
  if (steps < 1) {
    std::fprintf(stderr, "steps = %s: it must be at least 1\n", argv[1]);
    return 2;
  }
  for (const auto& load : {Load{"decode", kMany, kRunning, false}, Load{"turnover", kFew, kRunning, true},
                           Load{"no room", kTooFew, 2 * kRunning, true}}) {
    measure(load, steps);
  }
  return 0;
}
