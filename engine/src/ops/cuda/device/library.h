// A shared library that is loaded at run time instead of linked, so that the engine starts without it.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

namespace charonia::cuda {

class Library {
 public:
  // If the environment variable `variable` is set, loads only that file, or the library in that folder. Otherwise tries
  // the loader's search for each name, then the folders `packages` (such as "nvidia/nccl/lib") of the Python packages
  // next to this module. If nothing was loaded, why() lists the attempts.
  Library(const char* variable, std::initializer_list<const char*> names, std::initializer_list<const char*> packages);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& why() const { return why_; }
  const std::string& path() const { return path_; }
  void* symbol(const char* name) const;  // null if the library does not have it

 private:
  // Never closed, because CUDA libraries have threads and exit handlers.
  void* handle_ = nullptr;
  std::string path_, why_;
};

}  // namespace charonia::cuda
