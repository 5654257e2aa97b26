// How fast the reduction and update kernels are, against memcpy and loops that only stream, over the same
// memory in the same run.
//
// Build: g++ -std=c++17 -O3 -ffp-contract=off -fno-math-errno -pthread -Icoarse/kernels/include
// benchmarks/reduce_kernels.cpp
//            coarse/kernels/src/reduce*.cpp coarse/kernels/src/reduce/copy.cpp -o reduce_kernels
// Usage: reduce_kernels [--json FILE] [instruction set]
//
// --json appends a record a line, with commit and machine, as `coarse bench` does. Run it in the checkout.
//
// Every case is verified before it is timed. Bandwidth is algorithm bandwidth: bytes of one array per second,
// in units of 1e9, however many arrays the case reads and writes. All figures are measured.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coarse/reduce/copy.hpp"
#include "coarse/reduce/reduce.hpp"
#include "coarse/reduce/update.hpp"

namespace {

using coarse::DType;
using coarse::ReduceOp;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxArrays = 5;
constexpr std::size_t kMaxBytes = std::size_t{100} << 20;
constexpr std::size_t kSizes[] = {64u << 10, 256u << 10, 1u << 20, 25u << 20, kMaxBytes};

/// Arrays on huge pages where the system gives them, as in a memory device's arena.
struct Arrays {
  char* data[kMaxArrays];

  Arrays() {
    for (char*& array : data) {
      void* mapped = mmap(nullptr, kMaxBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) {
        std::perror("mmap");
        std::exit(1);
      }
      madvise(mapped, kMaxBytes, MADV_HUGEPAGE);
      array = static_cast<char*>(mapped);
    }
  }

  /// Zero is a fixed point of every case, so that repetitions neither overflow nor meet subnormals.
  void clear() {
    for (char* array : data) std::memset(array, 0, kMaxBytes);
  }
};

/// One thing to time: `run` does its work on bytes [begin, end) of the arrays.
struct Case {
  const char* name;
  std::function<void(Arrays&, std::size_t begin, std::size_t end)> run;
  std::function<bool(Arrays&)> verify;
};

Case reduceCase(const char* name, DType dtype, ReduceOp op, std::size_t numArrays, std::uint64_t one,
                std::uint64_t expected, std::uint32_t divisor) {
  Case result{name, {}, {}};
  result.run = [=](Arrays& arrays, std::size_t begin, std::size_t end) {
    void* parts[kMaxArrays];
    for (std::size_t i = 0; i < numArrays; ++i) parts[i] = arrays.data[i] + begin;
    coarse::reduce(dtype, op, parts, numArrays, parts, numArrays, (end - begin) / coarse::itemBytes(dtype),
                   divisor);
  };
  result.verify = [=, run = result.run](Arrays& arrays) {
    const std::size_t itemBytes = coarse::itemBytes(dtype);
    const std::size_t numBytes = 1000 * itemBytes;
    for (std::size_t i = 0; i < numArrays; ++i) {
      for (std::size_t at = 0; at < numBytes; at += itemBytes)
        std::memcpy(arrays.data[i] + at, &one, itemBytes);
    }
    run(arrays, 0, numBytes);
    bool right = true;
    for (std::size_t i = 0; i < numArrays; ++i) {
      for (std::size_t at = 0; at < numBytes; at += itemBytes) {
        right = right && std::memcmp(arrays.data[i] + at, &expected, itemBytes) == 0;
      }
    }
    return right;
  };
  return result;
}

Case copyCase(const char* name, const std::function<void(void*, const void*, std::size_t)>& copy) {
  return {name,
          [copy](Arrays& arrays, std::size_t begin, std::size_t end) {
            copy(arrays.data[1] + begin, arrays.data[0] + begin, end - begin);
          },
          [copy](Arrays& arrays) {
            for (int i = 0; i < 1000; ++i) arrays.data[0][i] = static_cast<char>(i);
            copy(arrays.data[1], arrays.data[0], 1000);
            return std::memcmp(arrays.data[0], arrays.data[1], 1000) == 0;
          }};
}

/// What a memory device does to a shard of two workers: arrays are two gradients, parameter and two moments.
Case adamCase(const char* name) {
  coarse::UpdateSettings settings;
  settings.rule = coarse::UpdateRule::kAdam;
  settings.stepSize = 0.5F;
  settings.firstWeight = 0.5F;
  settings.secondWeight = 0.25F;
  settings.epsilon = 0.5F;
  Case result{name, {}, {}};
  result.run = [=](Arrays& arrays, std::size_t begin, std::size_t end) {
    float* parts[kMaxArrays];
    for (std::size_t i = 0; i < kMaxArrays; ++i) parts[i] = reinterpret_cast<float*>(arrays.data[i] + begin);
    const void* const gradients[] = {parts[0], parts[1]};
    coarse::UpdateArrays operands;
    operands.gradients = gradients;
    operands.numGradients = 2;
    operands.parameter = parts[2];
    operands.states = parts + 3;
    operands.numElements = (end - begin) / sizeof(float);
    coarse::update(settings, DType::kFloat32, operands, 2);
  };
  result.verify = [run = result.run](Arrays& arrays) {
    const float ones[] = {3, 1, 8, 0, 0};
    for (std::size_t i = 0; i < kMaxArrays; ++i)
      std::fill_n(reinterpret_cast<float*>(arrays.data[i]), 1000, ones[i]);
    run(arrays, 0, 1000 * sizeof(float));
    // The mean is 2, moments 1 and 1: 8 - 0.5 * 1 / (1 + 0.5).
    const auto* parameter = reinterpret_cast<const float*>(arrays.data[2]);
    return std::all_of(parameter, parameter + 1000, [](float p) { return p == 8 - 0.5F / 1.5F; });
  };
  return result;
}

/// The same traffic as adamCase() without its arithmetic: five arrays are read, three of them written.
Case streamCase(const char* name) {
  Case result{name, {}, {}};
  result.run = [](Arrays& arrays, std::size_t begin, std::size_t end) {
    float* parts[kMaxArrays];
    for (std::size_t i = 0; i < kMaxArrays; ++i) parts[i] = reinterpret_cast<float*>(arrays.data[i] + begin);
    float *const p = parts[2], *const m = parts[3], *const v = parts[4];
    const float *const g = parts[0], *const h = parts[1];
    const std::size_t numElements = (end - begin) / sizeof(float);
#pragma GCC ivdep
    for (std::size_t i = 0; i < numElements; ++i) {
      const float sum = g[i] + h[i];
      p[i] += sum;
      m[i] += sum;
      v[i] += sum;
    }
  };
  result.verify = [run = result.run](Arrays& arrays) {
    for (std::size_t i = 0; i < kMaxArrays; ++i)
      std::fill_n(reinterpret_cast<float*>(arrays.data[i]), 1000, 1.F);
    run(arrays, 0, 1000 * sizeof(float));
    const auto* second = reinterpret_cast<const float*>(arrays.data[4]);
    return std::all_of(second, second + 1000, [](float value) { return value == 3; });
  };
  return result;
}

/// Little-endian bit patterns of 1, 2 and 4.
std::vector<Case> allCases() {
  return {
      copyCase("memcpy 1->1", [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n); }),
      copyCase("copyBytesStreaming 1->1", coarse::copyBytesStreaming),
      reduceCase("float32 sum 2->2", DType::kFloat32, ReduceOp::kSum, 2, 0x3f800000, 0x40000000, 1),
      reduceCase("float32 mean 2->2", DType::kFloat32, ReduceOp::kMean, 2, 0x3f800000, 0x3f800000, 2),
      reduceCase("float32 max 2->2", DType::kFloat32, ReduceOp::kMax, 2, 0x3f800000, 0x3f800000, 1),
      reduceCase("float32 mean 3->3", DType::kFloat32, ReduceOp::kMean, 3, 0x3f800000, 0x3f800000, 3),
      reduceCase("float32 mean 4->4", DType::kFloat32, ReduceOp::kMean, 4, 0x3f800000, 0x3f800000, 4),
      reduceCase("float64 mean 2->2", DType::kFloat64, ReduceOp::kMean, 2, 0x3ff0000000000000,
                 0x3ff0000000000000, 2),
      reduceCase("bfloat16 mean 2->2", DType::kBFloat16, ReduceOp::kMean, 2, 0x3f80, 0x3f80, 2),
      reduceCase("bfloat16 mean 4->4", DType::kBFloat16, ReduceOp::kMean, 4, 0x3f80, 0x3f80, 4),
      reduceCase("float16 mean 2->2", DType::kFloat16, ReduceOp::kMean, 2, 0x3c00, 0x3c00, 2),
      reduceCase("float16 mean 4->4", DType::kFloat16, ReduceOp::kMean, 4, 0x3c00, 0x3c00, 4),
      reduceCase("int32 mean 3->3", DType::kInt32, ReduceOp::kMean, 3, 7, 7, 3),
      reduceCase("int64 sum 2->2", DType::kInt64, ReduceOp::kSum, 2, 1, 2, 1),
      reduceCase("uint8 sum 2->2", DType::kUInt8, ReduceOp::kSum, 2, 1, 2, 1),
      streamCase("stream 5->3"),
      adamCase("adam of mean 2"),
  };
}

/// Threads that start each repetition together. Spinning is right here: nothing else should run on these
/// cores.
class Barrier {
 public:
  explicit Barrier(int numThreads) : numThreads_(numThreads) {}

  void wait() {
    const int generation = generation_.load();
    if (arrived_.fetch_add(1) + 1 == numThreads_) {
      arrived_.store(0);
      generation_.fetch_add(1);
    } else {
      while (generation_.load(std::memory_order_acquire) == generation) std::this_thread::yield();
    }
  }

 private:
  const int numThreads_;
  std::atomic<int> arrived_{0};
  std::atomic<int> generation_{0};
};

struct Times {
  double min_s, p50_s, p99_s;
};

/// Small cases are repeated within one measurement, so that the barrier's cost disappears.
Times timeCase(const Case& what, Arrays& arrays, std::size_t numBytes, int numThreads) {
  const int numRepeats = static_cast<int>(std::max<std::size_t>(1, (std::size_t{8} << 20) / numBytes));
  const int numSamples = numBytes > (std::size_t{4} << 20) ? 25 : 60;
  std::vector<double> seconds;
  // From the first thread's start: on a busy machine another thread may be done before this one leaves the
  // barrier.
  std::vector<Clock::time_point> starts(static_cast<std::size_t>(numThreads));
  Barrier barrier(numThreads);
  const auto work = [&](int thread) {
    const std::size_t slice = numBytes / static_cast<std::size_t>(numThreads);
    const std::size_t begin = slice * static_cast<std::size_t>(thread);
    for (int sample = 0; sample < numSamples; ++sample) {
      barrier.wait();
      starts[static_cast<std::size_t>(thread)] = Clock::now();
      for (int repeat = 0; repeat < numRepeats; ++repeat) what.run(arrays, begin, begin + slice);
      barrier.wait();
      if (thread != 0) continue;
      const std::chrono::duration<double> elapsed =
          Clock::now() - *std::min_element(starts.begin(), starts.end());
      seconds.push_back(elapsed.count() / numRepeats);
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < numThreads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2], seconds[seconds.size() * 99 / 100]};
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= ' ') result += c;
  }
  return result + '"';
}

std::string commit() {
  std::string described;
  const std::unique_ptr<FILE, int (*)(FILE*)> git(
      ::popen("git describe --always --dirty --tags 2>/dev/null", "r"), ::pclose);
  for (int c; git && (c = std::fgetc(git.get())) != EOF;) described += static_cast<char>(c);
  return described.empty() ? "unknown" : described;
}

std::string processorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(std::min(line.find(':') + 2, line.size()));
  }
  return "unknown";
}

/// Appends figures to a file, each with where it comes from.
class Records {
 public:
  explicit Records(const char* path) {
    if (path == nullptr) return;
    file_.open(path, std::ios::app);
    if (!file_) {
      std::perror(path);
      std::exit(1);
    }
    provenance_ = std::string("\"kind\": \"measured\", \"instruction_set\": ") +
                  quoted(coarse::instructionSet()) + ", \"commit\": " + quoted(commit()) +
                  ", \"machine\": {\"cpu\": " + quoted(processorModel()) +
                  ", \"cores\": " + std::to_string(std::thread::hardware_concurrency()) + "}}";
  }

  void add(const Case& what, std::size_t numBytes, int numThreads, const Times& times) {
    if (!file_.is_open()) return;
    file_ << "{\"bench\": \"reduce-kernels\", \"system\": " << quoted(what.name)
          << ", \"num_threads\": " << numThreads << ", \"bytes\": " << numBytes
          << ", \"min_us\": " << times.min_s * 1e6 << ", \"p50_us\": " << times.p50_s * 1e6
          << ", \"p99_us\": " << times.p99_s * 1e6
          << ", \"algbw_gbytes_per_s\": " << static_cast<double>(numBytes) / 1e9 / times.p50_s << ", "
          << provenance_ << std::endl;
  }

 private:
  std::ofstream file_;
  std::string provenance_;
};

void printCase(const Case& what, Arrays& arrays, int numThreads, Records& records) {
  std::printf("%-24s %7d", what.name, numThreads);
  for (const std::size_t numBytes : kSizes) {
    const Times times = timeCase(what, arrays, numBytes, numThreads);
    records.add(what, numBytes, numThreads, times);
    const double gigabytes = static_cast<double>(numBytes) / 1e9;
    std::printf("  %5.1f/%5.1f/%5.1f", gigabytes / times.min_s, gigabytes / times.p50_s,
                gigabytes / times.p99_s);
    std::fflush(stdout);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const bool hasRecords = argc > 2 && std::strcmp(argv[1], "--json") == 0;
  const char* instructionSet = argv[hasRecords ? 3 : 1];  // null behind the last one
  if (instructionSet != nullptr && !coarse::forceInstructionSet(instructionSet)) {
    std::fprintf(stderr, "reduce_kernels: this processor has no '%s' kernels; it would take '%s'\n",
                 instructionSet, coarse::instructionSet());
    return 2;
  }
  Records records(hasRecords ? argv[2] : nullptr);
  std::printf("measured, %s, algorithm bandwidth in 1e9 bytes/s: best/p50/p99\n", coarse::instructionSet());
  std::printf("%-24s %7s", "case", "threads");
  for (const std::size_t numBytes : kSizes)
    std::printf("  %13.2f MiB", static_cast<double>(numBytes) / (1 << 20));
  std::printf("\n");
  Arrays arrays;
  for (const Case& what : allCases()) {
    if (!what.verify(arrays)) {
      std::fprintf(stderr, "reduce_kernels: %s gives a wrong result\n", what.name);
      return 1;
    }
    arrays.clear();
    for (const int numThreads : {1, 2}) printCase(what, arrays, numThreads, records);
  }
  return 0;
}
