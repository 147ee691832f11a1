"""The parts of ``gpu_check.py``: what runs in the first minutes on a machine with a CUDA GPU."""
