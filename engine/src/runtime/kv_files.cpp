#include "runtime/kv_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <iterator>
#include <system_error>
#include <tuple>

#include "base/log.h"
#include "base/sha256.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

constexpr std::string_view kKvMagic = "CHKVBLK2";
constexpr std::string_view kKvEnding = ".kv", kKvUnfinished = ".kv.new";
constexpr std::size_t kKvNameDigits = 80;
constexpr mode_t kKvFileMode = S_IRUSR | S_IWUSR;
constexpr std::chrono::milliseconds kKvLockRetry{300};
constexpr std::chrono::seconds kPause{30};
constexpr std::size_t kMostTouched = 1 << 16;

// Two multiplicative hashes of 64-bit words with different factors. They are no protection against a person who can
// write to the folder.
class WordHash {
 public:
  void add(std::uint64_t word) {
    low_ = (low_ ^ word) * 0x9fb21c651e98df25U;
    low_ ^= low_ >> 32U;
    high_ = (high_ ^ word) * 0xd6e8feb86659fd93U;
    high_ ^= high_ >> 29U;
  }
  void add(std::span<const std::byte> bytes) {
    add(bytes.size());
    while (!bytes.empty()) {
      std::uint64_t word = 0;
      const auto part = bytes.first(std::min(bytes.size(), sizeof word));
      std::memcpy(&word, part.data(), part.size());
      add(word);
      bytes = bytes.subspan(part.size());
    }
  }
  std::array<std::uint64_t, 2> result() const { return {high_, low_}; }

 private:
  std::uint64_t low_ = 0x9e3779b97f4a7c15U, high_ = 0xc2b2ae3d27d4eb4fU;
};

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Finds damaged bytes. It has four lanes, because one multiplication waits for the one before it.
std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) {
  std::array<std::uint64_t, 4> lanes{seed, ~seed, bytes.size(), 0x9e3779b97f4a7c15U};
  for (; bytes.size() >= sizeof lanes; bytes = bytes.subspan(sizeof lanes)) {
    std::array<std::uint64_t, 4> words;
    std::memcpy(words.data(), bytes.data(), sizeof words);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = (lanes[i] ^ words[i]) * 0x9fb21c651e98df25U;
      lanes[i] ^= lanes[i] >> 32U;
    }
  }
  WordHash hash;
  for (const auto lane : lanes) hash.add(lane);
  hash.add(bytes);
  return hash.result()[0] ^ hash.result()[1];
}

std::string hex(std::span<const std::uint64_t> numbers) {
  std::string out;
  for (const auto number : numbers) {
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
    out += text.data();
  }
  return out;
}

std::string hex(const KvFiles::Key& key) { return hex(std::span(&key.root, 1)) + hex(key.digest); }

// The key of a file's name; empty if it is not a file of this store.
std::optional<KvFiles::Key> key_of(std::string_view name, std::string_view ending) {
  if (name.size() != kKvNameDigits + ending.size() || !name.ends_with(ending)) return std::nullopt;
  std::array<std::uint64_t, 5> numbers{};
  constexpr auto kDigits = kKvNameDigits / 5;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto digits = name.substr(i * kDigits, kDigits);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), numbers[i], 16);
    if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  }
  const KvFiles::Key key{numbers[0], {numbers[1], numbers[2], numbers[3], numbers[4]}};
  return name.starts_with(hex(key)) ? std::optional(key) : std::nullopt;
}

// Files take whole pages of a disk.
std::int64_t whole_pages(std::int64_t bytes) {
  constexpr std::int64_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

std::string io_error(int code) { return std::generic_category().message(code); }

// Whether opening or reading a file failed because of the file, and not because of the machine or the disk.
bool is_fault_of_file(int code) { return code == 0 || code == ENOENT || code == ELOOP || code == ENXIO; }

// Calls transfer(parts) until all bytes are transferred. Returns false if it fails or ends early; errno is 0 then.
template <class Transfer>
bool transfer_all(std::array<iovec, 3> parts, const Transfer& transfer) {
  std::span<iovec> rest(parts);
  while (!rest.empty()) {
    errno = 0;
    auto count = transfer(rest);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    for (; !rest.empty() && static_cast<std::size_t>(count) >= rest.front().iov_len; rest = rest.subspan(1)) {
      count -= static_cast<ssize_t>(rest.front().iov_len);
    }
    if (rest.empty()) break;
    rest.front().iov_base = static_cast<char*>(rest.front().iov_base) + count;
    rest.front().iov_len -= static_cast<std::size_t>(count);
  }
  return true;
}

}  // namespace

// Members change under KvFiles::mutex_.
struct KvFiles::Reading {
  PrefixPtr prefix;
  std::vector<PrefixPart> parts;
  std::size_t taken = 0, next = 0;  // blocks that were taken; the next one to read
  std::deque<Data> ready;
  std::size_t ready_bytes = 0, left_bytes = 0;  // read but not taken; not read
  bool failed = false;
};

struct KvFiles::Head {
  std::array<char, 8> magic;
  std::uint64_t root;
  std::array<std::uint64_t, 4> digest;
  std::uint64_t block_bytes;
};

KvFiles::Descriptor::~Descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int KvFiles::open_lock(const std::filesystem::path& folder) {
  std::error_code error, ignored;
  if (std::filesystem::create_directories(folder, error)) {
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all, error);
  }
  int lock = -1;
  if (std::filesystem::is_directory(folder, ignored)) {
    lock = ::open((folder / "engine.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, kKvFileMode);
    if (lock < 0) error.assign(errno, std::generic_category());
  }
  if (lock >= 0) return lock;
  throw Error(ErrorCode::invalid_argument,
              cat("kv_offload_path = ", folder.string(), " is not a folder that the engine can create and write (",
                  error.message(), "); name another folder, or leave kv_offload_path empty"));
}

KvFiles::KvFiles(Options options, std::vector<std::string>& warnings)
    : options_(std::move(options)),
      lock_(in_memory() ? -1 : open_lock(options_.folder)),
      limit_(options_.most_bytes) {
  if (try_lock()) {
    find_files();
  } else {
    warnings.push_back(cat("kv_offload_path = ", options_.folder.string(), " is used by another engine: this engine ",
                           "stores and finds no KV as long as the other one runs. Give each engine a folder of its ",
                           "own"));
  }
  thread_ = std::thread([this] { run(); });
}

KvFiles::Owner KvFiles::open(Options options, std::vector<std::string>& warnings) {
  return Owner(new KvFiles(std::move(options), warnings));
}

KvFiles::~KvFiles() {
  if (thread_.joinable()) thread_.join();
}

void KvFiles::close() {
  Lock lock(mutex_);
  if (std::exchange(stop_, true)) return;
  usable_ = false;
  wake_.notify_one();
  idle_.notify_all();
  idle_.wait_for(lock, options_.patience, [this] { return ended_; });
}

void KvFiles::Close::operator()(KvFiles* files) const {
  files->close();
  {
    const std::lock_guard lock(files->mutex_);
    if (!files->ended_) {
      files->abandoned_ = true;
      files->thread_.detach();
      return;
    }
  }
  delete files;
}

// On a file system without locks, every engine may use the folder.
bool KvFiles::try_lock() {
  if (in_memory()) return true;
  locked_ = flock(lock_.get(), LOCK_EX | LOCK_NB) == 0;
  return locked_ || errno != EWOULDBLOCK;
}

std::string KvFiles::digest(std::string_view text) {
  WordHash hash;
  hash.add(bytes_of(text));
  return hex(hash.result());
}

KvFiles::PrefixPtr KvFiles::prefix(std::string_view scope, std::span<const TokenId> tokens,
                                   std::vector<PrefixPart> stored) const {
  const auto length = static_cast<std::size_t>(options_.block_len);
  auto out = std::make_shared<Prefix>();
  out->stored = std::move(stored);
  auto digest = sha256(cat(options_.identity.size(), " ", options_.identity, scope));
  std::string text;
  auto& keys = out->keys;
  for (; tokens.size() >= length; tokens = tokens.subspan(length)) {
    text.assign(reinterpret_cast<const char*>(digest.data()), sizeof digest);
    text.append(reinterpret_cast<const char*>(tokens.data()), tokens.first(length).size_bytes());
    digest = sha256(text);
    keys.full.push_back({keys.full.empty() ? digest[0] : keys.full.front().root, digest});
    for (const auto kind : {CacheKind::window, CacheKind::state}) {
      if (options_.block_bytes[kind] == 0) continue;
      text.assign(reinterpret_cast<const char*>(digest.data()), sizeof digest);
      text += kind == CacheKind::window ? 'w' : 's';  // shorter than a text with tokens
      keys[kind].push_back({keys.full.front().root, sha256(text)});
    }
  }
  return out;
}

std::filesystem::path KvFiles::path_of(const Key& key, bool unfinished) const {
  return options_.folder / cat(hex(key), unfinished ? kKvUnfinished : kKvEnding);
}

std::int64_t KvFiles::file_bytes(CacheKind kind) const {
  return whole_pages(
      static_cast<std::int64_t>(sizeof(Head) + options_.block_bytes[kind] + sizeof(std::uint64_t)));
}

KvFiles::Head KvFiles::head_of(const Key& key, std::size_t block_bytes) const {
  Head out{.magic = {}, .root = key.root, .digest = key.digest, .block_bytes = block_bytes};
  std::ranges::copy(kKvMagic, out.magic.begin());
  return out;
}

// Adds the files of this user in the order of their last use, also files of other models, and removes files that were
// not finished.
void KvFiles::find_files() {
  std::vector<std::tuple<std::filesystem::file_time_type, Key, std::int64_t>> found;
  std::error_code error;
  std::filesystem::directory_iterator at, end;
  if (!in_memory()) at = std::filesystem::directory_iterator(options_.folder, error);
  for (; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    if (key_of(name, kKvUnfinished)) ::unlink(at->path().c_str());
    const auto key = key_of(name, kKvEnding);
    struct stat status{};
    if (!key || ::lstat(at->path().c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
      continue;
    }
    std::error_code ignored;
    found.emplace_back(at->last_write_time(ignored), *key, status.st_size);
  }
  std::ranges::sort(found);
  Lock lock(mutex_);
  entries_.clear();
  entries_of_.clear();
  bytes_ = 0;
  for (const auto& [time, key, bytes] : found) add(entries_.end(), {key, whole_pages(bytes), nullptr});
  while (bytes_ > options_.most_bytes) remove(entries_.front().key);
  remove_files(lock);
  usable_ = !stop_;
}

void KvFiles::add(Entries::iterator before, Entry entry) {
  bytes_ += entry.bytes;
  const auto at = entries_.insert(before, std::move(entry));
  entries_of_[at->key] = at;
}

// Before the block that it needs, as use() orders them: use() may have moved that block before this one was written.
KvFiles::Entries::iterator KvFiles::place_of(const Unwritten& block) {
  const auto& keys = block.prefix->keys;
  const bool is_full = block.part.kind == CacheKind::full;
  const auto needed = block.part.index - (is_full ? 1 : 0);
  if (needed < 0) return entries_.end();
  const auto found = entries_of_.find(block.prefix->key({CacheKind::full, needed}));
  if (found == entries_of_.end()) return entries_.end();
  const auto is_its_unit = [&](const Key& key) {
    return std::ranges::any_of(kCacheKinds, [&](CacheKind kind) {
      return !keys[kind].empty() && key == block.prefix->key({kind, needed});
    });
  };
  auto at = found->second;
  while (is_full && at != entries_.begin() && is_its_unit(std::prev(at)->key)) --at;
  return at;
}

void KvFiles::drop_unwritten(const Key& key) {
  const auto found = unwritten_.find(key);
  if (found == unwritten_.end()) return;
  unwritten_bytes_ -= file_bytes(found->second->part.kind);
  unwritten_.erase(found);
}

void KvFiles::remove(Key key) {
  drop_unwritten(key);
  const auto found = entries_of_.find(key);
  if (found == entries_of_.end()) return;
  bytes_ -= found->second->bytes;
  entries_.erase(found->second);
  entries_of_.erase(found);
  if (!in_memory()) removed_.push_back(key);
}

bool KvFiles::make_room(const Unwritten& block) {
  const auto bytes = file_bytes(block.part.kind);
  if (bytes > limit_) return false;
  const auto& prefix = *block.prefix;
  const auto& full = prefix.keys.full;
  const auto is_own = [&](const Key& key) {
    if (key.root != full.front().root) return false;
    return std::ranges::find(full, key) != full.end() ||
           std::ranges::any_of(prefix.stored, [&](const PrefixPart& part) { return prefix.key(part) == key; });
  };
  for (auto at = entries_.begin(); bytes_ + bytes > limit_;) {
    while (at != entries_.end() && is_own(at->key)) ++at;
    if (at == entries_.end()) return false;
    remove((at++)->key);
  }
  return true;
}

bool KvFiles::contains(const Key& key) const {
  const std::lock_guard lock(mutex_);
  return usable_ && known(key);
}

std::size_t KvFiles::count(const Prefix& prefix, std::size_t first) const {
  const std::lock_guard lock(mutex_);
  auto at = first;
  while (usable_ && !is_stuck() && at < prefix.size() && known(prefix.keys.full[at])) ++at;
  return at - first;
}

bool KvFiles::room() const {
  return usable_ && !paused_until_ && unwritten_bytes_ < kMostUnwritten;
}

bool KvFiles::has_room() const {
  const std::lock_guard lock(mutex_);
  return room();
}

bool KvFiles::wait_for_room(Clock::time_point until) {
  Lock lock(mutex_);
  idle_.wait_until(lock, until, [this] { return room() || !usable_ || paused_until_; });
  return room();
}

void KvFiles::put(const PrefixPtr& prefix, const PrefixPart& part, Data data) {
  const auto key = prefix->key(part);
  {
    const std::lock_guard lock(mutex_);
    if (!room() || known(key)) return;
    unwritten_.emplace(key, std::make_shared<const Unwritten>(Unwritten{prefix, part, std::move(data)}));
    unwritten_bytes_ += file_bytes(part.kind);
    queue_.push_back(key);
  }
  wake_.notify_one();
}

// The first block is used last, so that it is removed after the blocks that need it.
void KvFiles::use(const Prefix& prefix, std::span<const PrefixPart> parts) {
  {
    const std::lock_guard lock(mutex_);
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      const auto& key = prefix.key(*part);
      if (!known(key)) continue;
      // The thread writes files before it sets times.
      if (touched_.size() < kMostTouched && !in_memory()) touched_.push_back(key);
      const auto found = entries_of_.find(key);
      if (found != entries_of_.end()) entries_.splice(entries_.end(), entries_, found->second);
    }
  }
  wake_.notify_one();
}

void KvFiles::forget(const Prefix& prefix, std::size_t from) {
  if (prefix.size() <= from) return;
  {
    const std::lock_guard lock(mutex_);
    const auto& first = prefix.keys.full[from];
    std::vector<Key> keys;
    if (from == 0) {
      for (const auto& entry : entries_) keys.push_back(entry.key);
      for (const auto& [key, block] : unwritten_) keys.push_back(key);
      std::erase_if(keys, [&](const Key& key) { return key.root != first.root; });
    }
    for (const auto kind : kCacheKinds) {
      const auto& own = prefix.keys[kind];
      if (!own.empty()) keys.insert(keys.end(), own.begin() + static_cast<std::ptrdiff_t>(from), own.end());
    }
    for (const auto& key : keys) remove(key);
    for (const auto& weak : readings_) {
      const auto reading = weak.lock();
      if (reading && reading->prefix->size() > from && reading->prefix->keys.full[from] == first) {
        reading->failed = true;
        reading->ready.clear();
        reading->ready_bytes = 0;
      }
    }
  }
  wake_.notify_one();
}

bool KvFiles::flush(Clock::time_point until) {
  Lock lock(mutex_);
  const auto done = [this] {
    return stop_ || (queue_.empty() && touched_.empty() && removed_.empty() && !busy_);
  };
  return !is_stuck() && idle_.wait_until(lock, until, done);
}

std::shared_ptr<KvFiles::Reading> KvFiles::read(PrefixPtr prefix, std::vector<PrefixPart> parts) {
  auto out = std::make_shared<Reading>();
  out->prefix = std::move(prefix);
  out->parts = std::move(parts);
  for (const auto& part : out->parts) out->left_bytes += block_bytes(part);
  {
    const std::lock_guard lock(mutex_);
    readings_.push_back(out);
  }
  wake_.notify_one();
  return out;
}

std::optional<KvFiles::Data> KvFiles::take(Reading& reading) {
  Data out;
  {
    const std::lock_guard lock(mutex_);
    if (reading.ready.empty()) return reading.failed || stop_ ? std::nullopt : std::optional<Data>(nullptr);
    out = std::move(reading.ready.front());
    reading.ready.pop_front();
    reading.ready_bytes -= block_bytes(reading.parts[reading.taken++]);
  }
  wake_.notify_one();
  return out;
}

double KvFiles::read_s(std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (read_bytes_ == 0) return 0;
  for (const auto& weak : readings_) {
    if (const auto reading = weak.lock(); reading && !reading->failed) bytes += reading->left_bytes;
  }
  return read_s_ / read_bytes_ * static_cast<double>(bytes);
}

std::int64_t KvFiles::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::int64_t KvFiles::unfilled_bytes() const {
  return in_memory() ? std::max<std::int64_t>(0, options_.most_bytes - bytes()) : 0;
}

// Returns the first reading that has blocks to read, and room for them.
std::shared_ptr<KvFiles::Reading> KvFiles::next_reading() {
  std::erase_if(readings_, [](const auto& weak) { return weak.expired(); });
  std::size_t ahead = 0;
  const auto next_bytes = [this](const Reading& reading) { return block_bytes(reading.parts[reading.next]); };
  std::shared_ptr<Reading> out;
  for (const auto& weak : readings_) {
    const auto reading = weak.lock();
    if (!reading) continue;
    ahead += reading->ready_bytes;
    if (out || reading->failed || reading->next == reading->parts.size()) continue;
    if (reading->ready.empty() || reading->ready_bytes + next_bytes(*reading) <= kAhead) out = reading;
  }
  return out && (ahead == 0 || ahead + next_bytes(*out) <= kAheadOfAll) ? out : nullptr;
}

KvFiles::Data KvFiles::read_file(const Key& key, std::size_t block_bytes, bool& damaged) const {
  damaged = false;
  if (options_.before_io(false) != 0) return nullptr;
  const Descriptor file(::open(path_of(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status{};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    damaged = is_fault_of_file(errno);
    return nullptr;
  }
  const auto expected = head_of(key, block_bytes);
  Head head{};
  std::uint64_t stored = 0;
  damaged = !S_ISREG(status.st_mode) || status.st_uid != geteuid() ||
            status.st_size != static_cast<off_t>(sizeof head + block_bytes + sizeof stored);
  if (damaged) return nullptr;
  auto data = std::make_unique_for_overwrite<std::byte[]>(block_bytes);
  const bool read = transfer_all({iovec{&head, sizeof head}, iovec{data.get(), block_bytes},
                                  iovec{&stored, sizeof stored}},
                                 [&](std::span<iovec> parts) {
                                   return ::readv(file.get(), parts.data(), static_cast<int>(parts.size()));
                                 });
  const auto head_bytes = std::as_bytes(std::span(&head, 1));
  damaged = read ? !std::ranges::equal(head_bytes, std::as_bytes(std::span(&expected, 1))) ||
                       checksum({data.get(), block_bytes}, checksum(head_bytes, 0)) != stored
                 : is_fault_of_file(errno);
  return read && !damaged ? std::move(data) : nullptr;
}

int KvFiles::write_file(const Unwritten& block) const {
  if (const int code = options_.before_io(true); code != 0) return code;
  if (in_memory()) return 0;
  const auto& key = block.prefix->key(block.part);
  const auto bytes = block_bytes(block.part);
  const auto unfinished = path_of(key, true);
  ::unlink(unfinished.c_str());
  int code = 0;
  {
    const Descriptor file(
        ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kKvFileMode));
    if (file.get() < 0) return errno;
    auto head = head_of(key, bytes);
    auto sum = checksum({block.data.get(), bytes}, checksum(std::as_bytes(std::span(&head, 1)), 0));
    const bool written = transfer_all({iovec{&head, sizeof head}, iovec{block.data.get(), bytes},
                                       iovec{&sum, sizeof sum}},
                                      [&](std::span<iovec> parts) {
                                        return ::writev(file.get(), parts.data(), static_cast<int>(parts.size()));
                                      });
    if (!written) code = errno == 0 ? EIO : errno;
  }
  if (code == 0 && ::rename(unfinished.c_str(), path_of(key).c_str()) != 0) code = errno;
  if (code != 0) ::unlink(unfinished.c_str());
  return code;
}

void KvFiles::read_block(Lock& lock, Reading& reading) {
  const auto prefix = reading.prefix;
  const auto bytes = block_bytes(reading.parts[reading.next]);
  const auto key = prefix->key(reading.parts[reading.next]);
  std::shared_ptr<std::byte[]> kept;
  if (const auto waiting = unwritten_.find(key); waiting != unwritten_.end()) kept = waiting->second->data;
  if (const auto entry = entries_of_.find(key); !kept && entry != entries_of_.end()) kept = entry->second->kept;
  lock.unlock();
  Data data;
  bool damaged = false;
  const auto began = now();
  if (kept) {
    data = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::memcpy(data.get(), kept.get(), bytes);
  } else if (!in_memory()) {
    data = read_file(key, bytes, damaged);
  }
  const std::chrono::duration<double> took = now() - began;
  lock.lock();
  if (reading.failed) return;  // it was forgotten
  if (!data) {
    reading.failed = true;
    // The blocks after a damaged block are stored again, because they may be damaged too.
    for (auto i = reading.next; damaged && i < reading.parts.size(); ++i) remove(prefix->key(reading.parts[i]));
    return;
  }
  reading.ready.push_back(std::move(data));
  reading.ready_bytes += bytes;
  reading.left_bytes -= bytes;
  ++reading.next;
  constexpr double kMemory = 1 << 28;  // bytes
  if (kept) return;
  read_s_ += took.count();
  read_bytes_ += static_cast<double>(bytes);
  if (read_bytes_ > kMemory) read_s_ /= 2, read_bytes_ /= 2;
}

void KvFiles::write_block(Lock& lock) {
  const auto key = queue_.front();
  queue_.pop_front();
  const auto found = unwritten_.find(key);
  if (found == unwritten_.end()) return;  // it was removed
  const auto block = found->second;
  const bool fits = make_room(*block);
  remove_files(lock);
  lock.unlock();
  const int code = fits ? write_file(*block) : 0;
  lock.lock();
  const auto still = unwritten_.find(key);
  const bool wanted = still != unwritten_.end() && still->second == block;
  if (wanted && (code == ENOSPC || code == EDQUOT) && bytes_ > 0) {
    limit_ = bytes_;  // other files take the rest of the disk, so this block replaces some of ours
    queue_.push_front(key);
    return;
  }
  if (wanted) drop_unwritten(key);
  if (code != 0) {
    paused_until_ = now() + kPause;
    limit_ = options_.most_bytes;
    unwritten_.clear();
    unwritten_bytes_ = 0;
    queue_.clear();
    log({LogLevel::warning,
         cat("kv_offload_path = ", options_.folder.string(), " cannot be written (", io_error(code),
             "); no KV is stored for ", kPause.count(), " s"),
         "", {}});
    return;
  }
  const auto bytes = file_bytes(block->part.kind);
  limit_ = std::min(options_.most_bytes, limit_ + bytes / 8);  // the disk may have more space again
  if (fits && wanted) {
    add(place_of(*block), {key, bytes, in_memory() ? block->data : nullptr});
  } else if (fits && !in_memory()) {
    ::unlink(path_of(key).c_str());
  }
}

// The order of use survives a restart, because files have the times of their last use.
void KvFiles::touch_files(Lock& lock) {
  const auto keys = std::exchange(touched_, {});
  lock.unlock();
  for (const auto& key : keys) {
    // The system's own time of a file is the same for many of them.
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    utimensat(AT_FDCWD, path_of(key).c_str(), std::array{time, time}.data(), AT_SYMLINK_NOFOLLOW);
  }
  lock.lock();
}

void KvFiles::remove_files(Lock& lock) {
  const auto keys = std::exchange(removed_, {});
  if (keys.empty()) return;
  lock.unlock();
  for (const auto& key : keys) ::unlink(path_of(key).c_str());
  lock.lock();
}

// Does one thing, or waits until there is something to do. Returns whether the engine may continue.
bool KvFiles::work(Lock& lock) {
  if (!usable_) {
    wake_.wait_for(lock, kKvLockRetry, [this] { return stop_; });
    if (stop_) return false;
    lock.unlock();
    if (try_lock()) find_files();
    lock.lock();
    return true;
  }
  if (paused_until_ && now() >= *paused_until_) paused_until_.reset();
  busy_ = true;
  busy_since_ = now();
  if (!removed_.empty()) {
    remove_files(lock);
  } else if (const auto reading = next_reading()) {
    read_block(lock, *reading);
  } else if (!queue_.empty()) {
    write_block(lock);
  } else if (!touched_.empty()) {
    touch_files(lock);
  } else {
    busy_ = false;
    idle_.notify_all();
    if (!paused_until_) {
      wake_.wait(lock);
      return false;
    }
    wake_.wait_until(lock, *paused_until_);
    return true;
  }
  busy_ = false;
  idle_.notify_all();
  return true;
}

void KvFiles::run() {
  Lock lock(mutex_);
  while (!stop_) {
    try {
      if (!work(lock) || stop_) continue;
      lock.unlock();
      options_.changed();
      lock.lock();
    } catch (const std::exception& error) {  // out of memory
      if (!lock.owns_lock()) lock.lock();
      busy_ = false;
      usable_ = false;
      log({LogLevel::warning, cat("KV offload: ", error.what(), "; KV is stored again later"), "", {}});
    }
  }
  if (locked_) flock(lock_.get(), LOCK_UN);  // closing is not enough: a forked process has the file open too
  ended_ = true;
  const bool abandoned = abandoned_;
  idle_.notify_all();
  lock.unlock();
  if (abandoned) delete this;
}

}  // namespace charonia::runtime
