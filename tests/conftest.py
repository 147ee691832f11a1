"""Settings of every test: hypothesis examples are the same in every run, bounded in number and not timed."""

import os

from hypothesis import HealthCheck, settings

# before torch starts its threads: those of two xdist workers share the cores, and idle ones that spin take turns away
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

settings.register_profile(
    "pagedkv",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
settings.load_profile("pagedkv")
