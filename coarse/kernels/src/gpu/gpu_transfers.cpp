#include "coarse/gpu/gpu_transfers.hpp"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "coarse/gpu/cuda_pinned_pages.hpp"

namespace coarse {
namespace {

// Times for which the thread polls, and sleeps between polls. A GPU wakes no one, and an event takes a few
// hundred microseconds per batch.
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::microseconds kNap{20};
constexpr std::chrono::milliseconds kHealthInterval{100};

constexpr const char* kWithoutNccl = "; COARSE_DUAL_SYNC=off has the memory devices reduce everything";

/// Whether a count that wraps around has reached `number`.
bool hasReached(std::uint32_t count, std::uint32_t number) noexcept {
  return static_cast<std::int32_t>(count - number) >= 0;
}

std::size_t bytesOf(const Shard& shard) noexcept { return shard.numElements * itemBytes(shard.dtype); }

Mapping wordsMapping(std::size_t numBytes) {
  const int fd = createSealedMemory("words of GPU transfers", numBytes);
  try {
    Mapping mapping(fd, numBytes, Mapping::Access::kReadWrite);
    ::close(fd);
    return mapping;
  } catch (...) {
    ::close(fd);
    throw;
  }
}

}  // namespace

GpuTransfers::PinnedWords::PinnedWords(const cuda::SharedContext& context)
    : mapping_(wordsMapping(sizeof(Words))), registration_(context, mapping_.data(), sizeof(Words)) {}

cuda::DeviceAddress GpuTransfers::PinnedWords::brought() const noexcept {
  return registration_.deviceAddress() + offsetof(Words, brought);
}

cuda::DeviceAddress GpuTransfers::PinnedWords::returned() const noexcept {
  return registration_.deviceAddress() + offsetof(Words, returned);
}

cuda::DeviceAddress GpuTransfers::PinnedWords::summed() const noexcept {
  return registration_.deviceAddress() + offsetof(Words, summed);
}

GpuTransfers::GpuTransfers(Client& client, GpuTransfersConfig config, cuda::SharedContext context,
                           MappedMemory slots, MappedMemory results)
    : client_(client),
      config_(config),
      plan_(client.plan(config_.group)),
      context_(std::move(context)),
      slots_(slots),
      results_(results),
      words_(context_),
      // With their own priority, so that they share no hardware queue with computation.
      pushStream_(context_, context_->priorities().second),
      pullStream_(context_, context_->priorities().second),
      computed_(context_),
      fetched_(context_) {
  pin(slots_);
  pin(results_);
  tryWords();
  for (const Shard& shard : plan_.shards) stepBytes_ += bytesOf(shard);
  leftBytes_ = stepBytes_;
  thread_ = std::make_unique<std::thread>([this] { run(); });
}

GpuTransfers::~GpuTransfers() { close(); }

void GpuTransfers::close() noexcept {
  if (thread_ == nullptr || !context_->isUsable()) return;  // a fork has no such thread
  {
    const std::lock_guard lock(mutex_);
    isStopping_ = true;
    words_->returned.store(lastNumber_, std::memory_order_release);
  }
  hasWork_.notify_all();
  thread_->join();
  thread_.reset();
  const bool isUnfinished =
      failure_ != WaitStatus::kDone || !directSteps_.empty();  // no other thread remains
  if (directAllReduce_ != nullptr && (isUnfinished || directAllReduce_->isInStep()))
    directAllReduce_->abort();
  try {
    const cuda::ContextScope scope(*context_);
    pushStream_.synchronize();
    pullStream_.synchronize();
    if (directAllReduce_ != nullptr) directAllReduce_->synchronize();
  } catch (const cuda::Error&) {
    // A failed device copies nothing any more.
  }
  pinned_.clear();
}

void GpuTransfers::pin(const MappedMemory& memory) {
  if (memory.data != nullptr && memory.gpu == nullptr)
    pinned_.emplace_back(context_, memory.data, memory.numBytes);
}

void GpuTransfers::tryWords() {
  const cuda::ContextScope scope(*context_);
  pushStream_.writeValue(words_.brought(), 0);
  pullStream_.waitValue(words_.returned(), 0);
  pushStream_.synchronize();
  pullStream_.synchronize();
}

/// Orders later work of the push stream behind all earlier work of `stream`.
WaitStatus GpuTransfers::follow(cuda::StreamHandle stream) {
  if (const WaitStatus failure = status(); failure != WaitStatus::kDone) return failure;
  if (thread_ == nullptr) throw std::logic_error("tensors were pushed after close()");
  if (cuda::isCapturing(stream)) {
    throw cuda::Error(
        "gradients cannot be averaged while a CUDA graph is captured: memory devices take part in every "
        "step, which a graph would not. Capture the computation alone: forward and backward under "
        "no_sync(), with average_gradients() after each replay, or torch.cuda.make_graphed_callables() "
        "before "
        "the model is wrapped");
  }
  computed_.record(stream);
  pushStream_.wait(computed_);
  return WaitStatus::kDone;
}

WaitStatus GpuTransfers::stage(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream) {
  const cuda::ContextScope scope(*context_);
  if (const WaitStatus failure = follow(stream); failure != WaitStatus::kDone) return failure;
  for (const GpuTensor& tensor : tensors) {
    const ShardRange shards = client_.shardsOf(config_.group, tensor.tensor);
    stage(pieceOf(tensor, shards.first, shards));
  }
  return WaitStatus::kDone;
}

WaitStatus GpuTransfers::push(const std::vector<GpuTensor>& tensors, cuda::StreamHandle stream) {
  const cuda::ContextScope scope(*context_);
  if (const WaitStatus failure = follow(stream); failure != WaitStatus::kDone) return failure;
  if (const WaitStatus failure = takeOwn(tensors); failure != WaitStatus::kDone) return failure;
  for (Batch& each : cut(tensors)) {
    for (const Piece& piece : each.pieces) stage(piece);
    pushStream_.writeValue(words_.brought(), each.number);
    const auto batch = std::make_shared<const Batch>(std::move(each));
    unfetched_.push_back({batch, markBrought()});
    const std::lock_guard lock(mutex_);
    pushed_.push_back(batch);
  }
  hasWork_.notify_one();
  while (!unfetched_.empty() &&
         hasReached(words_->returned.load(std::memory_order_acquire), unfetched_.front().batch->number)) {
    followPush(std::move(unfetched_.front().brought));
    fetch(*unfetched_.front().batch);
    unfetched_.pop_front();
  }
  return WaitStatus::kDone;
}

WaitStatus GpuTransfers::join(cuda::StreamHandle stream) {
  const cuda::ContextScope scope(*context_);
  joinOwn(stream);  // before the wait for memory devices, which may block all later work
  for (Unfetched& each : unfetched_) {
    followPush(std::move(each.brought));
    pullStream_.waitValue(words_.returned(), each.batch->number);
    fetch(*each.batch);
  }
  unfetched_.clear();
  fetched_.record(pullStream_.handle());
  cuda::waitForEvent(stream, fetched_);
  pushStream_.wait(fetched_);  // slots are read before they are overwritten
  leftBytes_ = stepBytes_;
  return status();
}

std::size_t GpuTransfers::batchBytes() const noexcept {
  return std::clamp(leftBytes_ / 2, config_.leastBatchBytes, config_.mostBatchBytes);
}

void GpuTransfers::useDirectAllReduce(std::shared_ptr<GpuDirectAllReduce> directAllReduce,
                                      cuda::DeviceAddress slots) {
  {
    const std::lock_guard lock(mutex_);
    directAllReduce_.swap(directAllReduce);
  }
  ownSlots_ = slots;
}

WaitStatus GpuTransfers::waitForDirectAllReduce() {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (directSteps_.empty() && failure_ == WaitStatus::kDone) return WaitStatus::kDone;
    }
    if (const WaitStatus failure = status(); failure != WaitStatus::kDone) return failure;
    std::this_thread::sleep_for(kNap);
  }
}

WaitStatus GpuTransfers::status() const {
  if (!context_->isUsable()) return WaitStatus::kForked;
  const std::lock_guard lock(mutex_);
  if (!ownFailure_.empty()) throw nccl::Error(ownFailure_);
  return failure_;
}

std::uint32_t GpuTransfers::numPushed() const {
  const std::lock_guard lock(mutex_);
  return lastNumber_;
}

bool GpuTransfers::hasBrought(std::uint32_t count) const noexcept {
  return !context_->isUsable() ||  // a fork has no words
         hasReached(words_->brought.load(std::memory_order_acquire), count);
}

/// Passes their part of these tensors to direct all-reduce.
WaitStatus GpuTransfers::takeOwn(const std::vector<GpuTensor>& tensors) {
  if (directAllReduce_ == nullptr) return WaitStatus::kDone;
  try {
    for (const GpuTensor& tensor : tensors) {
      const ShardRange shards = client_.shardsOf(config_.group, tensor.tensor);
      cuda::DeviceAddress address = tensor.destination;
      if (address == 0 && ownSlots_ != 0) address = ownSlots_ + plan_.shards[shards.first].offset;
      directAllReduce_->take(shards, address, (tensor.flags & kPresent) != 0);
    }
    setGiving(true);
    directAllReduce_->advance(computed_);
  } catch (const nccl::Error& error) {
    failByNccl(error);
  } catch (...) {
    setGiving(false);
    throw;
  }
  setGiving(false);
  return status();
}

/// Makes the thread watch a call of NCCL, which may wait for other workers.
void GpuTransfers::setGiving(bool isGiving) {
  {
    const std::lock_guard lock(mutex_);
    isGiving_ = isGiving;
    numGivings_ += isGiving ? 1 : 0;
  }
  if (isGiving) hasWork_.notify_one();
}

void GpuTransfers::joinOwn(cuda::StreamHandle stream) {
  std::uint32_t lastBatch = 0;
  {
    const std::lock_guard lock(mutex_);
    if (directAllReduce_ == nullptr || failure_ != WaitStatus::kDone) return;
    lastBatch = lastNumber_;
  }
  directAllReduce_->join(stream, words_.summed(), ++numDirectSteps_);
  {
    const std::lock_guard lock(mutex_);
    if (failure_ == WaitStatus::kDone) directSteps_.push_back({numDirectSteps_, lastBatch});
  }
  hasWork_.notify_one();
}

std::vector<GpuTransfers::Batch> GpuTransfers::cut(const std::vector<GpuTensor>& tensors) {
  std::vector<ShardRange> shards;
  std::size_t restBytes = 0;
  for (const GpuTensor& tensor : tensors) {
    const ShardRange all = shards.emplace_back(client_.beginPush(config_.group, tensor.tensor));
    for (std::uint32_t shard = all.first; shard < all.last; ++shard)
      restBytes += bytesOf(plan_.shards[shard]);
  }
  std::vector<Batch> batches(1);
  std::size_t numBytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const ShardRange& all = shards[i];
    ShardRange piece{all.first, all.first, all.step};
    while (piece.last < all.last) {
      const std::uint32_t shard = piece.last++;
      numBytes += bytesOf(plan_.shards[shard]);
      restBytes -= bytesOf(plan_.shards[shard]);
      // A small rest joins the batch.
      const bool isFull = numBytes >= batchBytes() && restBytes >= batchBytes() / 2;
      if (!isFull && piece.last < all.last && isDirect(piece.last) == isDirect(shard)) continue;
      batches.back().pieces.push_back(pieceOf(tensors[i], all.first, piece));
      piece.first = piece.last;
      if (!isFull) continue;
      batches.emplace_back();
      leftBytes_ -= std::min(leftBytes_, std::exchange(numBytes, 0));
    }
  }
  leftBytes_ -= std::min(leftBytes_, numBytes);
  if (batches.back().pieces.empty()) batches.pop_back();
  const std::lock_guard lock(mutex_);
  for (Batch& batch : batches) batch.number = ++lastNumber_;
  // A failure may have occurred meanwhile: no stream may wait for later results.
  if (failure_ != WaitStatus::kDone) words_->returned.store(lastNumber_, std::memory_order_release);
  return batches;
}

GpuTransfers::Piece GpuTransfers::pieceOf(const GpuTensor& tensor, std::uint32_t firstShard,
                                          const ShardRange& shards) const {
  const Shard& first = plan_.shards[shards.first];
  const Shard& last = plan_.shards[shards.last - 1];
  const std::size_t offset = first.offset - plan_.shards[firstShard].offset;
  Piece piece;
  piece.shards = shards;
  piece.flags = tensor.flags;
  piece.numBytes = last.offset + bytesOf(last) - first.offset;
  if (isDirect(shards.first)) return piece;
  if (slots_.data != nullptr) piece.slot = slots_.data + first.offset;
  piece.result = tensor.result == nullptr ? piece.slot : tensor.result + offset;
  piece.resultMemory = tensor.result == nullptr ? &slots_ : &results_;
  if (tensor.source != 0) piece.source = tensor.source + offset;
  if (tensor.destination != 0) piece.destination = tensor.destination + offset;
  return piece;
}

void GpuTransfers::stage(const Piece& piece) {
  if (piece.source == 0) return;
  if (slots_.gpu == nullptr) {
    pushStream_.copyToHost(piece.slot, piece.source, piece.numBytes);
  } else if (isReached(slots_)) {
    pushStream_.copyOnDevice(cuda::addressOf(piece.slot), piece.source, piece.numBytes);
  } else {
    pushStream_.copyTo(*slots_.gpu, cuda::addressOf(piece.slot), piece.source, piece.numBytes);
  }
}

GpuTransfers::SomeEvent GpuTransfers::markBrought() {
  SomeEvent event;
  if (idleEvents_.empty()) {
    event = std::make_unique<cuda::Event>(context_);
  } else {
    event = std::move(idleEvents_.back());
    idleEvents_.pop_back();
  }
  event->record(pushStream_.handle());
  return event;
}

/// Orders later work of the pull stream behind a batch that may still be in transit to the slots when streams
/// are released early. Uses an event: CUDA does not see an order that only words create.
void GpuTransfers::followPush(SomeEvent brought) {
  pullStream_.wait(*brought);
  idleEvents_.push_back(std::move(brought));
}

void GpuTransfers::fetch(const Batch& batch) {
  for (const Piece& piece : batch.pieces) {
    if (piece.destination == 0) continue;
    const MappedMemory& memory = *piece.resultMemory;
    if (memory.gpu == nullptr) {
      pullStream_.copyToDevice(piece.destination, piece.result, piece.numBytes);
    } else if (isReached(memory)) {
      pullStream_.copyOnDevice(piece.destination, cuda::addressOf(piece.result), piece.numBytes);
    } else {
      pullStream_.copyFrom(*memory.gpu, piece.destination, cuda::addressOf(piece.result), piece.numBytes);
    }
  }
}

void GpuTransfers::run() {
  makeSleepsExact();
  std::unique_lock lock(mutex_);
  while (true) {
    hasWork_.wait(lock, [this] {
      const bool hasWork = !pushed_.empty() || !directSteps_.empty() || isGiving_;
      return isStopping_ || (hasWork && failure_ == WaitStatus::kDone);
    });
    if (isStopping_) return;
    lock.unlock();
    work();
    lock.lock();
  }
}

void GpuTransfers::work() {
  progressedAt_ = clock_.now();
  Clock::time_point checkedAt = Clock::now();
  YieldingSpin spin(kSpin);
  while (true) {
    const bool hasAnnounced = announceBrought();
    const bool hasReleased = releaseReturned();
    if (releaseSummed() || hasReleased || hasAnnounced) {
      progressedAt_ = clock_.now();
      spin.reset();
      continue;
    }
    {
      const std::lock_guard lock(mutex_);
      if (isStopping_ || failure_ != WaitStatus::kDone) return announced_.clear();
      if (pushed_.empty() && announced_.empty() && directSteps_.empty() && !isGiving_) return;
    }
    if (spin.yield()) continue;
    std::this_thread::sleep_for(kNap);
    const Clock::time_point now = Clock::now();
    if (now - checkedAt < kHealthInterval) continue;
    checkedAt = now;
    if (const WaitStatus status = checkProgress(); status != WaitStatus::kDone) fail(status);
    checkDirectAllReduce();
  }
}

bool GpuTransfers::announceBrought() {
  SharedBatch batch;
  {
    const std::lock_guard lock(mutex_);
    const std::uint32_t brought = words_->brought.load(std::memory_order_acquire);
    if (pushed_.empty() || !hasReached(brought, pushed_.front()->number)) return false;
    batch = std::move(pushed_.front());
    pushed_.pop_front();
  }
  for (const Piece& piece : batch->pieces) {
    const WaitStatus status = client_.post(config_.group, piece.shards, piece.flags);
    if (status != WaitStatus::kDone) {
      fail(status);
      return false;
    }
  }
  announced_.push_back(std::move(batch));
  return true;
}

bool GpuTransfers::releaseReturned() {
  bool hasReleased = false;
  while (!announced_.empty()) {
    const Batch& batch = *announced_.front();
    const bool isDone = std::all_of(batch.pieces.begin(), batch.pieces.end(), [this](const Piece& piece) {
      return client_.areDone(config_.group, piece.shards);
    });
    if (!isDone) break;
    const std::lock_guard lock(mutex_);
    if (isStopping_ || failure_ != WaitStatus::kDone) break;  // streams were released, by a greater number
    // Release: a reader of the count sees the results.
    words_->returned.store(batch.number, std::memory_order_release);
    announced_.pop_front();
    hasReleased = true;
  }
  return hasReleased;
}

/// Removes the steps that NCCL has completed successfully.
bool GpuTransfers::releaseSummed() {
  const std::uint32_t summed = words_->summed.load(std::memory_order_acquire);
  {
    const std::lock_guard lock(mutex_);
    if (directSteps_.empty() || !hasReached(summed, directSteps_.front().number)) return false;
  }
  checkDirectAllReduce();
  const std::lock_guard lock(mutex_);
  while (!directSteps_.empty() && hasReached(summed, directSteps_.front().number)) directSteps_.pop_front();
  return true;
}

void GpuTransfers::checkDirectAllReduce() {
  const auto directAllReduce = this->directAllReduce();
  if (directAllReduce == nullptr) return;
  try {
    directAllReduce->check();
  } catch (const nccl::Error& error) {
    failByNccl(error);
  }
}

void GpuTransfers::failByNccl(const nccl::Error& error) {
  // If NCCL was the first to notice a lost peer, that peer is the reason.
  if (const WaitStatus status = client_.checkPeers(); status != WaitStatus::kDone) fail(status);
  fail(WaitStatus::kAborted, error.what() + std::string(kWithoutNccl));
}

WaitStatus GpuTransfers::checkProgress() {
  if (const WaitStatus status = client_.checkPeers(); status != WaitStatus::kDone) return status;
  const std::chrono::duration<double> limit(config_.timeoutSeconds);
  const Clock::time_point now = clock_.now();
  const std::lock_guard lock(mutex_);
  if (!isGiving_ || givingSeen_ != numGivings_) {
    givingSeen_ = numGivings_;
    givingSince_ = now;
  } else if (now - givingSince_ >= limit) {
    return WaitStatus::kTimedOut;
  }
  if (now - progressedAt_ < limit) return WaitStatus::kDone;
  // The GPU's computation has no time limit.
  const std::uint32_t brought = words_->brought.load(std::memory_order_acquire);
  const bool waitsForNccl = !directSteps_.empty() && hasReached(brought, directSteps_.front().lastBatch);
  return announced_.empty() && !waitsForNccl ? WaitStatus::kDone : WaitStatus::kTimedOut;
}

std::shared_ptr<GpuDirectAllReduce> GpuTransfers::directAllReduce() const {
  const std::lock_guard lock(mutex_);
  return directAllReduce_;
}

/// Releases all streams, unless that is done.
void GpuTransfers::fail(WaitStatus status, std::string ownFailure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ != WaitStatus::kDone) return;
    failure_ = status;
    ownFailure_ = std::move(ownFailure);
    pushed_.clear();
    directSteps_.clear();
    words_->returned.store(lastNumber_, std::memory_order_release);
  }
  // This is the thread's only call of CUDA: NCCL waits for ranks that may never come, and nothing else waits
  // any more.
  if (const auto directAllReduce = this->directAllReduce(); directAllReduce != nullptr)
    directAllReduce->abort();
}

}  // namespace coarse
