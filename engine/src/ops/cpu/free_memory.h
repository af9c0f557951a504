// How much memory may still be allocated.
#pragma once

#include <cstddef>
#include <filesystem>

namespace charonia::ops::cpu {

// Bytes: the lower of MemAvailable (proc(5)) and what the control groups of this process, version 1 or 2, leave. What a
// group has in its inactive file cache counts as free, since the kernel gives it up before it fails an allocation.
// `proc` and `cgroup` are where those file systems are mounted. Throws Error(internal) when MemAvailable cannot be
// read.
std::size_t free_memory(const std::filesystem::path& proc = "/proc",
                        const std::filesystem::path& cgroup = "/sys/fs/cgroup");

}  // namespace charonia::ops::cpu
