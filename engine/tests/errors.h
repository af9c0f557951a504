// Checks of errors.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>

#include "charonia/error.h"

namespace charonia {

// Expects that `call` throws an Error with this code, if one is given. Returns the text of the error.
inline std::string error_of(const std::function<void()>& call, std::optional<ErrorCode> code,
                            std::source_location at = std::source_location::current()) {
  const ::testing::ScopedTrace trace(at.file_name(), static_cast<int>(at.line()), "");
  try {
    call();
  } catch (const Error& error) {
    if (code) {
      EXPECT_EQ(error.code(), *code) << error.what();
    }
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// Also expects that the text contains `parts`.
inline void expect_error(std::optional<ErrorCode> code, std::initializer_list<std::string_view> parts,
                         const std::function<void()>& call,
                         std::source_location at = std::source_location::current()) {
  const auto text = error_of(call, code, at);
  const ::testing::ScopedTrace trace(at.file_name(), static_cast<int>(at.line()), "");
  for (const auto part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}
inline void expect_error(std::initializer_list<std::string_view> parts, const std::function<void()>& call,
                         std::source_location at = std::source_location::current()) {
  expect_error(std::nullopt, parts, call, at);
}

}  // namespace charonia
