"""The documentation as a site: `make docs` writes build/site. Broken links and references are errors.

The source folder is the repository's root, so that pages read the same in a checkout and on the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import coarse

project = "COARSE"
author = "The COARSE developers"
version = release = coarse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "*/README.md"]
include_patterns += ["docs/**.md", "experiments/*/README.md"]

exclude_patterns = [".*", "build", "dist", "runs", "coarse", "tests", "benchmarks", "*.egg-info"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings quote names with single backquotes

html_theme = "furo"
html_title = f"COARSE {release}"
html_show_sphinx = False
html_copy_source = False
