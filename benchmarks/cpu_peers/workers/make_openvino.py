"""make_openvino.py HF_FOLDER FOLDER: a model as OpenVINO's intermediate representation, in the 16 bits it has."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

main_export(
    sys.argv[1],
    output=sys.argv[2],
    task="text-generation-with-past",
    framework="pt",
    stateful=True,
    ov_config=OVConfig(dtype="bf16"),
)
