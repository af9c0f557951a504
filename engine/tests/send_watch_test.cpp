#include "send_watch.h"

#include <gtest/gtest.h>

#include <chrono>

namespace charonia::triton {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class SendWatchTest : public testing::Test {
 protected:
  // Looks every 10 ms for that long; true when one of the looks said stuck.
  bool looked_for(milliseconds time) {
    for (const auto end = now_ + time; now_ < end;) {
      now_ += milliseconds(10);
      if (watch_.stuck(now_)) return true;
    }
    return false;
  }

  SendWatch watch_;
  SendWatch::Clock::time_point now_{};
};

TEST_F(SendWatchTest, OneResponseThatIsNotTakenForTheLimitIsStuck) {
  watch_.begins();
  EXPECT_FALSE(looked_for(SendWatch::kLimit - seconds(1)));
  EXPECT_TRUE(looked_for(seconds(2)));
}

TEST_F(SendWatchTest, WithoutAResponseNothingIsStuckAndEachHasTheLimitAnew) {
  EXPECT_FALSE(looked_for(3 * SendWatch::kLimit));
  for (int i = 0; i < 3; ++i) {
    watch_.begins();
    EXPECT_FALSE(looked_for(SendWatch::kLimit - seconds(1)));
    watch_.ended();
    if (i == 1) {
      EXPECT_FALSE(looked_for(seconds(5)));
    }
  }
}

TEST_F(SendWatchTest, AProcessThatWasStoppedIsGivenTimeToGoOn) {
  watch_.begins();
  EXPECT_FALSE(looked_for(milliseconds(20)));
  now_ += std::chrono::hours(1);
  EXPECT_FALSE(looked_for(milliseconds(500)));
  watch_.ended();
  EXPECT_FALSE(looked_for(seconds(2)));
}

}  // namespace
}  // namespace charonia::triton
