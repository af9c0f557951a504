// The name of a guide in error messages.
#pragma once

#include <string>

#include "charonia/types.h"

namespace charonia {

// The field name `guided_decoding_guide`, or the name that a structural tag has in `called`.
std::string called(const Guide& guide);

}  // namespace charonia
