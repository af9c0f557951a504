#include "emulator/host_async.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/text.h"

namespace charonia::cuda::host_grid {
namespace {

constexpr std::size_t kPiece = 16, kGroupThreads = 128;
constexpr int kNaNByte = 0xff;
constexpr int kProductRows = 64, kProductK = 16;
constexpr int kMaxArrivals = (1 << 20) - 1;
constexpr std::int64_t kMaxBytes = (1 << 20) - 1;
constexpr std::uint64_t kBarrierMark = 0xba22'1e2b'a221'e200;

template <class... T>
[[noreturn]] void misuse(const T&... text) {
  throw Misuse{cat(text...)};
}

bool is_nan(const void* at, std::size_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(at);
  return std::all_of(first, first + bytes, [](unsigned char x) { return x == kNaNByte; });
}

// Registers in flight have a pattern; returns their values. The first use saves them.
template <class Held>
const std::vector<std::uint32_t>& hold(std::vector<Held>& held, std::uint32_t* at, std::size_t n,
                                       std::string_view what) {
  const auto bytes = n * sizeof(std::uint32_t);
  auto found = std::ranges::find(held, at, &Held::at);
  if (found == held.end()) {
    for (const auto& other : held) {
      if (at < other.at + other.values.size() && other.at < at + n)
        misuse(what, " overlap those of a product in flight");
    }
    held.push_back({at, std::vector<std::uint32_t>(n)});
    std::memcpy(held.back().values.data(), at, bytes);
    std::memset(at, kNaNByte, bytes);
    return held.back().values;
  }
  if (found->values.size() != n) misuse(what, " are those of a product of another shape in flight");
  if (!is_nan(at, bytes)) misuse(what, " changed while a product was in flight");
  return found->values;
}

template <class Held>
void give_back(std::vector<Held>& held, std::uint32_t* at, std::string_view what) {
  const auto found = std::ranges::find(held, at, &Held::at);
  const auto bytes = found->values.size() * sizeof(std::uint32_t);
  if (!is_nan(at, bytes)) misuse(what, " changed while a product was in flight");
  std::memcpy(at, found->values.data(), bytes);
  held.erase(found);
}

void learn(std::vector<std::uint64_t>& known, const std::vector<std::uint64_t>& more) {
  known.resize(std::max(known.size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) known[i] = std::max(known[i], more[i]);
}

constexpr std::string_view kSums = "the sums of a product", kFactors = "the registers of operand a";

std::uint32_t* words_of_sums(const Product& product) { return static_cast<std::uint32_t*>(product.sums); }

// The numbers in a row of an operand.
std::size_t numbers_of_row(const Product& product) {
  return static_cast<std::size_t>(kProductK) * (product.integers ? 2 : 1);
}

}  // namespace

void Async::begin(std::byte* shared, std::size_t bytes, std::size_t threads) {
  shared_ = shared;
  bytes_ = bytes;
  count_ = threads;
  aligned_ = false;
  barriers_.clear();
  known_.clear();
  view_.clear();
  warpgroups_.clear();
  threads_.clear();
}

std::byte* Async::view() {
  if (view_.empty()) view_.resize(bytes_, static_cast<std::byte>(kNaNByte));
  return view_.data();
}

// Barriers.

void Async::init_barrier(void* at, int arrivals, std::size_t thread) {
  if (arrivals < 1 || arrivals > kMaxArrivals)
    misuse("barrier_init() with ", arrivals, " arrivals; 1 to ", kMaxArrivals);
  auto* const bytes = static_cast<std::byte*>(at);
  if (std::ranges::find(barriers_, bytes, &Barrier::at) != barriers_.end())
    misuse("barrier_init() of a barrier in use");
  barriers_.push_back({.at = bytes, .owner = thread, .arrivals = arrivals, .pending = arrivals});
  std::memcpy(at, &kBarrierMark, sizeof kBarrierMark);
}

void Async::fence_barriers(std::size_t thread) {
  for (auto& barrier : barriers_) barrier.fenced |= barrier.owner == thread;
}

Async::Barrier& Async::find(const void* at) {
  const auto found = std::ranges::find(barriers_, static_cast<const std::byte*>(at), &Barrier::at);
  if (found == barriers_.end()) misuse("uses a barrier before barrier_init()");
  if (std::memcmp(at, &kBarrierMark, sizeof kBarrierMark) != 0) misuse("uses a barrier whose memory was overwritten");
  return *found;
}

Async::Known& Async::known(std::size_t thread) {
  if (known_.empty()) known_.resize(count_);
  known_[thread].resize(barriers_.size());
  return known_[thread];
}

void Async::meet(std::size_t begin, std::size_t end) {
  Known all;
  for (auto i = begin; i < end; ++i) learn(all, known(i));
  for (auto i = begin; i < end; ++i) known(i) = all;
}

void Async::check_ended(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.expected != 0 || barrier.coming != 0) return;
  ++barrier.phase;
  barrier.ended = std::exchange(barrier.arrived, {});
  barrier.pending = barrier.arrivals;
}

void Async::arrive(void* at, int expected_bytes, std::size_t thread) {
  auto& barrier = find(at);
  if (barrier.pending == 0) {
    misuse("arrives at a barrier whose phase ", barrier.phase, " still waits for copies of ", barrier.expected,
           " bytes");
  }
  barrier.expected += expected_bytes;
  if (expected_bytes < 0 || barrier.expected > kMaxBytes) {
    misuse("expects ", barrier.expected, " bytes of a barrier; at most ", kMaxBytes);
  }
  --barrier.pending;
  learn(barrier.arrived, known(thread));
  check_ended(barrier);
}

bool Async::passed(void* at, int parity, bool may_arrive, std::size_t thread) {
  auto& barrier = find(at);
  if (parity != 0 && parity != 1) misuse("barrier_wait() with parity ", parity);
  auto& of_thread = known(thread);
  auto& ended = of_thread[static_cast<std::size_t>(&barrier - barriers_.data())];
  if (static_cast<int>(ended % 2) != parity) {
    if (ended > 0 || barrier.phase > 0 || barrier.coming > 0 || barrier.expected > 0) {
      misuse("waits for a phase of parity ", parity, " of a barrier of which it knows that ", ended,
             " phases have ended. Phase ", barrier.phase, " has begun: the wait can return too early, or never");
    }
    return true;
  }
  if (barrier.phase > ended + 1) {
    misuse("waits for phase ", ended, " of a barrier, but phase ", ended + 1,
           " has ended too: the wait may never return");
  }
  if (barrier.phase == ended + 1) {
    ++ended;
    learn(of_thread, barrier.ended);
    return true;
  }
  if (barrier.pending > 0) return false;
  if (barrier.coming > barrier.expected) {
    misuse("copies ", barrier.coming, " bytes, and a barrier expects ", barrier.expected);
  }
  if (barrier.coming < barrier.expected || !may_arrive) return false;
  for (const auto& copy : barrier.copies) {
    if (copy.read() != copy.data) {
      misuse("copies global memory that changes while the copy is in flight (before dependency_wait()?)");
    }
    for (std::size_t i = 0; i < copy.places.size(); ++i) {
      auto* const to = copy.to + copy.places[i];
      if (!is_nan(to, kPiece)) misuse("waits for a copy whose destination was written while it was in flight");
      std::memcpy(to, copy.data.data() + i * kPiece, kPiece);
      std::memcpy(view() + (to - shared_), to, kPiece);
    }
  }
  barrier.copies.clear();
  barrier.expected = barrier.coming = 0;
  check_ended(barrier);
  ++ended;
  learn(of_thread, barrier.ended);
  return true;
}

std::string Async::missing() const {
  std::string text;
  for (const auto& barrier : barriers_) {
    text += cat(text.empty() ? "" : "; ", "barrier ", &barrier - barriers_.data(), ", phase ", barrier.phase, ": ",
                barrier.arrivals - barrier.pending, " of ", barrier.arrivals, " arrivals, ", barrier.coming, " of ",
                barrier.expected, " bytes");
  }
  return text;
}

// Copies.

void Async::check_swizzle(Swizzle swizzle) const {
  if (swizzle != Swizzle::none && !aligned_) {
    misuse("uses a swizzle in memory that is not aligned to 1024 bytes: swizzled_shared() was not called");
  }
}

void Async::check_place(const void* to, std::size_t bytes, std::size_t alignment) const {
  const auto offset = static_cast<const std::byte*>(to) - shared_;
  if (offset < 0 || offset + static_cast<std::ptrdiff_t>(bytes) > static_cast<std::ptrdiff_t>(bytes_)) {
    misuse("copies ", bytes, " bytes to a place that is not in the block's dynamic shared memory");
  }
  if (static_cast<std::size_t>(offset) % alignment != 0) {
    misuse("copies to a place that is misaligned by ", static_cast<std::size_t>(offset) % alignment,
           " bytes; it needs ", alignment);
  }
}

void Async::add_copy(void* to, std::vector<std::uint32_t> places, std::function<std::vector<std::byte>()> read,
                     void* at) {
  auto& barrier = find(at);
  if (!barrier.fenced) misuse("copies with a barrier without barrier_init_fence()");
  if (barrier.pending == 0 && barrier.coming >= barrier.expected) {
    misuse("copies for phase ", barrier.phase, " of a barrier, whose ", barrier.expected,
           " bytes are already on their way");
  }
  auto* const bytes = static_cast<std::byte*>(to);
  for (const auto place : places) std::memset(bytes + place, kNaNByte, kPiece);
  barrier.coming += static_cast<std::int64_t>(places.size() * kPiece);
  auto data = read();
  barrier.copies.push_back({bytes, std::move(data), std::move(places), std::move(read)});
}

void Async::copy(void* to, const void* from, std::size_t bytes, void* barrier) {
  check_place(to, bytes, kPiece);
  if (bytes == 0 || bytes % kPiece != 0) misuse("copy_bulk() of ", bytes, " bytes; it must be a multiple of 16");
  if (const auto off = reinterpret_cast<std::uintptr_t>(from) % kPiece; off != 0) {
    misuse("copy_bulk() from an address that is misaligned by ", off, " bytes");
  }
  std::vector<std::uint32_t> places(bytes / kPiece);
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::uint32_t>(i * kPiece);
  const auto* const first = static_cast<const std::byte*>(from);
  add_copy(to, std::move(places), [=] { return std::vector<std::byte>(first, first + bytes); }, barrier);
}

void Async::copy_box(void* to, const TensorBox& box, const int* at, void* barrier) {
  const auto element = static_cast<std::int64_t>(size_of(box.type));
  const auto width = static_cast<std::uint32_t>(box.box[0] * element);
  std::array<std::int64_t, TensorBox::kMaxRank> from{};
  std::int64_t rows = 1;
  for (int i = 0; i < box.rank; ++i) {
    from[static_cast<std::size_t>(i)] = at[i];
    if (i > 0) rows *= box.box[static_cast<std::size_t>(i)];
  }
  const auto bytes = static_cast<std::size_t>(rows) * width;
  check_swizzle(box.swizzle);
  check_place(to, bytes, box.swizzle == Swizzle::none ? 128 : 8 * width);
  std::vector<std::uint32_t> places(bytes / kPiece);
  for (std::size_t i = 0; i < places.size(); ++i) {
    places[i] = swizzled(static_cast<std::uint32_t>(i * kPiece), box.swizzle);
  }
  const auto read = [=] {
    std::vector<std::byte> data(bytes);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto* source = static_cast<const std::byte*>(box.data);
      bool inside = true;
      auto rest = row;
      for (std::size_t i = 1; i < static_cast<std::size_t>(box.rank); ++i) {
        const auto index = from[i] + rest % box.box[i];
        rest /= box.box[i];
        inside &= index >= 0 && index < box.sizes[i];
        source += index * box.strides[i];
      }
      if (!inside) continue;
      const auto first = std::max<std::int64_t>(from[0], 0);
      const auto last = std::min<std::int64_t>(from[0] + box.box[0], box.sizes[0]);
      if (first < last) {
        std::memcpy(data.data() + row * width + (first - from[0]) * element, source + first * element,
                    static_cast<std::size_t>((last - first) * element));
      }
    }
    return data;
  };
  add_copy(to, std::move(places), read, barrier);
}

void Async::fence() {
  if (bytes_ > 0) std::memcpy(view(), shared_, bytes_);
}

// Products.

Async::Operand Async::gather(const std::byte* memory, std::uint64_t descriptor, int rows, bool transposed,
                             const Product& of) const {
  const auto field = [&](int at) { return static_cast<std::uint32_t>(descriptor >> at & 0x3fffU) << 4; };
  const std::uint32_t start = field(0), across = field(16), eights = field(32);
  constexpr std::array kModes{Swizzle::none, Swizzle::of_128, Swizzle::of_64, Swizzle::of_32};
  const auto swizzle = kModes[descriptor >> 62];
  const std::uint32_t width = swizzle == Swizzle::none ? kPiece : static_cast<std::uint32_t>(swizzle);
  check_swizzle(swizzle);
  if (transposed && swizzle == Swizzle::none) misuse("a transposed operand needs a swizzle");
  if ((descriptor & ~std::uint64_t{0xc000'3fff'3fff'3fff}) != 0) misuse("a descriptor with unknown bits ", descriptor);
  if (swizzle != Swizzle::none && start % (8 * width) >= width) {
    misuse("a descriptor of a matrix that is not aligned to 8 rows of ", width, " bytes");
  }
  Operand out;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < kProductK; ++k) {
      const auto r = static_cast<std::uint32_t>(row), c = static_cast<std::uint32_t>(k);
      std::uint32_t at = start;
      if (transposed) {
        at += r / (width / 2) * across + r % (width / 2) * 2 + c / 8 * eights + c % 8 * width;
      } else if (swizzle == Swizzle::none) {
        at += r / 8 * eights + r % 8 * width + c / 8 * across + c % 8 * 2;
      } else {
        at += r / 8 * eights + r % 8 * width + c * 2;
      }
      at = swizzled(at, swizzle);
      if (at + 2 > bytes_) misuse("a descriptor of a matrix that is not within the block's dynamic shared memory");
      std::uint16_t bits = 0;
      std::memcpy(&bits, memory + at, sizeof bits);
      out.bits.push_back(bits);
      std::array<float, 2> numbers{};
      of.numbers_of(bits, numbers.data());
      out.values.insert(out.values.end(), numbers.begin(), numbers.begin() + (of.integers ? 2 : 1));
    }
  }
  return out;
}

void Async::fence_products(std::size_t thread) {
  if (threads_.empty()) {
    threads_.resize(count_);
    warpgroups_.resize(count_ / kGroupThreads);
  }
  threads_[thread].fenced = true;
}

void Async::issue(std::size_t thread, const Product& product) {
  if (threads_.empty() || !threads_[thread].fenced) misuse("calls wgmma() without wgmma_fence()");
  if (thread / kGroupThreads >= warpgroups_.size()) misuse("calls wgmma() outside of a whole warpgroup");
  auto& self = threads_[thread];
  auto& group = warpgroups_[thread / kGroupThreads];
  const auto number = self.issued++;
  if (number == group.first + group.products.size()) {
    Issued issued{.by = product, .registers = std::vector<std::array<std::uint32_t, 4>>(kGroupThreads)};
    issued.b = gather(view(), product.b, product.n, product.transposed, product);
    if (product.registers == nullptr) issued.a = gather(view(), product.a, kProductRows, false, product);
    group.products.push_back(std::move(issued));
  }
  auto& issued = group.products[number - group.first];
  const auto same = [](const Product& x) {
    return std::tuple(x.n, x.numbers_of, x.registers == nullptr, x.a, x.b, x.transposed, x.add);
  };
  if (same(issued.by) != same(product)) misuse("calls wgmma() with other operands than the rest of its warpgroup");
  hold(self.sums, words_of_sums(product), static_cast<std::size_t>(product.n / 2), kSums);
  if (product.registers != nullptr) {
    const auto& values = hold(self.registers, product.registers, 4, kFactors);
    std::ranges::copy(values, issued.registers[thread % kGroupThreads].begin());
  }
  self.pending.push_back({product, number, self.groups});
}

void Async::commit(std::size_t thread) {
  if (!threads_.empty()) ++threads_[thread].groups;
}

// All lanes of the warp have issued the thread's products.
void Async::wait(std::size_t thread, int all_but_last) {
  if (threads_.empty()) return;
  auto& self = threads_[thread];
  const auto keep = static_cast<std::size_t>(all_but_last);
  while (!self.pending.empty() && self.pending.front().group + keep < self.groups) {
    const auto pending = self.pending.front();
    self.pending.pop_front();
    compute(thread, pending);
    const auto used = [&](auto member) {
      return std::ranges::any_of(
          self.pending, [&](const Pending& other) { return other.product.*member == pending.product.*member; });
    };
    if (!used(&Product::sums)) give_back(self.sums, words_of_sums(pending.product), kSums);
    if (pending.product.registers != nullptr && !used(&Product::registers)) {
      give_back(self.registers, pending.product.registers, kFactors);
    }
    self.fenced = false;
  }
}

void Async::compute(std::size_t thread, const Pending& pending) {
  auto& self = threads_[thread];
  auto& group = warpgroups_[thread / kGroupThreads];
  auto& issued = group.products[pending.number - group.first];
  const auto& product = pending.product;
  const auto in_group = thread % kGroupThreads, lane = in_group % 32, warp = in_group / 32;
  if (lane == 0) {
    const auto changed = [&](const Operand& before, std::uint64_t descriptor, int rows, bool transposed) {
      return gather(shared_, descriptor, rows, transposed, product).bits != before.bits;
    };
    if (changed(issued.b, product.b, product.n, product.transposed) ||
        (product.registers == nullptr && changed(issued.a, product.a, kProductRows, false))) {
      misuse(
          "waits for a product whose operand in shared memory was written while it was in flight, or without "
          "async_fence()");
    }
  }
  const auto g = lane / 4, t = lane % 4;
  const auto numbers = numbers_of_row(product);
  std::array<std::array<float, kProductK>, 2> of_registers{};  // rows g and g + 8 of the warp
  std::array<const float*, 2> a{};
  for (std::size_t half = 0; half < 2; ++half) {
    a[half] = of_registers[half].data();
    if (product.registers == nullptr) a[half] = issued.a.values.data() + (16 * warp + g + 8 * half) * numbers;
    for (std::size_t k = 0; product.registers != nullptr && k < kProductK; ++k) {
      const auto& from = issued.registers[32 * warp + 4 * g + k % 8 / 2];
      product.numbers_of(static_cast<std::uint16_t>(from[half + k / 8 * 2] >> 16 * (k % 2)), &of_registers[half][k]);
    }
  }
  auto& sums = std::ranges::find(self.sums, words_of_sums(product), &Held::at)->values;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto column = i / 4 * 8 + 2 * t + i % 2;
    const float* const b = issued.b.values.data() + column * numbers;
    float sum = 0;  // exact for integers: 32 products of 8 bits
    for (std::size_t k = 0; k < numbers; ++k) sum += a[i % 4 / 2][k] * b[k];
    if (product.integers) {
      sums[i] = (product.add ? sums[i] : 0U) + static_cast<std::uint32_t>(static_cast<std::int32_t>(sum));
    } else {
      sums[i] = std::bit_cast<std::uint32_t>(product.add ? std::bit_cast<float>(sums[i]) + sum : sum);
    }
  }
  if (++issued.done == static_cast<int>(kGroupThreads)) {
    while (!group.products.empty() && group.products.front().done == static_cast<int>(kGroupThreads)) {
      group.products.pop_front();
      ++group.first;
    }
  }
}

void Async::end_thread(std::size_t thread) const {
  if (threads_.empty()) return;
  if (const auto& pending = threads_[thread].pending; !pending.empty()) {
    misuse("ends with ", pending.size(), " products that it has not waited for");
  }
}

void Async::end_block() const {
  for (const auto& barrier : barriers_) {
    if (barrier.coming > 0) misuse("ends while copies of ", barrier.coming, " bytes are in flight");
  }
  for (const auto& group : warpgroups_) {
    if (!group.products.empty()) misuse("ends, and not all warps of its warpgroup have issued the same products");
  }
}

}  // namespace charonia::cuda::host_grid
