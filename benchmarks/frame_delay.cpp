/// A switch with long and lossy cables: passes Ethernet frames between network namespaces, each after a
/// delay.
///
///     frame_delay BITS_PER_S DELAY_US LOSS QUEUE_BYTES NAMESPACE...
///
/// Makes a TAP interface `cable` in each namespace of /run/netns and prints "ready". A frame waits until the
/// cable to its receiver has carried the frames before it, at BITS_PER_S, and then for the delay. If more
/// than QUEUE_BYTES wait for a cable, further frames to it are dropped. Frames may be as long as those that
/// TCP gives a network card to divide into segments: 64 KiB. LOSS is the probability that a segment is lost.
/// SIGTERM and the end of the parent end the process.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using Nanoseconds = std::int64_t;
using Address = std::array<char, 6>;

constexpr std::size_t kHeaderBytes = 10;  // of virtio_net_hdr, which says how a frame is to be divided
constexpr std::size_t kEthernetBytes = 14;
constexpr std::size_t kMostBytes = (std::size_t{1} << 16) + 128;
constexpr std::size_t kMovedBytes =
    kMostBytes / 2;  // shorter frames are copied, so that they take little memory
constexpr std::size_t kMostSpareBuffers = 64;
constexpr int kBatch = 64;

volatile sig_atomic_t isStopped = 0;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

Nanoseconds now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * Nanoseconds{1'000'000'000} + time.tv_nsec;
}

/// Moves this process into a namespace, and makes a TAP interface there.
int openCable(const std::string& name) {
  const std::string path = "/run/netns/" + name;
  const int space = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail(path);
  close(space);
  const int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (tap < 0) fail("/dev/net/tun");
  ifreq request{};
  std::strcpy(request.ifr_name, "cable");
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tap, TUNSETIFF, &request) != 0) fail(name + ": making the interface `cable`");
  if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN) != 0)
    fail(name + ": long frames");
  return tap;
}

template <typename Number>
Number get(const char* at) {
  Number value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

template <typename Number>
void set(char* at, Number value) {
  std::memcpy(at, &value, sizeof(value));
}

/// Sum of 16-bit words in ones' complement, of an even number of bytes.
std::uint16_t sumWords(const char* begin, const char* end, std::uint32_t sum = 0) {
  for (; begin < end; begin += 2) sum += get<std::uint16_t>(begin);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(sum);
}

/// The segments into which a network card would divide a frame of TCP over IPv4; one if it would not.
class Segments {
 public:
  /// `frame` begins with virtio_net_hdr, of which every number is in this machine's order.
  Segments(const char* frame, std::size_t size) : frame_(frame), size_(size) {
    constexpr char kTcpOverIp4 = 1, kMarked = '\x80';
    if ((frame[1] & ~kMarked) != kTcpOverIp4) return;
    ip_ = kHeaderBytes + kEthernetBytes;
    tcp_ = kHeaderBytes + get<std::uint16_t>(frame + 6);
    payload_ = tcp_ + 4 * (static_cast<unsigned char>(frame[tcp_ + 12]) >> 4);
    segmentBytes_ = get<std::uint16_t>(frame + 4);
    count_ = (size - payload_ + segmentBytes_ - 1) / segmentBytes_;
  }

  std::size_t count() const { return count_; }

  /// Writes a frame of the segments from `begin` on, before `end`; returns its size.
  std::size_t cut(std::size_t begin, std::size_t end, char* frame) const {
    const std::size_t offset = begin * segmentBytes_;
    const std::size_t length = std::min(size_ - payload_, end * segmentBytes_) - offset;
    std::memcpy(frame, frame_, payload_);
    std::memcpy(frame + payload_, frame_ + payload_ + offset, length);
    if (length <= segmentBytes_) {
      frame[1] = 0;
      set<std::uint16_t>(frame + 4, 0);
    }
    writeIp(frame + ip_, payload_ - ip_ + length, begin);
    writeTcp(frame, length, offset, end == count_);
    return payload_ + length;
  }

 private:
  void writeIp(char* ip, std::size_t bytes, std::size_t begin) const {
    set(ip + 2, htons(static_cast<std::uint16_t>(bytes)));
    set(ip + 4, htons(static_cast<std::uint16_t>(ntohs(get<std::uint16_t>(ip + 4)) + begin)));
    set<std::uint16_t>(ip + 10, 0);
    set(ip + 10, static_cast<std::uint16_t>(~sumWords(ip, ip + (tcp_ - ip_))));
  }

  /// Like the kernel, leaves the checksum with the sum of addresses, protocol and length: the rest is not
  /// sent.
  void writeTcp(char* frame, std::size_t length, std::size_t offset, bool isLast) const {
    char* tcp = frame + tcp_;
    set(tcp + 4, htonl(ntohl(get<std::uint32_t>(tcp + 4)) + static_cast<std::uint32_t>(offset)));
    constexpr char kFinAndPush = 0x09, kCongestionReduced = '\x80';
    if (!isLast) tcp[13] &= static_cast<char>(~kFinAndPush);
    if (offset) tcp[13] &= static_cast<char>(~kCongestionReduced);
    const auto bytes = htons(static_cast<std::uint16_t>(payload_ - tcp_ + length));
    const char* addresses = frame + ip_ + 12;
    set(tcp + 16, sumWords(addresses, addresses + 8, std::uint32_t{htons(IPPROTO_TCP)} + bytes));
  }

  const char* frame_;
  std::size_t size_;
  std::size_t ip_ = 0;
  std::size_t tcp_ = 0;
  std::size_t payload_ = 0;
  std::size_t segmentBytes_ = 0;
  std::size_t count_ = 1;
};

struct Frame {
  std::unique_ptr<char[]> bytes;
  std::size_t size;
  Nanoseconds due;
};

struct Port {
  int tap = -1;
  Address address{};            // of the node, seen in its frames
  Nanoseconds cableFreeAt = 0;  // when the cable to the node has carried all of `waiting`
  std::deque<Frame> waiting;    // by `due`
};

class Switch {
 public:
  Switch(double bitsPerSecond, Nanoseconds delay, double loss, double queueBytes)
      : nanosecondsPerByte_(8e9 / bitsPerSecond),
        delay_(delay),
        longestWait_(static_cast<Nanoseconds>(queueBytes * nanosecondsPerByte_)),
        loss_(loss),
        passedUntilLoss_(untilLoss()) {}

  void connect(const std::string& name) {
    ports_.emplace_back();
    ports_.back().tap = openCable(name);
  }

  void run(const sigset_t& whileWaiting) {
    std::vector<pollfd> polled;
    for (const Port& port : ports_) polled.push_back({port.tap, POLLIN, 0});
    while (!isStopped) {
      waitFor(polled, whileWaiting);
      for (std::size_t from = 0; from < ports_.size(); ++from) {
        if (polled[from].revents & POLLERR) throw std::runtime_error("a namespace is gone");
        if (polled[from].revents & POLLIN) receive(from);
        sendDue();
      }
    }
  }

 private:
  void waitFor(std::vector<pollfd>& polled, const sigset_t& mask) {
    const Nanoseconds left = std::max(Nanoseconds{0}, nextDue() - now());
    const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
    for (pollfd& each : polled) each.revents = 0;
    if (ppoll(polled.data(), polled.size(), &timeout, &mask) < 0 && errno != EINTR) fail("ppoll");
  }

  Nanoseconds nextDue() const {
    Nanoseconds next = now() + 1'000'000'000;
    for (const Port& port : ports_) {
      if (!port.waiting.empty()) next = std::min(next, port.waiting.front().due);
    }
    return next;
  }

  void receive(std::size_t from) {
    for (int count = 0; count < kBatch; ++count) {
      if (!buffer_) buffer_ = takeBuffer();
      const ssize_t size = read(ports_[from].tap, buffer_.get(), kMostBytes);
      if (size <= static_cast<ssize_t>(kHeaderBytes + 2 * sizeof(Address))) return;
      std::memcpy(ports_[from].address.data(), buffer_.get() + kHeaderBytes + sizeof(Address),
                  sizeof(Address));
      passSegments(from, static_cast<std::size_t>(size));
    }
  }

  /// Passes what is not lost of the frame in buffer_.
  void passSegments(std::size_t from, std::size_t size) {
    const std::size_t count = Segments(buffer_.get(), size).count();
    if (count <= passedUntilLoss_) {
      passedUntilLoss_ -= count;
      return pass(from, size);
    }
    std::unique_ptr<char[]> whole = std::move(buffer_);
    const Segments segments(whole.get(), size);
    for (std::size_t begin = 0; begin < count;) {
      const std::size_t end = std::min<std::uint64_t>(count, begin + passedUntilLoss_);
      if (end > begin) passCut(from, segments, begin, end);
      passedUntilLoss_ = end < count ? untilLoss() : passedUntilLoss_ - (end - begin);
      begin = end + 1;
    }
    keep(std::move(whole));
  }

  void passCut(std::size_t from, const Segments& segments, std::size_t begin, std::size_t end) {
    if (!buffer_) buffer_ = takeBuffer();
    pass(from, segments.cut(begin, end, buffer_.get()));
  }

  /// Number of segments before the next one that is lost.
  std::uint64_t untilLoss() {
    return loss_ > 0 ? std::geometric_distribution<std::uint64_t>(loss_)(random_) : UINT64_MAX;
  }

  /// Queues the frame in buffer_ for its receiver, or for all others if the receiver is not known.
  void pass(std::size_t from, std::size_t size) {
    Address receiver;
    std::memcpy(receiver.data(), buffer_.get() + kHeaderBytes, sizeof(Address));
    for (std::size_t to = 0; to < ports_.size(); ++to) {
      if (to != from && ports_[to].address == receiver) {
        if (hasRoom(ports_[to]))
          queue(ports_[to], size > kMovedBytes ? std::move(buffer_) : copy(size), size);
        return;
      }
    }
    for (std::size_t to = 0; to < ports_.size(); ++to) {
      if (to != from && hasRoom(ports_[to])) queue(ports_[to], copy(size), size);
    }
  }

  bool hasRoom(const Port& port) const { return port.cableFreeAt - now() <= longestWait_; }

  void queue(Port& port, std::unique_ptr<char[]> bytes, std::size_t size) {
    const auto carriedIn = static_cast<Nanoseconds>((size - kHeaderBytes) * nanosecondsPerByte_);
    port.cableFreeAt = std::max(now(), port.cableFreeAt) + carriedIn;
    port.waiting.push_back({std::move(bytes), size, port.cableFreeAt + delay_});
  }

  std::unique_ptr<char[]> copy(std::size_t size) {
    std::unique_ptr<char[]> bytes =
        size > kMovedBytes ? takeBuffer() : std::unique_ptr<char[]>(new char[size]);
    std::memcpy(bytes.get(), buffer_.get(), size);
    return bytes;
  }

  /// A frame that the kernel refuses, such as one to an interface that is not up yet, is lost.
  void sendDue() {
    const Nanoseconds time = now();
    for (Port& port : ports_) {
      while (!port.waiting.empty() && port.waiting.front().due <= time) {
        Frame frame = std::move(port.waiting.front());
        port.waiting.pop_front();
        if (write(port.tap, frame.bytes.get(), frame.size) < 0 && errno == EBADFD)
          fail("a namespace is gone");
        if (frame.size > kMovedBytes) keep(std::move(frame.bytes));
      }
    }
  }

  void keep(std::unique_ptr<char[]> buffer) {
    if (spare_.size() < kMostSpareBuffers) spare_.push_back(std::move(buffer));
  }

  std::unique_ptr<char[]> takeBuffer() {
    if (spare_.empty()) return std::unique_ptr<char[]>(new char[kMostBytes]);
    std::unique_ptr<char[]> taken = std::move(spare_.back());
    spare_.pop_back();
    return taken;
  }

  double nanosecondsPerByte_;
  Nanoseconds delay_;
  Nanoseconds longestWait_;
  double loss_;
  std::mt19937_64 random_{1};
  std::uint64_t passedUntilLoss_;
  std::deque<Port> ports_;
  std::unique_ptr<char[]> buffer_;
  std::vector<std::unique_ptr<char[]>> spare_;
};

/// Returns the signals that end a wait; elsewhere they are blocked.
sigset_t catchSignals() {
  struct sigaction action{};
  action.sa_handler = [](int) { isStopped = 1; };
  sigset_t blocked;
  sigset_t before;
  sigemptyset(&blocked);
  for (const int number : {SIGTERM, SIGINT}) {
    sigaction(number, &action, nullptr);
    sigaddset(&blocked, number);
  }
  sigprocmask(SIG_BLOCK, &blocked, &before);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  return before;
}

/// Frames are due also while all processors compute; where this is not permitted, they are passed on later.
void takePriority() {
  sched_param lowest{};
  lowest.sched_priority = 1;
  sched_setscheduler(0, SCHED_FIFO, &lowest);
  prctl(PR_SET_TIMERSLACK, 1);
}

}  // namespace

int main(int count, char** words) {
  if (count < 7) {
    std::fputs("frame_delay BITS_PER_S DELAY_US LOSS QUEUE_BYTES NAMESPACE NAMESPACE...\n", stderr);
    return 2;
  }
  try {
    const sigset_t whileWaiting = catchSignals();
    const auto delay = static_cast<Nanoseconds>(std::stod(words[2]) * 1e3);
    Switch frames(std::stod(words[1]), delay, std::stod(words[3]), std::stod(words[4]));
    for (int index = 5; index < count; ++index) frames.connect(words[index]);
    takePriority();
    std::puts("ready");
    std::fflush(stdout);
    frames.run(whileWaiting);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "frame_delay: %s\n", error.what());
    return 1;
  }
}
