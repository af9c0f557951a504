// Free memory from the files of proc and of control groups, written into a folder as the kernel would show them; and
// commit_blocks().
#include "ops/cpu/free_memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <tuple>

#include "base/huge_memory.h"
#include "charonia/error.h"
#include "errors.h"
#include "ops_support.h"

namespace charonia::ops::cpu {
namespace {

namespace fs = std::filesystem;

class FreeMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("charonia_free_memory_" + std::to_string(std::random_device{}()));
    write("proc/meminfo", "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    1000 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const fs::path& file, const std::string& text) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  std::size_t free() const { return free_memory(root_ / "proc", root_ / "cgroup"); }

  fs::path root_;
};

TEST_F(FreeMemoryTest, the_narrowest_limit_of_a_control_group_counts) {
  EXPECT_EQ(free(), 1000U * 1024) << "without control groups it is MemAvailable";
  using Files = std::vector<std::pair<const char*, const char*>>;
  const std::vector<std::tuple<const char*, std::size_t, Files>> cases = {
      {"version 2: the inactive file cache does not count",
       350000,
       {{"proc/self/cgroup", "0::/a/b\n"},
        {"cgroup/a/b/memory.max", "500000\n"},
        {"cgroup/a/b/memory.current", "300000\n"},
        {"cgroup/a/b/memory.stat", "anon 100000\ninactive_file 150000\n"}}},
      {"the group above, because max is no limit",
       300000,
       {{"proc/self/cgroup", "0::/a/b\n"},
        {"cgroup/a/b/memory.max", "max\n"},
        {"cgroup/a/memory.max", "400000\n"},
        {"cgroup/a/memory.current", "100000\n"}}},
      {"a container sees its group as the root",
       150000,
       {{"proc/self/cgroup", "0::/outside/that/is/not/here\n"},
        {"cgroup/memory.max", "200000\n"},
        {"cgroup/memory.current", "50000\n"}}},
      {"version 1: a limit counts, and an unlimited one does not",
       200000,
       {{"proc/self/cgroup", "12:cpu,cpuacct:/x\n7:memory:/x\n"},
        {"cgroup/memory/x/memory.limit_in_bytes", "600000\n"},
        {"cgroup/memory/x/memory.usage_in_bytes", "500000\n"},
        {"cgroup/memory/x/memory.stat", "total_inactive_file 100000\n"},
        {"cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
        {"cgroup/memory/memory.usage_in_bytes", "500000\n"}}},
      {"a group over its limit has nothing left",
       0,
       {{"proc/self/cgroup", "0::/\n"}, {"cgroup/memory.max", "1000\n"}, {"cgroup/memory.current", "5000\n"}}}};
  for (const auto& [what, expected, files] : cases) {
    fs::remove_all(root_ / "cgroup");
    for (const auto& [file, text] : files) write(file, text);
    EXPECT_EQ(free(), expected) << what;
  }
}

TEST_F(FreeMemoryTest, without_meminfo_the_error_names_the_file) {
  fs::remove(root_ / "proc/meminfo");
  expect_error({"meminfo"}, [&] { free(); });
}

TEST(FreeMemoryHereTest, this_machine_has_free_memory) {
  EXPECT_GT(make_ops("", 1)->free_memory(), std::size_t{1} << 20);
}

TEST(CommitBlocksTest, too_many_blocks_for_the_memory_are_rejected_with_the_numbers) {
  const auto ops = make_ops("", 1);
  const auto layout = kv_layout(4, 2, 128, 1024, DType::f32);
  const auto block_bytes = layout.block_bytes(CacheKind::full);
  const auto count = static_cast<int>(2 * ops->free_memory() / block_bytes);
  EXPECT_THROW(ops->make_kv_cache(layout, {count}), Error);
  const auto cache = ops->make_kv_cache(layout, {count}, {{4}});
  const auto bytes = std::to_string(block_bytes * static_cast<std::size_t>(count));
  expect_error(ErrorCode::resource_exhausted, {bytes, "cache_max_entry_count"},
               [&] { ops->commit_blocks(*cache, {count}); });
  ops->commit_blocks(*cache, {4});
  EXPECT_THROW(ops->commit_blocks(*cache, {count + 1}), Error);
  EXPECT_THROW(ops->commit_blocks(*cache, {-1}), Error);
}

TEST(HugeMemoryTest, only_written_pages_are_resident) {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  const HugeMemory memory(kBytes + 5);
  EXPECT_EQ(memory.resident_bytes(), 0U);
  memory.data()[kBytes / 2] = std::byte{1};
  EXPECT_GE(memory.resident_bytes(), 4096U);
  EXPECT_LE(memory.resident_bytes(), std::size_t{2} << 20);
  std::memset(memory.data(), 1, kBytes + 5);
  EXPECT_EQ(memory.resident_bytes(), kBytes + 5);
}

}  // namespace
}  // namespace charonia::ops::cpu
