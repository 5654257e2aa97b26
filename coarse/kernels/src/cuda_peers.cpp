#include "coarse/cuda_peers.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "coarse/cuda_driver.hpp"

namespace coarse::cuda {
namespace {

constexpr std::size_t kTriedWords = std::size_t{1} << 17;  // 1 MiB

/// What this process has found out.
struct Findings {
  std::mutex mutex;  // guards what follows
  std::map<std::pair<int, int>, std::string> obstacles;
  std::vector<std::string> untold;
};

Findings& findings() {
  static auto* const all = new Findings;  // never destroyed: threads may ask as the process ends
  return *all;
}

/// Numbers of which no two are alike, and none is what memory holds by chance.
std::vector<std::uint64_t> pattern() {
  std::vector<std::uint64_t> words(kTriedWords);
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (std::uint64_t& word : words) word = state = state * 6364136223846793005U + 1442695040888963407U;
  return words;
}

/// Whether what `user` copies to the memory of a peer and back is what it was.
bool keepsCopies(const SharedContext& user, int peer) {
  const std::vector<std::uint64_t> sent = pattern();
  const std::size_t numBytes = sent.size() * sizeof(std::uint64_t);
  const DeviceMemory own = DeviceMemory::allocate(user, numBytes);
  const DeviceMemory there = DeviceMemory::allocateOn(peer, user, numBytes);
  std::vector<std::uint64_t> received(sent.size());
  const ContextScope scope(*user);
  Stream stream(user);
  stream.copyToDevice(own.address(), sent.data(), numBytes);
  stream.copyOnDevice(there.address(), own.address(), numBytes);
  stream.fill(own.address(), 0, numBytes);
  stream.copyOnDevice(own.address(), there.address(), numBytes);
  stream.copyToHost(received.data(), own.address(), numBytes);
  stream.synchronize();
  return sent == received;
}

std::string between(int device, int peer) {
  return "copies from cuda:" + std::to_string(device) + " to cuda:" + std::to_string(peer) + " and back";
}

}  // namespace

std::string peerObstacle(int device, int peer) {
  if (device == peer) return "";
  if (!canAccessPeer(device, peer)) return "cuDeviceCanAccessPeer says no";
  Findings& known = findings();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.obstacles.find({device, peer});
  if (found != known.obstacles.end()) return found->second;
  std::string obstacle;
  try {
    if (!keepsCopies(std::make_shared<const Context>(device), peer)) {
      obstacle =
          between(device, peer) +
          " arrive wrong, although cuDeviceCanAccessPeer promises that they can be made: something "
          "between these GPUs loses them (an IOMMU, or access control of PCIe switches). COARSE copies "
          "through the host there; have NCCL do so too by NCCL_P2P_DISABLE=1";
      known.untold.push_back(obstacle);
    }
  } catch (const OutOfMemoryError&) {
    // There is no room to try it: what the driver says counts.
  } catch (const Error& error) {
    known.untold.push_back(between(device, peer) + " could not be tried, and are relied on: " + error.what());
  }
  return known.obstacles[{device, peer}] = std::move(obstacle);
}

bool reachesPeer(int device, int peer) { return peerObstacle(device, peer).empty(); }

std::vector<std::string> takePeerWarnings() {
  Findings& known = findings();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return std::exchange(known.untold, {});
}

}  // namespace coarse::cuda
