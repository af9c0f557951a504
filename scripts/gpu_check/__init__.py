"""Builds, tests and measures the engine on a machine with a GPU, stage by stage. scripts/gpu_check.sh starts it.

Every stage runs in a worker process of its own or shares one with its neighbours; a crash, a hang or a CUDA error ends
that process and nothing else. What a stage found is in the results file at once, so a run that was cut short goes on
where it stopped.
"""
