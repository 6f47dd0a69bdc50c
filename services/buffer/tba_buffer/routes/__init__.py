"""The HTTP endpoints, one file per thing they are about. Each has `router(buffer, auth)`."""
