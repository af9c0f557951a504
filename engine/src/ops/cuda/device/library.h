// A shared library that is loaded at run time and not linked, so that this one starts where it is missing.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace charonia::cuda {

class Library {
 public:
  // Tries, in this order: the path in environment variable `variable`, when that is set (and nothing else then); the
  // loader's own search for `name`; in_python_packages(package, name). Not loaded: why() says what was tried.
  Library(const char* variable, const char* name, std::string_view package);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }
  const std::string& path() const { return path_; }
  void* symbol(const char* name) const;  // null when it has none

 private:
  bool load(const std::string& path);

  // Never closed: CUDA libraries have threads and handlers at exit.
  void* handle_ = nullptr;
  std::string path_, why_;
};

}  // namespace charonia::cuda
