"""make_openvino.py HF_FOLDER VARIANT FOLDER: a model as OpenVINO's intermediate representation, in the 16 bits it has
or, for int8 and int4, with weights that NNCF rounds (int4: groups of 128, symmetric, as W4A16 has them)."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

source, variant, target = sys.argv[1:]
_CONFIGS = {
    "": OVConfig(dtype="bf16"),
    "int8": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=True)),
    "int4": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)),
}
main_export(
    source,
    output=target,
    task="text-generation-with-past",
    framework="pt",
    stateful=True,
    ov_config=_CONFIGS[variant],
)
