"""What holds for every test."""

from hypothesis import HealthCheck, settings

# no test depends on how fast the machine is, and two runs of the same code see the same examples; new ones are searched
# for by `pytest --hypothesis-profile=search`
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None)
settings.load_profile("any machine")
