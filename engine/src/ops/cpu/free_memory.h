// The amount of memory that may still be allocated.
#pragma once

#include <cstddef>
#include <filesystem>

namespace charonia::ops::cpu {

// Returns bytes: the smaller of MemAvailable (proc(5)) and the memory that this process's control groups (version 1 or
// 2) leave. The inactive file cache of a group counts as free, because the kernel reclaims it before an allocation
// fails. `proc` and `cgroup` are the mount points of these file systems. Throws Error(internal) if MemAvailable cannot
// be read.
std::size_t free_memory(const std::filesystem::path& proc = "/proc",
                        const std::filesystem::path& cgroup = "/sys/fs/cgroup");

}  // namespace charonia::ops::cpu
