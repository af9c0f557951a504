#include "ops/cpu/process_group.h"

#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <limits>
#include <thread>
#include <vector>

#include "charonia/error.h"
#include "ops_support.h"
#include "others_sleep.h"

namespace charonia::ops {
namespace {

// Runs rank(r) on one thread each, and returns the error of each rank, or an empty text.
std::vector<std::string> run_ranks(int ranks, const std::function<void(int)>& rank) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        rank(r);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

// The sum in rank order, computed by a loop over floats.
Matrix sum_of(const std::vector<Matrix>& tensors) {
  Matrix sum = tensors[0];
  for (std::size_t t = 1; t < tensors.size(); ++t) {
    for (std::int64_t r = 0; r < sum.rows; ++r) {
      for (std::int64_t c = 0; c < sum.cols; ++c) sum.set(r, c, sum.at(r, c) + tensors[t].at(r, c));
    }
  }
  return sum;
}

TEST(ProcessGroupTest, all_reduce_adds_in_rank_order_for_all_shapes_and_threads) {
  Random random(1);
  for (const int ranks : {1, 2, 3, 4, 7, 16}) {
    ProcessGroup group(ranks);
    for (int round = 0; round < 12; ++round) {
      // Fewer elements than ranks, than a cache line, and more than one thread's chunk.
      const int rows = round == 0 ? 1 : uniform(random, 1, 40), cols = round == 0 ? 3 : uniform(random, 1, 3000);
      std::vector<Matrix> tensors;
      for (int r = 0; r < ranks; ++r) {
        tensors.push_back(Matrix::random(random, DType::f32, rows, cols, 1, uniform(random, 0, 5)));
      }
      const auto before = tensors;
      const auto expected = sum_of(before);
      expect_no_errors(run_ranks(ranks, [&](int r) {
        ThreadPool pool(1 + r % 3);
        group.all_reduce(r, tensors[static_cast<std::size_t>(r)].tensor(), pool);
      }));
      for (int r = 0; r < ranks; ++r) {
        const auto& tensor = tensors[static_cast<std::size_t>(r)];
        const auto& original = before[static_cast<std::size_t>(r)];
        for (std::int64_t row = 0; row < rows; ++row) {
          ASSERT_TRUE(tensor.same_bits(row, expected, row)) << "rank " << r << " of " << ranks << " row " << row;
          for (std::int64_t gap = cols; gap < tensor.stride && row + 1 < rows; ++gap) {
            ASSERT_EQ(tensor.at(row, gap), original.at(row, gap)) << "elements between the rows must not change";
          }
        }
      }
    }
  }
}

TEST(ProcessGroupTest, all_gather_orders_columns_by_rank) {
  Random random(2);
  for (const int ranks : {1, 2, 3, 8}) {
    ProcessGroup group(ranks);
    for (const auto type : {DType::f32, DType::bf16}) {
      const int rows = uniform(random, 1, 20), cols = uniform(random, 1, 2000);
      std::vector<Matrix> in, out;
      for (int r = 0; r < ranks; ++r) {
        in.push_back(Matrix::random(random, type, rows, cols, 1, uniform(random, 0, 5)));
        out.emplace_back(type, rows, ranks * cols, uniform(random, 0, 5));
      }
      expect_no_errors(run_ranks(ranks, [&](int r) {
        ThreadPool pool(2);
        const auto i = static_cast<std::size_t>(r);
        group.all_gather(r, out[i].tensor(), in[i].tensor(), pool);
      }));
      for (const auto& whole : out) {
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t col = 0; col < ranks * cols; ++col) {
            ASSERT_EQ(whole.at(row, col), in[static_cast<std::size_t>(col / cols)].at(row, col % cols));
          }
        }
      }
    }
  }
}

TEST(ProcessGroupTest, a_long_chain_of_collectives_is_the_same_in_every_order_of_arrival) {
  constexpr int kRanks = 4, kSteps = 300;
  constexpr std::int64_t kCols = 100;
  enum class Arrival { as_it_comes, ascending, descending };
  const auto chain = [&](Arrival arrival) {
    ProcessGroup group(kRanks);
    std::vector<Matrix> tensors, gathered;
    Random random(3);
    for (int r = 0; r < kRanks; ++r) {
      tensors.push_back(Matrix::random(random, DType::f32, 1, kCols));
      gathered.emplace_back(DType::f32, 1, kRanks * kCols);
    }
    std::vector<std::atomic<int>> begun(kRanks);
    expect_no_errors(run_ranks(kRanks, [&](int r) {
      ThreadPool pool(1);
      const auto i = static_cast<std::size_t>(r);
      for (int step = 1; step <= kSteps; ++step) {
        const int before = arrival == Arrival::ascending ? r - 1 : r + 1;
        if (arrival != Arrival::as_it_comes && before >= 0 && before < kRanks) {
          while (begun[static_cast<std::size_t>(before)] < step) std::this_thread::yield();
        }
        begun[i] = step;
        group.all_reduce(r, tensors[i].tensor(), pool);
        group.all_gather(r, gathered[i].tensor(), tensors[i].tensor(), pool);
        // Each rank changes the data that the others have just read.
        for (std::int64_t c = 0; c < kCols; ++c) {
          tensors[i].set(0, c, 0.25F * gathered[i].at(0, (r + step) % kRanks * kCols + c) + 0.01F * (r + 1));
        }
      }
    }));
    return tensors;
  };
  const auto expected = chain(Arrival::as_it_comes);
  for (const auto arrival : {Arrival::ascending, Arrival::descending}) {
    const auto got = chain(arrival);
    for (std::size_t r = 0; r < expected.size(); ++r) EXPECT_TRUE(got[r].same_bits(0, expected[r], 0));
  }
}

TEST(ProcessGroupTest, a_failed_rank_releases_the_others) {
  for (const int ranks : {2, 5}) {
    for (int round = 0; round < 50; ++round) {
      ProcessGroup group(ranks);
      const int failing = round % ranks;
      auto errors = run_ranks(ranks, [&](int r) {
        ThreadPool pool(1);
        Matrix tensor(DType::f32, 1, 64);
        for (int step = 0; step < 5; ++step) {
          if (r == failing && step == round % 5) {
            group.abort(r, "out of luck");
            return;
          }
          group.all_reduce(r, tensor.tensor(), pool);
        }
        ADD_FAILURE() << "rank " << r << " went on without rank " << failing;
      });
      for (int r = 0; r < ranks; ++r) {
        if (r == failing) continue;
        EXPECT_EQ(errors[static_cast<std::size_t>(r)], "rank " + std::to_string(failing) + ": out of luck");
      }
      group.abort((failing + 1) % ranks, "the second failure says nothing new");
    }
  }
}

TEST(ProcessGroupTest, ranks_that_issue_different_operations_all_get_an_error) {
  constexpr int kRanks = 3;
  ProcessGroup group(kRanks);
  for (const bool other_shape : {true, false}) {
    const auto errors = run_ranks(kRanks, [&](int r) {
      ThreadPool pool(1);
      Matrix tensor(DType::f32, 2, r == 2 && other_shape ? 5 : 4), out(DType::f32, 2, 4 * kRanks);
      if (r == 2 && !other_shape) {
        group.all_gather(r, out.tensor(), tensor.tensor(), pool);
      } else {
        group.all_reduce(r, tensor.tensor(), pool);
      }
    });
    for (const auto& error : errors) EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
  }
}

TEST(ProcessGroupTest, a_rank_that_waits_long_sleeps) {
  ProcessGroup group(2);
  expect_no_errors(run_ranks(2, [&](int r) {
    if (r == 1) {
      EXPECT_TRUE(testing::others_sleep());
    }
    group.barrier();
  }));
}

}  // namespace
}  // namespace charonia::ops
