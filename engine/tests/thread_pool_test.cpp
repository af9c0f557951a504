#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "others_sleep.h"

namespace charonia {
namespace {

TEST(ThreadPoolTest, every_index_is_visited_once_for_all_sizes_and_grains) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const int n : {0, 1, 2, 7, 64, 1000}) {
      for (const int grain : {0, 1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> visits(static_cast<std::size_t>(n));
        pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          ASSERT_LT(begin, end);
          ASSERT_LE(end, n);
          for (auto i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
        });
        for (const auto& v : visits) ASSERT_EQ(v, 1);
      }
    }
  }
}

TEST(ThreadPoolTest, many_short_loops_are_all_completed) {
  ThreadPool pool(4);
  std::atomic<std::int64_t> sum = 0;
  constexpr int kLoops = 20000;
  for (int i = 0; i < kLoops; ++i) {
    pool.parallel_for(8, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
    ASSERT_EQ(sum, 8 * (i + 1));
  }
}

TEST(ThreadPoolTest, workers_take_part) {
  ThreadPool pool(2);
  // Each of the two chunks waits until the other has begun, so a single thread would never finish.
  std::atomic<int> begun = 0;
  pool.parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 2);
}

TEST(ThreadPoolTest, an_exception_reaches_the_caller_and_the_pool_still_works) {
  ThreadPool pool(3);
  for (int round = 0; round < 200; ++round) {
    EXPECT_THROW(pool.parallel_for(100, 1,
                                   [&](std::int64_t begin, std::int64_t) {
                                     if (begin == round % 100) throw std::runtime_error("chunk");
                                   }),
                 std::runtime_error);
    std::atomic<int> visited = 0;
    pool.parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++visited; });
    ASSERT_EQ(visited, 100);
  }
}

TEST(ThreadPoolTest, a_loop_within_a_loop_runs_inline) {
  ThreadPool pool(3);
  std::atomic<int> visited = 0;
  pool.parallel_for(10, 1, [&](std::int64_t, std::int64_t) {
    const auto outer = std::this_thread::get_id();
    pool.parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      visited += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(visited, 100);
}

TEST(ThreadPoolTest, two_concurrent_callers_both_complete) {
  ThreadPool pool(3);
  std::atomic<int> visited = 0;
  const auto call = [&] {
    for (int i = 0; i < 2000; ++i) {
      pool.parallel_for(16, 1, [&](std::int64_t begin, std::int64_t end) { visited += static_cast<int>(end - begin); });
    }
  };
  std::thread other(call);
  call();
  other.join();
  EXPECT_EQ(visited, 2 * 2000 * 16);
}

TEST(ThreadPoolTest, idle_workers_sleep) {
  ThreadPool pool(4);
  std::atomic<int> visited = 0;
  pool.parallel_for(64, 1, [&](std::int64_t, std::int64_t) { ++visited; });
  EXPECT_TRUE(testing::others_sleep());
}

}  // namespace
}  // namespace charonia
