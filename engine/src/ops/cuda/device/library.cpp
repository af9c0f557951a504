#include "ops/cuda/device/library.h"

#include <cstdlib>

#include <dlfcn.h>

#include "base/text.h"
#include "ops/cuda/device/python_packages.h"

namespace charonia::cuda {
Library::Library(const char* variable, const char* name, std::string_view package) {
  if (const char* const named = std::getenv(variable); named != nullptr && *named != '\0') {
    if (!load(named)) why_ = cat(variable, "=", named, ": ", why_);
    return;
  }
  if (load(name)) return;
  const auto first = why_;
  if (const auto file = in_python_packages(package, name); !file.empty() && load(file)) return;
  why_ = cat(first, "; it is not in the Python package ", package, " either (", variable, " can be set to its path)");
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
