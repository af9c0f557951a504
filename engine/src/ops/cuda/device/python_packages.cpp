#include "ops/cuda/device/python_packages.h"

#include <filesystem>
#include <system_error>

#include <dlfcn.h>

namespace charonia::cuda {
namespace {

namespace fs = std::filesystem;

// The file that contains this code.
fs::path this_module() {
  Dl_info info{};
  static const char here = 0;
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const auto path = fs::canonical(info.dli_fname, error);
  return error ? fs::path() : path;
}

}  // namespace

std::string in_python_packages(std::string_view package, std::string_view name) {
  for (auto folder = this_module().parent_path(); !folder.empty(); folder = folder.parent_path()) {
    const auto file = folder / package / name;
    std::error_code error;
    if (fs::exists(file, error)) return file.string();
    if (folder == folder.root_path()) break;
  }
  return {};
}

}  // namespace charonia::cuda
