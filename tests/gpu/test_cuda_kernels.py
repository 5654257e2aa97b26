"""Kernels on a GPU give the same bits as the host's sync cores, for every dtype, length and alignment."""

import struct
from itertools import product

import numpy as np
import pytest

from coarse.client.update_settings import SETTINGS_DTYPE
from coarse.kernels import _native
from coarse.kernels.cuda_kernels import DTYPES, MEASURED_DTYPES

SUM, MEAN, MAX = range(3)
FLOAT32 = DTYPES.index("float32")
ITEM_BYTES = dict(zip(DTYPES, (4, 8, 2, 2, 4, 8, 1), strict=True))
NUMPY = {"float32": np.uint32, "float64": np.uint64, "bfloat16": np.uint16, "float16": np.uint16}
EXPONENTS = {"float32": 0x7F800000, "float64": 0x7FF << 52, "bfloat16": 0x7F80, "float16": 0x7C00}
TILE_BYTES = 8192
LENGTHS = (1, 7, 1025, 2048, 4099, 10007)
NOBODY, EVERYBODY = -1, -2
NUM_RULES, NUM_STATES = 7, {1: 0, 2: 1, 3: 1, 4: 2, 5: 1, 6: 1, 7: 3}


class Arrays:
    """Equal arrays on host and GPU, without the first `offset` elements of each allocation."""

    def __init__(self, dtype, values, offset=0):
        import torch

        self.dtype, self.offset_bytes = dtype, offset * ITEM_BYTES[dtype]
        raw = [np.concatenate([np.zeros(self.offset_bytes, np.uint8), v.view(np.uint8)]) for v in values]
        # 16 more bytes, which must not change.
        self.host = [np.concatenate([r, np.full(16, 0xA5, np.uint8)]) for r in raw]
        self.gpu = [torch.from_numpy(h.copy()).cuda() for h in self.host]

    def host_addresses(self):
        return [h.ctypes.data + self.offset_bytes for h in self.host]

    def gpu_addresses(self):
        return [g.data_ptr() + self.offset_bytes for g in self.gpu]

    def assert_equal(self):
        for k, (host, gpu) in enumerate(zip(self.host, self.gpu, strict=True)):
            found = gpu.cpu().numpy()
            assert bytes(found[-16:]) == bytes(host[-16:])
            assert_same(
                self.dtype, found[self.offset_bytes : -16], host[self.offset_bytes : -16], f"array {k}"
            )


def assert_same(dtype, found, expected, what=""):
    """Equal bits, or both NaN."""
    if dtype in NUMPY:
        found, expected = found.view(NUMPY[dtype]), expected.view(NUMPY[dtype])
        sign = NUMPY[dtype](1 << (8 * ITEM_BYTES[dtype] - 1))
        are_nan = ((found & ~sign) > EXPONENTS[dtype]) & ((expected & ~sign) > EXPONENTS[dtype])
        wrong = np.flatnonzero((found != expected) & ~are_nan)
    else:
        wrong = np.flatnonzero(found != expected)
    assert wrong.size == 0, (
        f"{what}: {wrong.size} differ, first {wrong[0]}: {found[wrong[0]]} {expected[wrong[0]]}"
    )


def random_bits(random, dtype, num_elements):
    """Random bits, including NaN, Inf and subnormals."""
    return random.integers(0, 256, num_elements * ITEM_BYTES[dtype], np.uint8)


def numbers(random, dtype, num_elements, low=-3.0, high=3.0):
    values = random.uniform(low, high, num_elements).astype(np.float32)
    if dtype == "float32":
        return values.view(np.uint8)
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint8).numpy()


def run(kernels, cuda, name, batch, more=b""):
    data, num_tiles = batch
    kernels.launch(name, data + more, num_tiles=num_tiles, stream=cuda.current_stream().cuda_stream)
    cuda.synchronize()


@pytest.mark.parametrize("op", [SUM, MEAN, MAX])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_have_the_bits_of_the_sync_cores(kernels, cuda, dtype, op):
    random = np.random.default_rng(1)
    for num_inputs, num_elements, offset in product((1, 2, 3, 4, 8, 9), LENGTHS, (0, 1)):
        arrays = Arrays(dtype, [random_bits(random, dtype, num_elements) for _ in range(num_inputs)], offset)
        gpu, host, number = arrays.gpu_addresses(), arrays.host_addresses(), DTYPES.index(dtype)
        divisor = num_inputs if op == MEAN else 1
        batch = _native.cuda_reduce_batch(number, [(num_elements, divisor, gpu, gpu, 0, 0)])
        run(kernels, cuda, f"reduce_{'max' if op == MAX else 'sum'}_{dtype}", batch)
        _native.reduce_arrays(number, op, host, host, num_elements, divisor)
        arrays.assert_equal()


def test_a_batch_reduces_all_its_shards_whatever_the_grid(kernels, cuda):
    random = np.random.default_rng(2)
    sizes = [int(n) for n in random.integers(1, 200_000, 60)]
    for most_blocks in (1, 7, kernels.most_blocks):
        shards = [Arrays("bfloat16", [random_bits(random, "bfloat16", n) for _ in range(2)]) for n in sizes]
        rows = []
        for number, (n, shard) in enumerate(zip(sizes, shards, strict=True)):
            addresses = shard.gpu_addresses()
            rows.append((n, number, addresses, addresses, 0, 0))
            host = shard.host_addresses()
            _native.reduce_arrays(DTYPES.index("bfloat16"), MEAN, host, host, n, number)
        data, num_tiles = _native.cuda_reduce_batch(DTYPES.index("bfloat16"), rows)
        function = kernels.function("reduce_sum_bfloat16")
        stream = cuda.current_stream().cuda_stream
        kernels.context.launch(function, min(num_tiles, most_blocks), 256, stream, [data])
        cuda.synchronize()
        for shard in shards:
            shard.assert_equal()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rings_carry_float32_and_round_once(kernels, cuda, dtype):
    random = np.random.default_rng(3)
    number, n = DTYPES.index(dtype), 1 << 16
    stored = Arrays(dtype, [np.arange(n, dtype=np.uint16).view(np.uint8)] * 2)
    wide = Arrays("float32", [np.zeros(4 * n, np.uint8) for _ in range(2)])
    widening = (n, 1, stored.gpu_addresses()[:1], [], 0, wide.gpu_addresses()[0])
    run(kernels, cuda, f"ring_sum_{dtype}", _native.cuda_reduce_batch(number, [widening]))
    # Exact: widening and narrowing again restores the value.
    narrowing = (n, 1, [], stored.gpu_addresses()[1:], wide.gpu_addresses()[0], 0)
    run(kernels, cuda, f"ring_sum_{dtype}", _native.cuda_reduce_batch(number, [narrowing]))
    stored.assert_equal()
    # A step of a ring: the received data, then two contributions, in float32.
    received = Arrays("float32", [numbers(random, "float32", n)])
    local = Arrays(dtype, [numbers(random, dtype, n) for _ in range(2)])
    output = Arrays(dtype, [np.zeros(2 * n, np.uint8)])
    step = (
        n,
        3,
        local.gpu_addresses(),
        output.gpu_addresses(),
        received.gpu_addresses()[0],
        wide.gpu_addresses()[1],
    )
    run(kernels, cuda, f"ring_sum_{dtype}", _native.cuda_reduce_batch(number, [step]))
    floats = [received.host[0][:-16].view(np.float32)]
    for array in local.host:
        bits = array[:-16].view(np.uint16)
        floats.append(
            (bits.astype(np.uint32) << 16).view(np.float32)
            if dtype == "bfloat16"
            else bits.view(np.float16).astype(np.float32)
        )
    wide.host[1][:-16] = ((floats[0] + floats[1]) + floats[2]).view(np.uint8)
    assert_same("float32", wide.gpu[1].cpu().numpy()[:-16], wide.host[1][:-16])
    import torch

    mean = torch.from_numpy(wide.host[1][:-16].view(np.float32) / np.float32(3)).to(getattr(torch, dtype))
    assert_same(dtype, output.gpu[0].cpu().numpy()[:-16], mean.view(torch.uint8).numpy())


def measure_on_host(dtype, addresses, num_elements, divisor):
    """reduceAndMeasureShard() of the native code, for arrays."""
    number, item = DTYPES.index(dtype), ITEM_BYTES[dtype]
    total, offender = 0.0, NOBODY
    for begin in range(0, num_elements, TILE_BYTES // item):
        count = min(TILE_BYTES // item, num_elements - begin)
        tile = [address + begin * item for address in addresses]
        are_finite = [np.isfinite(_native.sum_of_squares(number, a, count)) for a in tile]
        _native.reduce_arrays(number, MEAN, tile, tile, count, divisor)
        squares = _native.sum_of_squares(number, tile[0], count)
        total += squares
        if not np.isfinite(squares) and offender == NOBODY:
            offender = are_finite.index(False) if False in are_finite else EVERYBODY
    return total, offender


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_measures_have_the_bits_of_the_sync_cores(kernels, cuda, dtype):
    import torch

    random = np.random.default_rng(4)
    sizes = [*LENGTHS, 300_000, 1_000_003]
    for offset in (0, 1):
        shards = [Arrays(dtype, [numbers(random, dtype, n) for _ in range(3)], offset) for n in sizes]
        infinity = struct.pack("<Q", EXPONENTS[dtype])[: ITEM_BYTES[dtype]]
        for shard, client, element in ((-1, 2, 400_000), (-1, 1, 900_000), (-2, 0, 7)):
            at = shards[shard].offset_bytes + element * ITEM_BYTES[dtype]
            for array in (shards[shard].host[client],):
                array[at : at + ITEM_BYTES[dtype]] = np.frombuffer(infinity, np.uint8)
            shards[shard].gpu[client].copy_(torch.from_numpy(shards[shard].host[client]))
        rows = []
        for n, shard in zip(sizes, shards, strict=True):
            addresses = shard.gpu_addresses()
            rows.append((n, 3, addresses, addresses, 0, 0))
        batch = _native.cuda_reduce_batch(DTYPES.index(dtype), rows)
        sums = torch.zeros(batch[1], dtype=torch.float64, device="cuda")
        offenders = torch.zeros(batch[1], dtype=torch.int32, device="cuda")
        done = torch.zeros(len(sizes), dtype=torch.int32, device="cuda")
        measures = torch.zeros(16 * len(sizes), dtype=torch.uint8, device="cuda")
        work = struct.pack("4Q", *(t.data_ptr() for t in (sums, offenders, done, measures)))
        run(kernels, cuda, f"measure_{dtype}", batch, work)
        found = list(struct.iter_unpack("<dii", bytes(measures.cpu().numpy())))
        for n, shard, (total, offender, _) in zip(sizes, shards, found, strict=True):
            expected = measure_on_host(dtype, shard.host_addresses(), n, 3)
            np.testing.assert_array_equal(total, expected[0])
            assert offender == expected[1]
            shard.assert_equal()
        assert not done.any()


def settings_of(rule):
    settings = np.zeros(1, SETTINGS_DTYPE)
    settings[0] = (rule, -1.1, 0.05, 0.93, 0.123, 0.9, 0.1, 0.9, 0.99, 0.01, 0.3, 1e-3, 1, 1)
    return settings.tobytes()


def update_rows(rule, n, divisor, gradients, parameter, master, states):
    """Rows of one update for the GPU and for the host."""
    for side in ("gpu_addresses", "host_addresses"):
        arrays = [getattr(a, side)() for a in (gradients, parameter, master, states)]
        wide = arrays[2][0] if parameter.dtype != "float32" else 0
        yield (n, divisor, arrays[0], arrays[1][0], wide, arrays[3], settings_of(rule))


@pytest.mark.parametrize("rule", range(1, NUM_RULES + 1))
@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_updates_have_the_bits_of_the_sync_cores(kernels, cuda, dtype, rule):
    random = np.random.default_rng(5)
    number = DTYPES.index(dtype)
    for num_gradients, n, offset in product((1, 2, 3), LENGTHS, (0, 1)):
        gradients = Arrays(dtype, [numbers(random, dtype, n) for _ in range(num_gradients)], offset)
        parameter = Arrays(dtype, [numbers(random, dtype, n)], offset)
        master = Arrays("float32", [numbers(random, "float32", n)], offset)
        states = Arrays(
            "float32", [numbers(random, "float32", n, 0, 1) for _ in range(NUM_STATES[rule])], offset
        )
        gpu, host = update_rows(rule, n, num_gradients, gradients, parameter, master, states)
        run(kernels, cuda, f"update_{dtype}", _native.cuda_update_batch(number, [gpu]))
        _native.update_arrays(number, host)
        for arrays in (gradients, parameter, master, states):
            arrays.assert_equal()


def test_a_batch_updates_all_its_shards(kernels, cuda):
    random = np.random.default_rng(6)
    rows, kept = [], []
    for i in range(23):
        n, rule = int(random.integers(1, 100_000)), 4 if i < 20 else 2
        gradients = Arrays("float32", [numbers(random, "float32", n) for _ in range(2)])
        parameter = Arrays("float32", [numbers(random, "float32", n)])
        states = Arrays("float32", [numbers(random, "float32", n, 0, 1) for _ in range(NUM_STATES[rule])])
        gpu, host = update_rows(rule, n, 2, gradients, parameter, states, states)
        rows.append(gpu)
        _native.update_arrays(FLOAT32, host)
        kept += [gradients, parameter, states]
    run(kernels, cuda, "update_float32", _native.cuda_update_batch(FLOAT32, rows))
    for arrays in kept:
        arrays.assert_equal()


def test_a_stream_is_held_until_a_time_but_not_for_long(kernels, cuda):
    import torch

    stream = cuda.current_stream().cuda_stream
    started_ns = torch.zeros(1, dtype=torch.int64, device="cuda")
    function = kernels.function("hold_until")
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        event.record()  # creates the event, so that only the launch lies between the two

    def hold_ms(until_ns):
        hold = struct.pack("=QQ", until_ns, started_ns.data_ptr())  # Hold of delay.cuh
        begin.record()
        kernels.context.launch(function, 1, 1, stream, [hold])
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end)

    hold_ms(0)  # loads the kernel
    first_ns = started_ns.item()
    assert hold_ms(first_ns) < 0.1  # the time is already over
    assert started_ns.item() > first_ns
    assert 0.199 <= hold_ms(2**63) < 0.4  # kLongestHoldNs; sleeps end late
