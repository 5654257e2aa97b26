// Included before each file of C++ in a wheel: of the C library, libstdc++'s headers then call what
// glibc 2.28 has.
#pragma once

#include <bits/c++config.h>

// They wait by these functions of glibc 2.30, because GCC was built with a newer glibc.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
