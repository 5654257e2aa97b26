#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "coarse/gpu/cuda_api.hpp"
#include "coarse/shared_memory/shared_memory.hpp"

/// The CUDA driver, loaded when it is first asked for; nothing here needs CUDA to be built or imported.
///
/// Everything belongs to the primary contexts of the devices, which are those of PyTorch and CuPy. Objects
/// may be used and destroyed in any thread, each by one at a time. A destructor waits for nothing but where
/// it says so, and does nothing in a fork of the process that made the object, where CUDA cannot be used.
namespace coarse::cuda {

/// A call of the driver failed: which, CUDA's name and text of the error, what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device, or the host for memory that is pinned, does not have so much memory.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// A driver's library with all functions of Api.
class Driver {
 public:
  /// Loads and initialises the driver.
  /// @throws Error that says what is missing: the library, one of its functions, a device.
  explicit Driver(const char* libraryName = "libcuda.so.1");

  const Api& api() const noexcept { return api_; }
  /// As 12020 for CUDA 12.2.
  int version() const noexcept { return version_; }

 private:
  Api api_;
  int version_ = 0;
};

/// Why CUDA cannot be used in this process; "" if it can. The first call decides.
const std::string& unavailableReason();
/// The functions of this process's driver.
/// @throws Error with unavailableReason().
const Api& api();
/// @throws Error unless `result` is kSuccess.
/// @param call the function's name.
/// @param advice what to do about it, where more is known than CUDA's text says.
void check(Result result, const char* call, const std::string& advice = {});

/// As 12020 for CUDA 12.2. @throws Error without CUDA.
int driverVersion();
/// Devices that this process may see, in CUDA's order. @throws Error without CUDA.
int numDevices();
std::string deviceName(int device);
/// As nvidia-smi writes it: "GPU-" and five groups of hexadecimal digits.
std::string deviceUuid(int device);
/// Of PCI, as sysfs writes it: "0000:17:00.0".
std::string deviceBusId(int device);
/// The device of that UUID; -1 if this process does not see it.
int deviceOf(const std::string& uuid);
int deviceAttribute(int device, DeviceAttribute attribute);
/// Whether the driver says that `device` can reach the memory of `peer`; what it copies there may be lost all
/// the same (cuda_peers.hpp).
bool canAccessPeer(int device, int peer);

/// Bytes of device memory.
struct MemoryInfo {
  std::size_t freeBytes;
  std::size_t totalBytes;
};

/// The primary context of a device, kept alive.
class Context {
 public:
  /// @throws Error if there is no such device.
  explicit Context(int device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  int device() const noexcept { return device_; }
  ContextHandle handle() const noexcept { return handle_; }
  /// Waits for everything that was given to the device in this context.
  void synchronize() const;
  /// The same, whatever comes of it. @returns false if nobody can wait, because a stream is being captured.
  bool settle() const noexcept;
  MemoryInfo memoryInfo() const;
  /// Least and greatest priority of streams; the smaller the number, the greater.
  std::pair<int, int> priorities() const;
  bool isUsable() const noexcept;

 private:
  int device_;
  ContextHandle handle_ = nullptr;
  int pid_;
};

using SharedContext = std::shared_ptr<const Context>;

/// Makes a context the calling thread's until the end of a scope.
/// @throws Error if CUDA refuses, and in a fork of the process that made the context.
class ContextScope {
 public:
  explicit ContextScope(const Context& context);
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope();
};

class Event {
 public:
  enum class Timing { kNone, kMeasured };

  explicit Event(SharedContext context, Timing timing = Timing::kNone);
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();

  EventHandle handle() const noexcept { return handle_; }
  const SharedContext& context() const noexcept { return context_; }
  /// Marks the work that `stream` has so far. @pre the stream is of the same device, here and below.
  void record(StreamHandle stream);
  /// Whether what was marked last is done; true before anything was.
  bool isDone() const;
  void synchronize() const;
  /// Time from what `start` has marked to what this one has. @pre both measure time, and are done.
  float millisecondsSince(const Event& start) const;

 private:
  SharedContext context_;
  EventHandle handle_ = nullptr;
};

/// A stream that does not wait for the legacy default stream.
class Stream {
 public:
  /// @param priority of Context::priorities(); 0 is what other streams have.
  explicit Stream(SharedContext context, int priority = 0);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  /// Returns at once; what the stream has is still done.
  ~Stream();

  StreamHandle handle() const noexcept { return handle_; }
  const SharedContext& context() const noexcept { return context_; }
  /// What is given to the stream from now on waits for what `event` has marked.
  void wait(const Event& event);
  /// What is given to the stream from now on waits until the word at `address` has reached `value`, as a
  /// number that wraps around. Tell CUDA by events, too, of what it waits for, where that is of CUDA: streams
  /// may share a queue, in which a wait stops what comes behind it.
  void waitValue(DeviceAddress address, std::uint32_t value);
  /// Writes `value` there when all before it is done and can be seen by whoever sees the value.
  void writeValue(DeviceAddress address, std::uint32_t value);
  /// @pre pinned host memory, or the copy takes the calling thread's time; it stays until the copy is done.
  void copyToDevice(DeviceAddress destination, const void* source, std::size_t numBytes);
  void copyToHost(void* destination, DeviceAddress source, std::size_t numBytes);
  /// Between memories of this device, or one that it can access.
  void copyOnDevice(DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  /// Between this device and any other, through the host if there is no other way.
  void copyFrom(const Context& other, DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  void copyTo(const Context& other, DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  void fill(DeviceAddress destination, unsigned char value, std::size_t numBytes);
  /// Memory of the device for this process alone, to be used by what the stream is given from now on, and by
  /// others once that is done.
  /// @returns 0 if there is not so much; @throws Error if the device has no memory pools.
  DeviceAddress allocate(std::size_t numBytes);
  /// Gives such memory back when the stream has done what it was given. @pre nothing else uses it any more.
  void free(DeviceAddress address);
  /// Has `function(data)` called in a thread of the driver when all before it is done; it must neither call
  /// CUDA nor throw. Work behind it waits for it.
  void callOnHost(HostFunction function, void* data);
  void synchronize() const;
  bool isIdle() const;

 private:
  SharedContext context_;
  StreamHandle handle_ = nullptr;
};

/// Has what somebody else's `stream` is given from now on wait for what `event` has marked.
void waitForEvent(StreamHandle stream, const Event& event);

/// Whether what is given to `stream` is captured into a CUDA graph instead of done. @pre its context is
/// current.
bool isCapturing(StreamHandle stream);

/// Loads machine code for as long as somebody keeps the primary context of the device.
/// @param code a cubin, which the driver reads to its end; may be gone afterwards.
/// @throws Error if it is for another device, or for a newer driver.
ModuleHandle loadModule(const Context& context, const void* code);
/// A kernel of a module. @throws Error if it has none of this name.
FunctionHandle findKernel(const Context& context, ModuleHandle module, const std::string& name);

struct LaunchShape {
  unsigned int grid[3] = {1, 1, 1};
  unsigned int block[3] = {1, 1, 1};
};

/// Launches a kernel, whoever has loaded it.
/// @param arguments where each parameter lies, in their order; read before this returns.
/// @pre the context in which the kernel was loaded is current.
void launchKernel(FunctionHandle kernel, const LaunchShape& shape, StreamHandle stream,
                  const std::vector<void*>& arguments);

/// Memory of the host that is pinned as long as this exists, so that devices copy at full speed and beside
/// other work. It may be a mapping of a memfd, which several processes can each register.
class HostRegistration {
 public:
  enum class Access { kReadWrite, kReadOnly };

  /// @param address, numBytes as mmap returned them; stay the caller's, and must outlive this.
  /// @param access as the memory is mapped; few devices take memory that is mapped read-only.
  /// @throws OutOfMemoryError, Error with CUDA's reason and what to do.
  HostRegistration(SharedContext context, void* address, std::size_t numBytes,
                   Access access = Access::kReadWrite);
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  ~HostRegistration();

  /// Where the device sees it.
  DeviceAddress deviceAddress() const noexcept { return deviceAddress_; }

 private:
  SharedContext context_;
  void* address_;
  DeviceAddress deviceAddress_ = 0;
};

/// Device memory that is a file descriptor, which travels between processes as any other. The memory lives as
/// long as a process has it mapped or holds a descriptor of it, whoever has allocated it.
class DeviceMemory {
 public:
  /// Allocates at least `numBytes`, in whole pages of the device; their contents are arbitrary.
  /// @throws OutOfMemoryError says how much there is; Error if the device cannot share memory.
  static DeviceMemory allocate(SharedContext context, std::size_t numBytes);
  /// The same in the memory of another device, for that of the context to use. @pre canAccessPeer()
  static DeviceMemory allocateOn(int device, SharedContext context, std::size_t numBytes);
  /// Maps what another process has allocated and exported; pieces side by side, wherever each lies.
  /// @param region whole allocations, each with its numBytes().
  /// @param others on whose devices it is to be used too.
  /// @throws Error if a descriptor is something else or smaller, or a device cannot reach that memory.
  ///   Where the region says whose memory it is, and this process sees that device, CUDA is asked before.
  static DeviceMemory import(SharedContext context, const Region& region,
                             std::vector<SharedContext> others = {});
  /// Bytes that an allocation of `numBytes` takes on a device.
  static std::size_t roundUpToPages(const Context& context, std::size_t numBytes);

  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  /// Unmaps it. @pre the device does nothing with it any more.
  ~DeviceMemory();

  DeviceAddress address() const noexcept { return address_; }
  std::size_t numBytes() const noexcept { return numBytes_; }
  const SharedContext& context() const noexcept { return context_; }
  /// Waits for everything that its devices have been given, whatever comes of that: unmapping does not.
  /// @returns false if it cannot, because a stream of theirs is being captured into a graph.
  bool settle() const noexcept;
  /// @returns a new descriptor, close-on-exec, which the caller closes. @pre it is in one piece.
  int exportFd() const;

 private:
  struct Piece {
    MemoryHandle handle;
    std::size_t numBytes;
  };

  DeviceMemory(SharedContext context, std::vector<Piece> pieces, std::vector<SharedContext> others = {});
  void map();
  void mapPieces();
  void allowAccess() const;
  void release() noexcept;

  SharedContext context_;
  std::vector<SharedContext> others_;
  std::vector<Piece> pieces_;
  DeviceAddress address_ = 0;
  std::size_t numBytes_ = 0;
  std::size_t numMappedBytes_ = 0;
};

}  // namespace coarse::cuda
