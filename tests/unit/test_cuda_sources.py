"""The CUDA kernels compile for every supported GPU; this needs no GPU."""

from __future__ import annotations

import locale
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coarse.kernels
from coarse.errors import CoarseError
from coarse.kernels.cuda_compiling import OPTIONS, choose_compiler, compiled
from coarse.kernels.cuda_kernels import kernel_names, source
from coarse.kernels.nvrtc import find_nvrtc

ARCHITECTURES = {12: (60, 70, 80, 90), 13: (90, 100)}
"""By major version of the compiler: P100, V100, A100, H100 and H200, B200."""

SOURCES = Path(coarse.kernels.__file__).with_name("cuda")


def nvrtc_for(architecture, majors=(12, 13)):
    """The newest run-time compiler of these versions that knows a GPU."""
    for nvrtc in find_nvrtc():
        if nvrtc.version[0] in majors and architecture in nvrtc.architectures():
            return nvrtc
    versions = " or ".join(map(str, majors))
    pytest.skip(f"no NVRTC of CUDA {versions} for sm_{architecture} was found; make cuda installs both")


@pytest.mark.parametrize(
    ("major", "architecture"), [(major, each) for major in ARCHITECTURES for each in ARCHITECTURES[major]]
)
@pytest.mark.parametrize("file", sorted(kernel_names()))
def test_nvrtc_compiles_every_kernel(file, major, architecture):
    nvrtc = nvrtc_for(architecture, (major,))
    cubin = nvrtc.compile(source(file), name=f"{file}.cu", architecture=architecture, options=OPTIONS)
    # Kernels have sections of these names.
    missing = [name for name in kernel_names()[file] if f".text.{name}\0".encode() not in cubin]
    assert not missing


@pytest.fixture(scope="module", params=["reduce", "update"])
def entries(request):
    """The PTX of each kernel."""
    nvrtc = nvrtc_for(80)
    ptx = nvrtc.compile(
        source(request.param), name="ptx", architecture=80, options=OPTIONS, is_virtual=True
    ).decode()
    texts = ptx.split(".visible .entry ")[1:]
    return {text.partition("(")[0].strip(): text for text in texts}


def test_no_operation_is_contracted_approximated_or_flushed(entries):
    for name, text in entries.items():
        assert not re.findall(r"\bfma\.|\.approx|\.full|\.ftz", text), name


def test_arrays_are_read_and_written_by_vectors(entries):
    # 16-bit types go with float32 in updates, by 8 and 16 bytes.
    for name, text in entries.items():
        for access in ("ld", "st"):
            assert re.search(rf"\b{access}\.(global\.)?(v4\.[fu]32|v2\.[fu]64)", text), name
        is_narrow = name.endswith("_uint8")
        assert is_narrow or not re.search(r"\bld\.(global\.)?u8", text), name


@pytest.mark.parametrize("file", ["measure", "reduce"])
def test_without_grid_constants_kernels_read_their_parameter_in_place_too(file):
    nvrtc = nvrtc_for(60)
    ptx = nvrtc.compile(source(file), name="ptx", architecture=60, options=OPTIONS, is_virtual=True)
    assert b".local" not in ptx  # each thread would have a copy of 4 KiB


def test_the_threads_locale_is_that_of_before():
    """It says how Python decodes what programs print."""
    nvrtc = nvrtc_for(90)
    before = locale.nl_langinfo(locale.CODESET)
    nvrtc.compile("__global__ void f() {}", name="f.cu", architecture=90)
    assert locale.nl_langinfo(locale.CODESET) == before


def test_machine_code_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nvrtc = nvrtc_for(90)
    sources = {name: source(name) for name in ("delay", "measure")}
    cubins = compiled(sources, nvrtc, 90)
    assert cubins.keys() == sources.keys()
    monkeypatch.setattr(nvrtc, "compile", None)  # is not called again
    assert compiled(sources, nvrtc, 90) == cubins
    assert [path.stat().st_mode & 0o77 for path in tmp_path.glob("coarse/cuda/*.cubin")] == [0, 0]


def test_one_process_compiles_and_the_others_wait(cuda_stand_ins, tmp_path):
    """Two memory devices, with a driver that takes any machine code and a compiler that is none of ours."""
    nvrtc_for(90)
    (tmp_path / "libcuda.so.1").symlink_to(cuda_stand_ins / "libcuda.so.1")
    code = (
        "from coarse.kernels.cuda_kernels import CudaKernels; kernels = CudaKernels(0); "
        "print(kernels.function('measure_float32') > 0)"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", "import logging; logging.basicConfig(level=logging.DEBUG); " + code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    )
    printed = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert all(text.endswith("True\n") for text in printed), printed
    assert sum("compiling measure" in text for text in printed) == 1, printed


def test_a_library_that_names_no_folder_to_look_in_finds_its_builtins(tmp_path):
    """Wheels of NVRTC 13.0 are such: the linker knows of no folder but the system's."""
    nvrtc = nvrtc_for(90)
    folder = Path(nvrtc.path).parent
    major, minor = nvrtc.version
    builtins = folder / f"libnvrtc-builtins.so.{major}.{minor}"
    if not builtins.exists():
        pytest.skip(f"{nvrtc} is not of a wheel or a toolkit")
    (tmp_path / builtins.name).symlink_to(builtins)
    library = tmp_path / Path(nvrtc.path).name
    library.write_bytes(Path(nvrtc.path).read_bytes().replace(b"$ORIGIN\0", b"/nobody\0"))
    code = (
        "import sys; from coarse.kernels.nvrtc import Nvrtc; from coarse.kernels.cuda_kernels import source; "
        "Nvrtc(sys.argv[1]).compile(source('delay'), name='delay.cu', architecture=90)"
    )
    subprocess.run([sys.executable, "-c", code, library], check=True)


def test_messages_of_the_compiler_name_file_and_line():
    nvrtc = nvrtc_for(90)
    broken = source("delay").replace("half = (end - now) / 2;", "half = (*end - now) / 2;")
    line = next(
        number
        for number, text in enumerate((SOURCES / "delay.cu").read_text().splitlines(), 1)
        if "half = (end - now) / 2;" in text
    )
    with pytest.raises(CoarseError, match=rf"cannot compile delay\.cu for sm_90.*delay\.cu\({line}\)"):
        nvrtc.compile(broken, name="delay.cu", architecture=90, options=OPTIONS)


def test_every_source_file_has_its_kernels_named():
    assert {path.stem for path in SOURCES.glob("*.cu")} == set(kernel_names())


class Found:
    """A run-time compiler of some version."""

    def __init__(self, *version):
        self.version = version

    def architectures(self):
        return (75, 90, 100) if self.version >= (13, 0) else (70, 75, 90)

    def __str__(self):
        return "NVRTC {}.{}".format(*self.version)


def test_the_newest_compiler_that_the_driver_goes_with_is_taken():
    found = [Found(13, 0), Found(12, 4), Found(12, 9)]
    assert choose_compiler(found, (13, 0), 90).version == (13, 0)
    assert choose_compiler(found, (12, 2), 90).version == (12, 9)


def test_an_older_compiler_is_taken_for_a_gpu_that_the_newest_does_not_know():
    assert choose_compiler([Found(13, 0), Found(12, 4)], (13, 0), 70).version == (12, 4)
    with pytest.raises(
        CoarseError, match=r"NVRTC 13\.0 cannot compile for this GPU, of compute capability 7\.0"
    ):
        choose_compiler([Found(13, 0)], (13, 0), 70)
    with pytest.raises(
        CoarseError, match=r"NVRTC 12\.4 cannot compile for this GPU, of compute capability 10\.0"
    ):
        choose_compiler([Found(13, 0), Found(12, 4)], (12, 4), 100)


def test_a_driver_that_is_too_old_is_told_what_to_install():
    with pytest.raises(CoarseError, match=r"CUDA 12\.2, which is older than NVRTC 13\.0: .*nvrtc-cu12"):
        choose_compiler([Found(13, 0)], (12, 2), 90)


def test_of_both_versions_the_right_one_is_taken():
    found = find_nvrtc()
    if {12, 13} - {nvrtc.version[0] for nvrtc in found}:
        pytest.skip("NVRTC of CUDA 12 and 13 were not both found; make cuda installs both")
    newest = max(nvrtc.version for nvrtc in found if nvrtc.version[0] == 12)
    assert choose_compiler(found, (13, 0), 90).version[0] == 13
    assert choose_compiler(found, (12, 0), 90).version == newest
    assert choose_compiler(found, (13, 0), 60).version[0] == 12


def test_without_a_compiler_it_is_told_what_to_install():
    with pytest.raises(CoarseError, match=r"NVRTC, which was not found: pip install 'coarse-train\[cuda\]'"):
        choose_compiler([], (13, 0), 90)


@pytest.fixture(scope="module")
def nvccs():
    """The compilers on PATH and of the wheels, one of each version."""
    wheels = [str(Path(entry) / "nvidia" / "cu13" / "bin") for entry in sys.path]
    paths = [shutil.which("nvcc"), *(shutil.which("nvcc", path=wheel) for wheel in wheels)]
    found = {ask(path, "--version"): path for path in filter(None, paths)}
    if not found:
        pytest.skip("nvcc was not found: pip install -e '.[dev]', or a CUDA toolkit on PATH")
    return list(found.values())


def ask(nvcc, option):
    return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout


# Those after the first by its PTX, which is most of the work and the same: sources ask for no more than that.
CODE_OF = {60: (60,), 70: (70,), 80: (80, 90)}


def test_nvcc_has_code_for_every_gpu():
    assert sorted(code for codes in CODE_OF.values() for code in codes) == sorted(ARCHITECTURES[12])


@pytest.mark.parametrize("file", sorted(kernel_names()))
def test_nvcc_compiles_without_warnings(nvccs, file, tmp_path):
    # Which GPUs and compilers of C++ NVIDIA is about to leave behind is no fault of a source.
    strict = ["-Werror", "all-warnings", "-Wno-deprecated-gpu-targets", "-allow-unsupported-compiler"]
    for nvcc in nvccs:
        known = ask(nvcc, "--list-gpu-arch").split()
        targets = [
            f"-gencode=arch=compute_{virtual},code=[{','.join(f'sm_{code}' for code in codes)}]"
            for virtual, codes in CODE_OF.items()
            if f"compute_{virtual}" in known
        ]
        assert targets, known
        command = [nvcc, "-std=c++17", *targets, *strict, "-Xcompiler", "-Wall,-Wextra", "-c"]
        subprocess.run(
            [*command, "-o", str(tmp_path / "kernels.o"), str(SOURCES / f"{file}.cu")],
            check=True,
            timeout=400,
        )
