// What errors call a guide.
#pragma once

#include <string>

#include "charonia/types.h"

namespace charonia {

// guided_decoding_guide, or what a structural tag says as `called`.
std::string called(const Guide& guide);

}  // namespace charonia
