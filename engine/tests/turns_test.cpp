#include "runtime/turns.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace charonia::runtime {
namespace {

using Entry = std::shared_ptr<std::string>;

TEST(TurnsTest, OwnersTakeTurnsHoweverMuchEachHasQueued) {
  Turns<std::string> turns;
  std::vector<Entry> all;
  for (const char* const text : {"a1", "a2", "a3", "b1", "c1"}) {
    all.push_back(std::make_shared<std::string>(text));
    turns.add(std::string(1, text[0]), all.back());
  }
  std::string order;
  while (const auto next = turns.next()) order += *next;
  EXPECT_EQ(order, "a1b1c1a2a3");
  EXPECT_TRUE(turns.empty());
}

TEST(TurnsTest, DroppedEntriesAreSkipped) {
  Turns<std::string> turns;
  auto dropped = std::make_shared<std::string>("a1");
  const auto kept = std::make_shared<std::string>("a2");
  turns.add("a", dropped);
  turns.add("a", kept);
  dropped.reset();
  EXPECT_EQ(turns.next(), kept);
  EXPECT_EQ(turns.next(), nullptr);
}

}  // namespace
}  // namespace charonia::runtime
