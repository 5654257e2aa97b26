#pragma once

#include <unistd.h>

namespace coarse {

/// The process that made an object; a fork of it has a copy of the object, and none of its threads.
class Owner {
 public:
  bool isThisProcess() const noexcept { return ::getpid() == pid_; }

 private:
  pid_t pid_ = ::getpid();
};

/// Deletes an object that has threads, but leaks it in a fork: there even the destructor of a condition
/// variable blocks, for a thread that waited for it and does not exist in the fork.
class LeakInForks {
 public:
  template <typename T>
  void operator()(T* object) const {
    if (owner_.isThisProcess()) delete object;
  }

 private:
  Owner owner_;
};

}  // namespace coarse
