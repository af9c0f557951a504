"""make_ctranslate2.py HF_FOLDER VARIANT FOLDER: a model in CTranslate2's format, with weights in VARIANT (int8)."""

from __future__ import annotations

import sys

from ctranslate2.converters import TransformersConverter

source, variant, target = sys.argv[1:]
TransformersConverter(source, low_cpu_mem_usage=True).convert(target, quantization=variant, force=True)
