#include "runtime/session_files.h"

#include <algorithm>
#include <chrono>
#include <cstring>
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

// Fowler, Noll and Vo.
std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = 0xcbf29ce484222325U) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
  return hash;
}

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

// Takes values from the front of a file's bytes; nothing where they end too soon.
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

struct Decoded {
  std::string id;
  History history;
  std::int64_t ended_s = 0;
};

std::optional<Decoded> decode(std::string_view bytes, int vocab_size) {
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

std::int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

SessionFiles::SessionFiles(std::filesystem::path folder, std::string_view model_name, int vocab_size)
    : folder_(std::move(folder)),
      suffix_(cat(".", hex(fnv1a(cat(model_name, "/", vocab_size))), ".session")),
      vocab_size_(vocab_size) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (!std::filesystem::is_directory(folder_)) {
    throw Error(ErrorCode::invalid_argument,
                cat("session_dir = ", folder_.string(), " is no folder and cannot be made (", error.message(),
                    "); name a folder that the engine may write to, or leave session_dir empty"));
  }
  thread_ = std::thread([this] { run(); });
}

SessionFiles::~SessionFiles() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

// Names are bounded by the file system: a long id is told by its hash, and by what the file says.
std::filesystem::path SessionFiles::file_of(std::string_view id) const {
  constexpr std::size_t kLongest = 80;
  const auto name =
      id.size() <= kLongest ? cat("s", hex(id)) : cat("h", hex(fnv1a(id)), hex(fnv1a(id, fnv1a("second"))));
  return folder_ / cat(name, suffix_);
}

std::vector<SessionFiles::Stored> SessionFiles::read(double ttl_s, std::vector<std::string>& warnings) const {
  std::vector<Stored> out;
  const auto now = seconds_now();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
    if (!entry.path().filename().string().ends_with(suffix_)) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    auto decoded = decode(bytes, vocab_size_);
    if (!decoded || file_of(decoded->id) != entry.path()) {
      warnings.push_back(
          cat("session_dir: ", entry.path().string(), " is damaged or no session file, and is passed over; remove it"));
      continue;
    }
    const auto idle_s = static_cast<double>(std::max<std::int64_t>(0, now - decoded->ended_s));
    if (idle_s > ttl_s) {
      std::filesystem::remove(entry.path(), error);
      continue;
    }
    out.push_back({std::move(decoded->id), std::make_shared<const History>(std::move(decoded->history)), idle_s});
  }
  if (error) warnings.push_back(cat("session_dir = ", folder_.string(), " cannot be read: ", error.message()));
  return out;
}

void SessionFiles::write(const std::string& id, std::shared_ptr<const History> history) {
  change(id, {std::move(history), seconds_now()});
}

void SessionFiles::erase(const std::string& id) { change(id, {}); }

void SessionFiles::change(const std::string& id, Change change) {
  {
    const std::lock_guard lock(mutex_);
    changes_.insert_or_assign(id, std::move(change));
  }
  wake_.notify_one();
}

void SessionFiles::flush() {
  std::unique_lock lock(mutex_);
  written_.wait(lock, [this] { return changes_.empty() && !writing_; });
}

void SessionFiles::run() {
  while (true) {
    std::map<std::string, Change> changes;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !changes_.empty(); });
      if (changes_.empty()) return;
      changes.swap(changes_);
      writing_ = true;
    }
    for (const auto& [id, change] : changes) apply(id, change);
    {
      const std::lock_guard lock(mutex_);
      writing_ = false;
    }
    written_.notify_all();
  }
}

void SessionFiles::apply(const std::string& id, const Change& change) {
  const auto file = file_of(id);
  std::error_code error;
  if (!change.history) {
    std::filesystem::remove(file, error);
    return;
  }
  // Whole or not at all: written beside its place, then moved there.
  auto beside = file;
  beside += ".new";
  std::ofstream out(beside, std::ios::binary | std::ios::trunc);
  out << encode(id, *change.history, change.ended_s);
  out.close();
  if (out) std::filesystem::rename(beside, file, error);
  if ((!out || error) && !std::exchange(warned_, true)) {
    log({LogLevel::warning,
         cat("session_dir: ", file.string(), " cannot be written; sessions will not survive a restart"), "", {}});
  }
}

}  // namespace charonia::runtime
