"""Builds the native module; everything else about the package stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("COARSE_BUILD_JOBS").install()

native = Pybind11Extension(
    "coarse.kernels._native",
    sources=sorted(glob("coarse/kernels/src/*.cpp") + glob("coarse/kernels/bindings/*.cpp")),
    include_dirs=["coarse/kernels/include", "coarse/kernels/bindings", "coarse/kernels/cuda"],
    depends=sorted(
        glob("coarse/kernels/**/*.hpp", recursive=True)
        + glob("coarse/kernels/src/*.inc")
        + glob("coarse/kernels/cuda/*.cuh")
    ),
    # Sums must not depend on the compiler's mood: no contraction of a*b+c into one rounding.
    # Nobody reads errno after a square root, and setting it would keep loops from being vectorised.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"],
    libraries=["pthread", "dl"],
    cxx_std=17,
)

setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
