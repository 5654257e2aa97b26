"""Measures the links of three GPUs, the last one without access to the others; uses the stand-in driver."""

from __future__ import annotations

from contextlib import closing

from coarse.kernels import _native
from coarse.profiler.gpu_links import DriverCopier, measure_gpu_links

SIZES = (1 << 12, 1 << 20)


def main() -> None:
    gpus = [_native.cuda_device_name(gpu) for gpu in range(_native.cuda_num_devices())]
    with closing(DriverCopier(len(gpus), max(SIZES))) as copier:
        links = measure_gpu_links(gpus, _native.cuda_reaches_peer, copier, sizes=SIZES, repeats=3)
    assert links.unreachable == ((0, 2), (1, 2), (2, 0), (2, 1))
    for path in links.curves:
        assert links.peak_gbytes_per_s(path) > 0, path
        print(path)


if __name__ == "__main__":
    main()
