#include "model_state.h"

#include <gtest/gtest.h>

#include <memory>

namespace charonia::triton {
namespace {

TEST(Generations, AModelIsReplacedOnceALaterOneOfItsNameAndVersionIsLoaded) {
  Generations all;
  Generation first(all, "engine", 1), other(all, "engine.other", 1), version(all, "engine", 2);
  first.begin();
  other.begin();
  version.begin();
  EXPECT_FALSE(first.replaced());
  Generation second(all, "engine", 1);
  EXPECT_FALSE(first.replaced());  // it is being loaded
  second.begin();
  EXPECT_TRUE(first.replaced());
  EXPECT_FALSE(second.replaced());
  EXPECT_FALSE(other.replaced());
  EXPECT_FALSE(version.replaced());
}

TEST(Generations, ALaterOneThatIsGoneReplacesNothing) {
  Generations all;
  Generation first(all, "engine", 1);
  first.begin();
  std::unique_ptr<Generation> failed, third;
  failed = std::make_unique<Generation>(all, "engine", 1);
  failed.reset();  // as it was being loaded
  failed = std::make_unique<Generation>(all, "engine", 1);
  failed->begin();
  EXPECT_TRUE(first.replaced());
  third = std::make_unique<Generation>(all, "engine", 1);
  third->begin();
  EXPECT_TRUE(failed->replaced());
  failed.reset();
  EXPECT_TRUE(first.replaced());
  third.reset();
  EXPECT_FALSE(first.replaced());
}

TEST(Generations, OneThatIsBeingLoadedIsNotReplaced) {
  Generations all;
  Generation late(all, "engine", 1), early(all, "engine", 1);
  early.begin();
  EXPECT_FALSE(late.replaced());
  late.begin();
  EXPECT_FALSE(late.replaced());
  EXPECT_TRUE(early.replaced());
}

}  // namespace
}  // namespace charonia::triton
