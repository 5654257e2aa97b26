"""Files of tests have names of their own: pytest imports each as a module without its folder."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_of_tests_have_the_same_name():
    counted = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(counted) > 200
    assert [name for name, number in counted.items() if number > 1] == []
