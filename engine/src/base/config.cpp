#include "charonia/config.h"

#include <algorithm>
#include <cctype>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia {
namespace {

// Returns false if the value is out of range.
using Store = std::function<bool(std::string_view, EngineConfig&, ModelConfig*)>;

struct Entry {
  ConfigField field;
  Store store;
};

// Stores what `parse` returns; its result is empty if the value is not valid. A model attribute is checked even if
// there is no ModelConfig to store it in.
template <class Config, class T, class Parse>
Store store(T Config::* member, Parse parse) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    std::optional<T> value = parse(text);
    if (!value) return false;
    if constexpr (std::is_same_v<Config, EngineConfig>) {
      engine.*member = std::move(*value);
    } else if (model != nullptr) {
      model->*member = std::move(*value);
    }
    return true;
  };
}

template <class Config>
Store store_int(int Config::* member, std::function<bool(int)> valid) {
  return store(member, [=](std::string_view text) {
    const auto value = parse_number<int>(text);
    return value && valid(*value) ? value : std::nullopt;
  });
}

template <class Config, class T>
Store store_float(T Config::* member, std::function<bool(double)> valid) {
  return store(member, [=](std::string_view text) {
    const auto value = parse_number<double>(text);
    return value && valid(*value) ? std::optional(static_cast<T>(*value)) : std::nullopt;
  });
}

template <class Config>
Store store_bool(bool Config::* member) {
  return store(member, [](std::string_view text) -> std::optional<bool> {
    std::string lower(text);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    if (lower == "true" || lower == "1" || lower == "yes" || lower == "on") return true;
    if (lower == "false" || lower == "0" || lower == "no" || lower == "off") return false;
    return std::nullopt;
  });
}

template <class Config>
Store store_string(std::string Config::* member, std::function<bool(std::string_view)> valid) {
  return store(member,
               [=](std::string_view text) { return valid(text) ? std::optional(std::string(text)) : std::nullopt; });
}

template <class Config>
Store store_string(std::string Config::* member, std::vector<std::string_view> choices = {}) {
  return store_string(member, [choices](std::string_view text) {
    return choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end();
  });
}

// Numbers separated by commas. parse: of one of them.
template <class T, class Parse>
Store store_list(std::vector<T> ModelConfig::* member, Parse parse) {
  return store(member, [=](std::string_view text) -> std::optional<std::vector<T>> {
    std::vector<T> values;
    while (!text.empty()) {
      const auto comma = text.find(',');
      const auto value = parse(trim(text.substr(0, comma)));
      if (!value) return std::nullopt;
      values.push_back(static_cast<T>(*value));
      if (comma == std::string_view::npos) break;
      text.remove_prefix(comma + 1);
    }
    return values;
  });
}

// Whole numbers; the value "-1" means an empty list.
Store store_ints(std::vector<int> ModelConfig::* member) {
  const auto at_least_minus_one = [](std::string_view text) {
    const auto value = parse_number<int>(text);
    return value && *value >= -1 ? value : std::nullopt;
  };
  const auto stored = store_list(member, at_least_minus_one);
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    if (!stored(text, engine, model)) return false;
    if (model != nullptr) std::erase(model->*member, -1);
    return true;
  };
}

// Numbers > 0.
Store store_floats(std::vector<float> ModelConfig::* member) {
  return store_list(member, [](std::string_view text) {
    const auto value = parse_number<double>(text);
    return value && *value > 0 ? value : std::nullopt;
  });
}

bool store_nothing(std::string_view, EngineConfig&, ModelConfig*) { return true; }

// Checks that definitions/*.toml refer to by name.
auto at_least(int minimum) {
  return [minimum](auto value) { return value >= minimum; };
}
auto above(int bound) {
  return [bound](auto value) { return value > bound; };
}
auto above_to(int bound, int maximum) {
  return [bound, maximum](auto value) { return value > bound && value <= maximum; };
}
auto between(double minimum, double maximum) {
  return [minimum, maximum](auto value) { return value >= minimum && value <= maximum; };
}
auto one_of(std::vector<int> choices) {
  return [choices = std::move(choices)](int value) {
    return std::find(choices.begin(), choices.end(), value) != choices.end();
  };
}
bool cache_share_or_count(double value) { return value >= 0 && (value < 1 || value == std::floor(value)); }
// An amount of memory, or an empty text.
bool memory_size(std::string_view text) { return text.empty() || parse_bytes(text).has_value(); }

const std::vector<Entry>& entries() {
  constexpr bool kModel = true, kUser = false;
  static const std::vector<Entry> table = {
#include "base/generated/config_keys.inc"
  };
  return table;
}

}  // namespace

std::span<const ConfigField> config_fields() {
  static const std::vector<ConfigField> fields = [] {
    std::vector<ConfigField> out;
    for (const auto& entry : entries()) out.push_back(entry.field);
    return out;
  }();
  return fields;
}

std::vector<std::string> apply_settings(const Settings& settings, EngineConfig& engine, ModelConfig* model) {
  std::vector<std::string> warnings;
  for (const auto& [key, value] : settings) {
    const auto& table = entries();
    const auto entry = std::find_if(table.begin(), table.end(), [&](const Entry& e) { return e.field.key == key; });
    if (entry == table.end()) {
      std::vector<std::string_view> keys;
      for (const auto& field : config_fields()) keys.push_back(field.key);
      const auto near = nearest(key, keys);
      throw Error(ErrorCode::invalid_argument,
                  cat("unknown setting '", key, "'", near.empty() ? "" : cat(" (did you mean '", near, "'?)")));
    }
    if (!entry->store(trim(value), engine, model)) {
      const bool large = entry->field.kind == "int" && entry->field.range.starts_with('>') &&
                         parse_number<std::int64_t>(trim(value)).value_or(0) > INT_MAX;
      throw Error(ErrorCode::invalid_argument,
                  cat("setting ", key, " = '", value, "' is not valid: it takes ", entry->field.range,
                      large ? cat(", at most ", INT_MAX) : "", " (", entry->field.help, ")"));
    }
    if (entry->field.ignored) {
      warnings.push_back(cat("setting ", key, " has no effect: ", entry->field.help));
    }
  }
  return warnings;
}

Settings read_config_ini(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) {
    throw Error(ErrorCode::invalid_argument,
                cat("cannot read ", file.string(), ": is its folder the weights folder of a workspace?"));
  }
  Settings settings;
  bool in_section = false, found = false;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const auto text = trim(line);
    if (text.empty() || text[0] == '#' || text[0] == ';') continue;
    if (text.front() == '[') {
      in_section = text == "[llama]";
      found |= in_section;
      continue;
    }
    if (!in_section) continue;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) {
      throw Error(ErrorCode::invalid_argument,
                  cat(file.string(), " line ", number, ": '", text, "' is not 'key = value'"));
    }
    settings.insert_or_assign(std::string(trim(text.substr(0, equals))), std::string(trim(text.substr(equals + 1))));
  }
  if (!found) throw Error(ErrorCode::invalid_argument, cat(file.string(), " has no section [llama]"));
  return settings;
}

Settings settings_from_environment() {
  Settings settings;
  for (const auto& field : config_fields()) {
    if (field.model_attribute) continue;
    std::string name = "CHARONIA_";
    for (const char c : field.key) name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    const char* value = std::getenv(name.c_str());
    if (value != nullptr && *value != '\0') settings.emplace(field.key, value);
  }
  return settings;
}

}  // namespace charonia
