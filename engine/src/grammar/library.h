// Opens llguidance when it is first needed. Its file is a Python extension module, so libpython must be open before it.
// If this process is not Python, CHARONIA_PYTHON_LIBRARY names the file. No interpreter is started.
#pragma once

#include "grammar/llguidance.h"

namespace charonia::grammar {

// The environment variables with the paths of llguidance's _lib.abi3.so and of libpython3. `charonia serve` and the
// Python package set them.
constexpr const char* kLibraryVariable = "CHARONIA_LLGUIDANCE_LIBRARY";
constexpr const char* kPythonVariable = "CHARONIA_PYTHON_LIBRARY";

// Opens the library once, and never closes it. Thread-safe. Throws Error(invalid_argument) if the library is not found
// or has another version.
const llg::Api& llguidance();

}  // namespace charonia::grammar
