"""The HTTP endpoints, grouped by subject; app.py joins their routers."""
