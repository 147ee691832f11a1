"""Bridges to compilers and runtimes that need more than the registered ops; each module is imported by its own name."""
