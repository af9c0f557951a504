"""With a copy of this folder on PYTHONPATH, the charonia package next to it precedes an editable installation."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
