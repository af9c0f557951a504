// The sampler of the device: histograms of flat rows, slots of sequences with penalties, shared lists.
// ops_sample_test.cpp, which all devices share, tests the results of each parameter.
#include "ops/cuda/kernels/sample.h"
#include "ops/cuda/sampling/sampler.h"

#include <gtest/gtest.h>

#include "charonia/error.h"
#include "device_arrays.h"
#include "errors.h"
#include "sample_reference.h"

namespace charonia::cuda {
namespace {

using ops::Bias;
using ops::expect_drawn;
using ops::Ids;
using ops::Matrix;
using ops::OwnedRow;
using ops::Random;
using ops::Sampled;
using ops::SampleRow;
using ops::uniform;
using Rows = std::vector<SampleRow>;

// A sampler with its stream; runs one step at a time.
class Device {
 public:
  Device(int vocab, int max_rows) : sampler_(vocab, max_rows) {}

  // padding: the number of rows after `rows`.
  std::vector<Sampled> sample(const Matrix& logits, std::span<const SampleRow> rows, int padding = 0) {
    std::vector<std::byte> packed_bytes(5);  // packed by the previous step
    const auto count = std::ssize(rows), n = count + padding;
    packed = sampler_.pack(rows, n, packed_bytes, notes_);
    EXPECT_EQ(packed.begin, 16U);
    EXPECT_EQ(packed_bytes.size(), packed.begin + packed.bytes);
    auto padded = Matrix(DType::f32, n, logits.cols, logits.stride - logits.cols);
    std::ranges::fill(padded.bytes, std::byte{0xff});  // NaN
    std::ranges::copy(logits.bytes, padded.bytes.begin());
    const DeviceArray bytes(stream_, packed_bytes);
    const MatrixOnDevice on_device(stream_, padded);
    sampler_.launch(stream_, on_device.tensor(), packed, bytes.data() + packed.begin, notes_);
    std::vector<std::byte> downloaded(sampler_.result_bytes(packed));
    stream_.download(downloaded.data(), sampler_.results(), downloaded.size(), "results");
    Ids ids(rows.size());
    stream_.download(ids.data(), sampler_.sampled(), rows.size() * sizeof(std::int32_t), "sampled");
    stream_.wait("results");
    auto out = sampler_.parse(downloaded.data(), count, notes_);
    for (std::size_t r = 0; r < rows.size(); ++r) EXPECT_EQ(ids[r], out[r].error.empty() ? out[r].token : -1);
    return out;
  }
  std::int32_t sample(const std::vector<float>& logits, const SampleRow& row) {
    Matrix one(DType::f32, 1, std::ssize(logits));
    std::memcpy(one.bytes.data(), logits.data(), one.bytes.size());
    return sample(one, std::span(&row, 1))[0].token;
  }

  SamplePacked packed;  // of the last step

 private:
  Stream stream_;
  Sampler sampler_;
  SampleNotes notes_;
};

// Rows so flat that tokens within a bin must be distinguished, by histograms over their codes and, if equal, by id.
TEST(CudaSampleTest, filters_of_flat_rows_equal_the_definition) {
  in_both_orders([] {
    constexpr int kVocab = 5003;
    Random random(23);
    Device device(kVocab, 16);
    for (const float spread : {0.0F, 1e-30F, 1e-4F, 0.5F}) {
      auto logits = Matrix::random(random, DType::f32, 12, kVocab, spread);
      for (int i = 0; spread == 0 && i < 12 * kVocab; ++i) {
        logits.set(i / kVocab, i % kVocab, i % 3 == 0 ? 1.5F : -1.5F);
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
        const auto x = logits.floats(static_cast<std::int64_t>(r));
        const auto expected = ops::drawn_token(x, rows[r], 0).value();
        const auto value = [&](std::int32_t id) { return x[static_cast<std::size_t>(id)]; };
        ASSERT_NEAR(value(sampled[r].token), value(expected), 2e-3F * spread) << spread << ", row " << r;
        if (spread == 0.0F) {
          ASSERT_NEAR(sampled[r].token, expected, 6) << "row " << r;
        }
      }
    }
  });
}

TEST(CudaSampleTest, penalties_count_over_steps_when_slots_are_reassigned) {
  in_both_orders([] {
    constexpr int kVocab = 60, kSlots = 3, kSequences = 7, kSteps = 60;
    Random random(24);
    Device device(kVocab, kSlots);
    struct Sequence {
      OwnedRow owned;  // with the whole output
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
      owned.prompt = ops::random_ids(random, 10, kVocab);
    }
    std::int64_t changed_hands = 0, kept = 0, unknown = 0;
    std::vector<std::size_t> members = {0, 1, 2};
    for (int step = 0; step < kSteps; ++step) {
      if (step % 4 == 3) {
        members.resize(kSequences);
        std::iota(members.begin(), members.end(), std::size_t{0});
        std::shuffle(members.begin(), members.end(), random);
        members.resize(static_cast<std::size_t>(uniform(random, 1, kSlots)));
      }
      const auto logits = Matrix::random(random, DType::f32, std::ssize(members), kVocab);
      Rows rows, known;
      for (const auto member : members) {
        auto& [owned, row_before] = sequences[member];
        // the step's sample was discarded
        if (step % 9 == 8 && !owned.output.empty()) owned.output.pop_back(), row_before = -1;
        owned.row.position = std::ssize(owned.output);
        known.push_back(owned.view());
        rows.push_back(known.back());
        if (row_before >= 0 && uniform(random, 0, 2) != 0) {
          rows.back().pending = row_before;
          rows.back().output = rows.back().output.first(owned.output.size() - 1);
          ++unknown;
        }
      }
      const auto sampled = device.sample(logits, rows);
      changed_hands += device.packed.histories;
      kept += std::ssize(members) - device.packed.histories;
      for (auto& s : sequences) s.row_before = -1;
      for (std::size_t i = 0; i < members.size(); ++i) {
        expect_drawn(logits.floats(static_cast<std::int64_t>(i)), known[i], sampled[i]);
        ASSERT_FALSE(testing::Test::HasFailure()) << "step " << step << ", row " << i;
        sequences[members[i]].owned.output.push_back(sampled[i].token);
        sequences[members[i]].row_before = static_cast<int>(i);
      }
    }
    EXPECT_GT(changed_hands, 20);
    EXPECT_GT(kept, 60) << "a history is uploaded only when its slot is assigned";
    EXPECT_GT(unknown, 40);
  });
}

TEST(CudaSampleTest, a_pending_token_is_counted_when_its_sequence_gets_a_slot_later) {
  Device device(6, 4);
  Rows rows(4);
  for (std::size_t r = 0; r < 4; ++r) rows[r].sequence = r + 1, rows[r].temperature = 0;
  const Bias likely_3 = {{3, 1.0F}};
  rows[2].bias = likely_3;
  EXPECT_EQ(device.sample(Matrix(DType::f32, 4, 6), rows)[2].token, 3);
  // Two penalties of 1: for the token that only the device knows, and for the token that the host passes.
  SampleRow row = rows[2];
  const Ids output = {0}, longer = {0, 3, 1};
  row.output = output;
  row.pending = 2;
  row.presence_penalty = 2;
  EXPECT_EQ(device.sample(std::vector<float>(6), row), 1);
  const Bias bias = {{3, 1.5F}};
  row.bias = bias;
  row.pending = -1;
  row.output = longer;
  EXPECT_EQ(device.sample(std::vector<float>(6), row), 2);
}

// Some proposals are accepted. A row with a target, such as a forced token, has no counts.
TEST(CudaSampleTest, rows_after_proposals_count_the_proposals) {
  in_both_orders([] {
    constexpr int kVocab = 8, kSteps = 80;
    Random random(25);
    Device device(kVocab, 6);
    OwnedRow owned;
    owned.row.temperature = 0.9F;
    owned.row.frequency_penalty = 0.3F;
    owned.row.repetition_penalty = 1.2F;
    owned.row.sequence = 9;
    owned.prompt = {1, 2, 3};
    int accepted = 0, kept = 0;
    bool keeps = false;
    for (int step = 0; step < kSteps; ++step) {
      const auto count = static_cast<std::size_t>(uniform(random, 0, 5));
      const auto logits = Matrix::random(random, DType::f32, static_cast<std::int64_t>(count) + 1, kVocab);
      std::vector<OwnedRow> all(count + 1, owned);
      Ids proposals;
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto& output = all[i].output;
        output.insert(output.end(), proposals.begin(), proposals.end());
        all[i].row.position = std::ssize(output);
        proposals.push_back(uniform(random, 0, kVocab - 1));
      }
      Rows rows;
      for (auto& one : all) rows.push_back(one.view());
      if (step % 5 == 4) rows[0].target = 3;
      const auto sampled = device.sample(logits, rows);
      for (std::size_t i = rows[0].target >= 0 ? 1 : 0; i < rows.size(); ++i) {
        expect_drawn(logits.floats(static_cast<std::int64_t>(i)), rows[i], sampled[i]);
        ASSERT_FALSE(testing::Test::HasFailure()) << "step " << step << ", row " << i;
      }
      kept += keeps && rows[0].target < 0 && device.packed.histories == static_cast<std::int64_t>(count) ? 1 : 0;
      owned.output.push_back(sampled[0].token);
      for (std::size_t i = 0; i < count && proposals[i] == sampled[i].token; ++i) {
        owned.output.push_back(sampled[i + 1].token);
      }
      accepted += static_cast<int>(owned.output.size() - all[0].output.size()) - 1;
      keeps = rows[0].target < 0 && owned.output.size() == all[0].output.size() + 1;
    }
    EXPECT_GT(accepted, 10);
    EXPECT_GT(kept, 20) << "a history is uploaded only when its slot is assigned";
  });
}

TEST(CudaSampleTest, rows_of_a_sequence_share_its_uploaded_counts) {
  constexpr int kVocab = 300;
  constexpr std::size_t kRows = 6;
  Random random(26);
  Device device(kVocab, kRows);
  const auto logits = Matrix::random(random, DType::f32, kRows, kVocab);
  std::vector<OwnedRow> all(kRows);
  Rows rows;
  for (std::size_t i = 0; i < all.size(); ++i) {
    auto& one = all[i];
    for (int id = 0; id < 200; ++id) one.prompt.push_back(id);
    one.output = {7, 250, 7};
    one.output.insert(one.output.end(), i, 7);
    one.row.temperature = 0;
    one.row.presence_penalty = one.row.frequency_penalty = 0.5F;
    one.row.position = std::ssize(one.output);
    one.row.sequence = 9;
    rows.push_back(one.view());
  }
  const auto sampled = device.sample(logits, rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    expect_drawn(logits.floats(static_cast<std::int64_t>(i)), rows[i], sampled[i]);
  }
  EXPECT_EQ(device.packed.histories, static_cast<std::int64_t>(kRows));
  EXPECT_LT(device.packed.bytes - device.packed.counts_at, 2 * 200 * sizeof(SampleCount));
}

TEST(CudaSampleTest, counts_stop_growing_before_they_reach_the_prompt_s_bit) {
  Device device(3, 1);
  OwnedRow row;
  row.row.temperature = 0;
  row.row.frequency_penalty = 1.0F / 1024;
  row.output.assign(40000, 1);
  EXPECT_EQ(device.sample({0, 31.9F, -50}, row.view()), 0);
  row.output.push_back(0);
  EXPECT_EQ(device.sample({0, 32.5F, -50}, row.view()), 1) << "32767 / 1024 is less";
}

// A bias for the whole vocabulary is uploaded once per request, except for rows that return log probabilities. Padding
// changes nothing.
TEST(CudaSampleTest, rows_of_one_request_share_their_list) {
  in_both_orders([] {
    constexpr int kVocab = 5000, kRows = 8;
    Random random(30);
    const auto logits = Matrix::random(random, DType::f32, kRows, kVocab, 2, 3);
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
    Device device(kVocab, 300);
    for (const int padding : {0, 250}) {
      const auto sampled = device.sample(logits, rows, padding);
      EXPECT_EQ(device.packed.list_entries, 4 * kVocab) << "one shared list, one of other bans, and two more";
      for (std::size_t r = 0; r < kRows; ++r) {
        const auto x = logits.floats(static_cast<std::int64_t>(r));
        expect_drawn(x, rows[r], sampled[r]);
        expect_logprobs(x, rows[r], sampled[r]);
      }
    }
  });
}

TEST(CudaSampleTest, rows_outside_the_vocabulary_are_rejected) {
  Sampler sampler(10, 2);
  SampleNotes notes;
  std::vector<std::byte> bytes;
  Rows rows(2);
  const Ids outside = {3, 10};
  rows[1].banned = outside;
  expect_error(ErrorCode::internal, {"token id 10"}, [&] { sampler.pack(rows, 2, bytes, notes); });
  EXPECT_THROW(Sampler(300000, 1), Error);
}

}  // namespace
}  // namespace charonia::cuda
