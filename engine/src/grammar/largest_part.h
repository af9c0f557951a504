// Which part of a guide makes its grammar large, for errors that come of its size.
#pragma once

#include <string>

#include "charonia/types.h"

namespace charonia::grammar {

// As the end of a sentence, with the place: a count, properties that may be left out, values, or a repetition. Empty
// where nothing stands out. Of what is referred to more than once, and of rules, it does not know.
std::string largest_part(const Guide& guide);

}  // namespace charonia::grammar
