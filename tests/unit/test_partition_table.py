"""PartitionTable: every worker has exactly one memory device; errors name the file and the fault."""

import pytest

from coarse.machine.memory_name import parse_memory_devices
from coarse.machine.partition_table import PartitionTable, choose_partition_table, partition_table_names


@pytest.mark.parametrize(
    ("num_workers", "num_devices", "expected"),
    [(2, 2, [0, 1]), (4, 2, [0, 0, 1, 1]), (3, 2, [0, 0, 1]), (4, 1, [0, 0, 0, 0]), (2, 4, [0, 2])],
)
def test_workers_are_dealt_out_in_even_blocks(num_workers, num_devices, expected):
    table = PartitionTable.even(num_workers=num_workers, num_devices=num_devices)
    assert [table.local_device(worker) for worker in range(num_workers)] == expected
    assert (table.num_workers, table.num_devices) == (num_workers, num_devices)


def test_a_file_says_which_device_serves_which_workers(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text('[[memory_device]]\nworkers = [0, 2]\n[[memory_device]]\nkind = "host"\nworkers = [1]\n')
    table = choose_partition_table(str(path), num_workers=3, devices=0)
    assert [device.workers for device in table.devices] == [(0, 2), (1,)]


DEVICE = "[[memory_device]]\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (DEVICE + "workers = [0, 0]\n", 2, "worker 0 has two memory devices: 0, which names it twice"),
        (
            DEVICE + "workers = [0]\n" + DEVICE + "workers = [0]\n",
            4,
            "worker 0 has two memory devices: 0 and 1",
        ),
        (DEVICE + "workers = [1]\n", 1, "worker 0 has no memory device although worker 1 has one"),
        (DEVICE + "workers = [-1]\n", 2, "not a list of local ranks"),
        (DEVICE + 'workers = ["a"]\n', 2, "not a list of local ranks"),
        (DEVICE + "workers = [true]\n", 2, "not a list of local ranks"),
        (DEVICE + "workers = []\n", 1, "no memory device has a worker"),
        (DEVICE + 'kind = "tape"\nworkers = [0]\n', 2, "kind 'tape' must be one of host"),
        (DEVICE + "size = 3\n", 1, "expected `workers` and `kind`"),
        (DEVICE + 'kind = "numa"\nworkers = [0]\n', 2, "kind 'numa' needs a key such as node = 2"),
        (DEVICE + 'kind = "numa"\nworkers = [0]\nnode = -1\n', 4, "node '-1' is not the number"),
        (
            DEVICE + 'kind = "numa"\nworkers = [0]\nnode = true\n',
            4,
            "memory_device 0: found node=True, expected a value such as node = 2",
        ),
        (
            DEVICE + 'kind = "numa"\nworkers = [0]\npath = "/dev/dax0.0"\n',
            4,
            "path has no meaning for kind 'numa'",
        ),
        (DEVICE + "workers = [0]\nnode = 0\n", 3, "node has no meaning for kind 'host'"),
        (
            DEVICE + "workers = [0]\n" + DEVICE + 'kind = "numa"\nnode = "0"\n',
            5,
            "memory_device 1: found node='0', expected a value such as node = 2",
        ),
        (DEVICE + 'kind = "numa"\nworkers = [0]\nnode = 1.0\n', 4, "found node=1.0, expected a value"),
        (
            DEVICE + 'kind = "dax"\nworkers = [0]\npath = "dax0.0"\n',
            4,
            "path 'dax0.0' is not an absolute path",
        ),
        (
            DEVICE + 'kind = "dax"\nworkers = [0]\npath = 3\n',
            4,
            'memory_device 0: found path=3, expected a value such as path = "/dev/dax0.0"',
        ),
        (
            DEVICE
            + 'kind = "dax"\nworkers = [0]\npath = "/dev/dax0.0"\n'
            + DEVICE
            + 'kind = "dax"\npath = "/dev/dax0.0"\n',
            7,
            "memory devices 0 and 1 both use /dev/dax0.0, which only one can use",
        ),
        (
            DEVICE + 'kind = "cuda"\nworkers = [0]\ndevice = "cuda:0"\n' + DEVICE,
            1,
            "some memory devices are on GPUs, others are not: cuda:0, host",
        ),
        (
            DEVICE + 'kind = "cuda"\nworkers = [0]\ndevice = "cuda:gpu0"\n',
            4,
            "device 'gpu0' is not the ordinal of a GPU",
        ),
        *(
            (
                DEVICE + f'kind = "cuda"\nworkers = [0]\ndevice = {value}\n',
                4,
                f"memory_device 0: found device={found}, expected a value such as device = .cuda:4.",
            )
            for value, found in [('"0"', "'0'"), ("0", "0"), ('"gpu0"', "'gpu0'"), ("[]", r"\[\]")]
        ),
        ("[[gpu]]\nworkers = [0]\n", 1, "found gpu"),
        ("\nmemory_device = 3\n", 2, "found memory_device"),
        ("", 1, "at least one memory device"),
        ("not toml at all", 1, "partition table"),
        (
            "worker_gpus = [0]\n" + DEVICE + "workers = [0]\ngpu = 0\n",
            4,
            "GPU 0 is named twice: as memory device 0",
        ),
        (
            "worker_gpus = [0]\n" + DEVICE + "workers = [0]\ngpu = 1\n" + DEVICE + "gpu = 1\n",
            6,
            "GPU 1 is named twice: as memory devices 0 and 1",
        ),
        ("worker_gpus = [1, 1]\n" + DEVICE + "workers = [0, 1]\ngpu = 0\n", 1, "GPU 1 appears twice"),
        ("worker_gpus = [1]\n" + DEVICE + "workers = [0, 1]\ngpu = 0\n", 1, "names 1 GPUs for 2 workers"),
        ("worker_gpus = [0]\n" + DEVICE + "workers = [0]\n", 2, "memory device 0 names no GPU, others do"),
        (DEVICE + "workers = [0]\ngpu = 0\n", 1, "names 0 GPUs for 1 workers"),
        (DEVICE + "workers = [0]\ngpu = -1\n", 3, "gpu=-1 is not the number of a GPU"),
        ("worker_gpus = 0\n" + DEVICE, 1, "worker_gpus=0 is not a list of GPUs"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_what_is_wrong(tmp_path, text, line, message):
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        PartitionTable.load(path)
    assert str(error.value).startswith(f"partition table {path}:{line}: ")


def test_a_gpu_is_named_as_pytorch_does(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(DEVICE + 'kind = "cuda"\nworkers = [0]\ndevice = "cuda:4"\n')
    table = PartitionTable.load(path)
    assert table.memories == ("cuda:4",)
    assert table.is_on_gpus


def test_a_file_gives_each_memory_device_its_memory(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(
        DEVICE
        + 'kind = "numa"\nnode = 2\nworkers = [0, 1]\n'
        + DEVICE
        + 'kind = "dax"\npath = "/dev/dax0.0"\n'
        + DEVICE
    )
    table = PartitionTable.load(path)
    assert table.memories == ("numa:2", "dax:/dev/dax0.0", "host")
    assert [device.workers for device in table.devices] == [(0, 1), (), ()]


def test_an_even_table_deals_workers_out_to_the_memories_that_are_named():
    table = choose_partition_table("", num_workers=4, devices=parse_memory_devices("host,numa:2"))
    assert [(str(device.memory), device.workers) for device in table.devices] == [
        ("host", (0, 1)),
        ("numa:2", (2, 3)),
    ]


def test_workers_are_found_by_the_memory_that_their_slots_lie_in():
    table = choose_partition_table("", num_workers=3, devices=parse_memory_devices("numa:0,numa:1,numa:0"))
    assert table.workers_in("numa:0") == (0, 2)
    assert table.workers_in("numa:1") == (1,)
    assert table.workers_in("host") == ()


def test_tables_of_the_papers_runs_come_by_name():
    assert partition_table_names() == ["aws-g4dn", "aws-p3", "aws-p3-2to1", "sdsc-p100"]
    one_to_one = choose_partition_table("aws-p3", num_workers=4, devices=0)
    assert [device.workers for device in one_to_one.devices] == [(0,), (1,), (2,), (3,)]
    two_to_one = choose_partition_table("aws-p3-2to1", num_workers=4, devices=0)
    assert [device.workers for device in two_to_one.devices] == [(0, 1), (2, 3)]
    assert two_to_one.worker_gpus == one_to_one.worker_gpus


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="no partition table is named 'p100'; did you mean sdsc-p100"):
        PartitionTable.load("p100")


def test_a_file_without_ending_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "table").write_text(DEVICE + "workers = [0]\n")
    monkeypatch.chdir(tmp_path)
    assert PartitionTable.load("table").num_workers == 1


def test_a_table_for_another_number_of_workers_is_refused(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text("[[memory_device]]\nworkers = [0, 1]\n")
    with pytest.raises(ValueError, match="is for 2 workers, but this job has 3"):
        choose_partition_table(str(path), num_workers=3, devices=0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        PartitionTable.load(tmp_path / "nowhere.toml")


def test_further_workers_go_to_the_memory_devices_with_the_fewest():
    table = PartitionTable.even(num_workers=3, num_devices=2)
    assert [device.workers for device in table.devices] == [(0, 1), (2,)]
    assert [device.workers for device in table.with_places(6).devices] == [(0, 1, 4), (2, 3, 5)]
    assert table.with_places(3) == table
