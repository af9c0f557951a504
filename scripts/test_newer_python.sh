#!/usr/bin/env bash
# test_newer_python.sh PYTHON [PYTEST_ARGUMENT...]: the tests of Triton's Python models and of what they import from
# workspaces, in an environment of its own with that Python (3.12 or newer), NumPy 2 and the newest tokenizers.
# nvidia-pytriton, and so make test, has neither.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?a Python, such as python3.13}
shift
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
folder=build/newer_python/$version
mkdir -p build/newer_python
[ -x "$folder/bin/pip" ] || "$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check --no-input --quiet install --only-binary :all: \
  'numpy>=2' safetensors tokenizers transformers jinja2 sentencepiece tiktoken ml-dtypes \
  pytest pytest-asyncio pytest-timeout hypothesis pydantic-settings
"$folder/bin/python" -c 'import sys, numpy, tokenizers; print("Python", sys.version.split()[0], "NumPy", numpy.__version__, "tokenizers", tokenizers.__version__)'
# Of conftest.py's settings no plugin is needed but these. What Python or NumPy will take away is an error where our
# code uses it. -W would take the names of modules for one name.
PYTHONPATH=client exec "$folder/bin/python" -m pytest -q -p no:cacheprovider \
  -o 'filterwarnings=
    error::DeprecationWarning:(prompt|prompt_ids|detokenize|charonia_answers)
    error::SyntaxWarning' tests/unit/test_preprocessing.py tests/unit/test_postprocessing.py \
  tests/unit/test_model_log.py tests/unit/test_answers.py "$@"
