#!/bin/sh
# Builds the library through which `coarse bench sync` calls UCC (over UCX), a peer, into this Python's environment.
#
#   benchmarks/build_ucc.sh [python]          # python: of the environment, default python3
#
# Needs UCC with its headers. pkg-config finds a distribution's package (Debian 13 or later: libucc-dev).
# For another location set UCC_PREFIX=/where/it/is. To build UCC from its sources:
#   ./autogen.sh && ./configure --prefix=$UCC_PREFIX --with-ucx=$UCX_PREFIX && make install
# UCX is Debian's libucx-dev, or the wheel libucx-cu12 (site-packages/libucx; delete its *.la files first).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
library=$("$python" -c 'import sys; print(sys.prefix)')/lib/libcoarse_bench_ucc.so
if [ -n "${UCC_PREFIX:-}" ]; then
    flags="-I$UCC_PREFIX/include -L$UCC_PREFIX/lib -Wl,-rpath,$UCC_PREFIX/lib -lucc"
else
    flags=$(pkg-config --cflags --libs ucc) || { echo "no UCC was found; read the head of $0" >&2; exit 1; }
fi
# shellcheck disable=SC2086  # contains several flags
${CC:-cc} -std=gnu11 -O2 -Wall -Wextra -shared -fPIC -o "$library" "$here/ucc_all_reduce.c" $flags
echo "built $library"
