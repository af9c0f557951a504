#include "ops/cuda/device/library.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include <dlfcn.h>

#include "base/text.h"

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

// The file `name` in the folder `package` (such as "nvidia/nccl/lib") of the Python packages next to this module; empty
// if it does not exist.
std::string in_python_packages(std::string_view package, std::string_view name) {
  for (auto folder = this_module().parent_path(); !folder.empty(); folder = folder.parent_path()) {
    const auto file = folder / package / name;
    std::error_code error;
    if (fs::exists(file, error)) return file.string();
    if (folder == folder.root_path()) break;
  }
  return {};
}

}  // namespace

Library::Library(const char* variable, std::initializer_list<const char*> names,
                 std::initializer_list<const char*> packages) {
  std::vector<std::string> paths;
  if (const char* const named = std::getenv(variable); named != nullptr && *named != '\0') {
    std::error_code ignored;
    if (fs::is_directory(named, ignored)) {
      for (const auto* name : names) paths.push_back((fs::path(named) / name).string());
    } else {
      paths.emplace_back(named);
    }
  } else {
    paths.assign(names.begin(), names.end());
    for (const auto* package : packages) {
      for (const auto* name : names) {
        if (auto file = in_python_packages(package, name); !file.empty()) paths.push_back(std::move(file));
      }
    }
  }
  for (auto& path : paths) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = std::move(path);
      why_.clear();
      return;
    }
    const char* const error = dlerror();
    why_ += cat(why_.empty() ? "" : "; ", error == nullptr ? path : std::string(error));
  }
}

void* Library::symbol(const char* name) const { return handle_ == nullptr ? nullptr : dlsym(handle_, name); }

}  // namespace charonia::cuda
