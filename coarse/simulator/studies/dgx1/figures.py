"""The document's figures: Tables 2.2 to 2.10, and ratios that the prose of chapter 2.2 names."""

from __future__ import annotations

from typing import NamedTuple

KEPLER, TITAN, PASCAL = "Kepler", "Titan", "P100"


class Profile(NamedTuple):
    """A row of Table 2.4 in ms of an epoch; `copies` are between GPUs, 0 for one GPU."""

    run: float
    communication: float
    computation: float
    copies: float = 0.0


# Table 2.4: (data set, network), machine, then one and two GPUs.
PROFILES: dict[tuple[str, str], dict[str, tuple[Profile, Profile]]] = {
    ("MNIST", "MLP"): {
        KEPLER: (Profile(845, 43, 370), Profile(750, 135.7, 198.4, 92.5)),
        TITAN: (Profile(639, 26.5, 331.5), Profile(609, 87.7, 191.3, 56.8)),
        PASCAL: (Profile(1090, 24.8, 192), Profile(880, 55, 98, 29.3)),
    },
    ("MNIST", "LeNet"): {
        KEPLER: (Profile(2795, 44.1, 2411), Profile(2006, 374.8, 1468, 329.3)),
        TITAN: (Profile(2259, 24.4, 1874), Profile(1401, 165.6, 976.4, 139.4)),
        PASCAL: (Profile(2336, 26, 1017), Profile(1261, 125.8, 567, 98.4)),
    },
    ("Cifar10", "MLP"): {
        KEPLER: (Profile(2263, 102.1, 420), Profile(1951, 305.2, 195, 200.7)),
        TITAN: (Profile(2256, 51.4, 416.9), Profile(2080, 179.3, 302.1, 100.6)),
        PASCAL: (Profile(2219, 53.6, 225.6), Profile(2000, 127.4, 110.8, 58.8)),
    },
    ("Cifar10", "LeNet"): {
        KEPLER: (Profile(3769, 102.7, 2582.9), Profile(3251, 383.2, 1263.7, 279.8)),
        TITAN: (Profile(3307, 52.61, 1813), Profile(2596, 217.4, 1185, 149.1)),
        PASCAL: (Profile(2747, 57, 915.6), Profile(2111, 145.7, 512.2, 83)),
    },
    ("PTB", "LSTM"): {
        KEPLER: (Profile(23800, 17.5, 23127), Profile(14700, 1208.8, 13605, 1163)),
        TITAN: (Profile(20981, 13.7, 19449), Profile(11596, 501.5, 10387, 466.0)),
        PASCAL: (Profile(14800, 17.0, 10059.2), Profile(8900, 373.6, 5040.8, 332.6)),
    },
}

# Table 2.5: seconds on one and two GPUs, batch 16, ImageNet.
TWO_GPUS: dict[str, dict[str, tuple[float, float]]] = {
    "LeNet": {KEPLER: (20.4, 17.2), TITAN: (14.4, 10.4), PASCAL: (10.6, 9.6)},
    "AlexNet": {KEPLER: (14.4, 10.4), TITAN: (10.1, 7.4), PASCAL: (5.8, 6.0)},
    "GoogLeNet": {KEPLER: (25.9, 13.2), TITAN: (16.8, 9.2), PASCAL: (7.4, 4.4)},
    "ResNet": {KEPLER: (75, 38.3), TITAN: (55.6, 28.6), PASCAL: (18.4, 10.1)},
}

# Table 2.5: the same for ResNet on Cifar10.
CIFAR_RESNET: dict[str, tuple[float, float]] = {
    KEPLER: (263.8, 147.8),
    TITAN: (173.2, 103.5),
    PASCAL: (147, 90.4),
}

# Table 2.6: seconds by batch on 1, 2, 4 and 8 GPUs.
GPU_COUNTS = (1, 2, 4, 8)
EIGHT_GPUS: dict[str, dict[int, tuple[float, float, float, float]]] = {
    "AlexNet": {32: (21, 14.0, 10.1, 13.7), 64: (34, 20.3, 15.6, 22.9)},
    "GoogLeNet": {32: (46.3, 24.8, 13.5, 10.0), 64: (85.2, 45.9, 23.6, 14.6)},
    "ResNet": {32: (130.1, 65.8, 34.0, 20.9), 64: (246.9, 127.1, 64.5, 34.8)},
}

# 2.2.2: LeNet's speed-up by GPUs, batch 16.
LENET_TREE = {2: 1.62, 4: 2.37, 8: 3.36}
LENET_NCCL = {2: 1.56, 4: 2.27, 8: 2.77}
# 2.2.2: LeNet on 4 GPUs, how many times faster than with a batch of 16.
LENET_BATCHES = {32: 1.92, 64: 3.67}
# 2.2.2: how many times faster NCCL is, batch 16, by GPUs.
NCCL_GAINS = {
    "GoogLeNet": {4: 1.1, 8: 1.2},
    "ResNet": {4: 1.1, 8: 1.25},
    "Inception-v3": {4: 1.1, 8: 1.25},
}

# Table 2.8: percent by batch.
NCCL_OVERHEADS = {
    "LeNet": {16: 16.4, 32: 24.0, 64: 26.7},
    "AlexNet": {16: 21.8, 32: 21.8, 64: 31.8},
    "ResNet": {16: 20.1, 32: 22.9, 64: 19.3},
    "GoogLeNet": {16: 18.7, 32: 17.5, 64: 16.2},
    "Inception-v3": {16: 16.9, 32: 19.4, 64: 18.9},
}

# Table 2.10: GB of GPU 0 and of another GPU, by batch. The table prints 5.63 for ResNet's other GPUs with a batch of
# 32; its own 6.2 % more on GPU 0 asks for 5.33.
MEMORY = {
    "LeNet": {16: (2.76, 1.96), 32: (2.84, 2.04), 64: (2.89, 2.36)},
    "AlexNet": {16: (2.15, 1.55), 32: (2.36, 1.76), 64: (2.97, 2.37)},
    "ResNet": {16: (3.62, 3.29), 32: (5.66, 5.33), 64: (9.48, 9.15)},
    "GoogLeNet": {16: (2.35, 2.24), 32: (3.64, 3.55), 64: (6.17, 6.07)},
    "Inception-v3": {16: (3.89, 3.60), 32: (6.70, 6.06), 64: (11.01, 10.78)},
}

DRAM_GBYTES_PER_S = {KEPLER: 208.0, TITAN: 363.0, PASCAL: 732.0}  # Table 2.2; K20c of the Kepler pair
# Table 2.2: cores and MHz of the Kepler pair.
K40C = (2880, 745)
K20C = (2496, 706)
P100_TFLOPS = 2 * 3584 * 1328e6 / 1e12  # Table 2.2: cores and clock
V100_TFLOPS = 17.7  # 2.2.1

# 2.3.2: prototype of shared memory over copies, synthetic MLP like MNIST's.
SHARED_MEMORY_GAINS = {KEPLER: 2.07, TITAN: 1.95, PASCAL: 3.33}
# 2.3.1: KB of the synthetic MLPs' weights.
SYNTHETIC_KB = {"MNIST": 482.0, "Cifar10": 794.0}
