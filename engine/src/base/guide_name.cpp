#include "base/guide_name.h"

#include "base/json.h"

namespace charonia {

std::string called(const Guide& guide) {
  constexpr std::size_t kMaxRead = 8 << 20;
  if (guide.type == GuideType::structural_tag && guide.text.size() <= kMaxRead) {
    const auto tag = nlohmann::json::parse(guide.text, nullptr, false);
    if (tag.is_object() && tag.contains("called") && tag["called"].is_string()) return tag["called"].get<std::string>();
  }
  return "guided_decoding_guide";
}

}  // namespace charonia
