// Sessions, and attempts to break them. Sessions affect only speed, so every turn has the same tokens as the
// whole conversation in an engine without sessions.
#include <deque>
#include <fstream>
#include <thread>

#include "engine_fixture.h"

namespace charonia {
namespace {

using testing::Collector;
using testing::request;
using testing::tokens_of;

class EngineSessionTest : public testing::EngineFixture {
 protected:
  // A conversation: the history that the session should have, and the next input.
  struct Talk {
    std::string id = "s";
    std::vector<TokenId> history;
    void add(const std::vector<TokenId>& tokens) { history.insert(history.end(), tokens.begin(), tokens.end()); }
    int size() const { return static_cast<int>(history.size()); }
  };

  static std::vector<TokenId> words(int count, int seed) {
    std::vector<TokenId> out;
    for (int i = 0; i < count; ++i) out.push_back(1 + (seed * 13 + i * 7 + i * i) % 39);
    return out;
  }
  static Request turn(const Talk& talk, std::vector<TokenId> input, int max_tokens) {
    auto out = request({}, max_tokens);
    out.session_id = talk.id;
    out.continuation_ids = std::move(input);
    return out;
  }
  // Sends `input`, and compares the completion with the whole conversation without a session.
  Result say(Engine& engine, Talk& talk, const std::vector<TokenId>& input, int max_tokens = 12) {
    Collector out(engine, turn(talk, input, max_tokens));
    EXPECT_EQ(out.last().num_session_tokens, talk.size());
    talk.add(input);
    EXPECT_EQ(out.last().num_input_tokens, talk.size());
    EXPECT_EQ(out.tokens(), alone(request(talk.history, max_tokens)));
    talk.add(out.tokens());
    engine.check_integrity();
    return out.last();
  }
  static SessionInfo info_of(const Engine& engine, const std::string& id) {
    for (const auto& one : engine.sessions()) {
      if (one.id == id) return one;
    }
    return {};
  }
};
INSTANTIATE_TEST_SUITE_P(Device, EngineSessionTest, testing::kDevices, testing::device_name);

TEST_P(EngineSessionTest, AConversationGoesOnAndItsBlocksAreFound) {
  const auto one = engine();
  Talk talk;
  EXPECT_EQ(say(*one, talk, words(20, 1)).num_cached_tokens, 0);
  for (int i = 2; i < 6; ++i) {
    const auto before = talk.size();
    // All full blocks that were computed; the last token of a completion is never computed.
    EXPECT_EQ(say(*one, talk, words(5, i)).num_cached_tokens, (before - 1) / 4 * 4);
  }
  const auto info = info_of(*one, "s");
  EXPECT_EQ(info.num_tokens, talk.size());
  EXPECT_EQ(info.num_turns, 5);
  EXPECT_GT(info.num_pinned_blocks, 0);
  EXPECT_FALSE(info.busy);
  EXPECT_EQ(one->stats().num_sessions, 1);
  EXPECT_EQ(one->stats().blocks_pinned, info.num_pinned_blocks);
}

TEST_P(EngineSessionTest, AWholeConversationReplacesTheHistory) {
  const auto one = engine();
  Talk talk;
  say(*one, talk, words(10, 1));
  auto whole = request(words(15, 9), 10);
  whole.session_id = "s";
  Collector out(*one, whole);
  talk.history = whole.input_ids;
  EXPECT_EQ(out.tokens(), alone(whole));
  EXPECT_EQ(out.last().num_session_tokens, 0);
  talk.add(out.tokens());
  say(*one, talk, words(4, 2));
  EXPECT_EQ(info_of(*one, "s").num_turns, 2);
  // A conversation that continues the history keeps its turns.
  auto longer = whole;
  longer.input_ids = talk.history;
  longer.input_ids.push_back(7);
  EXPECT_EQ(tokens_of(*one, longer), alone(longer));
  EXPECT_EQ(info_of(*one, "s").num_turns, 3);
}

TEST_P(EngineSessionTest, TurnsOfOneSessionAreAnsweredInTheOrderInWhichTheyCame) {
  faults_->step_ms = 1;
  const auto one = engine();
  Talk talk;
  std::deque<Collector> outs;
  for (int i = 0; i < 6; ++i) one->submit(turn(talk, words(3 + i, i), 10), outs.emplace_back().callback());
  tokens_of(*one, request({3, 4}, 5));  // does not wait for other requests
  for (int i = 0; i < 6; ++i) {
    talk.add(words(3 + i, i));
    EXPECT_EQ(outs[static_cast<std::size_t>(i)].tokens(), alone(request(talk.history, 10))) << "turn " << i;
    talk.add(outs[static_cast<std::size_t>(i)].tokens());
  }
  EXPECT_EQ(info_of(*one, "s").num_tokens, talk.size());
  one->check_integrity();
  EXPECT_EQ(one->stats().num_waiting + one->stats().num_running, 0);
}

TEST_P(EngineSessionTest, ManyClientsInFewSessionsWithFewBlocks) {
  const auto one = engine(
      {{"cache_max_entry_count", "40"}, {"session_len", "150"}, {"max_batch_size", "4"}, {"token_budget", "16"}});
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      Talk talk{"client" + std::to_string(c), {}};
      for (int i = 0; i < 4; ++i) {
        const auto input = words(6 + c, c * 10 + i);
        const auto tokens = tokens_of(*one, turn(talk, input, 12));
        talk.add(input);
        talk.add(tokens);
      }
      // The last completion checks everything, because its prompt is the whole conversation.
      Collector out(*one, turn(talk, words(5, 90 + c), 8));
      talk.add(words(5, 90 + c));
      EXPECT_EQ(out.last().num_input_tokens, talk.size());
      EXPECT_EQ(out.tokens(), tokens_of(*one, request(talk.history, 8)));
    });
  }
  for (auto& client : clients) client.join();
  one->check_integrity();
}

TEST_P(EngineSessionTest, CancelDropsTheTurnAndStopKeepsIt) {
  lengthen();
  const auto one = engine();
  for (const bool stops : {false, true}) {
    Talk talk{stops ? "stops" : "cancels", {}};
    say(*one, talk, words(7, 3));
    Collector cut;
    const auto input = words(5, 4);
    const auto handle = one->submit(turn(talk, input, 15'000), cut.callback());
    cut.wait_for(3);
    EXPECT_TRUE(stops ? one->stop(handle) : one->cancel(handle));
    EXPECT_EQ(cut.last().finish_reason, FinishReason::cancelled);
    if (stops) talk.add(input), talk.add(cut.tokens());
    EXPECT_EQ(info_of(*one, talk.id).num_tokens, talk.size());
    say(*one, talk, words(4, 5));
  }
}

TEST_P(EngineSessionTest, CancelInPrefillLeavesTheHistoryAsItWas) {
  lengthen();
  const auto one = engine({{"token_budget", "4"}});
  Talk talk;
  say(*one, talk, words(6, 1));
  Collector cut;
  const auto steps = one->stats().num_steps;
  const auto handle = one->submit(turn(talk, words(15'000, 2), 10), cut.callback());
  while (one->stats().num_steps < steps + 2) std::this_thread::yield();
  one->cancel(handle);
  EXPECT_EQ(cut.last().finish_reason, FinishReason::cancelled);
  EXPECT_TRUE(cut.tokens().empty());
  say(*one, talk, words(6, 3));
}

TEST_P(EngineSessionTest, CancelWhileAnotherTurnRunsTakesOneOutOfTheLine) {
  lengthen();
  const auto one = engine();
  Talk talk;
  Collector running, dropped, third;
  const auto first = words(5, 1), last = words(4, 3);
  const auto runs = one->submit(turn(talk, first, 15'000), running.callback());
  const auto handle = one->submit(turn(talk, words(6, 2), 20), dropped.callback());
  one->submit(turn(talk, last, 10), third.callback());
  running.wait_for(2);
  EXPECT_TRUE(one->cancel(handle));
  EXPECT_EQ(dropped.last().finish_reason, FinishReason::cancelled);
  EXPECT_TRUE(dropped.tokens().empty());
  EXPECT_TRUE(one->stop(runs));
  for (const auto& part : {first, running.tokens(), last}) talk.add(part);
  EXPECT_EQ(third.tokens(), alone(request(talk.history, 10)));
}

TEST_P(EngineSessionTest, AFailedTurnIsDropped) {
  const auto one = engine();
  Talk talk;
  say(*one, talk, words(6, 1));
  auto late = turn(talk, words(5, 2), 200);
  late.timeout_ms = 1;
  faults_->step_ms = 3;
  Collector cut(*one, late);
  EXPECT_EQ(cut.last().finish_reason, FinishReason::error);
  EXPECT_EQ(cut.last().error_code, ErrorCode::deadline_exceeded);
  say(*one, talk, words(5, 3));
}

TEST_P(EngineSessionTest, AConversationLongerThanTheContextLosesItsOldestTurns) {
  const auto one = engine({{"session_len", "100"}});
  Talk talk;
  std::vector<std::size_t> begins;  // of the turns in talk.history
  for (int i = 0; i < 12; ++i) {
    const auto input = words(9, i);
    Collector out(*one, turn(talk, input, 15));
    begins.push_back(talk.history.size());
    talk.add(input);
    // The turns that fit with 15 tokens of room.
    std::size_t first = 0;
    while (talk.history.size() - begins[first] + 15 > 100) ++first;
    const std::vector<TokenId> kept(talk.history.begin() + static_cast<std::ptrdiff_t>(begins[first]),
                                    talk.history.end());
    EXPECT_EQ(out.tokens(), alone(request(kept, 15))) << "turn " << i;
    EXPECT_EQ(out.last().num_input_tokens, static_cast<int>(kept.size()));
    talk.add(out.tokens());
    EXPECT_LE(info_of(*one, "s").num_tokens, 100);
  }
  // Without max_tokens a quarter of the context stays free.
  auto open_end = turn(talk, words(9, 50), 1);
  open_end.sampling.max_tokens.reset();
  Collector out(*one, open_end);
  EXPECT_LE(out.last().num_input_tokens, 75);
  EXPECT_EQ(out.last().num_input_tokens + out.last().num_output_tokens, 100);
  // Also if max_tokens may exceed the rest.
  auto fitted = turn(talk, words(9, 51), 90);
  fitted.fit_max_tokens = true;
  Collector as_much(*one, fitted);
  EXPECT_GT(as_much.last().num_input_tokens, 9);  // with some of the history
  EXPECT_EQ(as_much.last().num_input_tokens + as_much.last().num_output_tokens, 100);
  // Only an input that does not fit by itself is an error.
  expect_error(ErrorCode::invalid_argument, {"95", "15", "110", "100"},
               [&] { one->submit(turn(talk, words(95, 1), 15), out.callback()); });
}

TEST_P(EngineSessionTest, EndSessionForgetsAndARunningRequestGoesOn) {
  lengthen();
  const auto one = engine();
  EXPECT_FALSE(one->end_session("s"));
  Talk talk;
  say(*one, talk, words(6, 1));
  const auto input = words(5, 2);
  Collector running;
  const auto handle = one->submit(turn(talk, input, 15'000), running.callback());
  running.wait_for(2);
  EXPECT_TRUE(info_of(*one, "s").busy);
  EXPECT_TRUE(one->end_session("s"));
  one->check_integrity();
  EXPECT_EQ(one->stats().blocks_pinned, 0);
  EXPECT_TRUE(one->stop(handle));
  talk.add(input);
  EXPECT_EQ(running.tokens(), alone(request(talk.history, static_cast<int>(running.tokens().size()))));
  one->check_integrity();
  EXPECT_TRUE(one->sessions().empty());
  EXPECT_EQ(one->stats().num_sessions, 0);
  talk.history.clear();
  say(*one, talk, words(5, 3));
  EXPECT_TRUE(one->end_session("s"));
  one->check_integrity();
  EXPECT_EQ(one->stats().blocks_pinned, 0);
  auto last = turn(talk, words(5, 4), 5);
  last.end_session = true;
  tokens_of(*one, last);
  EXPECT_TRUE(one->sessions().empty());
}

TEST_P(EngineSessionTest, IdleSessionsExpire) {
  const auto one = engine({{"session_ttl_s", "0.05"}});
  Talk talk;
  say(*one, talk, words(6, 1));
  while (!one->sessions().empty()) std::this_thread::yield();
  EXPECT_EQ(one->stats().num_sessions, 0);
  while (one->stats().blocks_pinned > 0) std::this_thread::yield();  // an idle engine releases them by itself
  talk.history.clear();
  say(*one, talk, words(5, 2), 5);
}

TEST_P(EngineSessionTest, TheLongestIdleSessionLosesItsBlocksFirst) {
  const auto one = engine({{"cache_max_entry_count", "64"}, {"session_quota", "0.25"}, {"session_len", "200"}});
  std::vector<Talk> talks;
  for (int i = 0; i < 4; ++i) {
    talks.push_back({std::to_string(i), {}});
    say(*one, talks.back(), words(17, i), 8);
    EXPECT_LE(one->stats().blocks_pinned, 16);
  }
  EXPECT_EQ(info_of(*one, "0").num_pinned_blocks, 0);
  EXPECT_EQ(info_of(*one, "3").num_pinned_blocks, 6);
  Talk longest{"long", {}};
  say(*one, longest, words(120, 7), 8);
  EXPECT_EQ(info_of(*one, "long").num_pinned_blocks, 16) << "only the first blocks of the history are pinned";
  for (auto& talk : talks) say(*one, talk, words(3, 9), 4);
}

TEST_P(EngineSessionTest, BeyondMaxSessionsTheLongestIdleIsForgotten) {
  const auto one = engine({{"max_sessions", "2"}});
  std::vector<Talk> talks{{"a", {}}, {"b", {}}, {"c", {}}};
  for (auto& talk : talks) say(*one, talk, words(6, 2));
  ASSERT_EQ(one->sessions().size(), 2U);
  EXPECT_EQ(one->sessions()[0].id, "b");
  EXPECT_EQ(one->sessions()[1].id, "c");
}

TEST_P(EngineSessionTest, HistoriesSurviveARestartWhereTheyHaveAFolder) {
  // In nanoseconds the time to live does not fit into 64 bits.
  const Settings settings{{"session_dir", (dir_ / "sessions").string()}, {"session_ttl_s", "1e10"}};
  Talk talk{"../\xE2\x82\xAC /" + std::string(300, 'x'), {}}, gone{"gone", {}}, forgotten{"memory", {}};
  {
    const auto one = engine(settings);
    say(*one, talk, words(9, 1));
    say(*one, gone, words(9, 2));
    say(*one, talk, words(4, 3));
    one->end_session("gone");
  }
  say(*engine(), forgotten, words(6, 1));
  std::ofstream(dir_ / "sessions" / "notes.txt") << "not ours";
  const auto one = engine(settings);
  EXPECT_TRUE(one->info().warnings.empty());
  ASSERT_EQ(one->sessions().size(), 1U);
  EXPECT_EQ(one->sessions()[0].num_turns, 2);
  say(*one, talk, words(5, 4));
  forgotten.history.clear();
  say(*one, forgotten, words(6, 5));
}

TEST_P(EngineSessionTest, DamagedFilesAreAWarningAndOthersModelsAreNotRead) {
  const auto folder = dir_ / "sessions";
  const Settings settings{{"session_dir", folder.string()}};
  Talk first{"first", {}}, second{"second", {}};
  {
    const auto one = engine(settings);
    say(*one, first, words(9, 1));
    say(*one, second, words(9, 2));
  }
  std::filesystem::path damaged;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("s6669727374")) damaged = entry.path();  // "first"
  }
  ASSERT_FALSE(damaged.empty());
  std::fstream(damaged, std::ios::in | std::ios::out | std::ios::binary).seekp(40).put('?');
  {
    const auto one = engine(settings);
    ASSERT_EQ(one->info().warnings.size(), 1U);
    EXPECT_NE(one->info().warnings[0].find(damaged.string()), std::string::npos);
    say(*one, second, words(3, 3));
    first.history.clear();
    say(*one, first, words(3, 4));
  }
  testing::TinyModel larger;
  larger.vocab = 50;
  write_tiny_workspace(weights(), larger);
  const auto other = engine(settings);
  EXPECT_TRUE(other->info().warnings.empty());
  EXPECT_TRUE(other->sessions().empty());
}

TEST_P(EngineSessionTest, WithoutSessionsWholeConversationsAreAnsweredAndContinuationsRejected) {
  const auto none = engine({{"session_ttl_s", "0"}}), one = engine();
  auto whole = request(words(9, 1), 8);
  whole.session_id = "s";
  EXPECT_EQ(tokens_of(*none, whole), alone(whole));
  EXPECT_TRUE(none->sessions().empty());
  auto several = turn({}, words(3, 2), 5), nameless = several;
  several.sampling.n = 2;
  nameless.session_id.clear();
  const auto rejected = [](Engine& engine, const Request& asked, std::string_view named) {
    expect_error(ErrorCode::invalid_argument, {named}, [&] { engine.submit(asked, {}); });
  };
  rejected(*none, turn({}, words(3, 2), 5), "session_ttl_s");
  rejected(*one, several, "n = 2");
  rejected(*one, nameless, "session_id");
}

TEST_P(EngineSessionTest, AnEndIdThatTheContinuationRepeatsIsNotDoubled) {
  const auto one = engine();
  auto begin = request(words(6, 1), 40);
  begin.session_id = "s";
  begin.sampling.ignore_eos = false;
  const auto end_id = alone(request(words(6, 1), 40))[3];
  begin.sampling.end_ids = {end_id};
  Talk talk{"s", begin.input_ids};
  talk.add(tokens_of(*one, begin));
  ASSERT_EQ(talk.history.back(), end_id);
  auto next = turn(talk, {end_id, 5, 6}, 6);
  next.sampling.end_ids = {end_id};
  Collector second(*one, next);
  talk.add({5, 6});
  EXPECT_EQ(second.last().num_input_tokens, talk.size());
  EXPECT_EQ(second.tokens(), alone(request(talk.history, 6)));
}

// Regression: a turn of one end id that is kept without a completion leaves a turn without tokens. The next turn, which
// needs all the room, kept nothing of the history and dropped its own end id too: a prompt without a token, which ended
// all requests.
TEST_P(EngineSessionTest, ATurnOfOneEndIdThatNeedsAllTheRoomHasAPrompt) {
  lengthen();
  const auto one = engine({{"max_batch_size", "1"}});
  auto begin = request(words(6, 1), 3);
  begin.session_id = "s";
  const auto end_id = tokens_of(*one, begin).back();

  Collector running, stopped, last;
  const auto runs = one->submit(request({1, 2}, 19'000), running.callback());
  running.wait_for(1);
  auto closing = turn({}, {end_id}, 5);
  closing.sampling.end_ids = {end_id};
  ASSERT_TRUE(one->stop(one->submit(closing, stopped.callback())));
  EXPECT_TRUE(stopped.tokens().empty()) << "it must wait for its first token while another request runs";
  closing.sampling.max_tokens = one->info().config.session_len - 1;
  const auto handle = one->submit(closing, last.callback());
  one->cancel(runs);
  EXPECT_EQ(running.last().finish_reason, FinishReason::cancelled) << running.last().error;
  last.wait_for(1);
  one->cancel(handle);
  EXPECT_EQ(last.last().error, "");
  EXPECT_EQ(last.last().num_input_tokens, 1);
  one->check_integrity();
}

}  // namespace
}  // namespace charonia
