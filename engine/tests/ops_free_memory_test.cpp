// Free memory from the files of proc and of control groups, written into a folder as the kernel would show them; and
// commit_blocks().
#include "ops/cpu/free_memory.h"

#include <gtest/gtest.h>

#include <fstream>

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

constexpr std::size_t kAvailable = 1000 * 1024;

TEST_F(FreeMemoryTest, without_control_groups_it_is_mem_available) { EXPECT_EQ(free(), kAvailable); }

TEST_F(FreeMemoryTest, a_limit_of_version_2_counts_without_the_inactive_file_cache) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "500000\n");
  write("cgroup/a/b/memory.current", "300000\n");
  write("cgroup/a/b/memory.stat", "anon 100000\ninactive_file 150000\n");
  EXPECT_EQ(free(), 350000U);
}

TEST_F(FreeMemoryTest, the_narrowest_group_above_counts_and_max_is_no_limit) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/memory.max", "400000\n");
  write("cgroup/a/memory.current", "100000\n");
  EXPECT_EQ(free(), 300000U);
}

TEST_F(FreeMemoryTest, a_container_sees_its_group_as_the_root) {
  write("proc/self/cgroup", "0::/outside/that/is/not/here\n");
  write("cgroup/memory.max", "200000\n");
  write("cgroup/memory.current", "50000\n");
  EXPECT_EQ(free(), 150000U);
}

TEST_F(FreeMemoryTest, a_limit_of_version_1_counts_and_an_unlimited_one_does_not) {
  write("proc/self/cgroup", "12:cpu,cpuacct:/x\n7:memory:/x\n");
  write("cgroup/memory/x/memory.limit_in_bytes", "600000\n");
  write("cgroup/memory/x/memory.usage_in_bytes", "500000\n");
  write("cgroup/memory/x/memory.stat", "total_inactive_file 100000\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/memory/memory.usage_in_bytes", "500000\n");
  EXPECT_EQ(free(), 200000U);
}

TEST_F(FreeMemoryTest, a_group_over_its_limit_has_nothing_left) {
  write("proc/self/cgroup", "0::/\n");
  write("cgroup/memory.max", "1000\n");
  write("cgroup/memory.current", "5000\n");
  EXPECT_EQ(free(), 0U);
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
  const KvLayout layout{.num_layers = 4, .kv_heads = 2, .head_dim = 128, .block_len = 1024, .dtype = DType::f32};
  const auto block_bytes = layout.block_bytes();
  const auto count = static_cast<int>(2 * ops->free_memory() / block_bytes);
  EXPECT_THROW(ops->make_kv_cache(layout, count), Error);
  const auto cache = ops->make_kv_cache(layout, count, 4);
  const auto bytes = std::to_string(block_bytes * static_cast<std::size_t>(count));
  expect_error(ErrorCode::resource_exhausted, {bytes, "cache_max_entry_count"},
               [&] { ops->commit_blocks(*cache, count); });
  ops->commit_blocks(*cache, 4);
  EXPECT_THROW(ops->commit_blocks(*cache, count + 1), Error);
  EXPECT_THROW(ops->commit_blocks(*cache, -1), Error);
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
