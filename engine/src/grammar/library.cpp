#include "grammar/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::grammar {
namespace {

[[noreturn]] void fail(std::string_view why) {
  throw Error(ErrorCode::invalid_argument, cat("structured output is not available: ", why));
}

const char* variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// The extension module refers to Python's data, such as exception types. The loader resolves them immediately.
void open_python() {
  if (::dlsym(RTLD_DEFAULT, "PyExc_ValueError") != nullptr) return;  // this process is Python
  const char* const file = variable(kPythonVariable);
  if (file == nullptr) fail(cat("set ", kPythonVariable, " to the path of libpython3"));
  if (::dlopen(file, RTLD_LAZY | RTLD_GLOBAL) == nullptr) fail(cat("cannot open ", file, ": ", ::dlerror()));
}

llg::Api open() {
  const char* const file = variable(kLibraryVariable);
  if (file == nullptr) {
    fail(cat("set ", kLibraryVariable, " to the path of _lib.abi3.so of the Python package llguidance"));
  }
  open_python();
  void* const library = ::dlopen(file, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) fail(cat("cannot open ", file, ": ", ::dlerror()));
  const auto load = [&]<class Function>(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    if (function == nullptr) fail(cat(file, " has no function ", name));
  };
  llg::Api api{};
  load(api.get_version, "llg_get_version");
  const std::string version = api.get_version();
  if (version.substr(0, version.find(' ')) != llg::kVersion) {
    fail(cat(file, " is ", version, ", and this build needs ", llg::kVersion));
  }
  load(api.new_tokenizer, "llg_new_tokenizer");
  load(api.free_tokenizer, "llg_free_tokenizer");
  load(api.new_matcher, "llg_new_matcher");
  load(api.clone_matcher, "llg_clone_matcher");
  load(api.free_matcher, "llg_free_matcher");
  load(api.matcher_get_error, "llg_matcher_get_error");
  load(api.matcher_compute_mask_into, "llg_matcher_compute_mask_into");
  load(api.matcher_consume_tokens, "llg_matcher_consume_tokens");
  load(api.matcher_rollback, "llg_matcher_rollback");
  load(api.matcher_is_accepting, "llg_matcher_is_accepting");
  load(api.matcher_validate_tokens, "llg_matcher_validate_tokens");
  load(api.validate_grammar, "llg_validate_grammar");
  return api;
}

}  // namespace

const llg::Api& llguidance() {
  static const llg::Api api = open();  // after an exception, the next call tries again
  return api;
}

}  // namespace charonia::grammar
