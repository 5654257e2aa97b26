"""PartitionTable: every worker has exactly one memory device, and errors name the file and what is wrong."""

import pytest

from coarse.machine.partition_table import PartitionTable, choose_partition_table


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
    table = choose_partition_table(str(path), num_workers=3, num_devices=0)
    assert [device.workers for device in table.devices] == [(0, 2), (1,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[memory_device]]\nworkers = [0, 0]\n", "worker 0 has two memory devices"),
        ("[[memory_device]]\nworkers = [1]\n", "worker 0 has no memory device although worker 1 has one"),
        ("[[memory_device]]\nworkers = [-1]\n", "no list of local ranks"),
        ('[[memory_device]]\nworkers = ["a"]\n', "no list of local ranks"),
        ('[[memory_device]]\nkind = "tape"\nworkers = [0]\n', "kind 'tape' is none of host"),
        ("[[memory_device]]\nsize = 3\n", "expected `workers` and `kind`"),
        ("[[gpu]]\nworkers = [0]\n", "found gpu"),
        ("", "at least one memory device"),
        ("not toml at all", "partition table"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        PartitionTable.load(path)
    assert str(path) in str(error.value)


def test_a_table_for_another_number_of_workers_is_refused(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text("[[memory_device]]\nworkers = [0, 1]\n")
    with pytest.raises(ValueError, match="is for 2 workers, this job has 3"):
        choose_partition_table(str(path), num_workers=3, num_devices=0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        PartitionTable.load(tmp_path / "nowhere.toml")
