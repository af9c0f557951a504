// The library of structured output (grammar/guide_compiler.h), which is opened when the first guide comes: after the first
// start of a checkout it is compiled while the server runs.
#pragma once

#include <filesystem>
#include <string>

#include "grammar/guide_compiler.h"

namespace charonia::runtime {

// libcharonia_grammar.so: beside the program or library that this code is in, or in one of the two folders above. Where
// there is none, it is to come beside it.
std::filesystem::path guide_library_file();

struct GuideLibraryStatus {
  enum class State { there, compiling, missing };
  State state;
  std::string problem;  // unless it is there: what it is, and what to do
};

// Beside `file` may be another, with .build behind its name: who compiles the library holds a lock on that, and its text
// says where the compiler's messages are.
GuideLibraryStatus guide_library_status(const std::filesystem::path& file = guide_library_file());

// Never closed: what it makes needs it. Throws Error(pending) while it is compiled, and Error(unsupported) where it is not
// or cannot be opened. What fails may succeed later.
grammar::MakeGuideCompiler& open_guide_library(const std::filesystem::path& file = guide_library_file());

}  // namespace charonia::runtime
