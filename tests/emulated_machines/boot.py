"""Boots an emulated machine with NUMA, DAX and CXL memory, and runs the checks in `checks_in_guest.py` there.

    python tests/emulated_machines/boot.py --kernel linux-image-amd64.deb

Needs qemu-system-x86_64, a static busybox, cpio, ndctl, and a Debian kernel package (`apt-get download
linux-image-6.1.0-...-amd64`). The machine has two NUMA nodes (one has memory but no processors), firmware tables
of their latency and bandwidth (HMAT), and a CXL type-3 device, which becomes a DAX device. It mounts this system's
root read-only, so the guest runs this checkout with this Python. Everything is emulated: the checks show correct use
of the kernel's interfaces, and nothing about speed.

Uses software emulation, because nested KVM may not work. The machine has no NVDIMM: with it QEMU has too many ACPI
tables for SeaBIOS 1.16, which then drops them, and HMAT and CXL are missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED = "CHECKS PASSED"
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p"),
    *("nd_pmem", "dax_pmem", "device_dax", "kmem"),
    *("cxl_acpi", "cxl_pci", "cxl_mem", "cxl_pmem"),
)

INIT = """\
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in {modules}; do modprobe $module || echo "no module $module"; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro root /new || poweroff -f
mount -t proc proc /new/proc; mount -t sysfs sys /new/sys; mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm; mount -t tmpfs tmpfs /new/mnt
chroot /new /bin/sh -c {command}
poweroff -f
"""


def main() -> int:
    """Returns 0 if all checks have passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--kernel", type=Path, required=True, help="a Debian package linux-image-VERSION-amd64"
    )
    parser.add_argument("--limit-s", type=int, default=900, help="how long the machine may run")
    parser.add_argument("--command", help="run this in the guest instead of the checks")
    arguments = parser.parse_args()
    for tool in ("qemu-system-x86_64", "busybox", "cpio", "dpkg-deb"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is missing: apt-get install qemu-system-x86 busybox-static cpio ndctl")
    if not arguments.kernel.is_file():
        parser.error(
            f"--kernel {arguments.kernel}: there is no such file; docs/devices.md says how to get one"
        )
    with tempfile.TemporaryDirectory(prefix="coarse-boot-") as folder:
        subprocess.run(["dpkg-deb", "-x", arguments.kernel, f"{folder}/kernel"], check=True)
        (kernel,) = Path(folder, "kernel", "boot").glob("vmlinuz-*")
        initramfs = make_initramfs(Path(folder), arguments.command or check_command())
        output = run(machine(kernel, initramfs), arguments.limit_s)
    return 0 if PASSED in output else 1


def check_command() -> str:
    """The command for the guest's shell."""
    python, here, root = (shlex.quote(str(path)) for path in (sys.executable, HERE, ROOT))
    return (
        f"sh {here}/make_dax.sh; cd {root}; "
        "export TMPDIR=/mnt HOME=/mnt PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1; "
        f"{python} -m pytest -q --color=no -p no:cacheprovider {here}/checks_in_guest.py && echo {PASSED}"
    )


def make_initramfs(folder: Path, command: str) -> Path:
    """Makes an initramfs that mounts this system's root and runs `command` there; returns the archive."""
    tree = folder / "initramfs"
    for name in ("bin", "proc", "sys", "dev", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin" / "busybox")
    (release,) = (folder / "kernel" / "lib" / "modules").iterdir()
    copy_modules(release, tree / "lib" / "modules" / release.name)
    init = tree / "init"
    init.write_text(INIT.format(modules=" ".join(MODULES), command=shlex.quote(command)))
    init.chmod(0o755)
    archive = folder / "initramfs.cpio"
    with archive.open("wb") as stream:
        names = "\n".join(os.fspath(path.relative_to(tree)) for path in tree.rglob("*"))
        subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=stream, cwd=tree, check=True
        )
    return archive


def copy_modules(source: Path, target: Path) -> None:
    """Copies the guest's drivers, their dependencies, and the index of dependencies."""
    target.mkdir(parents=True)
    for index in ("modules.builtin", "modules.order"):
        shutil.copy(source / index, target)
    for folder in (
        "drivers/nvdimm",
        "drivers/dax",
        "drivers/cxl",
        "drivers/acpi/nfit",
        "drivers/virtio",
        "net/9p",
        "fs",
    ):
        if (source / "kernel" / folder).is_dir():
            wanted = ("9p", "fscache", "netfs") if folder == "fs" else ("",)
            for name in wanted:
                where = Path("kernel", folder, name)
                if (source / where).is_dir():
                    shutil.copytree(source / where, target / where, dirs_exist_ok=True)
    subprocess.run(["busybox", "depmod", "-b", target.parents[2], target.name], check=True)


def machine(kernel: Path, initramfs: Path) -> list[str]:
    """The command that starts the emulated machine."""
    table = []
    for target, latency_ns, gbytes_per_s in ((0, 100, 40), (1, 250, 20)):
        common = f"hmat-lb,initiator=0,target={target},hierarchy=memory"
        table += ["-numa", f"{common},data-type=access-latency,latency={latency_ns}"]
        table += ["-numa", f"{common},data-type=access-bandwidth,bandwidth={gbytes_per_s}G"]
    return [
        "qemu-system-x86_64",
        *("-machine", "q35,hmat=on,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"),
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
        *("-m", "2560M,slots=4,maxmem=16G"),
        *("-object", "memory-backend-ram,id=near,size=2G", "-object", "memory-backend-ram,id=far,size=512M"),
        *(
            "-numa",
            "node,nodeid=0,cpus=0-1,memdev=near,initiator=0",
            "-numa",
            "node,nodeid=1,memdev=far,initiator=0",
        ),
        *("-numa", "dist,src=0,dst=1,val=17", "-numa", "dist,src=1,dst=0,val=17"),
        *table,
        *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"),
        # Two ports: with one, Linux does not program the bridge's decoders, which QEMU before 8.0 does not expect.
        *("-device", "cxl-rp,port=0,bus=cxl.1,id=port0,chassis=0,slot=2"),
        *("-device", "cxl-rp,port=1,bus=cxl.1,id=port1,chassis=0,slot=3"),
        *("-object", "memory-backend-ram,id=expander,size=256M,share=on"),
        *("-object", "memory-backend-ram,id=labels,size=256K,share=on"),
        *("-device", "cxl-type3,bus=port0,memdev=expander,lsa=labels,id=cxl0"),
        *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root,bus=pcie.0"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1"),
        *("-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"),
    ]


def run(command: list[str], limit_s: int) -> str:
    """Runs the machine to its end; shows and returns its output."""
    lines = []
    with subprocess.Popen(
        ["timeout", "--foreground", str(limit_s), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
