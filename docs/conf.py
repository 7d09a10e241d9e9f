"""The documentation site: `make docs` writes it to build/site. See https://www.sphinx-doc.org."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxformer import __version__  # noqa: E402

project = "jaxformer"
author = "the jaxformer authors"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["build"]
nb_execution_mode = "off"  # the tests run the notebooks; the site shows what is stored in them
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "init"}  # a field of Dense with the name of a method of Module
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes of a class once, in its own text

html_theme = "furo"
html_title = f"jaxformer {__version__}"
html_theme_options = {"navigation_with_keys": True}
