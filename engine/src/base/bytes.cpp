#include "base/bytes.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "base/text.h"

namespace charonia {
namespace {

constexpr std::string_view kPrefixes = "kmgt";

// The factor of a unit, a power of 1000 or 1024. Empty if the text is not a unit.
std::optional<double> unit_of(std::string_view text) {
  std::string unit(text);
  std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (unit.empty() || unit == "b") return 1.0;
  const auto power = kPrefixes.find(unit.front());
  if (power == std::string_view::npos) return std::nullopt;
  const auto rest = std::string_view(unit).substr(1);
  if (rest != "b" && rest != "ib") return std::nullopt;
  return std::pow(rest == "ib" ? 1024.0 : 1000.0, static_cast<double>(power + 1));
}

}  // namespace

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  text = trim(text);
  const auto end = std::min(text.find_first_not_of("0123456789."), text.size());
  const auto number = parse_number<double>(text.substr(0, end));
  const auto unit = unit_of(trim(text.substr(end)));
  if (!number || !unit) return std::nullopt;
  const double bytes = std::floor(*number * *unit);
  constexpr double kMax = 9e18;
  if (bytes < 1 || bytes > kMax) return std::nullopt;
  return static_cast<std::int64_t>(bytes);
}

std::string bytes_text(std::int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (amount >= 1000 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  std::array<char, 64> buffer{};
  const int decimals = unit == 0 ? 0 : amount < 10 ? 2 : amount < 100 ? 1 : 0;
  std::snprintf(buffer.data(), buffer.size(), "%.*f %s", decimals, amount, kUnits[unit]);
  return buffer.data();
}

}  // namespace charonia
