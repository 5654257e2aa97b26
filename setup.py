"""Builds the native module; everything else about the package stands in pyproject.toml."""

from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ParallelCompile("COARSE_BUILD_JOBS").install()

KERNELS = sorted(glob("coarse/kernels/src/*/*.cpp"))
BINDINGS = sorted(glob("coarse/kernels/bindings/*.cpp"))
BINDINGS_TOGETHER = 9


def together(sources: list[str], count: int) -> list[str]:
    """Files that include `count` of the sources each: the header that all of these need takes longer than they do."""
    folder = Path("build/together")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for first in range(0, len(sources), count):
        lines = [f'#include "{Path(source).resolve()}"\n' for source in sources[first : first + count]]
        made.append(folder / f"bindings_{first // count}.cpp")
        if not made[-1].exists() or made[-1].read_text() != "".join(lines):
            made[-1].write_text("".join(lines))
    return [str(each) for each in made]


native = Pybind11Extension(
    "coarse.kernels._native",
    sources=KERNELS + together(BINDINGS, BINDINGS_TOGETHER),
    include_dirs=["coarse/kernels/include", "coarse/kernels/bindings", "coarse/kernels/cuda"],
    depends=sorted(
        BINDINGS
        + glob("coarse/kernels/**/*.hpp", recursive=True)
        + glob("coarse/kernels/src/*/*.inc")
        + glob("coarse/kernels/cuda/*.cuh")
    ),
    # Sums must not depend on the compiler's mood: no contraction of a*b+c into one rounding.
    # Nobody reads errno after a square root, and setting it would keep loops from being vectorised.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"],
    libraries=["pthread", "dl"],
    cxx_std=17,
)

setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
