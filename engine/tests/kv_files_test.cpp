// The folder of KV blocks: lookups, damaged files and bounds.
#include "runtime/kv_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <future>
#include <numeric>

#include "errors.h"
#include "test_folder.h"

namespace charonia::runtime {
namespace {

std::vector<std::filesystem::path> kv_files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".kv") out.push_back(entry.path());
  }
  std::ranges::sort(out);
  return out;
}

class KvFilesTest : public ::testing::Test {
 protected:
  static constexpr int kBlockLen = 4;
  static constexpr std::size_t kBytes = 1000;
  static constexpr std::int64_t kFileBytes = 4096;  // whole pages
  static constexpr auto kLong = std::chrono::hours(1);
  using Bytes = std::vector<std::byte>;

  ~KvFilesTest() override { std::filesystem::remove_all(folder_); }

  KvFiles::Owner open(std::string identity = "model", std::int64_t most_bytes = 1 << 20,
                      KvFiles::Options options = {}) {
    options.folder = folder_;
    options.identity = std::move(identity);
    options.block_len = kBlockLen;
    if (options.block_bytes.full == 0) options.block_bytes.full = kBytes;
    options.most_bytes = most_bytes;
    options.changed = [this] {
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    };
    return KvFiles::open(std::move(options), warnings_);
  }

  // Tokens of some blocks; the last token is `last`.
  static std::vector<std::int32_t> tokens(int last, int blocks = 3) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(blocks * kBlockLen));
    std::iota(out.begin(), out.end(), 0);
    out.back() = last;
    return out;
  }
  static Bytes content(std::size_t seed) {
    Bytes out(kBytes);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(seed * 7 + i * i);
    return out;
  }
  // Block i of the prefix gets content(seed + i).
  static void put(KvFiles& files, const KvFiles::PrefixPtr& prefix, std::size_t seed,
                  std::span<const PrefixPart> parts) {
    for (const auto& part : parts) {
      auto data = std::make_unique<std::byte[]>(kBytes);
      std::ranges::copy(content(seed + static_cast<std::size_t>(part.index)), data.get());
      files.put(prefix, part, std::move(data));
    }
  }
  static void put(KvFiles& files, const KvFiles::PrefixPtr& prefix, std::size_t seed,
                  CacheKind kind = CacheKind::full) {
    put(files, prefix, seed, parts(*prefix, 0, kind));
  }
  // The blocks of a prefix from `first` on.
  static std::vector<PrefixPart> parts(const KvFiles::Prefix& prefix, int first = 0,
                                       CacheKind kind = CacheKind::full) {
    std::vector<PrefixPart> out;
    for (int i = first; i < static_cast<int>(prefix.size()); ++i) out.push_back({kind, i});
    return out;
  }
  static void store(KvFiles& files, const KvFiles::PrefixPtr& prefix, std::size_t seed,
                    CacheKind kind = CacheKind::full) {
    put(files, prefix, seed, kind);
    EXPECT_TRUE(files.flush(KvFiles::Clock::now() + kLong));
  }
  // Reads the blocks of a prefix, up to the first one that is not there.
  std::vector<Bytes> read(KvFiles& files, const KvFiles::PrefixPtr& prefix, int first = 0,
                          CacheKind kind = CacheKind::full) {
    std::vector<Bytes> out;
    const auto wanted = parts(*prefix, first, kind);
    const auto reading = files.read(prefix, wanted);
    while (out.size() < wanted.size()) {
      std::optional<KvFiles::Data> data;
      wait_until([&] {
        data = files.take(*reading);
        return !data || *data;
      });
      if (!data) break;
      out.emplace_back(data->get(), data->get() + kBytes);
    }
    return out;
  }
  static void use(KvFiles& files, const KvFiles::PrefixPtr& prefix) { files.use(*prefix, parts(*prefix)); }
  void wait_until(const std::function<bool()>& holds) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, holds);
  }
  static std::vector<Bytes> contents(std::size_t seed, std::size_t count) {
    std::vector<Bytes> out;
    for (std::size_t i = 0; i < count; ++i) out.push_back(content(seed + i));
    return out;
  }
  std::size_t found(KvFiles& files, int last, int blocks = 3, const std::string& scope = "") {
    return files.count(*files.prefix(scope, tokens(last, blocks)), 0);
  }

  std::filesystem::path folder_ = testing::test_folder();
  std::vector<std::string> warnings_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

TEST_F(KvFilesTest, BlocksAreFoundBeforeTheyAreWrittenAndAfterARestart) {
  auto files = open();
  auto prefix = files->prefix("", tokens(7));
  put(*files, prefix, 1);
  EXPECT_EQ(files->count(*prefix, 0), 3U);
  EXPECT_EQ(read(*files, prefix), contents(1, 3));
  EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  EXPECT_EQ(read(*files, prefix, 1), contents(2, 2));
  files.reset();
  files = open();
  prefix = files->prefix("", tokens(7));
  EXPECT_EQ(files->count(*prefix, 0), 3U);
  EXPECT_EQ(read(*files, prefix), contents(1, 3));
  EXPECT_EQ(found(*files, 8), 2U) << "the last block has other tokens";
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(KvFilesTest, AnotherScopeAndAnotherModelFindNothing) {
  auto files = open();
  store(*files, files->prefix("0/alice", tokens(7)), 1);
  EXPECT_EQ(found(*files, 7, 3, "0/alice"), 3U);
  for (const auto* const scope : {"", "0/bob", "1/alice", "0/alice/"}) EXPECT_EQ(found(*files, 7, 3, scope), 0U);
  files.reset();
  EXPECT_EQ(found(*open("another model"), 7, 3, "0/alice"), 0U);
}

TEST_F(KvFilesTest, ABlockIsComparedWithItsTokensNotOnlyWithItsName) {
  auto files = open();
  const auto one = files->prefix("", tokens(7, 1)), other = files->prefix("", tokens(8, 1));
  store(*files, one, 1);
  store(*files, other, 2);
  const auto paths = kv_files_in(folder_);
  ASSERT_EQ(paths.size(), 2U);
  std::filesystem::rename(paths[0], folder_ / "between");
  std::filesystem::rename(paths[1], paths[0]);
  std::filesystem::rename(folder_ / "between", paths[1]);
  EXPECT_TRUE(read(*files, one).empty());
  EXPECT_TRUE(read(*files, other).empty());
}

TEST_F(KvFilesTest, ADamagedFileIsNotUsedAndRemoved) {
  const std::vector<std::function<void(const std::filesystem::path&)>> damages = {
      [](const auto& file) { std::filesystem::remove(file); },
      [](const auto& file) { std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1); },
      [](const auto& file) { std::filesystem::resize_file(file, 0); },
      [](const auto& file) { std::ofstream(file, std::ios::app) << 'x'; },
      [](const auto& file) { std::filesystem::remove(file), std::filesystem::create_directory(file); },
      [](const auto& file) { std::filesystem::remove(file), ::mkfifo(file.c_str(), 0600); },
      [](const auto& file) {
        const auto other = file.parent_path() / "other";
        std::filesystem::rename(file, other);
        std::filesystem::create_symlink(other, file);
      }};
  const auto flip = [](std::int64_t at) {
    return [at](const std::filesystem::path& file) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(at, at < 0 ? std::ios::end : std::ios::beg);
      const auto byte = static_cast<char>(stream.get() ^ 4);
      stream.seekp(at, at < 0 ? std::ios::end : std::ios::beg);
      stream.put(byte);
    };
  };
  auto all = damages;
  for (const std::int64_t at : {0, 9, 40, 70, 500, 1000, -1, -9}) all.emplace_back(flip(at));
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::filesystem::remove_all(folder_);
    auto files = open();
    const auto prefix = files->prefix("", tokens(7, 1));
    store(*files, prefix, 1);
    all[i](kv_files_in(folder_).at(0));
    EXPECT_TRUE(read(*files, prefix).empty()) << i;
    EXPECT_EQ(files->count(*prefix, 0), 0U) << i;
    store(*files, prefix, 2);
    const bool is_folder = i == 4;  // no file can replace it
    EXPECT_EQ(read(*files, prefix), is_folder ? contents(2, 0) : contents(2, 1)) << "it must be stored again: " << i;
  }
}

TEST_F(KvFilesTest, TheLeastRecentlyUsedFilesAreRemovedAlsoOfOtherModels) {
  {
    auto old = open("old model");
    store(*old, old->prefix("", tokens(1, 1)), 1);
    EXPECT_EQ(old->bytes(), kFileBytes);
  }
  auto files = open("model", 3 * kFileBytes);
  EXPECT_EQ(files->bytes(), kFileBytes);
  for (const int last : {2, 3}) store(*files, files->prefix("", tokens(last, 1)), 1);
  use(*files, files->prefix("", tokens(2, 1)));
  for (const int last : {4, 5}) {  // removes the file of the old model, then 3
    store(*files, files->prefix("", tokens(last, 1)), 1);
    EXPECT_LE(files->bytes(), 3 * kFileBytes);
    EXPECT_EQ(kv_files_in(folder_).size(), 3U);
  }
  for (const int last : {2, 4, 5}) EXPECT_EQ(found(*files, last, 1), 1U) << last;
  EXPECT_EQ(found(*files, 3, 1), 0U);
  // After a restart, the times of the files decide.
  for (const auto& file : kv_files_in(folder_)) {
    std::filesystem::last_write_time(file, std::filesystem::file_time_type::clock::now() - kLong);
  }
  use(*files, files->prefix("", tokens(4, 1)));
  EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  files.reset();
  files = open("model", kFileBytes);
  EXPECT_EQ(kv_files_in(folder_).size(), 1U);
  EXPECT_EQ(found(*files, 4, 1), 1U);
  files.reset();
  files = open("model", kFileBytes - 1);
  store(*files, files->prefix("", tokens(6, 1)), 1);
  EXPECT_TRUE(kv_files_in(folder_).empty()) << "a block that is larger than the folder may be is not stored";
}

TEST_F(KvFilesTest, TheFirstBlockOfAPrefixIsRemovedLast) {
  auto files = open("model", 3 * kFileBytes);
  const auto prefix = files->prefix("", tokens(1, 3));
  store(*files, prefix, 1);
  use(*files, prefix);
  store(*files, files->prefix("", tokens(9, 1)), 1);
  EXPECT_EQ(files->count(*prefix, 0), 2U);
  const auto longer = files->prefix("longer", tokens(1, 5));
  store(*files, longer, 1);
  EXPECT_EQ(files->count(*longer, 0), 3U) << "the end of a long prefix must not replace its beginning";
}

TEST_F(KvFilesTest, UnfinishedFilesAreRemovedAndForeignFilesAreKept) {
  open();
  const std::string name(80, 'a');
  for (const auto& file : {name + ".kv.new", std::string("notes.kv"), std::string("a.kv.new"), name + ".kvx"}) {
    std::ofstream(folder_ / file) << "text";
  }
  std::ofstream(folder_ / (name + ".kv")) << "no block";
  auto files = open("model", kFileBytes);
  store(*files, files->prefix("", tokens(1, 1)), 1);
  EXPECT_FALSE(std::filesystem::exists(folder_ / (name + ".kv.new")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / (name + ".kv"))) << "it counts, and is the least recently used file";
  for (const auto& file : {std::string("notes.kv"), std::string("a.kv.new"), name + ".kvx"}) {
    EXPECT_TRUE(std::filesystem::exists(folder_ / file)) << file;
  }
}

TEST_F(KvFilesTest, OnlyTheOwnerMayReadTheFiles) {
  auto files = open();
  store(*files, files->prefix("", tokens(1, 1)), 1);
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(folder_).permissions(), perms::owner_all);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_EQ(entry.status().permissions(), perms::owner_read | perms::owner_write) << entry.path();
  }
}

TEST_F(KvFilesTest, ASecondEngineUsesTheFolderAfterTheFirst) {
  auto first = open();
  store(*first, first->prefix("", tokens(7)), 1);
  auto second = open();
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("is used by another engine"), std::string::npos);
  EXPECT_EQ(found(*second, 7), 0U);
  EXPECT_FALSE(second->has_room());
  first.reset();
  wait_until([&] { return second->has_room(); });
  EXPECT_EQ(found(*second, 7), 3U);
  EXPECT_EQ(read(*second, second->prefix("", tokens(7))), contents(1, 3));
}

TEST_F(KvFilesTest, AFullDiskStoresNothingAndBreaksNothing) {
  auto files = open();
  const auto prefix = files->prefix("", tokens(1, 2));
  store(*files, files->prefix("", tokens(9, 1)), 5);
  // Writing beyond this size fails, like on a full disk.
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit low{500, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &low);
  put(*files, prefix, 1);
  const bool flushed = files->flush(KvFiles::Clock::now() + kLong);
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(flushed);
  EXPECT_EQ(files->count(*prefix, 0), 0U);
  EXPECT_FALSE(files->has_room()) << "the next blocks must not be copied in vain";
  EXPECT_EQ(kv_files_in(folder_).size(), 1U);
  EXPECT_EQ(read(*files, files->prefix("", tokens(9, 1))), contents(5, 1)) << "reading must go on";
}

TEST_F(KvFilesTest, AForgottenPrefixIsNotFoundAgain) {
  auto files = open();
  const auto prefix = files->prefix("", tokens(7));
  store(*files, prefix, 1);
  files->forget(*prefix);
  EXPECT_EQ(files->count(*prefix, 0), 0U);
  EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  EXPECT_TRUE(kv_files_in(folder_).empty());
  put(*files, prefix, 1);
  files->forget(*prefix);  // perhaps while it is written
  EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  EXPECT_EQ(files->count(*prefix, 0), 0U);
  EXPECT_TRUE(kv_files_in(folder_).empty());
}

TEST_F(KvFilesTest, TheFirstBlocksOfAPrefixRemainIfOnlyItsLastOnesAreForgotten) {
  auto files = open();
  const auto one = files->prefix("", tokens(8)), other = files->prefix("", tokens(8, 5));
  for (const auto& prefix : {one, other}) store(*files, prefix, 1);
  const auto reading = files->read(other, parts(*other));
  files->forget(*one, one->size());
  EXPECT_EQ(files->count(*one, 0), one->size());
  files->forget(*one, one->size() - 1);
  EXPECT_EQ(files->count(*one, 0), one->size() - 1);
  EXPECT_EQ(files->count(*other, 0), other->size());
  wait_until([&] { return files->take(*reading).value() != nullptr; });
  files->forget(*other, 1);
  EXPECT_EQ(files->take(*reading), std::nullopt) << "no more blocks may be loaded";
  EXPECT_EQ(files->count(*one, 0), 1U) << "both prefixes have the same first two blocks";
}

TEST_F(KvFilesTest, APathThatIsNoFolderIsRejected) {
  std::ofstream(folder_.string()) << "a file";
  expect_error(ErrorCode::invalid_argument, {"kv_offload_path", folder_.string(), "leave kv_offload_path empty"},
                        [this] { open(); });
  const auto folder = folder_;
  folder_ = folder.parent_path() / std::string(1000, 'a');
  expect_error(ErrorCode::invalid_argument, {"kv_offload_path", "File name too long"}, [this] { open(); });
  folder_ = folder;
}

TEST_F(KvFilesTest, ForgettingAPrefixRemovesAllBlocksAfterItsFirstBlock) {
  auto files = open();
  const auto one = files->prefix("", tokens(7)), other = files->prefix("", tokens(8, 5));
  const auto own = files->prefix("a", tokens(7));
  for (const auto& prefix : {one, other, own}) store(*files, prefix, 1);
  const auto reading = files->read(other, parts(*other));
  wait_until([&] { return files->take(*reading).value() != nullptr; });
  files->forget(*one);
  EXPECT_EQ(files->take(*reading), std::nullopt) << "no more blocks may be loaded";
  EXPECT_EQ(files->count(*other, 3), 0U);
  EXPECT_EQ(files->count(*own, 0), 3U) << "another scope has its own blocks";
}

TEST_F(KvFilesTest, AnErrorOfTheMachineKeepsTheFiles) {
  KvFiles::Options options;
  auto fails = std::make_shared<std::atomic<bool>>(false);
  options.before_io = [fails](bool) { return *fails ? EMFILE : 0; };
  auto files = open("model", 1 << 20, options);
  const auto prefix = files->prefix("", tokens(7));
  store(*files, prefix, 1);
  *fails = true;
  EXPECT_TRUE(read(*files, prefix).empty());
  *fails = false;
  EXPECT_EQ(read(*files, prefix), contents(1, 3));
}

TEST_F(KvFilesTest, ALongerTurnReplacesOtherPrefixesNotItself) {
  auto files = open("model", 4 * kFileBytes);
  store(*files, files->prefix("", tokens(2, 2)), 1);
  store(*files, files->prefix("other", tokens(1, 2)), 1);
  const auto longer = files->prefix("", tokens(1, 4));  // its first block is the least recently used one
  store(*files, longer, 1);
  EXPECT_EQ(files->count(*longer, 0), 4U);
}

TEST_F(KvFilesTest, OnADiskThatIsFullNewBlocksReplaceOldOnes) {
  KvFiles::Options options;
  options.before_io = [folder = folder_](bool writes) {
    return writes && kv_files_in(folder).size() >= 2 ? ENOSPC : 0;
  };
  auto files = open("model", 1 << 20, options);
  for (const int last : {1, 2, 3, 4}) store(*files, files->prefix("", tokens(last, 1)), 1);
  EXPECT_TRUE(files->has_room());
  for (const int last : {1, 2}) EXPECT_EQ(found(*files, last, 1), 0U);
  for (const int last : {3, 4}) EXPECT_EQ(found(*files, last, 1), 1U);
}

TEST_F(KvFilesTest, AllReadingsTogetherReadFewBytesAhead) {
  KvFiles::Options options;
  options.block_bytes.full = KvFiles::kAheadOfAll / 5 * 2;
  auto reads = std::make_shared<std::atomic<int>>(0);
  options.before_io = [reads](bool writes) { return *reads += writes ? 0 : 1, 0; };
  auto files = open("model", std::int64_t{1} << 30, options);
  const auto prefix = files->prefix("", tokens(7, 1));
  const auto put_one = [&](const KvFiles::PrefixPtr& one) {
    files->put(one, {}, std::make_unique<std::byte[]>(options.block_bytes.full));
    EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  };
  put_one(prefix);
  std::vector<std::shared_ptr<KvFiles::Reading>> readings;
  for (int i = 0; i < 3; ++i) readings.push_back(files->read(prefix, parts(*prefix)));
  put_one(files->prefix("other", tokens(7, 1)));  // the thread writes when it reads no more
  EXPECT_EQ(*reads, 2);
  EXPECT_NE(files->take(*readings[0]).value(), nullptr);
  wait_until([&] { return files->take(*readings[2]).value() != nullptr; });
}

TEST_F(KvFilesTest, EachKindHasItsOwnFiles) {
  KvFiles::Options options;
  options.block_bytes = {kBytes, kBytes, kBytes};
  auto files = open("model", 1 << 20, options);
  const auto prefix = files->prefix("", tokens(7));
  std::size_t seed = 1;
  for (const auto kind : kCacheKinds) {
    for (const auto& part : parts(*prefix, 0, kind)) EXPECT_FALSE(files->has(*prefix, part));
    store(*files, prefix, seed++, kind);
  }
  EXPECT_EQ(kv_files_in(folder_).size(), 9U);
  seed = 1;
  for (const auto kind : kCacheKinds) EXPECT_EQ(read(*files, prefix, 0, kind), contents(seed++, 3));
  files->forget(*prefix);
  for (const auto kind : kCacheKinds) EXPECT_FALSE(files->has(*prefix, {kind, 0}));
  EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
  EXPECT_TRUE(kv_files_in(folder_).empty());
}

// A conversation stores units at two places of each turn. It never reads the older ones again.
TEST_F(KvFilesTest, UnitsOfEarlierTurnsAreReplacedAndThoseOfThisTurnAreNot) {
  KvFiles::Options options;
  options.block_bytes = {kBytes, 0, kBytes};
  auto files = open("model", 12 * kFileBytes, options);
  for (int blocks = 2; blocks <= 10; blocks += 2) {
    auto stored = parts(*files->prefix("", tokens(blocks * kBlockLen - 1, blocks)));
    stored.push_back({CacheKind::state, blocks - 2});
    stored.push_back({CacheKind::state, blocks - 1});
    const auto prefix = files->prefix("", tokens(blocks * kBlockLen - 1, blocks), stored);
    put(*files, prefix, 1, stored);
    EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
    for (const auto& part : stored) EXPECT_TRUE(files->has(*prefix, part)) << blocks << " " << part.index;
    EXPECT_EQ(files->bytes(), std::min(12, 2 * blocks) * kFileBytes);
  }
}

// It does not matter how many were written when they were used.
TEST_F(KvFilesTest, TheEndOfAPrefixIsRemovedBeforeItsBeginning) {
  for (const std::size_t written : {0, 1, 3, 6}) {
    for (const bool restart : {false, true}) {
      SCOPED_TRACE(std::to_string(written) + (restart ? ", restart" : ""));
      std::filesystem::remove_all(folder_);
      std::promise<void> answers;
      KvFiles::Options options;
      options.block_bytes = {kBytes, 0, kBytes};
      auto waits = std::make_shared<std::atomic<bool>>(false);
      options.before_io = [waits, answer = answers.get_future().share()](bool) {
        if (*waits) answer.wait();
        return 0;
      };
      auto files = open("model", 6 * kFileBytes, options);
      constexpr auto kFull = CacheKind::full, kState = CacheKind::state;
      const std::vector<PrefixPart> all = {{kFull, 0}, {kFull, 1}, {kState, 1}, {kFull, 2}, {kFull, 3}, {kState, 3}};
      const auto prefix = files->prefix("", tokens(7, 4), all);
      put(*files, prefix, 1, std::span(all).first(written));
      EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
      *waits = true;
      put(*files, prefix, 1, std::span(all).subspan(written));
      files->use(*prefix, all);
      answers.set_value();
      EXPECT_TRUE(files->flush(KvFiles::Clock::now() + kLong));
      if (restart) {
        files.reset();
        options.before_io = [](bool) { return 0; };
        files = open("model", 6 * kFileBytes, options);
      }
      for (std::size_t left = all.size(); left-- > 0;) {
        store(*files, files->prefix(std::to_string(left), tokens(1, 1)), 1);
        for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(files->has(*prefix, all[i]), i < left) << left << i;
      }
    }
  }
}

TEST_F(KvFilesTest, BlocksInMemoryDoNotKeepTheKeysOfTheirPrefix) {
  const auto folder = std::exchange(folder_, {});
  auto files = open();
  auto prefix = files->prefix("", tokens(7));
  store(*files, prefix, 1);
  const std::weak_ptr<const KvFiles::Prefix> kept = std::exchange(prefix, nullptr);
  EXPECT_TRUE(kept.expired());
  EXPECT_EQ(found(*files, 7), 3U);
  folder_ = folder;
}

TEST_F(KvFilesTest, WithoutAFolderBlocksStayInMemoryWithinTheBound) {
  const auto folder = std::exchange(folder_, {});
  auto files = open("model", 3 * kFileBytes);
  const auto first = files->prefix("", tokens(7)), second = files->prefix("other", tokens(7, 2));
  store(*files, first, 1);
  EXPECT_EQ(read(*files, first), contents(1, 3));
  use(*files, first);
  store(*files, second, 5);
  EXPECT_EQ(files->bytes(), 3 * kFileBytes);
  EXPECT_EQ(read(*files, second), contents(5, 2));
  EXPECT_EQ(read(*files, first), contents(1, 1)) << "the end of the least recently used prefix was removed";
  files->forget(*second);
  EXPECT_TRUE(read(*files, second).empty());
  EXPECT_EQ(files->bytes(), kFileBytes);
  files.reset();
  files = open("model", 3 * kFileBytes);
  EXPECT_EQ(files->count(*first, 0), 0U);
  EXPECT_TRUE(warnings_.empty());
  folder_ = folder;
  EXPECT_FALSE(std::filesystem::exists(folder_));
}

// While the disk does not answer, nothing is found, and nothing waits for it.
TEST_F(KvFilesTest, ADiskThatDoesNotAnswerIsAbandoned) {
  struct Disk {
    ~Disk() { gone.set_value(); }
    std::promise<void> stuck, answers, gone;
    std::shared_future<void> answer = answers.get_future().share();
    std::atomic<bool> sticks{false};
    std::atomic<int> seconds{0};
  };
  auto disk = std::make_shared<Disk>();
  auto gone = disk->gone.get_future();
  KvFiles::Options options;
  options.patience = std::chrono::milliseconds(1);
  options.before_io = [disk](bool) {
    if (disk->sticks.exchange(false)) disk->stuck.set_value(), disk->answer.wait();
    return 0;
  };
  options.now = [disk] { return KvFiles::Clock::time_point(std::chrono::seconds(disk->seconds)); };
  auto files = open("model", 1 << 20, std::exchange(options, {}));
  store(*files, files->prefix("", tokens(7)), 1);
  disk->sticks = true;
  put(*files, files->prefix("", tokens(8, 1)), 1);
  disk->stuck.get_future().wait();
  EXPECT_EQ(found(*files, 7), 3U);
  disk->seconds = 1;
  EXPECT_EQ(found(*files, 7), 0U);
  EXPECT_FALSE(files->flush(KvFiles::Clock::now() + kLong));
  files.reset();
  disk->answers.set_value();
  disk.reset();
  gone.wait();  // the thread has deleted everything
}

}  // namespace
}  // namespace charonia::runtime
