#include "ops/cuda/library.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include <dlfcn.h>

#include "base/text.h"

namespace charonia::cuda {
namespace {

namespace fs = std::filesystem;

// The file that this code is in.
fs::path this_module() {
  Dl_info info{};
  static const char here = 0;
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const auto path = fs::canonical(info.dli_fname, error);
  return error ? fs::path() : path;
}

}  // namespace

Library::Library(const char* variable, const char* name, std::string_view package) {
  if (const char* const named = std::getenv(variable); named != nullptr && *named != '\0') {
    if (!load(named)) why_ = cat(variable, "=", named, ": ", why_);
    return;
  }
  if (load(name)) return;
  const auto first = why_;
  for (auto folder = this_module().parent_path(); !folder.empty() && folder != folder.root_path();
       folder = folder.parent_path()) {
    const auto file = folder / package / name;
    std::error_code error;
    if (fs::exists(file, error) && load(file.string())) return;
  }
  why_ =
      cat(first, "; nor is it in a folder ", package, " beside this module (", variable, " may name it with its path)");
}

bool Library::load(const std::string& path) {
  handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* const error = dlerror();
    why_ = error == nullptr ? cat(path, " cannot be loaded") : error;
    return false;
  }
  path_ = path;
  why_.clear();
  return true;
}

void* Library::symbol(const char* name) const { return handle_ == nullptr ? nullptr : dlsym(handle_, name); }

}  // namespace charonia::cuda
