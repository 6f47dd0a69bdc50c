"""Rehearse a recipe before GPUs are rented: schedules and assumed speeds here, the rest as programs of the services."""
