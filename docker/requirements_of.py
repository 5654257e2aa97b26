"""Prints the requirements of one of pyproject.toml's extras, one a line, for `pip install -r`.

`pip install -e '.[EXTRA]'` would compile the native module again in each stage of the image.
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
