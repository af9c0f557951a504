// A shared library that is loaded at run time instead of linked, so that the engine starts without it.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace charonia::cuda {

class Library {
 public:
  // If the environment variable `variable` is set, loads the path in it. Otherwise tries the loader's search for
  // `name`, then in_python_packages(package, name). If nothing was loaded, why() lists the attempts.
  Library(const char* variable, const char* name, std::string_view package);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }
  const std::string& path() const { return path_; }
  void* symbol(const char* name) const;  // null if the library does not have it

 private:
  bool load(const std::string& path);

  // Never closed, because CUDA libraries have threads and exit handlers.
  void* handle_ = nullptr;
  std::string path_, why_;
};

}  // namespace charonia::cuda
