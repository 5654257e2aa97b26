#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "coarse/collectives/collective.hpp"
#include "coarse/collectives/group_scratch.hpp"

namespace coarse {

/// Messages between ranks of a group, matched by sender and tag, in the order in which they were sent.
///
/// Each ordered pair of ranks has a *channel*, a ring of bytes in the group's scratch (message_area.hpp).
/// Each rank has a *bell*, which others ring after they wrote to it or took from it. A thread per rank,
/// started at the first message, moves bytes both ways, so that no order of sends and receives can block. A
/// message without a matching receive stays in its channel and blocks its sender, until the receiver waits
/// for a message from that sender. Messages that arrive before the awaited one are set aside.
///
/// Thread safety: any thread may call anything. A `done` must not call close().
class Messages {
 public:
  /// @param scratch of the group; outlives this.
  explicit Messages(const GroupScratch& scratch);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  /// Accepts a message; the messages' thread calls `done`.
  /// @throws std::invalid_argument if there is no such rank.
  void post(const Message& message);

  /// Ends messages in progress with an error. Idempotent.
  void close() noexcept;

 private:
  struct Header;
  struct Incoming;
  struct Kept;
  struct Pending : Message {
    Clock::time_point deadline;  // of clock_
  };

  std::size_t put(std::size_t to, const void* data, std::size_t numBytes);
  std::size_t take(std::size_t from, void* data, std::size_t numBytes);

  void serve();
  bool acceptPosts();
  bool advanceSends(std::size_t to);
  bool advanceReceives(std::size_t from);
  bool matchKept();
  void beginIncoming(std::size_t from, Incoming& incoming);
  void endIncoming(std::size_t from, Incoming& incoming);
  std::list<Pending>::iterator findReceive(std::size_t from, const Header& header);
  bool isAwaited(std::size_t from) const;
  void dropLost();
  void giveUp(Incoming& incoming, const std::string& why);
  std::string lossOf(const Pending& message, Clock::time_point now) const;
  void fail(const Message& message, const std::string& why) const;

  const GroupScratch& scratch_;
  const std::size_t rank_;
  const std::size_t numRanks_;
  const MessageArea& area_;

  std::mutex mutex_;  // guards posted_, isClosed_ and thread_
  std::vector<Message> posted_;
  bool isClosed_ = false;
  std::thread thread_;
  std::mutex joining_;

  // Used by the thread alone.
  AttendedClock clock_;
  struct Outgoing {
    Pending message;
    std::size_t moved = 0;  // header included
  };
  std::vector<std::string> brokenSends_;     // by receiver: why a message was only half sent; "" if none was
  std::vector<std::deque<Outgoing>> sends_;  // by receiver
  std::list<Pending> receives_;              // in posting order
  std::vector<std::unique_ptr<Incoming>> incoming_;
  std::list<Kept> kept_;
};

}  // namespace coarse
