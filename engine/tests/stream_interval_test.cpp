#include "runtime/stream_interval.h"

#include <gtest/gtest.h>

namespace charonia::runtime {
namespace {

using std::chrono::milliseconds;

TEST(StreamInterval, GrowsWithTheStreamsWithinItsBounds) {
  EngineConfig config;
  EXPECT_EQ(stream_interval(config, 0), milliseconds(20));
  EXPECT_EQ(stream_interval(config, 1), milliseconds(20));
  EXPECT_EQ(stream_interval(config, 25), milliseconds(20));
  EXPECT_EQ(stream_interval(config, 50), milliseconds(40));
  EXPECT_EQ(stream_interval(config, 1000), milliseconds(100));
  config.stream_interval_per_stream_ms = 0;
  EXPECT_EQ(stream_interval(config, 1000), milliseconds(20));
}

TEST(StreamInterval, AStreamOfASubscriptionCountsAFifth) {
  Request request;
  EXPECT_EQ(stream_weight(request), 1);
  request.joined_responses = true;
  EXPECT_EQ(stream_weight(request), 0.2);
  EXPECT_EQ(stream_interval({}, 250 * stream_weight(request)), milliseconds(40));
  request.stream = false;
  EXPECT_EQ(stream_weight(request), 0);
}

TEST(StreamInterval, OneResponsePerTokenStaysSo) {
  EngineConfig config;
  config.stream_interval_ms = 0;
  EXPECT_EQ(stream_interval(config, 1000), milliseconds(0));
}

TEST(StreamInterval, AMaximumBelowTheMinimumHasNoEffect) {
  EngineConfig config;
  config.stream_interval_ms = 50;
  config.stream_interval_max_ms = 10;
  EXPECT_EQ(stream_interval(config, 1000), milliseconds(50));
}

}  // namespace
}  // namespace charonia::runtime
