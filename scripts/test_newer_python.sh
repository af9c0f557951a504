#!/usr/bin/env bash
# test_newer_python.sh PYTHON [PYTEST_ARGUMENT...]: tests Triton's Python models and the code that they import from workspaces
# in a separate environment with this Python (3.12 or newer), NumPy 2 and the newest tokenizers. make test cannot have these,
# because of nvidia-pytriton.
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
# Only these of conftest.py's settings are needed. Use of features that Python or NumPy will remove is an error in this
# repository's modules. (-W cannot filter by several modules.)
PYTHONPATH=client exec "$folder/bin/python" -m pytest -q -p no:cacheprovider \
  -o 'filterwarnings=
    error::DeprecationWarning:(prompt|prompt_ids|detokenize|charonia_answers)
    error::SyntaxWarning' tests/unit/test_preprocessing.py tests/unit/test_postprocessing.py \
  tests/unit/test_model_log.py tests/unit/test_answers.py "$@"
