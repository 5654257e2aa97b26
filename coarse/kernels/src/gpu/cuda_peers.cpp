#include "coarse/gpu/cuda_peers.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace coarse::cuda {
namespace {

constexpr std::size_t kTriedBytes = std::size_t{1} << 20;

/// The results of this process's tests.
struct Findings {
  std::mutex mutex;                                              // guards the next member
  std::map<std::pair<int, std::string>, std::string> obstacles;  // by device, and UUID of the peer
  std::vector<std::string> untold;
};

Findings& findings() {
  static auto* const all = new Findings;  // never destroyed: threads may ask as the process ends
  return *all;
}

/// Distinct numbers that memory does not contain by chance.
std::vector<std::uint64_t> pattern() {
  std::vector<std::uint64_t> words(kTriedBytes / sizeof(std::uint64_t));
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (std::uint64_t& word : words) word = state = state * 6364136223846793005U + 1442695040888963407U;
  return words;
}

/// Whether a copy by `user` to a peer's memory and back preserves the data; the memory's contents are
/// preserved.
/// @param numBytes up to kTriedBytes.
bool keepsCopies(const SharedContext& user, DeviceAddress there, std::size_t numBytes) {
  const std::vector<std::uint64_t> sent = pattern();
  const DeviceMemory own = DeviceMemory::allocate(user, 2 * kTriedBytes);
  const DeviceAddress kept = own.address() + kTriedBytes;
  std::vector<std::uint64_t> received(numBytes / sizeof(std::uint64_t));
  const ContextScope scope(*user);
  Stream stream(user);
  stream.copyOnDevice(kept, there, numBytes);
  stream.copyToDevice(own.address(), sent.data(), numBytes);
  stream.copyOnDevice(there, own.address(), numBytes);
  stream.fill(own.address(), 0, numBytes);
  stream.copyOnDevice(own.address(), there, numBytes);
  stream.copyToHost(received.data(), own.address(), numBytes);
  stream.copyOnDevice(there, kept, numBytes);
  stream.synchronize();
  return std::equal(received.begin(), received.end(), sent.begin());
}

/// The name of a peer in messages.
std::string nameOf(const std::string& uuid) {
  const int device = deviceOf(uuid);
  return device < 0 ? uuid : "cuda:" + std::to_string(device);
}

/// The obstacle to copies from a device to a peer, by a trial that reports whether they arrive.
/// @pre findings().mutex is held
template <typename Trial>
std::string findObstacle(Findings& known, int device, const std::string& peer, Trial arrive) {
  const std::string copies =
      "copies from cuda:" + std::to_string(device) + " to " + nameOf(peer) + " and back";
  try {
    if (arrive()) return "";
    known.untold.push_back(copies +
                           " arrive wrong, although cuDeviceCanAccessPeer promises that they can be made: "
                           "something between these GPUs "
                           "loses them (an IOMMU, or access control of PCIe switches). COARSE copies through "
                           "the host there; have NCCL "
                           "do so too by NCCL_P2P_DISABLE=1");
    return known.untold.back();
  } catch (const OutOfMemoryError&) {
    return "";  // not enough memory to test it: the driver's answer counts
  } catch (const Error& error) {
    known.untold.push_back(copies + " could not be tried, and are relied on: " + error.what());
    return "";
  }
}

/// The known obstacle of a pair, or else the result of a trial.
template <typename Trial>
std::string obstacleBetween(int device, const std::string& peer, Trial arrive) {
  Findings& known = findings();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.obstacles.find({device, peer});
  if (found != known.obstacles.end()) return found->second;
  return known.obstacles[{device, peer}] = findObstacle(known, device, peer, arrive);
}

}  // namespace

std::string peerObstacle(int device, int peer) {
  if (device == peer) return "";
  if (!canAccessPeer(device, peer)) return "cuDeviceCanAccessPeer says no";
  return obstacleBetween(device, deviceUuid(peer), [&] {
    const auto user = std::make_shared<const Context>(device);
    const DeviceMemory there = DeviceMemory::allocateOn(peer, user, kTriedBytes);
    return keepsCopies(user, there.address(), kTriedBytes);
  });
}

std::string peerObstacle(int device, const std::string& peer) {
  if (const int seen = deviceOf(peer); seen >= 0) return peerObstacle(device, seen);
  Findings& known = findings();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.obstacles.find({device, peer});
  return found == known.obstacles.end() ? "" : found->second;
}

void requireKeptCopies(const DeviceMemory& memory, const Region& region) {
  const SharedContext& user = memory.context();
  DeviceAddress address = memory.address();
  const auto tryPiece = [&](const Region& piece) {
    const DeviceAddress begin = std::exchange(address, address + piece.numBytes);
    if (piece.gpu.empty() || deviceOf(piece.gpu) >= 0) return;
    const std::string obstacle = obstacleBetween(user->device(), piece.gpu, [&] {
      return keepsCopies(user, begin, std::min<std::size_t>(piece.numBytes, kTriedBytes));
    });
    if (!obstacle.empty()) throw Error(obstacle);
  };
  tryPiece(region);
  for (const Region& piece : region.rest) tryPiece(piece);
}

bool reachesPeer(int device, int peer) { return peerObstacle(device, peer).empty(); }

std::vector<std::string> takePeerWarnings() {
  Findings& known = findings();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return std::exchange(known.untold, {});
}

}  // namespace coarse::cuda
