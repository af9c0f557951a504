#include "ops/cpu/free_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::ops::cpu {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// Reads a file that contains one number. Empty if the file does not exist or is not a number ("max").
std::optional<std::uint64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  std::string text;
  if (!std::getline(in, text)) return std::nullopt;
  return parse_number<std::uint64_t>(trim(text));
}

// The number after `key` in a file of lines "key number ...".
std::optional<std::uint64_t> number_of(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string name, value, rest; in >> name >> value; std::getline(in, rest)) {
    if (name == key) return parse_number<std::uint64_t>(std::string_view(value));
  }
  return std::nullopt;
}

struct Names {
  const char *limit, *usage, *inactive_file;
};
constexpr Names kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// The memory that the control group and its ancestors leave. `group` may not exist below `root` (a container sees its
// own group as the root).
std::uint64_t left_by(const fs::path& root, const fs::path& group, const Names& names) {
  std::uint64_t left = kNoLimit;
  fs::path at = group.relative_path();
  while (true) {
    const auto folder = root / at;
    if (const auto limit = number_in(folder / names.limit)) {
      const auto usage = number_in(folder / names.usage).value_or(0);
      const auto cached = number_of(folder / "memory.stat", names.inactive_file).value_or(0);
      const auto used = usage - std::min(usage, cached);
      left = std::min(left, *limit - std::min(*limit, used));
    }
    if (at.empty()) return left;
    at = at.parent_path();
  }
}

}  // namespace

std::size_t free_memory(const fs::path& proc, const fs::path& cgroup) {
  const auto available_kib = number_of(proc / "meminfo", "MemAvailable:");
  if (!available_kib) {
    throw Error(ErrorCode::internal, cat("cannot read MemAvailable from ", (proc / "meminfo").string()));
  }
  std::uint64_t left = *available_kib * 1024;

  // Lines "hierarchy:controllers:path"; version 2 has no controllers.
  std::ifstream groups(proc / "self" / "cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = cat(",", line.substr(first + 1, second - first - 1), ",");
    const fs::path group = line.substr(second + 1);
    if (controllers == ",,") {
      left = std::min(left, left_by(cgroup, group, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      left = std::min(left, left_by(cgroup / "memory", group, kVersion1));
    }
  }
  return left;
}

}  // namespace charonia::ops::cpu
