#!/usr/bin/env bash
# Builds Horovod 0.28.1, one of the peers of `coarse bench sync`, into the current Python environment.
#
#     benchmarks/build_horovod.sh [SDIST]
#
# PyTorch over gloo only: no MPI, no GPU. Needs cmake, make, g++, and torch and setuptools in the environment.
# The wheel is built without isolation, against the environment's torch. Without SDIST, pip fetches the sources.
# The only change to the sources: C++17, which torch's headers require since 2.1.
set -euo pipefail

version=0.28.1
python=${PYTHON:-python3}
work=$(mktemp -d -t build-horovod-XXXXXX)
trap 'rm -rf "$work"' EXIT

for tool in cmake make g++; do
    command -v "$tool" >/dev/null || { echo "build_horovod.sh: needs $tool; install it first" >&2; exit 1; }
done
"$python" -c 'import torch, setuptools' || {
    echo "build_horovod.sh: $python has no torch or no setuptools; pip install torch setuptools wheel" >&2
    exit 1
}

sdist=${1:-}
if [[ -z $sdist ]]; then
    "$python" -m pip download --quiet --no-deps --no-binary=:all: --no-build-isolation \
        --dest "$work" "horovod==$version"
    sdist=$work/horovod-$version.tar.gz
fi
tar -xzf "$sdist" -C "$work"
source=$work/horovod-$version
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
    "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 # its third-party parts ask for policies that CMake 4 dropped
export MAKEFLAGS=${MAKEFLAGS:--j$(nproc)}
"$python" -m pip install --no-build-isolation "$source"
"$python" -c "import horovod, horovod.torch as hvd; assert hvd.gloo_built(); print(\"horovod\", horovod.__version__)"
