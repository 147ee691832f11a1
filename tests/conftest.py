"""Settings of every test: hypothesis examples are the same in every run, bounded in number and not timed."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pagedkv",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
settings.load_profile("pagedkv")
