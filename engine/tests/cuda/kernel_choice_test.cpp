// The choice between two kernels at the start of an engine, for computations of the tests.
#include "ops/cuda/kernel_choice.h"

#include <gtest/gtest.h>

#include "base/text.h"
#include "test_folder.h"

namespace charonia::cuda {
namespace {

using Calls = std::vector<std::string>;
using Chosen = std::vector<bool>;

class KernelChoiceTest : public ::testing::Test {
 protected:
  ~KernelChoiceTest() override { std::filesystem::remove(file_); }

  // measures: whether the start has seconds for measurements.
  KernelChoice choice(bool measures = true) {
    calls_.clear();
    return {device_info(0),
            {.unproven = true,
             .timer = [](Stream&, double, const std::function<void(int)>&) { return 0.0; },
             .memory = file_,
             .seconds = measures ? 3600.0 : 0.0}};
  }

  struct Behaviour {
    double candidate = 500;  // microseconds; the usual kernel takes 1000
    bool right = true;
    bool has_memory = true;
    int rows = 1;
  };
  // A size that appends to calls_. Its kernels are "old" and "new".
  KernelChoice::Computation size(const std::string& name, const Behaviour& behaviour) {
    return {.name = name,
            .rows = behaviour.rows,
            .agrees =
                [this, name, behaviour] {
                  calls_.push_back("compare " + name);
                  if (!behaviour.has_memory) throw Error(ErrorCode::resource_exhausted, "no memory");
                  return behaviour.right;
                },
            .measure =
                [this, name, behaviour] {
                  calls_.push_back("measure " + name);
                  return std::optional(KernelTimes{1000, behaviour.candidate});
                },
            .usual = "old",
            .candidate = "new"};
  }
  static void expect_wrong(const KernelChoice& choice, const std::string& name) {
    EXPECT_EQ(choice.report(), Calls{name + ": old, because the results of new were wrong"});
    EXPECT_EQ(choice.warning(), cat("the kernel 'new' for ", name,
                                    " gave results that differ from the other kernel's, and is not used. Please report "
                                    "this"));
  }

  Stream stream_;
  Calls calls_;
  const std::filesystem::path file_ = charonia::testing::test_folder();
};

TEST_F(KernelChoiceTest, all_sizes_are_compared_before_one_is_measured) {
  auto with = choice();
  EXPECT_EQ(with.choose(stream_, {size("a", {}), size("b", {.candidate = 1500}), size("c", {.rows = 0})}),
            (Chosen{true, false, false}));
  EXPECT_EQ(calls_, (Calls{"compare a", "compare b", "compare c", "measure a", "measure b"}));
  EXPECT_EQ(with.report(), (Calls{"a: new, measured with 1 rows: new 500 us, old 1000 us",
                                  "b: old, measured with 1 rows: new 1500 us, old 1000 us",
                                  "c: old, because nothing was measured"}));
  EXPECT_EQ(with.warning(), "");
}

TEST_F(KernelChoiceTest, a_wrong_size_that_cannot_be_measured_rejects_all_sizes) {
  auto with = choice();
  EXPECT_EQ(with.choose(stream_, {size("a", {}), size("b", {.right = false, .rows = 0})}), (Chosen{false, false}));
  EXPECT_EQ(calls_, (Calls{"compare a", "compare b"}));
  expect_wrong(with, "b");
}

TEST_F(KernelChoiceTest, a_stored_faster_size_is_not_used_if_another_size_is_wrong) {
  auto first = choice();
  EXPECT_EQ(first.choose(stream_, {size("a", {}), size("slower", {.candidate = 1500})}), (Chosen{true, false}));
  first.end();
  for (const std::string other : {"slower", "new size"}) {
    for (const bool right : {true, false}) {
      auto with = choice(false);
      EXPECT_EQ(with.choose(stream_, {size("a", {}), size(other, {.right = right})}), (Chosen{right, false}));
      EXPECT_EQ(calls_, (Calls{"compare a", "compare " + other}));
      if (!right) expect_wrong(with, other);
    }
  }
}

TEST_F(KernelChoiceTest, sizes_without_a_candidate_are_not_compared) {
  auto first = choice();
  first.choose(stream_, {size("a", {.candidate = 1500})});
  first.end();
  auto slower = choice();
  EXPECT_EQ(slower.choose(stream_, {size("a", {})}), Chosen{false}) << "stored as slower";
  EXPECT_EQ(calls_, Calls{});
  auto without_time = choice(false);
  EXPECT_EQ(without_time.choose(stream_, {size("b", {})}), Chosen{false}) << "not stored";
  EXPECT_EQ(calls_, Calls{});
}

TEST_F(KernelChoiceTest, the_first_sizes_of_all_computations_are_measured_first) {
  auto with = choice();
  const std::vector<KernelChoice::Sizes> all{{size("a1", {}), size("a2", {}), size("a3", {})},
                                             {size("b1", {.right = false}), size("b2", {})},
                                             {size("c1", {}), size("c2", {})}};
  EXPECT_EQ(with.choose_all(stream_, all), (std::vector<Chosen>{{true, true, true}, {false, false}, {true, true}}));
  EXPECT_EQ(calls_, (Calls{"compare a1", "compare a2", "compare a3", "compare b1", "compare c1", "compare c2",
                           "measure a1", "measure c1", "measure a2", "measure c2", "measure a3"}));
  ASSERT_EQ(with.report().size(), 6U);
  EXPECT_EQ(with.report()[1], "b1: old, because the results of new were wrong");
}

TEST_F(KernelChoiceTest, a_size_that_there_is_no_memory_for_is_not_used) {
  auto with = choice();
  EXPECT_EQ(with.choose(stream_, {size("a", {.has_memory = false}), size("b", {})}), (Chosen{false, true}));
  EXPECT_EQ(calls_, (Calls{"compare a", "compare b", "measure b"}));
  EXPECT_EQ(with.warning(), "a: old, because there is no memory to measure with");
  EXPECT_EQ(with.report()[0], with.warning());
}

TEST_F(KernelChoiceTest, seconds_of_one_preparation_do_not_limit_the_next_one) {
  auto with = choice();
  with.begin(0);
  EXPECT_EQ(with.choose(stream_, {size("a", {})}), Chosen{false});
  EXPECT_TRUE(with.report()[0].ends_with("The next start measures it")) << with.report()[0];
  with.begin();
  EXPECT_EQ(with.choose(stream_, {size("a", {})}), Chosen{true});
  EXPECT_EQ(calls_, (Calls{"compare a", "measure a"}));
}

}  // namespace
}  // namespace charonia::cuda
