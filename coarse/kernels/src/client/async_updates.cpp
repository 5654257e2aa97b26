#include "coarse/client/async_updates.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "coarse/shared_memory/layout.hpp"

namespace coarse {
namespace {

UpdateSettings settingsOf(const CoarseUpdateSettings& given) {
  UpdateSettings settings;
  settings.rule = static_cast<UpdateRule>(given.rule);
  settings.gradientScale = given.gradient_scale;
  settings.parameterScale = given.parameter_scale;
  settings.stepSize = given.step_size;
  settings.firstDecay = given.first_decay;
  settings.firstWeight = given.first_weight;
  settings.momentum = given.momentum;
  settings.secondDecay = given.second_decay;
  settings.secondWeight = given.second_weight;
  settings.epsilon = given.epsilon;
  settings.updateNumber = given.update_number;
  settings.hasGradient = 1;
  return settings;
}

void updateThrough(void* updates, const char* key, const void* gradient, const void* value, void* updated,
                   std::uint64_t numBytes, const CoarseUpdateSettings* settings, CoarseReduceDone done,
                   void* context) {
  static_cast<AsyncUpdates*>(updates)->update(
      key, gradient, value, updated, numBytes, settingsOf(*settings),
      [done, context](const char* failure) { done(context, failure); });
}

}  // namespace

AsyncUpdates::AsyncUpdates(AsyncReducer& reducer)
    : reducer_(reducer), interface_{COARSE_ASYNC_UPDATES_VERSION, this, &updateThrough} {}

void AsyncUpdates::add(const std::string& key, const Place& place) {
  const std::lock_guard lock(mutex_);
  if (parameters_.count(key) != 0)
    throw std::invalid_argument("there is a parameter of the name " + key + " already");
  reducer_.add(key, place.group, place.tensor, place.numBytes);
  parameters_[key].place = place;
}

bool AsyncUpdates::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = parameters_.find(key);
  if (found == parameters_.end()) return true;
  if (found->second.isUnderWay || !reducer_.remove(key)) return false;
  parameters_.erase(found);
  return true;
}

void AsyncUpdates::update(std::string_view key, const void* gradient, const void* value, void* updated,
                          std::size_t numBytes, const UpdateSettings& settings, Done done) {
  Parameter* parameter = nullptr;
  if (const std::string refusal = begin(key, numBytes, parameter); !refusal.empty())
    return done(refusal.c_str());
  const Place& place = parameter->place;
  // Usually nothing was assigned since the last update, and reading both costs less than writing one.
  if (place.writes && std::memcmp(place.parameter, value, numBytes) != 0) {
    if (const std::string failure = write(*parameter, value); !failure.empty())
      return finish(*parameter, updated, failure.c_str(), done);
  }
  *place.settings = settings;
  reducer_.reduce(
      key, gradient, nullptr, numBytes,
      [this, parameter, updated, done = std::move(done)](const char* failure) {
        finish(*parameter, updated, failure, done);
      },
      kPresent | kUpdate);
}

/// @returns why the update cannot begin; empty if it has.
std::string AsyncUpdates::begin(std::string_view key, std::size_t numBytes, Parameter*& parameter) {
  const std::lock_guard lock(mutex_);
  const auto found = parameters_.find(std::string(key));
  if (found == parameters_.end()) return "no parameter was registered as " + std::string(key);
  parameter = &found->second;
  if (parameter->place.numBytes != numBytes)
    return std::string(key) + " has " + std::to_string(parameter->place.numBytes) + " bytes, not " +
           std::to_string(numBytes);
  if (parameter->isUnderWay) return std::string(key) + " is updated twice at once";
  parameter->isUnderWay = true;
  return {};
}

/// Sets the parameter to `value`. No memory device uses it before this client's push, but another client may
/// still copy the last result.
/// @returns why it cannot; empty if it has.
std::string AsyncUpdates::write(const Parameter& parameter, const void* value) {
  const Place& place = parameter.place;
  const auto haveCopied = [&] {
    for (std::size_t client = 0; client < place.numClients; ++client) {
      // acquire: later writes must not precede that client's reads.
      if (place.copied[client].load(std::memory_order_acquire) < parameter.numUpdates) return false;
    }
    return true;
  };
  const std::string failure = reducer_.awaitOthers(place.group, place.tensor, haveCopied);
  if (failure.empty()) std::memcpy(place.parameter, value, place.numBytes);
  return failure;
}

void AsyncUpdates::finish(Parameter& parameter, void* updated, const char* failure, const Done& done) {
  const Place& place = parameter.place;
  if (failure == nullptr) {
    std::memcpy(updated, place.parameter, place.numBytes);
    ++parameter.numUpdates;
    // release: after the reads of the copy.
    if (place.copied != nullptr)
      place.copied[place.client].store(parameter.numUpdates, std::memory_order_release);
  }
  {
    const std::lock_guard lock(mutex_);
    parameter.isUnderWay = false;
  }
  done(failure);
}

}  // namespace coarse
