"""With this folder's copy on PYTHONPATH, the package charonia beside it comes before an editable installation."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
