// What headers of GCC 12 call and the libstdc++ of GCC 8 has not, or under an earlier version, by what it
// has. Each wheel contains its own, hidden from other libraries.

#include <condition_variable>
#include <mutex>
#include <new>
#include <sstream>

#define DEFINES(symbol) __asm__(symbol) __attribute__((visibility("hidden")))
#define CALLS(symbol) __asm__(symbol)

extern "C" {
// std::ostringstream::ostringstream()
void makeStream(void* memory) DEFINES("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
// std::condition_variable::wait(std::unique_lock<std::mutex>&)
void waitFor(std::condition_variable* condition, std::unique_lock<std::mutex>* lock)
    DEFINES("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
// std::__throw_bad_array_new_length()
[[noreturn]] void throwBadLength() DEFINES("_ZSt28__throw_bad_array_new_lengthv");
// std::exception_ptr::_M_addref() and _M_release(); its copies and destructor
void addReference(void* pointer) DEFINES("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release(void* pointer) DEFINES("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void copyPointer(void* to, const void* from) CALLS("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroyPointer(void* pointer) CALLS("_ZNSt15__exception_ptr13exception_ptrD1Ev");
}

void makeStream(void* memory) { new (memory) std::ostringstream(std::ios_base::out); }

void waitFor(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}

void throwBadLength() { throw std::bad_array_new_length(); }

void addReference(void* pointer) {
  void* copy;  // never destroyed
  copyPointer(&copy, pointer);
}

void release(void* pointer) { destroyPointer(pointer); }
