// KV blocks in the files of a folder, so that prefixes outlive the KV cache and the process (setting kv_offload_path).
// Or in the memory of the process, so that they outlive the KV cache of a GPU (kv_offload_memory).
//
// A file has one block of one kind of cache: a head, the bytes of the block on all ranks, and a checksum of all bytes
// before. The head has the block's key: a SHA-256 of the identity (a hash of everything that decides the bits of KV),
// the scope, all tokens from the beginning of the sequence to the end of the block, and the kind. A reader compares it.
// If a file is missing, damaged, foreign, or belongs to another user, its block is computed.
//
// A thread reads, writes and removes the files. No call waits for a disk, except open(), flush() and close(), the last
// two for a bounded time. While the disk does not answer, nothing is found.
// A file is written under another name and then renamed. It is not synced, because the checksum finds a file that was
// lost with the power. All files together have at most the given size; the least recently used files are removed first.
// One engine at a time uses a folder: it holds a lock. A second engine stores and finds nothing until the first one has
// ended.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/cache_kind.h"

namespace charonia::runtime {

class KvFiles {
 public:
  using TokenId = std::int32_t;
  using Clock = std::chrono::steady_clock;
  using Data = std::unique_ptr<std::byte[]>;  // [block_bytes of the kind]

  // root: of all prefixes that begin with the same block. digest: of all tokens up to the end of the block, and the
  // kind.
  struct Key {
    std::uint64_t root = 0;
    std::array<std::uint64_t, 4> digest{};
    auto operator<=>(const Key&) const = default;
  };
  // The keys of the blocks from the beginning of a sequence. Kinds without bytes have none, except kind `full`.
  struct Prefix {
    PerKind<std::vector<Key>> keys;
    std::vector<PrefixPart> stored;  // the parts that put() stores
    std::size_t size() const { return keys.full.size(); }  // blocks
    const Key& key(const PrefixPart& part) const { return keys[part.kind][static_cast<std::size_t>(part.index)]; }
  };
  using PrefixPtr = std::shared_ptr<const Prefix>;

  struct Options {
    std::filesystem::path folder;  // empty: blocks stay in memory
    std::string identity;
    int block_len = 0;                 // tokens of a block
    PerKind<std::size_t> block_bytes;  // of a block of each kind on all ranks
    std::int64_t most_bytes = 0;       // of all files
    std::function<void()> changed = [] {};  // called by the thread after it has read or written a block
    std::chrono::milliseconds patience{5000};  // a disk that takes longer for a block does not answer
    // For tests: called by the thread before it reads or writes a block. Returns an error of errno.h, or 0.
    std::function<int(bool writes)> before_io = [](bool) { return 0; };
    std::function<Clock::time_point()> now = &Clock::now;
  };

  // Calls close(). If the thread still waits for the disk, the thread deletes the object later.
  struct Close {
    void operator()(KvFiles* files) const;
  };
  using Owner = std::unique_ptr<KvFiles, Close>;
  // Throws Error(invalid_argument), with the remedy, if the folder cannot be created or written. Adds a warning if
  // another engine uses the folder.
  static Owner open(Options options, std::vector<std::string>& warnings);
  KvFiles(const KvFiles&) = delete;
  KvFiles& operator=(const KvFiles&) = delete;
  // Ends the thread, which then releases the folder. Drops blocks that are not written. Waits for `patience` at most.
  void close();

  static std::string digest(std::string_view text);  // a hash of 128 bits, in hex
  PrefixPtr prefix(std::string_view scope, std::span<const TokenId> tokens,
                   std::vector<PrefixPart> stored = {}) const;
  Clock::time_point now() const { return options_.now(); }

  // How many blocks of kind `full` from `first` on are stored without a gap. 0 while the disk does not answer.
  std::size_t count(const Prefix& prefix, std::size_t first) const;
  bool has(const Prefix& prefix, const PrefixPart& part) const { return contains(prefix.key(part)); }
  // Whether put() would queue a block now. If not, the disk is slower than the engine, cannot be written, or the folder
  // is in use.
  bool has_room() const;
  bool wait_for_room(Clock::time_point until);
  // Queues a block. Does nothing if it is stored, or if there is no room.
  void put(const PrefixPtr& prefix, const PrefixPart& part, Data data);
  bool in_memory() const { return options_.folder.empty(); }
  // These blocks count as used now.
  void use(const Prefix& prefix, std::span<const PrefixPart> parts);
  // Removes the blocks of a prefix from block `from` on, and ends readings of block `from`. With 0, also removes all other
  // blocks of prefixes with the same first block.
  void forget(const Prefix& prefix, std::size_t from = 0);
  // Waits until the queue is empty. Returns false if it is not empty at the given time.
  bool flush(Clock::time_point until);

  // The blocks of a prefix that are read, in order. At most kAhead bytes are read before they are taken.
  struct Reading;
  std::shared_ptr<Reading> read(PrefixPtr prefix, std::vector<PrefixPart> parts);
  // Takes the next block. nullopt: the reading has ended early. Null: not read yet.
  std::optional<Data> take(Reading& reading);

  // Estimated seconds to read this many bytes after the bytes that others wait for. 0: not measured yet.
  double read_s(std::size_t bytes) const;
  std::int64_t bytes() const;  // of all files
  std::int64_t unfilled_bytes() const;  // of memory that it may still take; 0 with a folder
  std::int64_t file_bytes(CacheKind kind) const;  // of a block, in whole pages

  static constexpr std::size_t kAhead = std::size_t{32} << 20, kAheadOfAll = std::size_t{128} << 20;
  static constexpr std::int64_t kMostUnwritten = std::int64_t{64} << 20;

 private:
  struct KeyHash {
    std::size_t operator()(const Key& key) const { return key.digest[0]; }
  };
  struct Unwritten {
    PrefixPtr prefix;
    PrefixPart part;
    std::shared_ptr<std::byte[]> data;
  };
  struct Entry {
    Key key;
    std::int64_t bytes = 0;
    std::shared_ptr<std::byte[]> kept;  // without a folder
  };
  // Least recently used first. The blocks that a block needs are after it.
  using Entries = std::list<Entry>;
  using Lock = std::unique_lock<std::mutex>;
  // Closes a descriptor of a file.
  class Descriptor {
   public:
    explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
    ~Descriptor();
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return descriptor_; }

   private:
    int descriptor_;
  };
  struct Head;

  KvFiles(Options options, std::vector<std::string>& warnings);
  ~KvFiles();
  static int open_lock(const std::filesystem::path& folder);
  std::filesystem::path path_of(const Key& key, bool unfinished = false) const;
  std::size_t block_bytes(const PrefixPart& part) const { return options_.block_bytes[part.kind]; }
  Head head_of(const Key& key, std::size_t block_bytes) const;
  bool contains(const Key& key) const;
  bool try_lock();
  void find_files();
  // Under mutex_. The thread removes the file later, but before it writes another one.
  bool room() const;
  bool is_stuck() const { return busy_ && now() - busy_since_ > options_.patience; }
  bool known(const Key& key) const { return entries_of_.contains(key) || unwritten_.contains(key); }
  void add(Entries::iterator before, Entry entry);
  Entries::iterator place_of(const Unwritten& block);
  void remove(Key key);
  void drop_unwritten(const Key& key);
  // Removes the least recently used files until this block fits. Returns false if only blocks and stored units of the
  // same prefix are left, because the end of a long prefix must not replace its beginning.
  bool make_room(const Unwritten& block);
  std::shared_ptr<Reading> next_reading();
  // The thread. They unlock while they work.
  void run();
  bool work(Lock& lock);
  void read_block(Lock& lock, Reading& reading);
  void write_block(Lock& lock);
  void touch_files(Lock& lock);
  void remove_files(Lock& lock);
  // Null: not usable; `damaged` is then false if it may be usable later.
  Data read_file(const Key& key, std::size_t block_bytes, bool& damaged) const;
  int write_file(const Unwritten& block) const;  // an error of errno.h, or 0

  const Options options_;
  const Descriptor lock_;  // of the lock file; -1 without a folder
  bool locked_ = false;
  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  bool usable_ = false, stop_ = false, busy_ = false;
  bool ended_ = false, abandoned_ = false;  // the thread has ended; the thread deletes this object
  Clock::time_point busy_since_{};
  Entries entries_;
  std::unordered_map<Key, Entries::iterator, KeyHash> entries_of_;
  std::int64_t bytes_ = 0;
  std::int64_t limit_ = 0;  // of bytes_: less than most_bytes after the disk was full
  std::deque<Key> queue_;  // blocks to write
  std::unordered_map<Key, std::shared_ptr<const Unwritten>, KeyHash> unwritten_;
  std::int64_t unwritten_bytes_ = 0;
  std::vector<Key> touched_;  // files whose time is to be set
  std::vector<Key> removed_;  // files to remove
  std::list<std::weak_ptr<Reading>> readings_;
  double read_s_ = 0, read_bytes_ = 0;  // measured; older reads count less
  std::optional<Clock::time_point> paused_until_;  // after a file could not be written
  std::thread thread_;
};

}  // namespace charonia::runtime
