// A libcuda.so.1 without a GPU: streams are threads, device memory is host memory, or memfds where it is
// shared. Streams run in parallel with each other and the caller, and execute their work in order; waits are
// real. Variables of the environment change it:
//   STAND_IN_GPUS=n         devices that there are (1)
//   CUDA_VISIBLE_DEVICES    numbers of those that the process sees, in this order, as CUDA has it
//   STAND_IN_GPUS_ARE_APART=all, or pairs such as 1:7,3:5: these do not reach each other's memory
//   STAND_IN_LOSES=a:b,...  what device a copies to memory of b does not arrive there, and nothing says so
//   STAND_IN_LINKS=a:b:us:ns,... a copy by device a from or to memory of b takes so many us more, and so many
//                           ns for each byte
//   STAND_IN_PAGE_BYTES=n   what shared memory is taken by (2 MiB)
//   STAND_IN_FAULTS_AT=d:n  the n-th launch of a process on device d fails in its turn, and with it what the
//                           process asks of its GPUs from then on, as CUDA has it
//   STAND_IN_DIES_AT=d:n    SIGKILL ends the process whose n-th launch on device d this is, in its turn
//   STAND_IN_REFUSES=f:n:r  the n-th call of the function f in a process, and those after it, return r
//   STAND_IN_LACKS=n        this attribute of all devices is 0 (CUdevice_attribute)
//   STAND_IN_HIDES_MEMORY=1 device memory is not where its addresses say: a processor that uses one of them
//                           gets SIGSEGV, and a copy or kernel that is given an address of the host's fails
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "coarse/gpu/cuda_api.hpp"
#include "host_kernels.hpp"

using namespace coarse::cuda;

struct CUctx_st {
  DeviceOrdinal device;
};
struct CUevent_st {
  std::shared_ptr<std::atomic<bool>> isDone = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::chrono::steady_clock::time_point> when =
      std::make_shared<std::chrono::steady_clock::time_point>();
};

/// Whether a kernel of this process has failed: nothing that was asked for since is done any more.
static std::atomic<bool> hasFaulted{false};

struct CUstream_st {
  explicit CUstream_st(DeviceOrdinal owner) : device(owner), thread([this] { run(); }) {}
  ~CUstream_st() {
    give({});
    thread.join();
  }
  void give(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    works.push_back(std::move(work));
    changed.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return works.empty(); });
  }
  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !works.empty(); });
      const std::function<void()> work = works.front();
      lock.unlock();
      if (work && !hasFaulted) work();
      lock.lock();
      works.pop_front();
      changed.notify_all();
      if (!work) return;
    }
  }
  const DeviceOrdinal device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> works;  // the first one is being done
  std::atomic<bool> isCapturing{false};
  std::thread thread;
};

namespace {

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidContext = 201;
constexpr Result kNotFound = 500;
constexpr Result kPeerAccessUnsupported = 217;
constexpr Result kLaunchFailed = 719;
constexpr Result kIllegalAddress = 700;
constexpr int kMostDevices = 8;
std::array<CUctx_st, kMostDevices> contexts{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}};

/// The contexts that a thread has made current; used by destructors to the end of a thread, so it has none.
struct CurrentContexts {
  std::array<ContextHandle, 16> stack;
  std::size_t depth;
};
thread_local CurrentContexts current;

/// -1 if none is.
DeviceOrdinal currentDevice() { return current.depth == 0 ? -1 : current.stack[current.depth - 1]->device; }

std::array<std::atomic<std::size_t>, kMostDevices> launchesOn{};

std::mutex pooledMutex;
std::map<DeviceAddress, std::size_t> pooled;  // memory of the device's own pool, and its lengths
std::atomic<std::size_t> pooledLimitBytes{std::size_t{1} << 30};
std::atomic<std::size_t> unreturnedBytes{0};  // that were freed, and nobody has waited for since

std::mutex streamsMutex;
std::set<StreamHandle> streams;

/// Ranges of addresses that do not overlap.
class Ranges {
 public:
  bool add(DeviceAddress begin, std::size_t numBytes) {
    const std::lock_guard lock(mutex_);
    return ranges_.emplace(begin, numBytes).second;
  }
  bool remove(DeviceAddress begin) {
    const std::lock_guard lock(mutex_);
    return ranges_.erase(begin) == 1;
  }
  /// The length of the range in which these lie; 0 if there is none.
  std::size_t around(DeviceAddress begin, std::size_t numBytes) {
    const std::lock_guard lock(mutex_);
    const auto range = ranges_.lower_bound(begin);
    if (range == ranges_.end() || begin + numBytes > range->first + range->second) return 0;
    return range->second;
  }

 private:
  std::mutex mutex_;
  std::map<DeviceAddress, std::size_t, std::greater<>> ranges_;
};
Ranges pinned;    // memory of the host
Ranges reserved;  // addresses of devices; what is mapped there lies as far behind as they are long

std::atomic<std::size_t> numWaits{0};
std::atomic<bool> hidesMemory{std::getenv("STAND_IN_HIDES_MEMORY") != nullptr};

/// Where what a device has at these addresses is in this process; null if it has nothing there.
std::byte* placeOf(DeviceAddress address, std::size_t numBytes) {
  auto* const place = reinterpret_cast<std::byte*>(address);
  if (!hidesMemory || pinned.around(address, numBytes) > 0) return place;
  const std::size_t distance = reserved.around(address, numBytes);
  return distance == 0 ? nullptr : place + distance;
}

/// Whether a word that is no address of a device is probably one of the host's.
bool seemsOfHost(DeviceAddress word) {
  const DeviceAddress top = word >> 40;
  return top == 0x55 || top == 0x56 || top == 0x7e || top == 0x7f;
}

std::size_t wholePages(std::size_t numBytes) { return (numBytes + 4095) / 4096 * 4096; }

/// Addresses with nothing behind them, of whole pages; 0 if there are none.
DeviceAddress reserve(std::size_t numBytes) {
  const std::size_t taken = hidesMemory ? 2 * numBytes : numBytes;
  void* const begin = ::mmap(nullptr, taken, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return 0;
  const auto address = reinterpret_cast<DeviceAddress>(begin);
  reserved.add(address, numBytes);
  return address;
}
bool unreserve(DeviceAddress address, std::size_t numBytes) {
  const std::size_t taken = hidesMemory ? 2 * numBytes : numBytes;
  return reserved.remove(address) && ::munmap(reinterpret_cast<void*>(address), taken) == 0;
}

std::atomic<std::uint32_t>* wordAt(DeviceAddress address) {
  return reinterpret_cast<std::atomic<std::uint32_t>*>(placeOf(address, sizeof(std::uint32_t)));
}

Result state() { return hasFaulted ? kLaunchFailed : kSuccess; }
/// Whether the calling thread may give a stream work: it needs the stream's own context.
Result stateOf(StreamHandle stream) { return currentDevice() == stream->device ? state() : kInvalidContext; }
/// Gives a stream work.
Result give(StreamHandle stream, std::function<void()> work) {
  stream->give(std::move(work));
  return state();
}

/// @param destination, source null if no device has them.
Result copy(void* destination, const void* source, std::size_t numBytes, StreamHandle stream) {
  if (const Result result = stateOf(stream); result != kSuccess) return result;
  if (destination == nullptr || source == nullptr) return kIllegalAddress;
  return give(stream, [=] { std::memcpy(destination, source, numBytes); });
}

std::size_t standInFreeBytes() {
  const std::lock_guard lock(pooledMutex);
  std::size_t taken = 0;
  for (const auto& [memory, numBytes] : pooled) taken += numBytes;
  const std::size_t limit = pooledLimitBytes;
  return limit - std::min(limit, taken);
}

/// STAND_IN_PAGE_BYTES, or 2 MiB: what shared device memory is taken by.
std::size_t pageBytes() {
  static const char* const text = std::getenv("STAND_IN_PAGE_BYTES");
  return text == nullptr ? std::size_t{2} << 20 : std::strtoul(text, nullptr, 10);
}

/// The devices that this process sees, by their numbers on the machine.
std::vector<DeviceOrdinal> visibleDevices() {
  const char* const text = std::getenv("STAND_IN_GPUS");
  const int numDevices = text == nullptr ? 1 : std::clamp(std::atoi(text), 0, kMostDevices);
  std::vector<DeviceOrdinal> visible;
  if (const char* const named = std::getenv("CUDA_VISIBLE_DEVICES"); named != nullptr) {
    std::istringstream names(named);
    for (std::string name; std::getline(names, name, ',');) {
      if (std::atoi(name.c_str()) < numDevices) visible.push_back(std::atoi(name.c_str()));
    }
    return visible;
  }
  for (int device = 0; device < numDevices; ++device) visible.push_back(device);
  return visible;
}

DeviceOrdinal onMachine(DeviceOrdinal device) { return visibleDevices()[static_cast<std::size_t>(device)]; }

/// Whether it is this launch, of those on one device, that a variable names.
/// @param device By its number on the machine.
/// @param launch From 1 on.
bool isNamed(const char* variable, DeviceOrdinal device, std::size_t launch) {
  const char* const text = std::getenv(variable);
  return text != nullptr && std::to_string(device) + ":" + std::to_string(launch) == text;
}

/// What a function of this name returns in place of doing anything; kSuccess if it is to do it.
Result refusal(const char* function) {
  static const char* const text = std::getenv("STAND_IN_REFUSES");
  static const std::size_t length = text == nullptr ? 0 : std::strcspn(text, ":");
  if (length == 0 || std::strlen(function) != length || std::strncmp(text, function, length) != 0)
    return kSuccess;
  static std::atomic<unsigned long> calls{0};
  char* end = nullptr;
  const unsigned long first = std::strtoul(text + length + 1, &end, 10);
  return ++calls < first ? kSuccess : static_cast<Result>(std::strtoul(end + 1, nullptr, 10));
}

struct Owned {
  std::size_t numBytes;
  DeviceOrdinal device;
};

std::mutex ownersMutex;
std::map<DeviceAddress, Owned, std::greater<>> owned;  // mapped memory, and where on the machine it lies

/// @param one, other by their numbers on the machine; -1 is none.
bool areApart(DeviceOrdinal one, DeviceOrdinal other) {
  const char* const text = std::getenv("STAND_IN_GPUS_ARE_APART");
  if (text == nullptr || one == other || other < 0) return false;
  const std::string pairs = "," + std::string(text) + ",";
  const auto names = [&](DeviceOrdinal first, DeviceOrdinal second) {
    return pairs.find("," + std::to_string(first) + ":" + std::to_string(second) + ",") != std::string::npos;
  };
  return pairs == ",all," || names(one, other) || names(other, one);
}
bool areSomeApart() { return std::getenv("STAND_IN_GPUS_ARE_APART") != nullptr; }

/// The device of the machine in whose memory an address is; -1 for others.
DeviceOrdinal ownerAt(DeviceAddress address) {
  const std::lock_guard lock(ownersMutex);
  const auto range = owned.lower_bound(address);
  const bool isWithin = range != owned.end() && address < range->first + range->second.numBytes;
  return isWithin ? range->second.device : -1;
}

/// Whether a device may use what lies at an address, of device memory or not.
bool reaches(DeviceOrdinal device, DeviceAddress address) {
  return !areSomeApart() || !areApart(onMachine(device), ownerAt(address));
}

/// Whether what a device copies to an address is lost.
bool loses(DeviceOrdinal device, DeviceAddress destination) {
  const char* const text = std::getenv("STAND_IN_LOSES");
  if (text == nullptr) return false;
  const std::string pair =
      "," + std::to_string(onMachine(device)) + ":" + std::to_string(ownerAt(destination)) + ",";
  return ("," + std::string(text) + ",").find(pair) != std::string::npos;
}

/// How much longer a device takes to copy from or to an address.
std::chrono::nanoseconds delayOf(DeviceOrdinal device, DeviceAddress address, std::size_t numBytes) {
  const char* const text = std::getenv("STAND_IN_LINKS");
  if (text == nullptr) return std::chrono::nanoseconds(0);
  const std::string ends = std::to_string(onMachine(device)) + ":" + std::to_string(ownerAt(address)) + ":";
  std::istringstream links(text);
  for (std::string link; std::getline(links, link, ',');) {
    if (link.compare(0, ends.size(), ends) != 0) continue;
    char* end = nullptr;
    const unsigned long us = std::strtoul(link.c_str() + ends.size(), &end, 10);
    return std::chrono::nanoseconds(us * 1000 + std::strtoul(end + 1, nullptr, 10) * numBytes);
  }
  return std::chrono::nanoseconds(0);
}

constexpr const char* kMemoryName = "device memory ";

/// The device of the machine in whose memory a segment lies, whichever process has allocated it: its name
/// says so.
DeviceOrdinal ownerOf(int fd) {
  std::array<char, 128> target{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), target.data(), target.size() - 1) < 0) return -1;
  const char* const name = std::strstr(target.data(), kMemoryName);
  return name == nullptr ? -1 : std::atoi(name + std::strlen(kMemoryName));
}

Result number(int* result, int value) {
  *result = value;
  return kSuccess;
}

}  // namespace

#define REFUSABLE \
  if (const Result refused = refusal(__func__); refused != kSuccess) return refused

extern "C" {

Result cuInit(unsigned int) {
  REFUSABLE;
  return kSuccess;
}
// NVRTC 13 asks for it, and does without its own cache then.
Result cuGetExportTable(const void**, const void*) { return kNotSupported; }
Result cuDriverGetVersion(int* version) { return number(version, 13000); }
Result cuGetErrorName(Result, const char** name) {
  *name = "CUDA_ERROR_STAND_IN";
  return kSuccess;
}
Result cuGetErrorString(Result, const char** text) {
  *text = "as the stand-in has it";
  return kSuccess;
}
Result cuDeviceGetCount(int* count) { return number(count, static_cast<int>(visibleDevices().size())); }
Result cuDeviceGet(DeviceOrdinal* device, int ordinal) {
  const bool exists = ordinal >= 0 && ordinal < static_cast<int>(visibleDevices().size());
  return exists ? number(device, ordinal) : kInvalidDevice;
}
Result cuDeviceGetName(char* name, int length, DeviceOrdinal) {
  std::strncpy(name, "stand-in", static_cast<std::size_t>(length));
  return kSuccess;
}
Result cuDeviceGetUuid_v2(Uuid* uuid, DeviceOrdinal device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xf0 + i);
  uuid->bytes[0] = static_cast<char>(0xf0 + onMachine(device));
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, DeviceOrdinal device) {
  constexpr int kMajor = 75, kMinor = 76;  // of the compute capability, which is 9.0
  if (attribute == DeviceAttribute::kPciBusId) return number(value, 0x17 + onMachine(device));
  if (attribute == DeviceAttribute::kPciDomainId) return number(value, 0);
  if (attribute == DeviceAttribute::kPciDeviceId) return number(value, 0);
  if (static_cast<int>(attribute) == kMajor) return number(value, 9);
  const char* const lacking = std::getenv("STAND_IN_LACKS");
  if (lacking != nullptr && std::to_string(static_cast<int>(attribute)) == lacking) return number(value, 0);
  return number(value, static_cast<int>(attribute) == kMinor ? 0 : 1);
}
Result cuDeviceCanAccessPeer(int* can, DeviceOrdinal device, DeviceOrdinal peer) {
  REFUSABLE;
  return number(can, device != peer && !areApart(onMachine(device), onMachine(peer)) ? 1 : 0);
}
Result cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceOrdinal device) {
  REFUSABLE;
  *context = &contexts[static_cast<std::size_t>(device)];
  return kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(DeviceOrdinal) { return kSuccess; }
Result cuCtxPushCurrent_v2(ContextHandle context) {
  if (current.depth == current.stack.size()) return kNotPermitted;
  current.stack[current.depth++] = context;
  return kSuccess;
}
Result cuCtxPopCurrent_v2(ContextHandle* context) {
  if (current.depth == 0) return kInvalidContext;
  *context = current.stack[--current.depth];
  return kSuccess;
}
/// Not called by COARSE, but by NCCL's stand-in.
Result cuCtxGetDevice(DeviceOrdinal* device) {
  if (current.depth == 0) return kInvalidContext;
  return number(device, currentDevice());
}
Result cuCtxSynchronize() {
  REFUSABLE;
  ++numWaits;
  const std::lock_guard lock(streamsMutex);
  for (const StreamHandle stream : streams) {
    if (stream->device == currentDevice() && stream->isCapturing) return kStreamCaptureUnsupported;
  }
  for (const StreamHandle stream : streams) {
    if (stream->device == currentDevice()) stream->synchronize();
  }
  unreturnedBytes = 0;
  return state();
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *greatest = -5;
  return number(least, 0);
}
Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = std::size_t{1} << 30;
  *total = std::size_t{2} << 30;
  return kSuccess;
}

Result cuMemHostRegister_v2(void* address, std::size_t numBytes, unsigned int) {
  REFUSABLE;
  const bool isNew = pinned.add(reinterpret_cast<DeviceAddress>(address), numBytes);
  return isNew ? kSuccess : kHostMemoryAlreadyRegistered;
}
Result cuMemHostUnregister(void* address) {
  return pinned.remove(reinterpret_cast<DeviceAddress>(address)) ? kSuccess : kNotPermitted;
}
Result cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* host, unsigned int) {
  REFUSABLE;
  *address = reinterpret_cast<DeviceAddress>(host);
  return kSuccess;
}

Result cuMemcpyHtoDAsync_v2(DeviceAddress destination, const void* source, std::size_t numBytes,
                            StreamHandle stream) {
  REFUSABLE;
  return copy(placeOf(destination, numBytes), source, numBytes, stream);
}
Result cuMemcpyDtoHAsync_v2(void* destination, DeviceAddress source, std::size_t numBytes,
                            StreamHandle stream) {
  REFUSABLE;
  return copy(destination, placeOf(source, numBytes), numBytes, stream);
}
Result cuMemcpyDtoDAsync_v2(DeviceAddress destination, DeviceAddress source, std::size_t numBytes,
                            StreamHandle stream) {
  REFUSABLE;
  if (!reaches(currentDevice(), destination) || !reaches(currentDevice(), source)) return kIllegalAddress;
  const auto delay =
      delayOf(currentDevice(), destination, numBytes) + delayOf(currentDevice(), source, numBytes);
  if (delay.count() > 0) give(stream, [delay] { std::this_thread::sleep_for(delay); });
  if (loses(currentDevice(), destination)) return stateOf(stream);
  return copy(placeOf(destination, numBytes), placeOf(source, numBytes), numBytes, stream);
}
Result cuMemcpyPeerAsync(DeviceAddress destination, ContextHandle to, DeviceAddress source,
                         ContextHandle from, std::size_t numBytes, StreamHandle stream) {
  REFUSABLE;
  if (!reaches(to->device, destination) || !reaches(from->device, source)) return kIllegalAddress;
  return copy(placeOf(destination, numBytes), placeOf(source, numBytes), numBytes, stream);
}
/// Takes memory at once, and gives it back when the stream has come to it, as CUDA may: to the pool, and to
/// the device when somebody waits for a stream.
Result cuMemAllocAsync(DeviceAddress* address, std::size_t numBytes, StreamHandle stream) {
  REFUSABLE;
  if (const Result result = stateOf(stream); result != kSuccess) return result;
  if (numBytes > standInFreeBytes()) return kOutOfMemory;
  *address = reserve(wholePages(numBytes));
  if (*address == 0) return kOutOfMemory;
  if (::mprotect(placeOf(*address, numBytes), numBytes, PROT_READ | PROT_WRITE) != 0) return kNotPermitted;
  const std::lock_guard lock(pooledMutex);
  pooled.emplace(*address, numBytes);
  return kSuccess;
}
Result cuMemFreeAsync(DeviceAddress address, StreamHandle stream) {
  if (const Result result = stateOf(stream); result != kSuccess) return result;
  const std::lock_guard lock(pooledMutex);
  const auto found = pooled.find(address);
  if (found == pooled.end()) return kNotPermitted;
  const std::size_t numBytes = found->second;
  pooled.erase(found);
  return give(stream, [=] {
    unreserve(address, wholePages(numBytes));
    unreturnedBytes += numBytes;
  });
}
Result cuMemsetD8Async(DeviceAddress destination, unsigned char value, std::size_t numBytes,
                       StreamHandle stream) {
  REFUSABLE;
  if (const Result result = stateOf(stream); result != kSuccess) return result;
  std::byte* const place = placeOf(destination, numBytes);
  if (place == nullptr) return kIllegalAddress;
  return give(stream, [=] { std::memset(place, value, numBytes); });
}

Result cuStreamCreateWithPriority(StreamHandle* stream, unsigned int, int) {
  REFUSABLE;
  if (currentDevice() < 0) return kInvalidContext;
  *stream = new CUstream_st(currentDevice());
  const std::lock_guard lock(streamsMutex);
  streams.insert(*stream);
  return kSuccess;
}
Result cuStreamDestroy_v2(StreamHandle stream) {
  {
    const std::lock_guard lock(streamsMutex);
    streams.erase(stream);
  }
  delete stream;
  return kSuccess;
}
Result cuStreamSynchronize(StreamHandle stream) {
  REFUSABLE;
  ++numWaits;
  stream->synchronize();
  unreturnedBytes = 0;
  return state();
}
Result cuStreamQuery(StreamHandle stream) {
  const std::lock_guard lock(stream->mutex);
  return hasFaulted || stream->works.empty() ? state() : kNotReady;
}
Result cuStreamIsCapturing(StreamHandle stream, int* status) { return number(status, stream->isCapturing); }
Result cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned int) {
  REFUSABLE;
  return give(stream, [isDone = event->isDone] {
    while (!hasFaulted && !*isDone) std::this_thread::yield();
  });
}
Result cuStreamWaitValue32_v2(StreamHandle stream, DeviceAddress address, std::uint32_t value, unsigned int) {
  REFUSABLE;
  const auto* const word = wordAt(address);
  if (word == nullptr) return kIllegalAddress;
  return give(stream, [=] {
    while (!hasFaulted && static_cast<std::int32_t>(word->load(std::memory_order_acquire) - value) < 0)
      std::this_thread::yield();
  });
}
Result cuStreamWriteValue32_v2(StreamHandle stream, DeviceAddress address, std::uint32_t value,
                               unsigned int) {
  REFUSABLE;
  auto* const word = wordAt(address);
  if (word == nullptr) return kIllegalAddress;
  return give(stream, [=] { word->store(value, std::memory_order_release); });
}

Result cuEventCreate(EventHandle* event, unsigned int) {
  REFUSABLE;
  *event = new CUevent_st;
  return kSuccess;
}
Result cuEventDestroy_v2(EventHandle event) {
  delete event;
  return kSuccess;
}
Result cuEventRecord(EventHandle event, StreamHandle stream) {
  REFUSABLE;
  event->isDone = std::make_shared<std::atomic<bool>>(false);
  event->when = std::make_shared<std::chrono::steady_clock::time_point>();
  return give(stream, [isDone = event->isDone, when = event->when] {
    *when = std::chrono::steady_clock::now();
    *isDone = true;
  });
}
Result cuEventQuery(EventHandle event) {
  REFUSABLE;
  return hasFaulted || *event->isDone ? state() : kNotReady;
}
Result cuEventSynchronize(EventHandle event) {
  REFUSABLE;
  ++numWaits;
  while (!hasFaulted && !*event->isDone) std::this_thread::yield();
  unreturnedBytes = 0;
  return state();
}
Result cuEventElapsedTime(float* milliseconds, EventHandle begin, EventHandle end) {
  if (!*begin->isDone || !*end->isDone) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(*end->when - *begin->when).count();
  return state();
}

Result cuLaunchHostFunc(StreamHandle stream, HostFunction function, void* data) {
  REFUSABLE;
  return give(stream, [=] { function(data); });
}
/// Functions are HostKernels: a module has all of them, whatever it is loaded from.
Result cuModuleLoadData(ModuleHandle* module, const void* image) {
  REFUSABLE;
  if (std::strcmp(static_cast<const char*>(image), "no machine code") == 0) return kNotSupported;
  *module = reinterpret_cast<ModuleHandle>(&contexts);
  return kSuccess;
}
Result cuModuleGetFunction(FunctionHandle* function, ModuleHandle, const char* name) {
  REFUSABLE;
  const auto& kernels = coarse::test::hostKernels();
  const auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  *function = reinterpret_cast<FunctionHandle>(const_cast<coarse::test::HostKernel*>(&found->second));
  return kSuccess;
}
Result cuLaunchKernel(FunctionHandle function, unsigned int, unsigned int, unsigned int, unsigned int,
                      unsigned int, unsigned int, unsigned int, StreamHandle stream, void** parameters,
                      void**) {
  REFUSABLE;
  if (const Result result = stateOf(stream); result != kSuccess) return result;
  const std::size_t launch = ++launchesOn[static_cast<std::size_t>(currentDevice())];
  const bool dies = isNamed("STAND_IN_DIES_AT", onMachine(currentDevice()), launch);
  const bool faults = isNamed("STAND_IN_FAULTS_AT", onMachine(currentDevice()), launch);
  const auto* const kernel = reinterpret_cast<const coarse::test::HostKernel*>(function);
  // Read before this returns, as CUDA does.
  const auto* const batch = static_cast<const std::byte*>(parameters[0]);
  std::vector<std::byte> copied(batch, batch + kernel->parameterBytes);
  for (std::size_t offset = 0; offset + sizeof(DeviceAddress) <= copied.size();
       offset += sizeof(DeviceAddress)) {
    DeviceAddress perhaps = 0;
    std::memcpy(&perhaps, &copied[offset], sizeof(perhaps));
    if (!reaches(currentDevice(), perhaps)) return kIllegalAddress;
    if (std::byte* const place = placeOf(perhaps, 1); place != nullptr) {
      std::memcpy(&copied[offset], &place, sizeof(place));
    } else if (seemsOfHost(perhaps)) {
      return kIllegalAddress;
    }
  }
  return give(stream, [kernel, dies, faults, copied = std::move(copied)] {
    if (dies) ::raise(SIGKILL);
    if (faults) {
      hasFaulted = true;
    } else {
      kernel->run(copied.data());
    }
  });
}

Result cuMemGetAllocationGranularity(std::size_t* granularity, const MemAllocationProp*, int) {
  REFUSABLE;
  *granularity = pageBytes();
  return kSuccess;
}
Result cuMemCreate(MemoryHandle* handle, std::size_t numBytes, const MemAllocationProp* properties,
                   unsigned long long) {
  REFUSABLE;
  if (numBytes > std::size_t{1} << 30) return kOutOfMemory;
  const std::string name = kMemoryName + std::to_string(onMachine(properties->location.id));
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(numBytes)) != 0) return kOutOfMemory;
  *handle = static_cast<MemoryHandle>(fd);
  return kSuccess;
}
Result cuMemRelease(MemoryHandle handle) {
  return ::close(static_cast<int>(handle)) == 0 ? kSuccess : kNotPermitted;
}
Result cuMemExportToShareableHandle(void* fd, MemoryHandle handle, int, unsigned long long) {
  REFUSABLE;
  return number(static_cast<int*>(fd), ::dup(static_cast<int>(handle)));
}
Result cuMemImportFromShareableHandle(MemoryHandle* handle, void* fd, int) {
  REFUSABLE;
  const int copied = ::dup(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)));
  *handle = static_cast<MemoryHandle>(copied);
  return copied < 0 ? kNotPermitted : kSuccess;
}
Result cuMemAddressReserve(DeviceAddress* address, std::size_t numBytes, std::size_t, DeviceAddress,
                           unsigned long long) {
  REFUSABLE;
  if (numBytes == 0 || numBytes % pageBytes() != 0) return kInvalidValue;
  *address = reserve(numBytes);
  return *address == 0 ? kOutOfMemory : kSuccess;
}
Result cuMemAddressFree(DeviceAddress address, std::size_t numBytes) {
  return unreserve(address, numBytes) ? kSuccess : kNotPermitted;
}
Result cuMemMap(DeviceAddress address, std::size_t numBytes, std::size_t, MemoryHandle handle,
                unsigned long long) {
  REFUSABLE;
  const int fd = static_cast<int>(handle);
  if (::lseek(fd, 0, SEEK_END) < static_cast<off_t>(numBytes)) return kNotPermitted;
  std::byte* const place = reserved.around(address, numBytes) == 0 ? nullptr : placeOf(address, numBytes);
  if (place == nullptr || numBytes % pageBytes() != 0) return kInvalidValue;
  if (::mmap(place, numBytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return kNotPermitted;
  const std::lock_guard lock(ownersMutex);
  owned[address] = {numBytes, ownerOf(fd)};
  return kSuccess;
}
Result cuMemUnmap(DeviceAddress address, std::size_t numBytes) {
  {
    const std::lock_guard lock(ownersMutex);
    owned.erase(owned.lower_bound(address + numBytes - 1), owned.upper_bound(address));
  }
  void* const unmapped =
      ::mmap(placeOf(address, numBytes), numBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return unmapped == MAP_FAILED ? kNotPermitted : kSuccess;
}
Result cuMemSetAccess(DeviceAddress address, std::size_t numBytes, const MemAccessDesc* accesses,
                      std::size_t numAccesses) {
  REFUSABLE;
  for (std::size_t i = 0; i < numAccesses; ++i) {
    for (DeviceAddress page = address; page < address + numBytes; page += pageBytes()) {
      if (!reaches(accesses[i].location.id, page)) return kPeerAccessUnsupported;
    }
  }
  return ::mprotect(placeOf(address, numBytes), numBytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess
                                                                                       : kNotPermitted;
}

/// Not of CUDA: what the device's memory pool can give, and what is taken of it.
void standInLimitPool(std::size_t numBytes) { pooledLimitBytes = numBytes; }
std::size_t standInPooledBytes() { return pooledLimitBytes - standInFreeBytes() + unreturnedBytes; }
/// Not of CUDA: how many kernels this process has launched on a device.
std::size_t standInLaunches(int device) { return launchesOn[static_cast<std::size_t>(device)]; }
/// Not of CUDA: how often this process has waited for a stream or an event.
std::size_t standInWaits() { return numWaits; }
/// Not of CUDA: whether a kernel of this process has failed.
void standInFault(bool isSo) { hasFaulted = isSo; }
/// Not of CUDA: has the processor of this process be the GPU, whose memory it sees; before any is mapped.
void standInShowMemory() { hidesMemory = false; }
/// Not of CUDA: where what a device has at these addresses is in this process; null if it has nothing there.
void* standInPlaceOf(const void* address, std::size_t numBytes) {
  return placeOf(reinterpret_cast<DeviceAddress>(address), numBytes);
}
/// Not of CUDA: has a stream say that it is captured.
void standInCapture(StreamHandle stream, bool isCapturing) { stream->isCapturing = isCapturing; }

}  // extern "C"
