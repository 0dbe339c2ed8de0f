// The barrier between ranks that run at the same time, as threads of this process.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "guild/exchange.h"
#include "shared/peer_memory.h"

namespace guild::test {

namespace {

// Ranks that meet on the CPU.
class Ranks {
 public:
  explicit Ranks(int64_t count) : peers_(count), report_(count) {
    int64_t const bytes = peer_memory_bytes(memory(0));
    for (void*& peer : peers_) {
      blocks_.emplace_back(bytes / int64_t(sizeof(Block)) + 1);
      peer = blocks_.back().data();
    }
  }

  Meet meeting(int64_t rank, double seconds) {
    Meet x;
    x.memory = memory(rank), x.seconds = seconds, x.report = &report_[rank];
    return x;
  }
  PeerReport const& report(int64_t rank) const { return report_[rank]; }

 private:
  struct alignas(16) Block {
    char bytes[16] = {};
  };

  PeerMemory memory(int64_t rank) const {
    return {int64_t(peers_.size()), rank, 4, 2, 32, int64_t(peers_.size()), peers_.data()};
  }

  std::vector<std::vector<Block>> blocks_;
  std::vector<void*> peers_;
  std::vector<PeerReport> report_;
};

TEST(Meeting, EndsAtOnceForAllRanks) {
  Ranks ranks(4);
  std::vector<std::thread> others;
  for (int64_t r = 1; r < 4; ++r) {
    others.emplace_back([&, r] { cpu::meet(ranks.meeting(r, 60)); });
  }
  cpu::meet(ranks.meeting(0, 60));
  for (std::thread& other : others) other.join();
  for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(ranks.report(r).failure, 0) << "rank " << r;
}

// Each rank is waited for until the same moment, not for as long again after the one before it.
TEST(Meeting, HasOneDeadline) {
  Ranks ranks(3);
  std::vector<std::thread> others;
  for (int64_t r = 1; r < 3; ++r) {
    others.emplace_back([&, r] {
      std::this_thread::sleep_for(std::chrono::milliseconds(r == 1 ? 600 : 1500));
      cpu::meet(ranks.meeting(r, 60));
    });
  }
  cpu::meet(ranks.meeting(0, 1));
  for (std::thread& other : others) other.join();
  for (int64_t r = 0; r < 3; ++r) {
    SCOPED_TRACE(r);
    EXPECT_EQ(ranks.report(r).failure, int64_t(PeerFailure::late));
    EXPECT_EQ(ranks.report(r).rank, 2);
    EXPECT_EQ(ranks.report(r).reporter, 0);
  }
}

// A failure is one word.
TEST(PeerMemory, FailuresAreUnpackedAsTheyWerePacked) {
  for (int64_t const rows : {int64_t(0), int64_t(1), (int64_t(1) << 31) - 1}) {
    for (int64_t const rank : {0, kMostRanks - 1}) {
      PeerReport const found =
          unpacked(packed(PeerFailure::overflow, rank, kMostRanks - 1 - rank, kMostFacts, rows));
      EXPECT_EQ(found.failure, int64_t(PeerFailure::overflow));
      EXPECT_EQ(found.rank, rank);
      EXPECT_EQ(found.reporter, kMostRanks - 1 - rank);
      EXPECT_EQ(found.fact, kMostFacts);
      EXPECT_EQ(found.rows, rows);
    }
  }
  EXPECT_EQ(unpacked(packed(PeerFailure::late, 3, 1, 0)).rows, 0);
}

}  // namespace

}  // namespace guild::test
