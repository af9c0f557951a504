#include "runtime/session_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

constexpr std::string_view kMagic = "CHSESS1\n";
constexpr std::string_view kUnfinished = ".new";  // suffix of a file that is being written
constexpr mode_t kOwnerOnly = S_IRUSR | S_IWUSR;
constexpr std::chrono::seconds kLockRetry{1};
constexpr std::int64_t kClockSkew_s = 60;

std::string hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  for (const char byte : bytes) {
    out += kDigits[static_cast<unsigned char>(byte) >> 4];
    out += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return out;
}

std::string hex(std::uint64_t value) {
  return hex(std::string_view(reinterpret_cast<const char*>(&value), sizeof value));
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_list(std::string& out, const std::vector<std::int32_t>& list) {
  put(out, static_cast<std::uint32_t>(list.size()));
  out.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(std::int32_t));
}

// Reads values from the front of a file's bytes. Returns nullopt if too few bytes are left.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
  std::optional<T> take() {
    T value{};
    if (rest_.size() < sizeof value) return std::nullopt;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  std::optional<std::string_view> bytes(std::size_t count) {
    if (rest_.size() < count) return std::nullopt;
    const auto out = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return out;
  }
  std::optional<std::vector<std::int32_t>> list() {
    const auto count = take<std::uint32_t>();
    const auto data = count ? bytes(std::size_t{*count} * sizeof(std::int32_t)) : std::nullopt;
    if (!data) return std::nullopt;
    std::vector<std::int32_t> out(*count);
    if (*count > 0) std::memcpy(out.data(), data->data(), data->size());
    return out;
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

std::string encode(std::string_view id, const History& history, std::int64_t ended_s) {
  std::string out(kMagic);
  put(out, static_cast<std::uint32_t>(id.size()));
  out += id;
  put(out, ended_s);
  put_list(out, history.turns);
  put_list(out, history.tokens);
  put(out, fnv1a(out));
  return out;
}

std::int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string error_text(int code) { return std::generic_category().message(code); }

// Writes a file that only this user can read, and syncs it. Returns the error text, or "" on success.
std::string write_file(const std::filesystem::path& path, const std::string& bytes) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kOwnerOnly);
  std::FILE* const file = descriptor < 0 ? nullptr : ::fdopen(descriptor, "wb");
  if (file == nullptr) return error_text(errno);
  std::string why;
  if (std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fflush(file) != 0 ||
      fdatasync(fileno(file)) != 0) {
    why = error_text(errno);
  }
  if (std::fclose(file) != 0 && why.empty()) why = error_text(errno);
  return why;
}

}  // namespace

struct SessionFiles::Decoded {
  std::string id;
  History history;
  std::int64_t ended_s = 0;
};

std::optional<SessionFiles::Decoded> SessionFiles::decode(std::string_view bytes, int vocab_size) {
  if (bytes.size() < kMagic.size() + sizeof(std::uint64_t) || !bytes.starts_with(kMagic)) return std::nullopt;
  const auto body = bytes.substr(0, bytes.size() - sizeof(std::uint64_t));
  if (Reader(bytes.substr(body.size())).take<std::uint64_t>() != fnv1a(body)) return std::nullopt;
  Reader reader(body.substr(kMagic.size()));
  const auto length = reader.take<std::uint32_t>();
  const auto id = length ? reader.bytes(*length) : std::nullopt;
  const auto ended_s = reader.take<std::int64_t>();
  auto turns = reader.list(), tokens = reader.list();
  if (!id || !ended_s || !turns || !tokens || !reader.at_end() || tokens->empty() || turns->empty())
    return std::nullopt;
  const auto is_token = [&](auto token) { return token >= 0 && token < vocab_size; };
  const auto size = static_cast<std::int64_t>(tokens->size());
  if (!std::ranges::all_of(*tokens, is_token) || !std::ranges::is_sorted(*turns) || turns->front() < 0 ||
      turns->back() > size) {
    return std::nullopt;
  }
  return Decoded{std::string(*id), {std::move(*tokens), std::move(*turns)}, *ended_s};
}

SessionFiles::SessionFiles(std::filesystem::path folder, std::string_view model_name, int vocab_size,
                           std::chrono::milliseconds removal_delay)
    : folder_(std::move(folder)),
      suffix_(cat(".", hex(fnv1a(cat(model_name, "/", vocab_size))), ".session")),
      vocab_size_(vocab_size),
      removal_delay_(removal_delay) {
  std::error_code error;
  if (std::filesystem::create_directories(folder_, error)) {
    std::filesystem::permissions(folder_, std::filesystem::perms::owner_all, error);
  }
  if (!std::filesystem::is_directory(folder_)) {
    throw Error(ErrorCode::invalid_argument,
                cat("session_dir = ", folder_.string(), " is no folder and cannot be made (", error.message(),
                    "); name a folder that the engine may write to, or leave session_dir empty"));
  }
  lock_ = ::open((folder_ / cat("engine", suffix_, ".lock")).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kOwnerOnly);
  try_lock();
  if (locked_) remove_unfinished();
  thread_ = std::thread([this] { run(); });
}

SessionFiles::~SessionFiles() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (lock_ >= 0) {
    if (owned_) flock(lock_, LOCK_UN);  // closing is not enough: a forked process has the file open too
    ::close(lock_);
  }
}

// On a file system without locks, and in a folder without write permission, every engine may try to write.
bool SessionFiles::try_lock() {
  if (!owned_) {
    locked_ = lock_ >= 0 && flock(lock_, LOCK_EX | LOCK_NB) == 0;
    owned_ = locked_ || lock_ < 0 || errno != EWOULDBLOCK;
  }
  return owned_;
}

// File systems limit the length of names, so the name for a long id contains its hash. The file contains the whole id.
std::filesystem::path SessionFiles::file_of(std::string_view id) const {
  constexpr std::size_t kLongest = 80;
  const auto name =
      id.size() <= kLongest ? cat("s", hex(id)) : cat("h", hex(fnv1a(id)), hex(fnv1a(id, fnv1a("second"))));
  return folder_ / cat(name, suffix_);
}

// Returns nullopt if the file cannot be read (for example a folder, or a file on a bad disk), is damaged, or has the
// wrong name for its session.
std::optional<SessionFiles::Decoded> SessionFiles::read_file(const std::filesystem::path& path) const {
  try {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    auto decoded = decode(bytes, vocab_size_);
    if (decoded && file_of(decoded->id) != path) decoded.reset();
    return decoded;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

template <class Take>
void SessionFiles::each_path(std::string_view ending, std::error_code& error, Take take) const {
  // Not a range-based loop: it would throw if reading the folder fails halfway.
  for (std::filesystem::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
    if (at->path().filename().string().ends_with(ending)) take(at->path());
  }
}

std::vector<SessionFiles::Stored> SessionFiles::read(double ttl_s, std::vector<std::string>& warnings) {
  std::vector<Stored> out;
  const auto now = seconds_now();
  std::error_code error;
  int num_old = 0, num_future = 0;
  each_path(suffix_, error, [&](const std::filesystem::path& path) {
    auto decoded = read_file(path);
    if (!decoded) {
      warnings.push_back(
          cat("session_dir: ", path.string(), " is damaged or no session file, and is passed over; remove it"));
      return;
    }
    if (decoded->ended_s > now + kClockSkew_s) ++num_future;
    const auto idle_s = static_cast<double>(std::max<std::int64_t>(0, now - decoded->ended_s));
    if (idle_s > ttl_s) {
      ++num_old;
      return;
    }
    out.push_back({std::move(decoded->id), std::make_shared<const History>(std::move(decoded->history)), idle_s});
  });
  if (error) warnings.push_back(cat("session_dir = ", folder_.string(), " cannot be read: ", error.message()));
  if (num_future > 0) {
    warnings.push_back(cat("session_dir = ", folder_.string(), ": ", num_future,
                           " sessions ended in the future, and count as just ended; check the machine's clock"));
  }
  {
    const std::lock_guard lock(mutex_);
    if (!owned_) {
      warnings.push_back(cat("session_dir = ", folder_.string(), " is used by another engine with this model: ",
                             "histories are not stored as long as it runs. Give each engine a folder of its own"));
    } else if (num_old > 0) {
      ttl_s_ = ttl_s;
      remove_old_at_ = std::chrono::steady_clock::now() + removal_delay_;
    }
  }
  wake_.notify_one();
  return out;
}

void SessionFiles::remove_old() const {
  const auto now = seconds_now();
  std::error_code error;
  each_path(suffix_, error, [&](const std::filesystem::path& path) {
    const auto decoded = read_file(path);
    std::error_code ignored;  // the next start tries again
    if (decoded && static_cast<double>(now - decoded->ended_s) > ttl_s_) std::filesystem::remove(path, ignored);
  });
}

// Removes the files that were half written when their engine ended.
void SessionFiles::remove_unfinished() const {
  std::error_code error;
  each_path(cat(suffix_, kUnfinished), error, [&](const std::filesystem::path& path) {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  });
}

void SessionFiles::write(const std::string& id, std::shared_ptr<const History> history) {
  {
    const std::lock_guard lock(mutex_);
    changes_.insert_or_assign(id, Change{std::move(history), seconds_now(), owned_});
  }
  wake_.notify_one();
}

void SessionFiles::erase(const std::string& id, bool at_once) {
  const auto file = file_of(id);
  {
    const std::lock_guard lock(mutex_);
    std::error_code error;
    // The thread may be writing the file, so it removes the file again.
    if (owned_ && at_once) std::filesystem::remove(file, error);
    // Without the lock, do not queue a change for a file that does not exist: the queue would grow without limit.
    if (!owned_ && !std::filesystem::exists(file, error)) {
      changes_.erase(id);
      return;
    }
    changes_.insert_or_assign(id, Change{nullptr, seconds_now(), owned_});
  }
  wake_.notify_one();
}

void SessionFiles::flush() {
  std::unique_lock lock(mutex_);
  written_.wait(lock, [this] { return (changes_.empty() || !owned_) && !writing_; });
}

void SessionFiles::run() {
  while (true) {
    std::map<std::string, Change> changes;
    bool lock_is_new = false;
    {
      std::unique_lock lock(mutex_);
      const auto ready = [this] { return stop_ || !changes_.empty(); };
      while (!ready() && !remove_old_at_) wake_.wait(lock, [&] { return ready() || remove_old_at_; });
      if (!ready() && !wake_.wait_until(lock, *remove_old_at_, ready)) {
        remove_old_at_.reset();
        lock.unlock();
        guarded([this] { remove_old(); });
        continue;
      }
      if (changes_.empty()) return;
      const bool was_locked = locked_;
      if (!try_lock()) {
        if (stop_) {
          log({LogLevel::warning,
               cat("session_dir = ", folder_.string(), " is used by another engine: ", changes_.size(),
                   " sessions are not stored"),
               "", {}});
          return;
        }
        wake_.wait_for(lock, kLockRetry, [this] { return stop_; });
        continue;
      }
      lock_is_new = locked_ && !was_locked;
      changes.swap(changes_);
      writing_ = true;
    }
    if (lock_is_new) guarded([this] { remove_unfinished(); });
    for (const auto& [id, change] : changes) guarded([&] { apply(id, change); });
    {
      const std::lock_guard lock(mutex_);
      writing_ = false;
    }
    written_.notify_all();
  }
}

// Catches the exceptions of `work`, which would end the process.
template <class Work>
void SessionFiles::guarded(Work work) {
  try {
    work();
  } catch (const std::exception& error) {
    warn(cat("session_dir = ", folder_.string(), ": ", error.what()));
  }
}

void SessionFiles::warn(const std::string& message) {
  if (!std::exchange(warned_, true)) log({LogLevel::warning, message, "", {}});
}

void SessionFiles::apply(const std::string& id, const Change& change) {
  const auto file = file_of(id);
  if (!change.owned) {
    // Another engine held the lock when the change was queued. It may have changed the session later.
    const auto stored = read_file(file);
    if (stored && stored->ended_s > change.asked_s) return;
  }
  auto beside = file;
  beside += kUnfinished;
  std::string why;
  std::error_code error;
  if (change.history) {
    // Atomic: writes a second file and then renames it.
    why = write_file(beside, encode(id, *change.history, change.asked_s));
    if (why.empty()) {
      std::filesystem::rename(beside, file, error);
      if (!error) {
        warned_ = false;
        return;
      }
      why = error.message();
    }
    why = cat("cannot be written (", why, "); the session does not survive a restart");
  }
  // The files on disk are outdated.
  for (const auto& old : {beside, file}) {
    std::filesystem::remove(old, error);
    if (error) why = cat("cannot be removed (", error.message(), "); the session comes back after a restart as it was");
  }
  if (!why.empty()) warn(cat("session_dir: ", file.string(), " ", why));
}

}  // namespace charonia::runtime
