#include "coarse/gpu/cuda_driver.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <optional>
#include <variant>

#include "coarse/gpu/cuda_peers.hpp"
#include "coarse/shared_memory/layout.hpp"

namespace coarse::cuda {
namespace {

constexpr const char* kOldestDriver = "CUDA 12.0 (driver 525)";

std::string versionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Loads a library and finds its functions; records the first missing one.
class Symbols {
 public:
  explicit Symbols(const char* libraryName) : library_(::dlopen(libraryName, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ != nullptr) return;
    const char* reason = ::dlerror();
    throw Error(std::string("there is no CUDA driver: ") + (reason != nullptr ? reason : libraryName) +
                ". Install NVIDIA's driver; in a container, start it with --gpus all");
  }
  template <typename Function>
  void find(const char* name, Function*& function) {
    // dlsym() always returns an object pointer.
    function = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (function == nullptr && firstMissing_.empty()) firstMissing_ = name;
  }
  const std::string& firstMissing() const noexcept { return firstMissing_; }

 private:
  void* library_;  // stays loaded: functions are called until the process ends
  std::string firstMissing_;
};

std::string adviceFor(Result result) {
  switch (result) {
    case kNoDevice:
    case kInvalidDevice:
      return "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and the devices that a container was given";
    case kDeviceUnavailable:
      return "another process has it for itself: let several use it (nvidia-smi -c 0)";
    case kStubLibrary:
      return "libcuda.so.1 is the toolkit's stub, found before the driver's: look at LD_LIBRARY_PATH";
    case kSystemDriverMismatch:
      return "the driver was updated under the running kernel module: load it again, or restart the machine";
    case kSystemNotReady:
      return "start NVIDIA's fabric manager, of the driver's version (nvidia-fabricmanager), and look at its "
             "log";
    default:
      return "";
  }
}

std::string describe(const Api& api, Result result, const char* call, const std::string& advice) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.cuGetErrorName(result, &name) != kSuccess) name = "unknown error";
  if (api.cuGetErrorString(result, &text) != kSuccess) text = "no text";
  std::string message = std::string(call) + ": " + name + " (" + std::to_string(result) + ", " + text + ")";
  const std::string& what = advice.empty() ? adviceFor(result) : advice;
  return what.empty() ? message : message + "; " + what;
}

/// The process's driver, or the reason for its absence.
const std::variant<Driver, std::string>& processDriver() {
  static const auto driver = []() -> std::variant<Driver, std::string> {
    try {
      return Driver();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  }();
  return driver;
}

DeviceOrdinal checkedDevice(int device) {
  DeviceOrdinal ordinal = 0;
  check(api().cuDeviceGet(&ordinal, device), "cuDeviceGet",
        "this process sees " + std::to_string(numDevices()) + " CUDA device(s), cuda:" +
            std::to_string(device) + " is none of them; look at nvidia-smi and CUDA_VISIBLE_DEVICES");
  return ordinal;
}

MemAllocationProp allocationOn(int device) {
  MemAllocationProp properties{};
  properties.type = kMemAllocationPinned;
  properties.requestedHandleTypes = kMemHandlePosixFd;
  properties.location = {kMemLocationDevice, device};
  return properties;
}

std::string mebibytes(std::size_t numBytes) {
  return numBytes >> 20 > 0 ? std::to_string(numBytes >> 20) + " MiB"
                            : std::to_string(numBytes >> 10) + " KiB";
}

MemoryHandle importHandle(int fd) {
  MemoryHandle handle = 0;
  void* const osHandle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  check(api().cuMemImportFromShareableHandle(&handle, osHandle, kMemHandlePosixFd),
        "cuMemImportFromShareableHandle",
        "descriptor " + std::to_string(fd) +
            " is to be device memory; where the GPU that has it is kept from this process by its container "
            "or control "
            "group (not by CUDA_VISIBLE_DEVICES), let it have that GPU too, in Slurm by --gpu-bind=none");
  return handle;
}

void requireReach(const Context& user, const Region& region) {
  const std::string obstacle = region.gpu.empty() ? "" : peerObstacle(user.device(), region.gpu);
  if (!obstacle.empty()) {
    const int owner = deviceOf(region.gpu);
    throw Error("cuda:" + std::to_string(user.device()) + " cannot reach the memory of " +
                (owner < 0 ? region.gpu : "cuda:" + std::to_string(owner)) + ": " + obstacle);
  }
  for (const Region& piece : region.rest) requireReach(user, piece);
}

}  // namespace

Driver::Driver(const char* libraryName) {
  Symbols symbols(libraryName);
#define COARSE_CUDA_FIND(name, ...) symbols.find(#name, api_.name);
  COARSE_CUDA_FUNCTIONS(COARSE_CUDA_FIND)
#undef COARSE_CUDA_FIND
  if (api_.cuDriverGetVersion != nullptr) api_.cuDriverGetVersion(&version_);
  if (!symbols.firstMissing().empty()) {
    throw Error(std::string(libraryName) + " has no " + symbols.firstMissing() + ": it is for CUDA " +
                versionText(version_) + ", and " + kOldestDriver +
                " is the oldest that will do; update NVIDIA's driver");
  }
  const Result result = api_.cuInit(0);
  if (result != kSuccess) throw Error(describe(api_, result, "cuInit", ""));
  int count = 0;
  if (api_.cuDeviceGetCount(&count) != kSuccess || count == 0)
    throw Error("there is a CUDA driver, but no device: " + adviceFor(kNoDevice));
}

const std::string& unavailableReason() {
  static const std::string available;
  const auto* reason = std::get_if<std::string>(&processDriver());
  return reason != nullptr ? *reason : available;
}

const Api& api() {
  if (const auto* driver = std::get_if<Driver>(&processDriver())) return driver->api();
  throw Error(unavailableReason());
}

void check(Result result, const char* call, const std::string& advice) {
  if (result == kSuccess) return;
  const std::string message = describe(api(), result, call, advice);
  if (result == kOutOfMemory) throw OutOfMemoryError(message);
  throw Error(message);
}

int driverVersion() {
  int version = 0;
  check(api().cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

int numDevices() {
  int count = 0;
  check(api().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

std::string deviceName(int device) {
  std::array<char, 256> name{};
  check(api().cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, checkedDevice(device)),
        "cuDeviceGetName");
  return name.data();
}

std::string deviceUuid(int device) {
  Uuid uuid{};
  check(api().cuDeviceGetUuid_v2(&uuid, checkedDevice(device)), "cuDeviceGetUuid");
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::array<char, 3> digits{};
    std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits.data();
  }
  return text;
}

std::string deviceBusId(int device) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.0",
                deviceAttribute(device, DeviceAttribute::kPciDomainId),
                deviceAttribute(device, DeviceAttribute::kPciBusId),
                deviceAttribute(device, DeviceAttribute::kPciDeviceId));
  return text.data();
}

int deviceOf(const std::string& uuid) {
  const int count = numDevices();
  for (int device = 0; device < count; ++device) {
    if (deviceUuid(device) == uuid) return device;
  }
  return -1;
}

int deviceAttribute(int device, DeviceAttribute attribute) {
  int value = 0;
  check(api().cuDeviceGetAttribute(&value, attribute, checkedDevice(device)), "cuDeviceGetAttribute");
  return value;
}

bool canAccessPeer(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  check(api().cuDeviceCanAccessPeer(&can, checkedDevice(device), checkedDevice(peer)),
        "cuDeviceCanAccessPeer");
  return can != 0;
}

Context::Context(int device) : device_(device), pid_(::getpid()) {
  check(api().cuDevicePrimaryCtxRetain(&handle_, checkedDevice(device)), "cuDevicePrimaryCtxRetain");
}

Context::~Context() {
  if (isUsable()) api().cuDevicePrimaryCtxRelease_v2(device_);
}

bool Context::isUsable() const noexcept { return ::getpid() == pid_; }

void Context::synchronize() const {
  const ContextScope scope(*this);
  check(api().cuCtxSynchronize(), "cuCtxSynchronize");
}

bool Context::trySynchronize() const noexcept {
  Result result = kSuccess;
  try {
    const ContextScope scope(*this);
    result = api().cuCtxSynchronize();
  } catch (const Error&) {
    return true;  // a failed device does not use the memory any more
  }
  return result != kStreamCaptureUnsupported && result != kStreamCaptureInvalidated &&
         result != kStreamCaptureImplicit;
}

MemoryInfo Context::memoryInfo() const {
  const ContextScope scope(*this);
  MemoryInfo info{};
  check(api().cuMemGetInfo_v2(&info.freeBytes, &info.totalBytes), "cuMemGetInfo");
  return info;
}

std::pair<int, int> Context::priorities() const {
  const ContextScope scope(*this);
  std::pair<int, int> range;
  check(api().cuCtxGetStreamPriorityRange(&range.first, &range.second), "cuCtxGetStreamPriorityRange");
  return range;
}

ContextScope::ContextScope(const Context& context) {
  if (!context.isUsable()) throw Error("CUDA does not work in the fork of a process that uses it");
  check(api().cuCtxPushCurrent_v2(context.handle()), "cuCtxPushCurrent");
}

ContextScope::~ContextScope() {
  ContextHandle popped = nullptr;
  api().cuCtxPopCurrent_v2(&popped);
}

Event::Event(SharedContext context, Timing timing) : context_(std::move(context)) {
  const ContextScope scope(*context_);
  check(api().cuEventCreate(&handle_,
                            timing == Timing::kNone ? static_cast<unsigned int>(kEventDisableTiming) : 0U),
        "cuEventCreate");
}

Event::~Event() {
  if (context_->isUsable()) api().cuEventDestroy_v2(handle_);
}

void Event::record(StreamHandle stream) { check(api().cuEventRecord(handle_, stream), "cuEventRecord"); }

bool Event::isDone() const {
  const Result result = api().cuEventQuery(handle_);
  if (result != kNotReady) check(result, "cuEventQuery");
  return result == kSuccess;
}

void Event::synchronize() const { check(api().cuEventSynchronize(handle_), "cuEventSynchronize"); }

float Event::millisecondsSince(const Event& start) const {
  float milliseconds = 0;
  check(api().cuEventElapsedTime(&milliseconds, start.handle_, handle_), "cuEventElapsedTime");
  return milliseconds;
}

Stream::Stream(SharedContext context, int priority) : context_(std::move(context)) {
  const ContextScope scope(*context_);
  check(api().cuStreamCreateWithPriority(&handle_, kStreamNonBlocking, priority),
        "cuStreamCreateWithPriority");
}

Stream::~Stream() {
  if (context_->isUsable()) api().cuStreamDestroy_v2(handle_);
}

void Stream::wait(const Event& event) { waitForEvent(handle_, event); }

void Stream::waitValue(DeviceAddress address, std::uint32_t value) {
  check(api().cuStreamWaitValue32_v2(handle_, address, value, kWaitValueGreaterOrEqual),
        "cuStreamWaitValue32");
}

void Stream::writeValue(DeviceAddress address, std::uint32_t value) {
  check(api().cuStreamWriteValue32_v2(handle_, address, value, kWriteValueDefault), "cuStreamWriteValue32");
}

void Stream::copyToDevice(DeviceAddress destination, const void* source, std::size_t numBytes) {
  check(api().cuMemcpyHtoDAsync_v2(destination, source, numBytes, handle_), "cuMemcpyHtoDAsync");
}

void Stream::copyToHost(void* destination, DeviceAddress source, std::size_t numBytes) {
  check(api().cuMemcpyDtoHAsync_v2(destination, source, numBytes, handle_), "cuMemcpyDtoHAsync");
}

void Stream::copyOnDevice(DeviceAddress destination, DeviceAddress source, std::size_t numBytes) {
  check(api().cuMemcpyDtoDAsync_v2(destination, source, numBytes, handle_), "cuMemcpyDtoDAsync");
}

void Stream::copyFrom(const Context& other, DeviceAddress destination, DeviceAddress source,
                      std::size_t numBytes) {
  check(api().cuMemcpyPeerAsync(destination, context_->handle(), source, other.handle(), numBytes, handle_),
        "cuMemcpyPeerAsync");
}

void Stream::copyTo(const Context& other, DeviceAddress destination, DeviceAddress source,
                    std::size_t numBytes) {
  check(api().cuMemcpyPeerAsync(destination, other.handle(), source, context_->handle(), numBytes, handle_),
        "cuMemcpyPeerAsync");
}

void Stream::fill(DeviceAddress destination, unsigned char value, std::size_t numBytes) {
  check(api().cuMemsetD8Async(destination, value, numBytes, handle_), "cuMemsetD8Async");
}

DeviceAddress Stream::allocate(std::size_t numBytes) {
  DeviceAddress address = 0;
  const Result result = api().cuMemAllocAsync(&address, numBytes, handle_);
  if (result == kOutOfMemory) return 0;
  check(result, "cuMemAllocAsync");
  return address;
}

void Stream::free(DeviceAddress address) { check(api().cuMemFreeAsync(address, handle_), "cuMemFreeAsync"); }

void Stream::callOnHost(HostFunction function, void* data) {
  check(api().cuLaunchHostFunc(handle_, function, data), "cuLaunchHostFunc");
}

void Stream::synchronize() const { check(api().cuStreamSynchronize(handle_), "cuStreamSynchronize"); }

bool Stream::isIdle() const {
  const Result result = api().cuStreamQuery(handle_);
  if (result != kNotReady) check(result, "cuStreamQuery");
  return result == kSuccess;
}

void waitForEvent(StreamHandle stream, const Event& event) {
  check(api().cuStreamWaitEvent(stream, event.handle(), 0), "cuStreamWaitEvent");
}

bool isCapturing(StreamHandle stream) {
  int status = kStreamCaptureNone;
  check(api().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != kStreamCaptureNone;
}

ModuleHandle loadModule(const Context& context, const void* code) {
  const ContextScope scope(context);
  ModuleHandle module = nullptr;
  check(api().cuModuleLoadData(&module, code), "cuModuleLoadData",
        "these kernels are not for " + deviceName(context.device()) + " with a driver of CUDA " +
            versionText(driverVersion()));
  return module;
}

FunctionHandle findKernel(const Context& context, ModuleHandle module, const std::string& name) {
  const ContextScope scope(context);
  FunctionHandle kernel = nullptr;
  check(api().cuModuleGetFunction(&kernel, module, name.c_str()), "cuModuleGetFunction",
        "the module has no kernel " + name);
  return kernel;
}

void launchKernel(FunctionHandle kernel, const LaunchShape& shape, StreamHandle stream,
                  const std::vector<void*>& arguments) {
  check(api().cuLaunchKernel(kernel, shape.grid[0], shape.grid[1], shape.grid[2], shape.block[0],
                             shape.block[1], shape.block[2], 0, stream, const_cast<void**>(arguments.data()),
                             nullptr),
        "cuLaunchKernel");
}

HostRegistration::HostRegistration(SharedContext context, void* address, std::size_t numBytes, Access access)
    : context_(std::move(context)), address_(address) {
  const ContextScope scope(*context_);
  unsigned int flags = kHostRegisterPortable | kHostRegisterDeviceMap;
  if (access == Access::kReadOnly) flags |= kHostRegisterReadOnly;
  const Result result = api().cuMemHostRegister_v2(address, numBytes, flags);
  std::string advice = "pinning " + mebibytes(numBytes) + " of host memory";
  if (result == kHostMemoryAlreadyRegistered) advice += ", which somebody else in this process has pinned";
  if (result == kOutOfMemory || result == kNotPermitted)
    advice += "; look at the memory limit of the container or cgroup, and at ulimit -l";
  if (result == kNotSupported) advice += "; memory of this kind cannot be pinned on this system";
  check(result, "cuMemHostRegister", advice);
  const Result found = api().cuMemHostGetDevicePointer_v2(&deviceAddress_, address, 0);
  if (found == kSuccess) return;
  api().cuMemHostUnregister(address);
  check(found, "cuMemHostGetDevicePointer");
}

HostRegistration::~HostRegistration() {
  if (!context_->isUsable()) return;
  // Unregistering needs a current context; without one nothing is left to unregister from.
  if (api().cuCtxPushCurrent_v2(context_->handle()) != kSuccess) return;
  api().cuMemHostUnregister(address_);
  ContextHandle popped = nullptr;
  api().cuCtxPopCurrent_v2(&popped);
}

std::size_t DeviceMemory::roundUpToPages(const Context& context, std::size_t numBytes) {
  const MemAllocationProp properties = allocationOn(context.device());
  std::size_t granularity = 0;
  check(api().cuMemGetAllocationGranularity(&granularity, &properties, kMemGranularityMinimum),
        "cuMemGetAllocationGranularity");
  return roundUp(numBytes, granularity);
}

DeviceMemory DeviceMemory::allocate(SharedContext context, std::size_t numBytes) {
  const int device = context->device();
  return allocateOn(device, std::move(context), numBytes);
}

DeviceMemory DeviceMemory::allocateOn(int device, SharedContext context, std::size_t numBytes) {
  if (deviceAttribute(device, DeviceAttribute::kPosixFdSupported) == 0) {
    throw Error("cuda:" + std::to_string(device) + " (" + deviceName(device) +
                ") cannot share memory with other processes by file descriptors");
  }
  const std::size_t rounded = roundUpToPages(*context, numBytes);
  const MemAllocationProp properties = allocationOn(device);
  MemoryHandle handle = 0;
  const Result result = api().cuMemCreate(&handle, rounded, &properties, 0);
  if (result == kOutOfMemory && device == context->device()) {
    const MemoryInfo info = context->memoryInfo();
    check(result, "cuMemCreate",
          "cuda:" + std::to_string(device) + " needs " + mebibytes(rounded) + " and has " +
              mebibytes(info.freeBytes) + " of " + mebibytes(info.totalBytes) + " free");
  }
  check(result, "cuMemCreate");
  return DeviceMemory(std::move(context), {{handle, rounded}});
}

DeviceMemory DeviceMemory::import(SharedContext context, const Region& region,
                                  std::vector<SharedContext> others) {
  requireReach(*context, region);
  for (const SharedContext& other : others) requireReach(*other, region);
  const ContextScope scope(*context);
  std::vector<Piece> pieces;
  const auto add = [&](const Region& piece) {
    try {
      pieces.push_back({importHandle(piece.fd), piece.numBytes});
    } catch (const Error&) {
      for (const Piece& imported : pieces) api().cuMemRelease(imported.handle);
      throw;
    }
  };
  add(region);
  for (const Region& piece : region.rest) add(piece);
  return DeviceMemory(std::move(context), std::move(pieces), std::move(others));
}

DeviceMemory::DeviceMemory(SharedContext context, std::vector<Piece> pieces,
                           std::vector<SharedContext> others)
    : context_(std::move(context)), others_(std::move(others)), pieces_(std::move(pieces)) {
  for (const Piece& piece : pieces_) numBytes_ += piece.numBytes;
  try {
    map();
  } catch (...) {
    release();
    throw;
  }
}

void DeviceMemory::map() {
  const ContextScope scope(*context_);
  check(api().cuMemAddressReserve(&address_, numBytes_, 0, 0, 0), "cuMemAddressReserve");
  mapPieces();
  allowAccess();
}

void DeviceMemory::mapPieces() {
  for (const Piece& piece : pieces_) {
    check(api().cuMemMap(address_ + numMappedBytes_, piece.numBytes, 0, piece.handle, 0), "cuMemMap",
          "mapping " + mebibytes(piece.numBytes) + " of device memory");
    numMappedBytes_ += piece.numBytes;
  }
}

void DeviceMemory::allowAccess() const {
  std::vector<MemAccessDesc> accesses;
  std::string names;
  const auto add = [&](const Context& context) {
    accesses.push_back({{kMemLocationDevice, context.device()}, kMemAccessReadWrite});
    names += (names.empty() ? "cuda:" : " and cuda:") + std::to_string(context.device());
  };
  add(*context_);
  for (const SharedContext& other : others_) add(*other);
  check(api().cuMemSetAccess(address_, numBytes_, accesses.data(), accesses.size()), "cuMemSetAccess",
        names + (accesses.size() > 1 ? " have" : " has") + " to reach this memory");
}

bool DeviceMemory::trySynchronize() const noexcept {
  if (!context_->isUsable()) return true;
  bool isSynchronized = context_->trySynchronize();
  for (const SharedContext& other : others_) isSynchronized &= other->trySynchronize();
  return isSynchronized;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : context_(std::move(other.context_)),
      others_(std::move(other.others_)),
      pieces_(std::exchange(other.pieces_, {})),
      address_(std::exchange(other.address_, 0)),
      numBytes_(std::exchange(other.numBytes_, 0)),
      numMappedBytes_(std::exchange(other.numMappedBytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  context_ = std::move(other.context_);
  others_ = std::move(other.others_);
  pieces_ = std::exchange(other.pieces_, {});
  address_ = std::exchange(other.address_, 0);
  numBytes_ = std::exchange(other.numBytes_, 0);
  numMappedBytes_ = std::exchange(other.numMappedBytes_, 0);
  return *this;
}

DeviceMemory::~DeviceMemory() { release(); }

void DeviceMemory::release() noexcept {
  if (context_ == nullptr || !context_->isUsable()) return;
  if (address_ != 0) {
    if (numMappedBytes_ > 0) api().cuMemUnmap(address_, numMappedBytes_);
    api().cuMemAddressFree(std::exchange(address_, 0), numBytes_);
  }
  for (const Piece& piece : std::exchange(pieces_, {})) api().cuMemRelease(piece.handle);
}

int DeviceMemory::exportFd() const {
  int fd = -1;
  check(api().cuMemExportToShareableHandle(&fd, pieces_.front().handle, kMemHandlePosixFd, 0),
        "cuMemExportToShareableHandle");
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

}  // namespace coarse::cuda
