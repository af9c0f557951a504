"""Builds, tests and measures the engine on a machine with a GPU, piece by piece. scripts/gpu_check.sh starts it.

Every piece runs in a worker process of its own or shares one with its neighbours; a crash, a hang or a CUDA error ends
that process and nothing else. What a piece found is in the results file at once, so a run that was cut short goes on
where it stopped.
"""
