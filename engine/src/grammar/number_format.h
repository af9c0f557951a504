// How numbers of schemas are printed: as few digits as give the same number again.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace charonia::grammar {

// A format of printf for this number. Finite numbers alone.
inline const char* number_format(double number) {
  for (const char* format : {"%.15g", "%.16g"}) {
    char text[32];
    std::snprintf(text, sizeof text, format, number);
    if (std::strtod(text, nullptr) == number) return format;
  }
  return "%.17g";
}

}  // namespace charonia::grammar
