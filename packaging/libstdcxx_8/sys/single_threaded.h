// In place of a header of glibc 2.32, by which libstdc++'s count references without atomic operations in one thread.
#pragma once

constexpr char __libc_single_threaded = 0;
