// What can be seen of the values of schemas without going through all of them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"

namespace charonia::grammar {

// A step of a JSON pointer.
std::string pointer_step(std::string_view key);

bool has(std::span<const std::string_view> names, std::string_view name);

// Keywords of values, and of schemas by name.
bool has_values(std::string_view key);
bool has_names(std::string_view key);

// Of JSON Schema: 1.0 is an integer.
bool is_type(const nlohmann::ordered_json& value, std::string_view type);
bool is_required(const nlohmann::ordered_json& schema, const std::string& name);

// Tells of pairs of schemas whether no value is made under both.
class Disjoint {
 public:
  // Where a reference leads; null: that is not known.
  using Target = std::function<const nlohmann::ordered_json*(const nlohmann::ordered_json& uri)>;

  explicit Disjoint(Target target) : target_(std::move(target)) {}

  // True where it can be seen: they have other types, other values, or are objects that need a property with other values,
  // or one that the other has not. What has properties and no type makes objects alone.
  bool operator()(const nlohmann::ordered_json& left, const nlohmann::ordered_json& right);
  // So much was looked at that all answers are false from here on.
  bool is_tired() const { return looks_ > kMaxLooks; }

 private:
  static constexpr std::size_t kMaxLooks = std::size_t{1} << 25;
  struct Values;

  const nlohmann::ordered_json& resolved(const nlohmann::ordered_json& schema);
  Values values_of(const nlohmann::ordered_json& schema, int depth = 0);
  bool look(std::size_t times);
  bool lacks(const nlohmann::ordered_json& closed, const nlohmann::ordered_json& other);
  bool differ(const Values& left, const Values& right);

  const Target target_;
  std::size_t looks_ = 0;
};

}  // namespace charonia::grammar
