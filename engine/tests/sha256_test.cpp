// Known digests: the lengths around which the padding needs another chunk.
#include "base/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace charonia {
namespace {

TEST(Sha256, EqualsDigestsOfAnotherImplementation) {
  const std::vector<std::pair<std::string, std::array<std::uint64_t, 4>>> cases{
      {"",
       {0xe3b0c44298fc1c14, 0x9afbf4c8996fb924, 0x27ae41e4649b934c, 0xa495991b7852b855}},
      {"abc",
       {0xba7816bf8f01cfea, 0x414140de5dae2223, 0xb00361a396177a9c, 0xb410ff61f20015ad}},
      {std::string(55, 'a'),
       {0x9f4390f8d30c2dd9, 0x2ec9f095b65e2b9a, 0xe9b0a925a5258e24, 0x1c9f1e910f734318}},
      {std::string(56, 'a'),
       {0xb35439a4ac6f0948, 0xb6d6f9e3c6af0f5f, 0x590ce20f1bde7090, 0xef7970686ec6738a}},
      {std::string(1000, '\xff'),
       {0xb4f73dff046400b7, 0x6728ab32619e3d89, 0xe00132653725f660, 0xc62ab9fca975b372}}};
  for (const auto& [text, digest] : cases) EXPECT_EQ(sha256(text), digest) << text.size();
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace charonia
