// Sampling on the device, compared with the CPU's, and with the definition in double where rounding may decide.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/sample.h"
#include "ops/cuda/sampling/sampler.h"

namespace charonia::cuda {
namespace {

using ops::Random;
using ops::Sampled;
using ops::SampleRow;
using ops::uniform;
using Rows = std::vector<SampleRow>;
using Bias = std::vector<std::pair<std::int32_t, float>>;
using Ids = std::vector<std::int32_t>;

#if defined(CHARONIA_CUDA_ON_HOST)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Logits of rows of one vocabulary.
struct Logits {
  int vocab = 0;
  std::vector<float> values;  // [rows, vocab]

  static Logits random(Random& random, int rows, int vocab, float scale) {
    Logits out{vocab, std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(vocab))};
    std::normal_distribution<float> normal(0, scale);
    for (auto& x : out.values) x = normal(random);
    return out;
  }
  static Logits of(std::vector<float> row) { return {static_cast<int>(row.size()), std::move(row)}; }
  std::size_t rows() const { return values.size() / static_cast<std::size_t>(vocab); }
  std::span<const float> row(std::size_t r) const {
    return std::span(values).subspan(r * static_cast<std::size_t>(vocab), static_cast<std::size_t>(vocab));
  }
};

// A sampler with its stream; runs one step at a time.
class Device {
 public:
  Device(int vocab, int max_rows) : sampler_(vocab, max_rows) {}

  // padding: rows after `rows`; gap: elements between rows of logits.
  std::vector<Sampled> sample(const Logits& logits, std::span<const SampleRow> rows, int padding = 0, int gap = 0) {
    std::vector<std::byte> packed_bytes(5);  // packed by the previous step
    const auto n = static_cast<std::int64_t>(rows.size()) + padding;
    const auto packed = sampler_.pack(rows, n, packed_bytes, notes_);
    EXPECT_EQ(packed.begin, 16U);
    EXPECT_EQ(packed_bytes.size(), packed.begin + packed.bytes);
    plain = packed.plain;
    histories = packed.histories;
    const DeviceArray bytes(stream_, packed_bytes);
    const auto stride = static_cast<std::size_t>(logits.vocab + gap);
    std::vector<float> spread(static_cast<std::size_t>(n) * stride, kNaN);
    for (std::size_t r = 0; r < rows.size(); ++r) std::ranges::copy(logits.row(r), spread.begin() + r * stride);
    const DeviceArray on_device(stream_, spread);
    sampler_.launch(stream_, {on_device.data(), DType::f32, n, logits.vocab, static_cast<std::int64_t>(stride)}, packed,
                    bytes.data() + packed.begin, notes_);
    return results(packed, rows.size());
  }
  std::vector<Sampled> sample(const Logits& logits, const SampleRow& row) { return sample(logits, std::span(&row, 1)); }

  std::vector<Sampled> results(const SamplePacked& packed, std::size_t rows) {
    std::vector<std::byte> downloaded(sampler_.result_bytes(packed));
    stream_.download(downloaded.data(), sampler_.results(), downloaded.size(), "results");
    Ids ids(rows);
    stream_.download(ids.data(), sampler_.sampled(), rows * sizeof(std::int32_t), "sampled");
    stream_.wait("results");
    auto out = sampler_.parse(downloaded.data(), static_cast<std::int64_t>(rows), notes_);
    for (std::size_t r = 0; r < rows; ++r) EXPECT_EQ(ids[r], out[r].error.empty() ? out[r].token : -1);
    return out;
  }

  Stream& stream() { return stream_; }
  Sampler& sampler() { return sampler_; }
  SampleNotes& notes() { return notes_; }

  bool plain = true;  // of the last step
  std::int64_t histories = 0;

 private:
  Stream stream_;
  Sampler sampler_;
  SampleNotes notes_;
};

Sampled cpu_sample(std::span<const float> logits, const SampleRow& row) {
  static ops::cpu::SampleScratch scratch;
  std::vector<float> copy(logits.begin(), logits.end());
  try {
    return ops::cpu::sample_row(copy, row, *ops::cpu::instruction_set("portable").kernels, scratch);
  } catch (const Error& error) {
    Sampled out;
    out.error = error.what();
    return out;
  }
}

// The token by the definition, in double; empty if the edge of a filter or the draw is too close to decide in float.
std::optional<std::int32_t> defined_token(std::span<const float> logits, const SampleRow& row) {
  std::vector<double> changed(logits.begin(), logits.end());
  const auto at = [&](std::int32_t id) -> double& { return changed[static_cast<std::size_t>(id)]; };
  for (const auto& [id, bias] : row.bias) at(id) += static_cast<double>(bias);
  for (const auto id : row.banned) at(id) = -std::numeric_limits<double>::infinity();
  std::set<std::int32_t> all(row.prompt.begin(), row.prompt.end());
  all.insert(row.output.begin(), row.output.end());
  const auto repetition = static_cast<double>(row.repetition_penalty);
  for (const auto id : all) at(id) = at(id) > 0 ? at(id) / repetition : at(id) * repetition;
  std::map<std::int32_t, int> counts;
  for (const auto id : row.output) ++counts[id];
  for (const auto& [id, n] : counts) {
    at(id) -= static_cast<double>(row.presence_penalty) + n * static_cast<double>(row.frequency_penalty);
  }
  Ids order(changed.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return at(a) > at(b); });
  constexpr double kNear = 1e-4;
  if (row.temperature == 0) {
    if (order.size() > 1 && at(order[0]) != at(order[1]) && at(order[0]) - at(order[1]) < kNear) return std::nullopt;
    return order[0];
  }
  if (row.top_k > 0 && static_cast<std::size_t>(row.top_k) < order.size()) {
    order.resize(static_cast<std::size_t>(row.top_k));
  }
  std::vector<double> weights;
  for (const auto id : order) {
    weights.push_back(std::exp((at(id) - at(order[0])) / static_cast<double>(row.temperature)));
  }
  const double all_of_them = std::accumulate(weights.begin(), weights.end(), 0.0);
  double cumulated = 0;
  std::size_t n = weights.size();
  if (row.top_p < 1) {
    const double target = static_cast<double>(row.top_p) * all_of_them;
    for (n = 0; n < weights.size();) {
      cumulated += weights[n++];
      if (std::abs(cumulated - target) < kNear * all_of_them) return std::nullopt;
      if (cumulated >= target) break;
    }
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (row.min_p > 0 && std::abs(weights[i] - static_cast<double>(row.min_p)) < kNear) return std::nullopt;
  }
  while (weights[n - 1] < static_cast<double>(row.min_p)) --n;
  const double sum = std::accumulate(weights.begin(), weights.begin() + static_cast<std::ptrdiff_t>(n), 0.0);
  const double target = ops::cpu::random_unit(row.seed, row.position) * sum;
  cumulated = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (std::abs(cumulated + weights[i] - target) < kNear * sum) return std::nullopt;
    cumulated += weights[i];
    if (cumulated > target) return order[i];
  }
  return std::nullopt;
}

// Whether the token equals the CPU's draw, or the draw is too close to an edge to decide.
bool agrees(std::int32_t token, std::span<const float> logits, const SampleRow& row) {
  const auto expected = cpu_sample(logits, row);
  if (token == expected.token) return true;
  const auto defined = defined_token(logits, row);
  return !defined.has_value();
}

// A row's parameters with the memory of its lists.
struct OwnedRow {
  SampleRow row;
  Bias bias;
  Ids banned, prompt, output;

  const SampleRow& view() {
    row.bias = bias;
    row.banned = banned;
    row.prompt = prompt;
    row.output = output;
    return row;
  }
};

Ids random_ids(Random& random, int most, int vocab) {
  Ids out;
  for (int i = uniform(random, 0, most); i > 0; --i) out.push_back(uniform(random, 0, vocab - 1));
  return out;
}

OwnedRow random_row(Random& random, int vocab, bool with_lists) {
  OwnedRow out;
  auto& row = out.row;
  const auto coin = [&] { return uniform(random, 0, 1) == 1; };
  row.seed = random();
  row.position = uniform(random, 0, 1000);
  row.temperature = std::array{0.0F, 0.3F, 1.0F, 2.5F, 40.0F}[static_cast<std::size_t>(uniform(random, 0, 4))];
  if (coin()) row.top_k = uniform(random, 1, vocab + 5);
  if (coin()) row.top_k = std::min(row.top_k, uniform(random, 1, 50));
  if (coin()) row.top_p = static_cast<float>(uniform(random, 1, 99)) / 100;
  if (coin()) row.min_p = static_cast<float>(uniform(random, 0, 50)) / 100;
  if (!with_lists) return out;
  out.prompt = random_ids(random, 20, vocab);
  out.output = random_ids(random, 20, vocab);
  if (coin()) row.repetition_penalty = coin() ? 1.3F : 0.8F;
  if (coin()) row.presence_penalty = 0.7F;
  if (coin()) row.frequency_penalty = -0.2F;
  std::set<std::int32_t> biased;
  for (int i = uniform(random, 0, 3); i > 0; --i) biased.insert(uniform(random, 0, vocab - 1));
  for (const auto id : biased) out.bias.emplace_back(id, 2.0F);
  if (vocab > 20) out.banned = random_ids(random, 4, vocab);
  std::ranges::sort(out.banned);
  return out;
}

// Compares rows with random parameters, some with lists, with the CPU's tokens.
void check_random_rows(Random& random, int vocab, int steps, int num_rows) {
  Device device(vocab, num_rows + 2);
  std::uint64_t sequences = 0;
  for (int step = 0; step < steps; ++step) {
    const auto logits = Logits::random(random, num_rows, vocab, step % 2 == 0 ? 3.0F : 0.5F);
    std::vector<OwnedRow> owned;
    Rows rows;
    for (int r = 0; r < num_rows; ++r) {
      owned.push_back(random_row(random, vocab, step % 3 != 0 && r % 2 == 0));
      owned.back().row.sequence = ++sequences;
    }
    for (auto& row : owned) rows.push_back(row.view());
    const auto sampled = device.sample(logits, rows, step % 3, uniform(random, 0, 4));
    ASSERT_EQ(device.plain, step % 3 == 0);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      ASSERT_EQ(sampled[r].error, "");
      ASSERT_TRUE(agrees(sampled[r].token, logits.row(r), rows[r]))
          << "vocabulary " << vocab << ", step " << step << ", row " << r << ": " << sampled[r].token << ", not "
          << cpu_sample(logits.row(r), rows[r]).token;
    }
  }
}

TEST(CudaSampleTest, samples_equal_the_cpu_for_all_parameters) {
  in_both_orders([] {
    Random random(20);
    check_random_rows(random, 1, 3, 3);
    check_random_rows(random, 31, 8, 12);
    check_random_rows(random, 1000, 12, 12);
    check_random_rows(random, 5000, 4, 12);
  });
}

TEST(CudaSampleTest, samples_equal_the_cpu_for_large_vocabularies) {
  Random random(21);
  check_random_rows(random, 32000, 3, 8);
  check_random_rows(random, 50257, 3, 4);
}

TEST(CudaSampleTest, few_rows_have_no_defined_token) {
  Random random(22);
  int told = 0;
  for (int i = 0; i < 200; ++i) {
    const auto logits = Logits::random(random, 1, 300, 3);
    auto row = random_row(random, 300, true);
    if (defined_token(logits.row(0), row.view())) ++told;
  }
  EXPECT_GT(told, 185) << "too few rows have a defined token";
}

TEST(CudaSampleTest, greedy_selects_the_lowest_of_equal_ids) {
  in_both_orders([] {
    auto logits = Logits::of(std::vector<float>(9000, 1.0F));
    logits.values[8700] = logits.values[4300] = logits.values[4301] = 2;
    Device device(9000, 4);
    OwnedRow row;
    row.row.temperature = 0;
    EXPECT_EQ(device.sample(logits, row.view())[0].token, 4300);
    row.bias = {{5, 50.0F}, {4300, -kInfinity}};
    EXPECT_EQ(device.sample(logits, row.view())[0].token, 5);
    row.banned = {5};
    EXPECT_EQ(device.sample(logits, row.view())[0].token, 4301);
    std::ranges::fill(logits.values, -1.0F);
    logits.values[1] = -0.0F, logits.values[600] = 0.0F;
    row = {};
    row.row.temperature = 0;
    EXPECT_EQ(device.sample(logits, row.view())[0].token, 1) << "-0 is no less than 0";
  });
}

// Rows so flat that tokens within a bin must be distinguished, by histograms over their codes and, if equal, by id.
TEST(CudaSampleTest, filters_of_flat_rows_equal_the_cpu) {
  in_both_orders([] {
    constexpr int kVocab = 5003;
    Random random(23);
    Device device(kVocab, 16);
    for (const float spread : {0.0F, 1e-30F, 1e-4F, 0.5F}) {
      auto logits = Logits::random(random, 12, kVocab, spread);
      for (std::size_t i = 0; i < logits.values.size(); ++i) {
        if (spread == 0.0F) logits.values[i] = i % 3 == 0 ? 1.5F : -1.5F;
      }
      Rows rows(12);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        auto& row = rows[r];
        row.seed = random();
        row.temperature = r % 2 == 0 ? 1.0F : 1000.0F;
        if (r % 3 == 1) row.top_k = uniform(random, 1500, 4500);
        if (r % 4 >= 2) row.top_p = 0.6F;
        if (r == 11) row.min_p = 0.01F;
      }
      const auto sampled = device.sample(logits, rows);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        // Edges are everywhere. The drawn token has the same probability, and among equal tokens it is the same one or
        // a neighbour.
        const auto expected = cpu_sample(logits.row(r), rows[r]).token;
        const auto value = [&](std::int32_t id) { return logits.row(r)[static_cast<std::size_t>(id)]; };
        ASSERT_NEAR(value(sampled[r].token), value(expected), 2e-3F * spread) << spread << ", row " << r;
        if (spread == 0.0F) {
          ASSERT_NEAR(sampled[r].token, expected, 6) << "row " << r;
        }
      }
    }
  });
}

TEST(CudaSampleTest, top_k_of_equal_logits_keeps_the_lowest_ids) {
  in_both_orders([] {
    constexpr int kDraws = kEmulated ? 60 : 500;
    const Logits logits{100, std::vector<float>(100 * kDraws, 1.0F)};
    Rows rows(kDraws);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].top_k = 3, rows[i].position = static_cast<std::int64_t>(i);
    std::set<std::int32_t> seen;
    for (const auto& sampled : Device(100, kDraws).sample(logits, rows)) seen.insert(sampled.token);
    EXPECT_EQ(seen, (std::set<std::int32_t>{0, 1, 2}));
  });
}

TEST(CudaSampleTest, temperatures_may_be_tiny_or_huge) {
  const auto logits = Logits::of({1, 5, 4.999F, -3});
  Device device(4, 1);
  SampleRow row;
  for (const float temperature : {1e-6F, 1e-30F, 1e-42F}) {
    row.temperature = temperature;
    EXPECT_EQ(device.sample(logits, row)[0].token, 1) << temperature;
  }
  for (const float temperature : {1e10F, 3e38F}) {
    row.temperature = temperature;
    for (row.position = 0; row.position < 8; ++row.position) {
      EXPECT_EQ(device.sample(logits, row)[0].token, cpu_sample(logits.row(0), row).token) << temperature;
    }
  }
}

TEST(CudaSampleTest, frequencies_follow_the_probabilities) {
  constexpr int kDraws = kEmulated ? 512 : 20480, kRows = 512;
  const std::vector<float> row_logits = {0, 1, 2, -1, 0.5F, -kInfinity, 2, -2};
  struct Case {
    SampleRow row;
    std::set<std::size_t> left;  // tokens that can be drawn
    double most;                 // one-in-a-thousand value of chi-square
  };
  std::vector<Case> cases(3);
  cases[0].left = {0, 1, 2, 3, 4, 6, 7}, cases[0].most = 22.5;
  cases[1].row.top_k = 4, cases[1].left = {1, 2, 4, 6}, cases[1].most = 16.3;
  // The weights are e^2, e^2, e, e^0.5, 1, ..; their sum is 20.6. top_p and min_p both keep the first four.
  cases[2].row.top_p = 0.85F, cases[2].row.min_p = 0.2F, cases[2].left = {1, 2, 4, 6}, cases[2].most = 16.3;
  Logits logits{static_cast<int>(row_logits.size()), {}};
  for (int r = 0; r < kRows; ++r) logits.values.insert(logits.values.end(), row_logits.begin(), row_logits.end());
  Device device(logits.vocab, kRows);
  for (const auto& c : cases) {
    std::vector<int> counts(row_logits.size());
    for (int done = 0; done < kDraws; done += kRows) {
      Rows rows(kRows, c.row);
      for (std::size_t r = 0; r < kRows; ++r) rows[r].seed = 42, rows[r].position = done + static_cast<std::int64_t>(r);
      for (const auto& sampled : device.sample(logits, rows)) ++counts[static_cast<std::size_t>(sampled.token)];
    }
    double sum = 0, chi_square = 0;
    for (const auto id : c.left) sum += std::exp(static_cast<double>(row_logits[id]));
    for (std::size_t id = 0; id < counts.size(); ++id) {
      if (!c.left.contains(id)) {
        EXPECT_EQ(counts[id], 0) << id;
        continue;
      }
      const double expected = kDraws * std::exp(static_cast<double>(row_logits[id])) / sum;
      chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
    }
    EXPECT_LT(chi_square, c.most);
  }
}

TEST(CudaSampleTest, penalties_count_over_steps_when_slots_are_reassigned) {
  in_both_orders([] {
    constexpr int kVocab = 60, kSlots = 3, kSequences = 7, kSteps = 60;
    Random random(24);
    Device device(kVocab, kSlots);
    struct Sequence {
      OwnedRow owned;
      Ids output;  // the whole output
      int row_before = -1;
    };
    std::vector<Sequence> sequences(kSequences);
    for (std::size_t i = 0; i < kSequences; ++i) {
      auto& owned = sequences[i].owned;
      owned.row.temperature = i % 2 == 0 ? 0.0F : 0.8F;
      if (i % 3 == 0 && i != 6) owned.row.repetition_penalty = 1.4F;
      if (i % 3 == 1) owned.row.presence_penalty = 0.5F;
      if (i != 6) owned.row.frequency_penalty = 0.6F;  // the last one has no penalties
      owned.row.seed = i;
      owned.row.sequence = 100 + i;
      owned.prompt = random_ids(random, 10, kVocab);
    }
    int changed_hands = 0, kept = 0, unknown = 0;
    std::vector<std::size_t> members = {0, 1, 2};
    for (int step = 0; step < kSteps; ++step) {
      if (step % 4 == 3) {
        std::vector<std::size_t> all(kSequences);
        std::iota(all.begin(), all.end(), std::size_t{0});
        std::shuffle(all.begin(), all.end(), random);
        members.assign(all.begin(), all.begin() + uniform(random, 1, kSlots));
      }
      const auto logits = Logits::random(random, static_cast<int>(members.size()), kVocab, 1);
      Rows rows, known;
      for (const auto member : members) {
        auto& s = sequences[member];
        // the step's sample was discarded
        if (step % 9 == 8 && !s.output.empty()) s.output.pop_back(), s.row_before = -1;
        s.owned.output = s.output;
        s.owned.row.position = static_cast<std::int64_t>(s.output.size());
        known.push_back(s.owned.view());
      }
      for (std::size_t i = 0; i < members.size(); ++i) {
        auto& s = sequences[members[i]];
        auto row = known[i];
        if (s.row_before >= 0 && uniform(random, 0, 2) != 0) {
          row.pending = s.row_before;
          row.output = row.output.first(row.output.size() - 1);
          ++unknown;
        }
        rows.push_back(row);
      }
      const auto sampled = device.sample(logits, rows);
      changed_hands += static_cast<int>(device.histories);
      kept += static_cast<int>(members.size()) - static_cast<int>(device.histories);
      for (auto& s : sequences) s.row_before = -1;
      for (std::size_t i = 0; i < members.size(); ++i) {
        ASSERT_TRUE(agrees(sampled[i].token, logits.row(i), known[i])) << "step " << step << ", row " << i;
        sequences[members[i]].output.push_back(sampled[i].token);
        sequences[members[i]].row_before = static_cast<int>(i);
      }
    }
    EXPECT_GT(changed_hands, 20);
    EXPECT_GT(kept, 60);
    EXPECT_GT(unknown, 40);
  });
}

TEST(CudaSampleTest, a_history_is_uploaded_only_when_its_slot_is_assigned) {
  Device device(10, 2);
  const auto logits = Logits::of({5, 4.5F, 4, 0, 0, 0, 0, 0, 0, 0});
  SampleRow row;
  row.temperature = 0;
  row.frequency_penalty = 0.75F;
  row.sequence = 7;
  Ids sampled, output;
  for (int step = 0; step < 6; ++step) {
    row.output = output;
    row.pending = step == 0 ? -1 : 0;
    sampled.push_back(device.sample(logits, row)[0].token);
    EXPECT_EQ(device.histories, step == 0 ? 1 : 0);
    output.assign(sampled.begin(), sampled.end() - 1);
  }
  // 5, 4.5 and 4 lose 0.75 each time they are sampled; ties go to the lower id.
  EXPECT_EQ(sampled, (Ids{0, 1, 0, 2, 1, 0}));
}

TEST(CudaSampleTest, a_pending_token_is_counted_when_its_sequence_gets_a_slot_later) {
  Device device(6, 4);
  const auto logits = Logits::random(*std::make_unique<Random>(25), 4, 6, 0);
  Rows rows(4);
  for (std::size_t r = 0; r < 4; ++r) rows[r].sequence = r + 1, rows[r].temperature = 0;
  const Bias likely_3 = {{3, 1.0F}};
  rows[2].bias = likely_3;
  EXPECT_EQ(device.sample(logits, rows)[2].token, 3);
  // Two penalties of 1: for the token that only the device knows, and for the token that the host passes.
  SampleRow row = rows[2];
  const Ids output = {0};
  row.output = output;
  row.pending = 2;
  row.presence_penalty = 2;
  EXPECT_EQ(device.sample({6, {0, 0, 0, 0, 0, 0}}, row)[0].token, 1);
  const Bias bias = {{3, 1.5F}};
  row.bias = bias;
  row.pending = -1;
  const Ids longer = {0, 3, 1};
  row.output = longer;
  EXPECT_EQ(device.sample({6, {0, 0, 0, 0, 0, 0}}, row)[0].token, 2);
}

TEST(CudaSampleTest, counts_stop_growing_before_they_reach_the_prompt_s_bit) {
  Device device(3, 1);
  OwnedRow row;
  row.row.temperature = 0;
  row.row.frequency_penalty = 1.0F / 1024;
  row.output.assign(40000, 1);
  EXPECT_EQ(device.sample(Logits::of({0, 31.9F, -50}), row.view())[0].token, 0);
  row.output.push_back(0);
  EXPECT_EQ(device.sample(Logits::of({0, 32.5F, -50}), row.view())[0].token, 1) << "32767 / 1024 is less";
}

TEST(CudaSampleTest, rows_that_cannot_be_sampled_report_it_and_do_not_affect_others) {
  in_both_orders([] {
    constexpr int kVocab = 5000;
    Random random(26);
    auto logits = Logits::random(random, 8, kVocab, 2);
    const auto at = [&](int row, int id) -> float& {
      return logits.values[static_cast<std::size_t>(row * kVocab + id)];
    };
    at(1, 4999) = kNaN, at(1, 4321) = kInfinity;
    at(2, 77) = kNaN;
    at(3, 4100) = -kNaN, at(3, 3) = 1e30F;
    for (int id = 0; id < kVocab; ++id) at(5, id) = -kInfinity;
    Ids all(kVocab);
    std::iota(all.begin(), all.end(), 0);
    Rows rows(8);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      rows[r].temperature = r % 2 == 0 ? 0.0F : 1.0F;
      rows[r].seed = r;
      rows[r].logprobs = r % 3 == 0 ? 2 : -1;
    }
    const auto check = [&](Device& device) {
      const auto sampled = device.sample(logits, rows);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const auto expected = cpu_sample(logits.row(r), rows[r]);
        ASSERT_EQ(sampled[r].error, expected.error) << r;
        if (expected.error.empty()) {
          EXPECT_TRUE(agrees(sampled[r].token, logits.row(r), rows[r])) << r;
          EXPECT_EQ(sampled[r].top.size(), expected.top.size());
        }
      }
    };
    Device device(kVocab, 8);
    check(device);
    EXPECT_TRUE(device.plain);
    rows[7].banned = all;
    const Bias bias = {{12, kInfinity}};
    rows[6].bias = bias;
    check(device);
    EXPECT_FALSE(device.plain);
  });
}

void check_logprobs(const Logits& logits, std::size_t r, const SampleRow& row, const Sampled& sampled) {
  const auto x = logits.row(r);
  const double maximum = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float value : x) sum += std::exp(static_cast<double>(value) - maximum);
  const auto logprob = [&](std::int32_t id) {
    return static_cast<double>(x[static_cast<std::size_t>(id)]) - maximum - std::log(sum);
  };
  if (row.logprobs < 0) {
    ASSERT_EQ(sampled.logprob, 0.0F);
    ASSERT_TRUE(sampled.top.empty());
    return;
  }
  ASSERT_NEAR(sampled.logprob, logprob(sampled.token), 2e-6);
  Ids order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logprob(a) > logprob(b); });
  ASSERT_EQ(sampled.top.size(), std::min<std::size_t>(static_cast<std::size_t>(row.logprobs), x.size()));
  for (std::size_t i = 0; i < sampled.top.size(); ++i) {
    ASSERT_EQ(sampled.top[i].first, order[i]) << i;
    if (std::isinf(logprob(order[i]))) {
      ASSERT_EQ(sampled.top[i].second, -kInfinity);
    } else {
      ASSERT_NEAR(sampled.top[i].second, logprob(order[i]), 2e-6);
    }
  }
}

TEST(CudaSampleTest, log_probabilities_are_of_the_unmodified_logits) {
  in_both_orders([] {
    Random random(27);
    for (const int vocab : {1, 31, 1000, 9001}) {
      Device device(vocab, 9);
      for (const bool plain : {true, false}) {
        auto logits = Logits::random(random, 9, vocab, 3);
        std::vector<OwnedRow> owned;
        for (int r = 0; r < 9; ++r) {
          auto row = random_row(random, vocab, !plain && vocab > 20);
          row.row.sequence = static_cast<std::uint64_t>(1 + r + (plain ? 0 : 9));
          row.row.logprobs = std::array{-1, 0, 1, 5, 20}[static_cast<std::size_t>(r % 5)];
          for (int id = 0; r == 4 && id < vocab; ++id) logits.values[static_cast<std::size_t>(r * vocab + id)] = 2;
          // The most likely tokens are adjacent, and more than a list holds: the groups' maxima do not help.
          for (int id = 0; r == 8 && id < vocab; ++id) {
            logits.values[static_cast<std::size_t>(r * vocab + id)] += id >= 700 && id < 3000 ? 50.0F : 0.0F;
          }
          owned.push_back(row);
        }
        for (int id = 1; id < vocab; ++id) logits.values[static_cast<std::size_t>(3 * vocab + id)] = -kInfinity;
        owned[8].row.logprobs = 20;
        owned[3].banned.clear();
        Rows rows;
        for (auto& row : owned) rows.push_back(row.view());
        const auto sampled = device.sample(logits, rows, 0, vocab % 2);
        for (std::size_t r = 0; r < rows.size(); ++r) {
          ASSERT_EQ(sampled[r].error, "");
          check_logprobs(logits, r, rows[r], sampled[r]);
        }
      }
    }
  });
}

bool same(const Sampled& a, const Sampled& b) {
  return a.token == b.token && a.logprob == b.logprob && a.top == b.top && a.error == b.error;
}

TEST(CudaSampleTest, rows_do_not_depend_on_other_rows_their_index_or_padding) {
  in_both_orders([] {
    constexpr int kVocab = 13000, kRows = 12;
    Random random(28);
    auto logits = Logits::random(random, kRows, kVocab, 2);
    std::vector<OwnedRow> owned;
    Rows rows;
    for (int r = 0; r < kRows; ++r) {
      owned.push_back(random_row(random, kVocab, r % 3 == 0));
      owned.back().row.logprobs = r % 2 == 0 ? 5 : -1;
    }
    for (auto& row : owned) rows.push_back(row.view());
    std::uint64_t sequences = 0;
    const auto renew = [&] {
      for (auto& row : rows) row.sequence = ++sequences;
    };
    renew();
    Device device(kVocab, 300);
    const auto together = device.sample(logits, rows);
    renew();
    const auto padded = device.sample(logits, rows, 250, 3);
    for (std::size_t r = 0; r < kRows; ++r) {
      EXPECT_TRUE(same(together[r], padded[r])) << r;
      const Logits one{kVocab, {logits.row(r).begin(), logits.row(r).end()}};
      rows[r].sequence = ++sequences;
      EXPECT_TRUE(same(together[r], device.sample(one, rows[r])[0])) << r;
    }
  });
}

// A bias for the whole vocabulary is uploaded once per request, except for rows that return log probabilities.
TEST(CudaSampleTest, rows_of_one_request_share_their_list) {
  in_both_orders([] {
    constexpr int kVocab = 5000, kRows = 8;
    Random random(30);
    const auto logits = Logits::random(random, kRows, kVocab, 2);
    Bias bias;
    for (int id = 0; id < kVocab; ++id) bias.emplace_back(id, static_cast<float>(uniform(random, -3, 3)));
    const Ids banned = {7, 2000}, other = {7, 2001};
    Rows rows(kRows);
    for (std::size_t r = 0; r < kRows; ++r) {
      rows[r].seed = rows[r].sequence = r + 1;
      rows[r].bias = bias;
      rows[r].banned = r == 3 ? other : banned;
      rows[r].logprobs = r == 1 || r == 6 ? 4 : -1;
    }
    Device device(kVocab, kRows);
    std::vector<std::byte> bytes;
    const auto packed = device.sampler().pack(rows, kRows, bytes, device.notes());
    EXPECT_EQ(packed.list_entries, 4 * kVocab) << "one shared list, one of other bans, and two more";
    const auto sampled = device.sample(logits, rows);
    for (std::size_t r = 0; r < kRows; ++r) {
      ASSERT_EQ(sampled[r].error, "");
      EXPECT_TRUE(agrees(sampled[r].token, logits.row(r), rows[r])) << r;
      check_logprobs(logits, r, rows[r], sampled[r]);
    }
  });
}

TEST(CudaSampleTest, a_captured_step_serves_rows_with_other_parameters) {
  constexpr int kVocab = 3000, kRows = 4;
  Random random(29);
  Device device(kVocab, kRows);
  auto& stream = device.stream();
  const auto logits = Logits::random(random, kRows, kVocab, 2);
  const DeviceArray on_device(stream, logits.values);
  std::vector<std::byte> bytes;
  const auto captured = device.sampler().pack({}, kRows, bytes, device.notes());
  const DeviceArray upload(stream, bytes);
  Graph::begin(stream);
  device.sampler().launch(stream, {on_device.data(), DType::f32, kRows, kVocab, kVocab}, captured, upload.data(),
                          device.notes());
  const auto graph = Graph::end(stream);
  for (int step = 0; step < 4; ++step) {
    Rows rows;
    for (int r = 0; r < kRows - step % 2; ++r) rows.push_back(random_row(random, kVocab, false).row);
    rows[0].logprobs = 3;
    bytes.clear();
    const auto packed = device.sampler().pack(rows, kRows, bytes, device.notes());
    ASSERT_TRUE(packed.plain);
    ASSERT_EQ(packed.bytes, captured.bytes);
    stream.upload(upload.data(), bytes.data(), bytes.size(), "parameters");
    graph.launch(stream, "a captured step");
    const auto sampled = device.results(packed, rows.size());
    for (std::size_t r = 0; r < rows.size(); ++r) {
      EXPECT_TRUE(agrees(sampled[r].token, logits.row(r), rows[r])) << r;
      check_logprobs(logits, r, rows[r], sampled[r]);
    }
  }
}

TEST(CudaSampleTest, invalid_rows_are_rejected) {
  Device device(10, 2);
  std::vector<std::byte> bytes;
  const auto refused = [&](std::span<const SampleRow> rows, std::int64_t padded, std::string_view why) {
    expect_error(ErrorCode::internal, {why}, [&] { device.sampler().pack(rows, padded, bytes, device.notes()); });
  };
  Rows rows(2);
  refused(rows, 1, "padded to 1");
  refused(rows, 3, "room for 2");
  const Ids outside = {3, 10};
  rows[1].banned = outside;
  refused(rows, 2, "token id 10");
  rows[1] = {};
  rows[0].repetition_penalty = 2;
  rows[0].prompt = outside;
  refused(rows, 2, "token id 10");
  rows[0].prompt = {};
  rows[1].repetition_penalty = 2;
  refused(rows, 2, "two rows of sequence 0");
  EXPECT_THROW(Sampler(300000, 1), Error);
}

}  // namespace
}  // namespace charonia::cuda
