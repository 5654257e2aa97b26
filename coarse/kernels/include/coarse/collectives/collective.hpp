#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

/// One collective operation on plain memory, as requested by the ranks of a group
/// (docs/design/torch-backend.md). Independent of torch and Python; a separately compiled torch extension
/// includes this header.
namespace coarse {

/// Ranks compare these values: add at the end, never renumber.
enum class CollectiveKind : std::uint8_t {
  kBarrier = 0,
  kBroadcast = 1,
  kAllReduce = 2,
  kReduce = 3,
  kAllGather = 4,
  kReduceScatter = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
};

/// The type of elements in a reduction. Operations that only move bytes use kOpaque.
enum class ElementType : std::uint8_t {
  kOpaque = 0,
  kFloat32 = 1,
  kFloat64 = 2,
  kBFloat16 = 3,
  kFloat16 = 4,
  kInt8 = 5,
  kUInt8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
  kBool = 10,
};

enum class Combine : std::uint8_t {
  kNone = 0,
  kSum = 1,
  kMean = 2,
  kMax = 3,
  kMin = 4,
  kProduct = 5,
  kBitAnd = 6,
  kBitOr = 7,
  kBitXor = 8,
};

inline constexpr std::size_t kMostDims = 8;
inline constexpr std::size_t kDTypeNameBytes = 16;

/// A rank's description of its call, compared by all ranks: any difference is a user's mistake.
struct CallHeader {
  std::uint64_t sequence = 0;
  std::uint64_t pieceBytes = 0;  // bytes of each rank's piece
  std::int64_t dims[kMostDims] = {};
  char dtype[kDTypeNameBytes] = {};
  std::int32_t root = -1;
  CollectiveKind kind = CollectiveKind::kBarrier;
  Combine combine = Combine::kNone;
  std::uint8_t numDims = 0;  // of a piece; 255: not given
  std::uint8_t reserved = 0;
};

inline constexpr std::uint8_t kDimsNotTold = 255;

/// One call of one rank. A *piece* is one rank's contribution to the operation, or its part of the result:
/// the whole tensor of an all-reduce, the output of a reduce-scatter, the input of an all-gather.
///
/// inputs and outputs have an entry per rank if there is a piece for or from each rank (inputs of
/// reduce-scatter, scatter at the root and all-to-all; outputs of all-gather, gather at the root and
/// all-to-all), else one. Input and output may be the same memory, piece by piece; they must not partly
/// overlap.
struct Collective {
  CallHeader header;  // sequence is set by the group
  ElementType element = ElementType::kOpaque;
  std::size_t elementBytes = 1;
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  const std::uint64_t* inputBytes = nullptr;   // all-to-all: for each rank
  const std::uint64_t* outputBytes = nullptr;  // all-to-all: from each rank
  std::chrono::milliseconds timeout{0};
};

/// One message between two ranks.
struct Message {
  bool isSend = false;
  int peer = -1;  // -1: a receive from any rank
  int tag = 0;
  void* data = nullptr;  // read or written until done
  std::size_t numBytes = 0;
  char dtype[kDTypeNameBytes] = {};
  std::chrono::milliseconds timeout{0};  // counted from post()
  /// Called once with "" or the error, and the peer.
  std::function<void(const std::string& error, int peer)> done;
};

/// A group of ranks that run the same collectives in the same order.
///
/// Every operation includes a check: if ranks differ in kind, dtype, shape, root or operator, all of them get
/// an error that names rank and sequence number, nothing is written, and the group stays usable. After any
/// other error the group is broken, and every later call fails with the first reason.
///
/// Reductions combine in the order of the ranks, in float32 for 16-bit types, so that all ranks get the same
/// bits.
///
/// Thread safety: one caller of run() at a time; everything else from any thread.
class Collectives {
 public:
  virtual ~Collectives() = default;

  /// @throws std::runtime_error in a fork of the process that joined the group: the fork has the memory, but
  /// is not a rank.
  virtual void checkOwner() const = 0;

  /// Runs one collective to its end.
  /// @throws std::invalid_argument if ranks' calls differ; std::runtime_error if a rank is gone or late, or
  /// the group is closed, or as checkOwner().
  virtual void run(const Collective& call) = 0;

  /// Sends or receives, concurrently with collectives and other messages. Messages are matched by sender and
  /// tag, in sending order; dtype and size must match those sent. Returns immediately.
  /// @throws std::invalid_argument if there is no such rank; as checkOwner().
  virtual void post(const Message& message) = 0;

  /// The number of collectives begun.
  virtual std::uint64_t sequence() const noexcept = 0;

  /// The ranks that have not begun the collective that this rank began last. For another node: the ranks
  /// without news.
  virtual std::string missingRanks() const = 0;

  /// Leaves: a blocked run() throws, and so do other ranks that wait for this one. Idempotent; no effect in a
  /// fork.
  virtual void close() noexcept = 0;
};

/// The layout version of the structures above; a torch extension checks it before it uses them.
inline constexpr std::uint32_t kCollectiveAbi = 4;

}  // namespace coarse
