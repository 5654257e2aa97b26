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

/// The CUDA driver, loaded at its first use; nothing here needs CUDA at build or import time.
///
/// Everything belongs to the devices' primary contexts, which PyTorch and CuPy use too. Any thread may use
/// and destroy an object, one thread at a time. A destructor waits for nothing unless its comment says so. It
/// does nothing in a fork of the process that made the object, where CUDA cannot be used.
namespace coarse::cuda {

/// A driver call failed. The message gives the call, CUDA's name and text of the error, and a remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device, or the host for pinned memory, does not have enough memory.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// A driver's library with all functions of Api.
class Driver {
 public:
  /// Loads and initialises the driver.
  /// @throws Error that names the missing part: the library, one of its functions, a device.
  explicit Driver(const char* libraryName = "libcuda.so.1");

  const Api& api() const noexcept { return api_; }
  /// For example 12020 for CUDA 12.2.
  int version() const noexcept { return version_; }

 private:
  Api api_;
  int version_ = 0;
};

/// Why this process cannot use CUDA; "" if it can. The first call decides.
const std::string& unavailableReason();
/// The functions of this process's driver.
/// @throws Error with unavailableReason().
const Api& api();
/// @throws Error unless `result` is kSuccess.
/// @param call the function's name.
/// @param advice a remedy, if more is known than CUDA's text says.
void check(Result result, const char* call, const std::string& advice = {});

/// For example 12020 for CUDA 12.2. @throws Error without CUDA.
int driverVersion();
/// Number of devices that this process may see. @throws Error without CUDA.
int numDevices();
std::string deviceName(int device);
/// In nvidia-smi's notation: "GPU-" and five groups of hexadecimal digits.
std::string deviceUuid(int device);
/// The PCI address, in the notation of sysfs: "0000:17:00.0".
std::string deviceBusId(int device);
/// The device with that UUID; -1 if this process does not see it.
int deviceOf(const std::string& uuid);
int deviceAttribute(int device, DeviceAttribute attribute);
/// Whether the driver reports that `device` can reach the memory of `peer`; copies there may still be lost
/// (cuda_peers.hpp).
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
  /// Waits for all work of the device in this context.
  void synchronize() const;
  /// The same, without reporting errors. @returns false if waiting is impossible, because a stream is being
  /// captured.
  bool trySynchronize() const noexcept;
  MemoryInfo memoryInfo() const;
  /// Least and greatest priority of streams; a smaller number is a greater priority.
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
  /// Marks the work given to `stream` so far. @pre the stream is of the same device, here and below.
  void record(StreamHandle stream);
  /// Whether the work marked last is done; true if nothing was marked.
  bool isDone() const;
  void synchronize() const;
  /// Time between the points that `start` and this event have marked. @pre both measure time, and are done.
  float millisecondsSince(const Event& start) const;

 private:
  SharedContext context_;
  EventHandle handle_ = nullptr;
};

/// A stream that does not wait for the legacy default stream.
class Stream {
 public:
  /// @param priority from Context::priorities(); other streams have 0.
  explicit Stream(SharedContext context, int priority = 0);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  /// Returns immediately; the stream's work still completes.
  ~Stream();

  StreamHandle handle() const noexcept { return handle_; }
  const SharedContext& context() const noexcept { return context_; }
  /// Makes later work of the stream wait for the work that `event` has marked.
  void wait(const Event& event);
  /// Makes later work of the stream wait until the word at `address` has reached `value`, as a number that
  /// wraps around. If the wait depends on CUDA work, also declare that by events: streams may share a queue,
  /// in which a wait blocks everything behind it.
  void waitValue(DeviceAddress address, std::uint32_t value);
  /// Writes `value` there when all earlier work is done and visible to readers of the value.
  void writeValue(DeviceAddress address, std::uint32_t value);
  /// @pre pinned host memory, or the copy takes the calling thread's time; the memory must stay valid until
  /// the copy is done.
  void copyToDevice(DeviceAddress destination, const void* source, std::size_t numBytes);
  void copyToHost(void* destination, DeviceAddress source, std::size_t numBytes);
  /// Between memories of this device, or one that it can access.
  void copyOnDevice(DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  /// Between this device and any other, through the host if no other way exists.
  void copyFrom(const Context& other, DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  void copyTo(const Context& other, DeviceAddress destination, DeviceAddress source, std::size_t numBytes);
  void fill(DeviceAddress destination, unsigned char value, std::size_t numBytes);
  /// Device memory for this process alone. The stream's later work may use it, and other work once that is
  /// done.
  /// @returns 0 if there is not enough memory; @throws Error if the device has no memory pools.
  DeviceAddress allocate(std::size_t numBytes);
  /// Frees such memory when the stream's work so far is done. @pre nothing else uses it any more.
  void free(DeviceAddress address);
  /// Calls `function(data)` in a driver thread when all earlier work is done; it must neither call CUDA nor
  /// throw. Later work waits for it.
  void callOnHost(HostFunction function, void* data);
  void synchronize() const;
  bool isIdle() const;

 private:
  SharedContext context_;
  StreamHandle handle_ = nullptr;
};

/// Makes later work of another owner's `stream` wait for the work that `event` has marked.
void waitForEvent(StreamHandle stream, const Event& event);

/// Whether work given to `stream` is captured into a CUDA graph instead of executed. @pre its context is
/// current.
bool isCapturing(StreamHandle stream);

/// Loads machine code, which stays loaded while anyone keeps the device's primary context.
/// @param code a cubin, which the driver reads to its end; may be freed afterwards.
/// @throws Error if it is for another device, or for a newer driver.
ModuleHandle loadModule(const Context& context, const void* code);
/// A kernel of a module. @throws Error if the module has no kernel of this name.
FunctionHandle findKernel(const Context& context, ModuleHandle module, const std::string& name);

struct LaunchShape {
  unsigned int grid[3] = {1, 1, 1};
  unsigned int block[3] = {1, 1, 1};
};

/// Launches a kernel, loaded by any component.
/// @param arguments the addresses of the parameters, in their order; read before this returns.
/// @pre the context in which the kernel was loaded is current.
void launchKernel(FunctionHandle kernel, const LaunchShape& shape, StreamHandle stream,
                  const std::vector<void*>& arguments);

/// Host memory, pinned as long as this exists, so that devices copy at full speed and concurrently with other
/// work. It may be a mapping of a memfd, which several processes can each register.
class HostRegistration {
 public:
  enum class Access { kReadWrite, kReadOnly };

  /// @param address, numBytes as mmap returned them; the caller's memory, which must outlive this.
  /// @param access the protection of the mapping; few devices accept memory that is mapped read-only.
  /// @throws OutOfMemoryError, Error with CUDA's reason and a remedy.
  HostRegistration(SharedContext context, void* address, std::size_t numBytes,
                   Access access = Access::kReadWrite);
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  ~HostRegistration();

  /// The device's address of the memory.
  DeviceAddress deviceAddress() const noexcept { return deviceAddress_; }

 private:
  SharedContext context_;
  void* address_;
  DeviceAddress deviceAddress_ = 0;
};

/// Device memory behind a file descriptor, which processes can pass to each other. The memory lives as long
/// as any process has it mapped or holds a descriptor of it.
class DeviceMemory {
 public:
  /// Allocates at least `numBytes`, in whole pages of the device; their contents are arbitrary.
  /// @throws OutOfMemoryError that gives the available memory; Error if the device cannot share memory.
  static DeviceMemory allocate(SharedContext context, std::size_t numBytes);
  /// The same in the memory of another device, for use by the context's device. @pre canAccessPeer()
  static DeviceMemory allocateOn(int device, SharedContext context, std::size_t numBytes);
  /// Maps memory that another process has allocated and exported; pieces are adjacent, wherever each lies.
  /// @param region whole allocations, each with its numBytes().
  /// @param others contexts whose devices will use it too.
  /// @throws Error if a descriptor is invalid or smaller, or a device cannot reach that memory. If the region
  /// names its GPU, and this process sees that device, CUDA is asked first.
  static DeviceMemory import(SharedContext context, const Region& region,
                             std::vector<SharedContext> others = {});
  /// Bytes that an allocation of `numBytes` takes on a device.
  static std::size_t roundUpToPages(const Context& context, std::size_t numBytes);

  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  /// Unmaps it. @pre the device does not use it any more.
  ~DeviceMemory();

  DeviceAddress address() const noexcept { return address_; }
  std::size_t numBytes() const noexcept { return numBytes_; }
  const SharedContext& context() const noexcept { return context_; }
  /// Waits for all work of its devices, without reporting errors: unmapping does not wait.
  /// @returns false if it cannot wait, because one of their streams is being captured into a graph.
  bool trySynchronize() const noexcept;
  /// @returns a new descriptor, close-on-exec, which the caller closes. @pre the memory is in one piece.
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
