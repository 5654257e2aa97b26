#!/usr/bin/env bash
# Sets up a fresh Ubuntu 24.04 instance for experiments.aws.run: compilers, driver, environment, COARSE.
#
#     experiments/aws/setup.sh            # an instance with GPUs
#     experiments/aws/setup.sh --cpu      # any machine, without GPUs
#     experiments/aws/setup.sh --horovod  # builds Horovod too (some 15 minutes); where there are GPUs it is with NCCL,
#                                         # for which nvcc and nccl.h must be there
#     experiments/aws/setup.sh --without-nvlink   # as the paper has it: GPUs with PCIe alone; --with-nvlink again with both
#
# Run it in a checkout. It may be run again. A driver that is newly installed needs a reboot, and then another run.
#
# Every version is pinned: Python packages by constraints.txt, the driver by its branch, Ubuntu's packages by the date of
# the image (SNAPSHOT, by Ubuntu's snapshot service). The same image gives the same software.
# Driver 580 is the last for V100 and the first for CUDA 13. V100 (p3) needs PyTorch for CUDA 12: wheels for CUDA 13 have no
# code for it.
set -euo pipefail
cd "$(dirname "$0")/../.."

cpu_only=false
with_horovod=false
nvlink_disabled=
for flag in "$@"; do
    case $flag in
        --cpu) cpu_only=true ;;
        --horovod) with_horovod=true ;;
        --without-nvlink) nvlink_disabled=1 ;;
        --with-nvlink) nvlink_disabled=0 ;;
        *)
            echo "setup.sh: unknown flag $flag; there are --cpu, --horovod, --without-nvlink and --with-nvlink" >&2
            exit 2
            ;;
    esac
done
python=${PYTHON:-python3}
venv=${VENV:-.venv}
driver=${DRIVER:-580}
constraints=$PWD/experiments/aws/constraints.txt

as_root() { if [[ $(id -u) -eq 0 ]]; then "$@"; else sudo "$@"; fi; }

# The day on which the image was made, which then has no newer packages than the snapshot. "" on other systems than
# Ubuntu 24.04 and later, whose apt knows no snapshots.
image_snapshot() {
    local serial
    serial=$(sed -n 's/^serial: \([0-9]\{8\}\).*/\1/p' /etc/cloud/build.info 2>/dev/null || true)
    if [[ -n $serial ]] && apt-get --snapshot=x --version >/dev/null 2>&1; then echo "${serial}T235959Z"; fi
}

# A fresh instance updates itself while it starts, and whoever installs meanwhile has to wait.
apt_get() {
    local snapshot=()
    if [[ -n ${SNAPSHOT:=$(image_snapshot)} ]]; then snapshot=(--snapshot "$SNAPSHOT"); fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "${snapshot[@]}" "$@"
}

install_packages() {
    if command -v cloud-init >/dev/null; then cloud-init status --wait >/dev/null || true; fi
    for attempt in 1 2 3 4 5; do
        if apt_get update; then break; fi
        if [[ $attempt = 5 ]]; then exit 1; fi
        sleep 30
    done
    apt_get install -y --no-install-recommends g++ make cmake git pciutils python3-dev python3-venv >/dev/null
}

install_driver() {
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then return; fi
    if [[ -e /proc/driver/nvidia/version ]]; then
        echo "setup.sh: a driver is loaded, and finds no GPU: $(head -1 /proc/driver/nvidia/version). V100 needs one up" \
            "to 580, and not the open kernel modules; take an image without a driver" >&2
        exit 1
    fi
    apt_get install -y "linux-headers-$(uname -r)" "nvidia-driver-$driver-server"
    if has_nvswitch; then
        apt_get install -y "nvidia-fabricmanager-$driver"
        as_root systemctl enable nvidia-fabricmanager
    fi
    if ! nvidia-smi; then
        echo "setup.sh: the driver is installed; reboot, and run this again" >&2
        exit 3
    fi
}

# NVSwitch (p4d, p5) is a bridge of NVIDIA. Without the fabric manager CUDA does not start on such machines.
has_nvswitch() { [[ -n $(lspci -n -d 10de::0680) ]]; }

# The driver reads this when it is loaded, maybe from the initial RAM disk.
set_nvlink() {
    echo "options nvidia NVreg_NvLinkDisable=$nvlink_disabled" | as_root tee /etc/modprobe.d/coarse-nvlink.conf >/dev/null
    as_root update-initramfs -u
    if ! grep -qx "NvLinkDisable: $nvlink_disabled" /proc/driver/nvidia/params; then
        echo "setup.sh: NVLink will be $([[ $nvlink_disabled = 1 ]] && echo off || echo on) after a reboot" >&2
        exit 3
    fi
}

# One that was installed for something else may have no CUDA, or no code for these GPUs.
has_torch() {
    "$venv/bin/python" - "$cpu_only" 2>/dev/null <<'EOF'
import sys, torch
if sys.argv[1] == "false":
    assert torch.cuda.device_count()
    for gpu in range(torch.cuda.device_count()):
        assert torch.ones(2, device=f"cuda:{gpu}").sum().item() == 2
EOF
}

# PyTorch for CUDA 12 where a GPU is older than Turing (compute capability 7.5), which CUDA 13 has dropped.
torch_index() {
    if $cpu_only; then
        echo https://download.pytorch.org/whl/cpu
    elif nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -qx '[3-6]\..*\|7\.[0-4]'; then
        echo https://download.pytorch.org/whl/cu126
    else
        echo https://download.pytorch.org/whl/cu130
    fi
}

install_python() {
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
    export PIP_CONSTRAINT=$constraints
    "$venv/bin/python" -m pip install --quiet pip setuptools wheel
    if ! has_torch; then
        "$venv/bin/python" -m pip install --quiet --force-reinstall torch --index-url "${TORCH_INDEX:-$(torch_index)}"
    fi
    # Editable: whatever starts in the checkout imports the checkout's package, which then has its native module.
    "$venv/bin/python" -m pip install --quiet -e '.[torch,examples,cuda]'
}

# A peer that cannot be built is left out; the runs go on without it.
install_horovod() {
    for folder in /usr/local/cuda*/bin; do
        if [[ -x $folder/nvcc ]]; then PATH="$folder:$PATH"; fi
    done
    local environment=(PATH="$(realpath -m "$venv")/bin:$PATH" PYTHON=python)
    if ! $cpu_only; then
        if ! command -v nvcc >/dev/null || ! echo '#include <nccl.h>' | g++ -E -x c++ - >/dev/null 2>&1; then
            echo "setup.sh: Horovod is left out: with NCCL it needs nvcc on PATH, of PyTorch's CUDA version, and" \
                "nccl.h: packages such as cuda-nvcc-12-6, cuda-cudart-dev-12-6 and libnccl-dev of NVIDIA's repository" >&2
            return
        fi
        environment+=(HOROVOD_GPU_OPERATIONS=NCCL)
    fi
    env "${environment[@]}" benchmarks/build_horovod.sh ||
        echo "setup.sh: Horovod was not built, and is left out" >&2
}

if command -v apt-get >/dev/null; then install_packages; fi
$cpu_only || install_driver
install_python
if $with_horovod; then install_horovod; fi
"$venv/bin/coarse" doctor
if [[ -n $nvlink_disabled ]]; then set_nvlink; fi
instance=$($cpu_only && echo cpu || echo "TYPE, such as g5.12xlarge")
echo "ready: $venv/bin/python -m experiments.aws.run --instance $instance"
