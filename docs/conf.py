"""Sphinx's settings for the site of the documents; scripts/docs_site.py calls it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INIT = (ROOT / "python/guild/__init__.py").read_text()

project = "Guild"
copyright = "the authors of Guild"
version = release = re.search(r'^__version__ = "(.*)"', INIT, re.MULTILINE)[1]

extensions = ["myst_parser"]
exclude_patterns = ["source"]
html_theme = "furo"
html_title = f"Guild {version}"
html_theme_options = {  # lines of code of 100 columns fit the page
    "light_css_variables": {"code-font-size": "73%"},
    "dark_css_variables": {"code-font-size": "73%"},
}
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 4
python_maximum_signature_line_length = 80
smartquotes = False

# Every name of Guild's must lead somewhere. The sites of other projects are not asked, so that the
# build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!guild\.).*")]
